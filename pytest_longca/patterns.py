"""What wrong (query, key) pairs have in common, in words: the shape of the error names its cause."""

from torch import Tensor


def describe_pairs(verb: str, places: Tensor, off: int, group: int, why: str) -> str:
    """One line about wrong pairs: how many, the first, and what they share.

    `places` is `[pairs, 4]`: batch, query head, query, key; `off` is seqlen_kv - seqlen_q, so that `key - query - off` is the distance from
    the diagonal.
    """
    b, h, i, j = places[0].tolist()
    number = "1 pair" if len(places) == 1 else f"{len(places)} pairs (query, key)"
    shared = "; ".join(text for text in (_diagonal(places, off), _heads(places, group), _batches(places)) if text)
    reason = f", {why}" if why else ""
    return f"batch {b}, head {h}, query {i} {verb} key {j}{reason}; {number} in all{': ' + shared if shared else ''}"


def _diagonal(places: Tensor, off: int) -> str:
    distance = places[:, 3] - places[:, 2] - off
    low, high = int(distance.min()), int(distance.max())
    if len(places) > 1 and low == high:
        return f"all {abs(low)} {'right of' if low > 0 else 'left of'} the diagonal" if low else "all on the diagonal"
    keys, queries = places[:, 3].unique(), places[:, 2].unique()
    if len(places) > 1 and len(keys) == 1:
        return f"all at key {int(keys)}"
    if len(places) > 1 and len(queries) == 1:
        return f"all in query {int(queries)}"
    return ""


def _heads(places: Tensor, group: int) -> str:
    heads = places[:, 1].unique()
    if len(heads) == 1 and int(heads) == 0:
        return ""
    if group > 1 and bool((heads % group != 0).all()):
        return f"only heads {_listed(heads)}, never the first of a group of {group}: the head map"
    return "" if bool((heads == 0).any()) else f"only heads {_listed(heads)}"


def _batches(places: Tensor) -> str:
    batches = places[:, 0].unique()
    return "" if bool((batches == 0).any()) else f"only batch {_listed(batches)}"


def _listed(values: Tensor) -> str:
    shown = ", ".join(map(str, values[:8].tolist()))
    return shown + (", ..." if len(values) > 8 else "")
