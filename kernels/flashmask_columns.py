"""FlashMask's column form of row intervals, in few operations: what a GPU takes for this is the number of launches, not the work."""

import torch
from torch import Tensor
from torch.nn import functional

NEVER = torch.iinfo(torch.int32).max


def column_form(rows: Tensor, seqlen_kv: int) -> Tensor | None:
    """The *masked* queries of each key, int32 `[mask batch, 1, seqlen_kv, 2, 2]`, as `Mask.columns` gives them.

    `rows` are canonical row intervals `[mask batch, 1, seqlen_q, 2, 2]`. None if a key has more than two masked runs.

    A masked run of a key begins at query i if i - 1 sees the key and i does not, and ends where it is seen again; the queries before
    the first and after the last count as seeing everything. The first and the last of these marks of each key are found by minimum and
    maximum, and cover all that is masked unless there are more than two runs: then fewer pairs are masked than rows leave out.
    """
    batch, _, seqlen_q = rows.shape[:3]
    own = rows[:, 0]
    start, length, plane, query = _crossings(own, seqlen_kv)
    total = int(length.sum())
    if total > 4 * batch * seqlen_kv:  # more than two begins and two ends for each key
        return None
    piece = torch.repeat_interleave(length, output_size=total)
    key = (plane * seqlen_kv + start - length.cumsum(0) + length)[piece] + torch.arange(total, device=rows.device)
    query = query[piece].to(torch.int32)
    marks = torch.full((2, 2 * batch * seqlen_kv), NEVER, dtype=torch.int32, device=rows.device)
    first, last = marks[0], marks[1].neg_()
    first.scatter_reduce_(0, key, query, "amin")
    last.scatter_reduce_(0, key, query, "amax")
    marks[1].masked_fill_(first == last, 0)
    marks.masked_fill_(marks.abs() == NEVER, 0)
    columns = marks.view(2, 2, batch, seqlen_kv).permute(2, 3, 0, 1).contiguous()
    both = torch.stack([(form[..., 1] - form[..., 0]).sum(dtype=torch.int64) for form in (columns, own)])
    return columns[:, None] if int(both.sum()) == batch * seqlen_q * seqlen_kv else None


def _crossings(rows: Tensor, seqlen_kv: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs of keys that become masked, or visible again, from one query to the next: (first key, keys, plane, query), int64 `[runs]`.

    A plane is `batch` for those that become masked, `mask batch + batch` for the others.
    """
    batch, seqlen_q = rows.shape[:2]
    everything = torch.tensor([[0, seqlen_kv], [0, 0]], dtype=torch.int32).to(rows.device).expand(batch, 1, 2, 2)
    seen = torch.cat((everything, rows, everything), 1)
    pairs = torch.stack((seen[:, :-1], seen[:, 1:])).flatten(0, 1)  # [2 * batch, seqlen_q + 1, 2, 2]
    others = pairs.unflatten(0, (2, batch)).flip(0).flatten(0, 1)
    others = others.masked_fill(others[..., 1:] == 0, seqlen_kv)
    low, high = functional.pad(others[..., 1], (1, 0)), functional.pad(others[..., 0], (0, 1), value=seqlen_kv)  # what lies between them
    start = torch.maximum(pairs[..., :1], low[..., None, :])  # [2 * batch, seqlen_q + 1, 2, 3]
    length = torch.minimum(pairs[..., 1:], high[..., None, :]) - start
    found = (length.flatten() > 0).nonzero()[:, 0]
    entry = found.div(6, rounding_mode="floor")
    return start.flatten()[found].long(), length.flatten()[found].long(), entry // (seqlen_q + 1), entry % (seqlen_q + 1)
