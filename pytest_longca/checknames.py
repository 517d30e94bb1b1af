"""The checks by name, tier and stage, without their code: what options and reports need. Imports neither torch nor triton."""

from collections.abc import Iterable
from dataclasses import dataclass

from pytest_longca.errors import unknown_name


@dataclass(frozen=True, slots=True)
class CheckInfo:
    """What a check sees, whether it runs by default, and where: "probes" on small exhaustive cases, "examples" on drawn ones."""

    tier: str
    stage: str
    description: str


CHECK_INFO: dict[str, CheckInfo] = {
    "count": CheckInfo("default", "probes", "queries and keys 0, values one-hot: which keys each row reads, without a tolerance"),
    "support": CheckInfo(
        "default", "probes", "do in one row of one head: which keys, heads and rows get a gradient, and that each visible one does"
    ),
    "layout": CheckInfo("default", "probes", "q, k, v and do in different memory layouts, each apart: the same truth"),
    "truth": CheckInfo("default", "examples", "out, lse, dq, dk and dv against the high-precision reference, row by row"),
    "poison": CheckInfo("default", "examples", "huge values and NaN around the operands and in recycled memory change nothing"),
    "guard": CheckInfo(
        "default",
        "examples",
        "nothing outside the results is written: canaries around the operands, the operands, and the process's settings",
    ),
    "repeat": CheckInfo("default", "examples", "the same call again: bitwise equal where that is promised, right every time"),
    "state": CheckInfo(
        "default", "examples", "another case between the forward and the backward, and before the next call, changes nothing"
    ),
    "scale": CheckInfo("thorough", "examples", "logits near -120, below -50000, near +100, keys times 10, peaked, biased"),
    "stress": CheckInfo("thorough", "examples", "twenty calls, each after a busy producer on the same device"),
    "overflow": CheckInfo("thorough", "examples", "tokens whose offsets pass 2^31 and 2^32 elements, in memory that is not touched"),
    "metamorphic": CheckInfo(
        "thorough",
        "examples",
        "documents alone and reversed, heads and batch reversed, halves merged, a window as wide as the sequence, do doubled",
    ),
    "training": CheckInfo(
        "thorough", "examples", "each subset of q, k, v needing gradients, checkpointing, torch.compile, side stream, CUDA graph"
    ),
    "resources": CheckInfo("thorough", "examples", "nothing is kept after a call; memory linear in the length where that is promised"),
}

PROBES = tuple(name for name, info in CHECK_INFO.items() if info.tier == "default" and info.stage == "probes")
"""What runs on the cases of `strategies.probe_cases`."""
DEFAULT = tuple(name for name, info in CHECK_INFO.items() if info.tier == "default" and info.stage == "examples")
"""What runs on every drawn example."""
THOROUGH = tuple(CHECK_INFO)
"""Everything."""

GROUPS = {"default": PROBES + DEFAULT, "probes": PROBES, "examples": DEFAULT, "thorough": THOROUGH, "all": THOROUGH}


def select_checks(wanted: Iterable[str], stage: str | None = None) -> tuple[str, ...]:
    """The named checks, groups expanded, in table order and once each; those of one stage if given.

    Raises InvalidArgument for an unknown name, with the closest ones.

    >>> select_checks(["default"], "probes")
    ('count', 'support', 'layout')
    """
    chosen: set[str] = set()
    for name in wanted:
        if name not in GROUPS and name not in CHECK_INFO:
            raise unknown_name("check", name, [*CHECK_INFO, *GROUPS])
        chosen.update(GROUPS.get(name, (name,)))
    return tuple(name for name, info in CHECK_INFO.items() if name in chosen and stage in (None, info.stage))
