"""A run that ends in time: the order of its items, the clock that stops it, and what a file of records has of it already."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from pytest_longca.case import Direction
from pytest_longca.errors import InvalidArgument
from pytest_longca.outcome import NotVerified
from pytest_longca.report.record import Record
from pytest_longca.report.series import Key, key_of
from pytest_longca.report.store import read_records

STAGES = {"test_probes": "probes", "test_timing": "timing", "test_examples": "examples"}
"""The suite's tests that are ordered and resumed, in the order in which a budget runs them."""

NOT_FINAL = frozenset({"not_verified", "not_installed"})
RESERVE = 0.03
"""The share of a budget that is kept for what comes after the last item: page, summary, gate."""
REMEMBERED = 3


class Budget:
    """The time that a session may take. An item starts only if what is left covers the longest of the last few."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._now = now
        self._end = now() + seconds * (1 - RESERVE)
        self._started: float | None = None
        self._recent: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def left_s(self) -> float:
        """Seconds until items must have ended; negative afterwards."""
        return self._end - self._now()

    def add(self, seconds: float) -> None:
        """Give back what was not the budget's to pay for."""
        self._end += seconds

    def begin(self) -> NotVerified | None:
        """Start the next item, or say why it does not start."""
        self.end()
        if self.left_s <= max(self._recent, default=0.0):
            return self.postponed()
        self._started = self._now()
        return None

    def end(self) -> None:
        """The item that was started is over."""
        if self._started is not None:
            self._recent.append(self._now() - self._started)
            self._started = None

    def postponed(self) -> NotVerified:
        """What becomes of an item that the budget has no time for."""
        return NotVerified(f"outside --longca-budget={self._seconds:g}s; --longca-resume goes on with it", is_postponed=True)


def arrange(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items with the most telling ones first: probes, timings, examples, then the others.

    Timings go round the kernels and masks: each cell's first (shortest) case, in all passes, before any cell's second.
    """
    places: dict[tuple[object, ...], dict[str, int]] = {}
    order = list(STAGES)
    ranked = []
    for number, item in enumerate(items):
        test, turn = getattr(item, "originalname", ""), (0, 0)
        if stage_of(item) == "timing":
            key, process = key_of_item(item), item.callspec.params["longca_process"]  # type: ignore[attr-defined]  # timings are parametrized
            cell = places.setdefault((key.kernel, key.mask, process), {})
            turn = (process, cell.setdefault(_of_any_pass(key.case), len(cell)))
        ranked.append((order.index(test) if stage_of(item) else len(order), turn, number, item))
    return [item for *_, item in sorted(ranked, key=lambda row: row[:3])]


def _of_any_pass(case: str) -> str:
    """A case's id without its pass: one reference serves them all, if they come together."""
    return "/".join(part for part in case.split("/") if part not in set(Direction))


def stage_of(item: pytest.Item) -> str | None:
    """The stage of a suite's item that is ordered and resumed, or None."""
    return STAGES.get(getattr(item, "originalname", "")) if item.nodeid.startswith("longca/") else None


def key_of_item(item: pytest.Item) -> Key:
    """The key of the records that an item with a stage makes."""
    params = item.callspec.params  # type: ignore[attr-defined]  # items with a stage are parametrized
    case = params.get("longca_case_id", "")
    return Key(params["longca_kernel_name"], params.get("longca_mask_name") or case.partition("(")[0], stage_of(item) or "", case, "", 1)


def earlier_records(path: str | None) -> list[Record]:
    """The records that a resumed run starts from; none where there is no such file yet. Raises InvalidArgument on a broken one."""
    if path is None or not Path(path).exists() or not Path(path).stat().st_size:
        return []
    try:
        return read_records(path)
    except InvalidArgument as error:
        raise InvalidArgument(f"--longca-resume: {error}") from None


def split(items: Sequence[pytest.Item], earlier: Iterable[Record]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """(items to run, items whose results the earlier records hold). A case that several processes time needs a record from each."""
    held = Counter(key_of(record) for record in earlier if record.kind not in NOT_FINAL)
    to_run: list[pytest.Item] = []
    done: list[pytest.Item] = []
    for item in items:
        key = key_of_item(item) if stage_of(item) else None
        is_held = key is not None and held[key] > 0
        if is_held and key is not None:
            held[key] -= 1
        (done if is_held else to_run).append(item)
    return to_run, done


def check_device(earlier: Iterable[Record], device: str) -> None:
    """Raise InvalidArgument if the earlier timings were taken on another device than this run's."""
    others = sorted({record.device for record in earlier if record.samples_ms} - {device})
    if others:
        raise InvalidArgument(
            f"--longca-resume: its timings are from {', '.join(others)}, and this is {device}: records of several devices are no one run"
        )
