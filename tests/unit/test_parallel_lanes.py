"""Streams without a GPU: the real code of a rank under streams that only keep clocks, every access to memory checked against them.

Two accesses to one memory, one of them a write, must be ordered; memory that is free again must not be given out on its stream before every
access to it is over, as PyTorch's allocator on a GPU would. Transfers are switched off: what is received is made up on the spine.
"""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytest_longca.case import Case
from pytest_longca.catalogue import MASKS, load
from pytest_longca.parallel.attend import ContextParallel
from pytest_longca.parallel.comm import Channel
from pytest_longca.parallel.heads import _copy
from pytest_longca.parallel.kernel import NaiveBlock
from pytest_longca.parallel.lanes import Finish, Lanes, ahead
from pytest_longca.parallel.mechanisms import MECHANISMS, Mesh
from pytest_longca.parallel.setup import Sharing, bind, shards_of
from pytest_longca.parallel.timing import strays_from_one_lane
from pytest_longca.parallel.world import World
from tests.unit.dispatched import Dispatched

Clock = dict[str, int]


@dataclass(eq=False)
class Stream:
    """What it has been given is over: of each stream, so many operations."""

    name: str
    clock: Clock = field(default_factory=lambda: defaultdict(int))
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Clock) -> None:
        for name, time in event.items():
            self.clock[name] = max(self.clock[name], time)

    def record_event(self) -> Clock:
        return dict(self.clock)

    def is_behind(self, access: "Access") -> bool:
        return self.clock[access.stream] >= access.time


@dataclass(frozen=True)
class Access:
    stream: str
    time: int
    is_write: bool
    what: str


@dataclass
class Memory:
    weak: StorageWeakRef
    pool: str
    accesses: list[Access] = field(default_factory=list)


class Watch(TorchDispatchMode):
    """Every operation on the stream that is current, and what is wrong with it."""

    def __init__(self) -> None:
        super().__init__()
        self.current = [Stream("caller")]
        self.wrong: list[str] = []
        self._memory: dict[int, Memory] = {}
        self._free: dict[str, list[Memory]] = defaultdict(list)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func is torch.ops.aten.detach.default:
            return result
        stream = self.current[-1]
        stream.clock[stream.name] += 1
        self._notice_what_is_free()
        given = tree_leaves((args, kwargs or {}))
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info and argument.alias_info.is_write
        ]
        written += [value for name, value in (kwargs or {}).items() if name == "out"]
        for tensor in (x for x in given if isinstance(x, torch.Tensor)):
            self._access(tensor, stream, any(tensor is x for x in tree_leaves(written)), str(func))
        for tensor in (x for x in tree_leaves(result) if isinstance(x, torch.Tensor)):
            if tensor.untyped_storage()._cdata not in self._memory:
                self._allocate(tensor, stream, str(func))
        return result

    def _notice_what_is_free(self) -> None:
        for key, memory in list(self._memory.items()):
            if memory.weak.expired():
                self._free[memory.pool].append(self._memory.pop(key))

    def _allocate(self, tensor: torch.Tensor, stream: Stream, what: str) -> None:
        kept = []
        for memory in self._free[stream.name]:
            unsafe = [access for access in memory.accesses if not stream.is_behind(access)]
            self.wrong += [f"{what} on {stream.name} may get memory that {access.what} on {access.stream} uses" for access in unsafe]
            kept += [memory] if unsafe else []
        self._free[stream.name] = kept
        storage = tensor.untyped_storage()
        self._memory[storage._cdata] = Memory(StorageWeakRef(storage), stream.name)
        self._access(tensor, stream, True, what)

    def _access(self, tensor: torch.Tensor, stream: Stream, is_write: bool, what: str) -> None:
        storage = tensor.untyped_storage()
        memory = self._memory.setdefault(storage._cdata, Memory(StorageWeakRef(storage), "caller"))
        for other in memory.accesses:
            if (is_write or other.is_write) and not stream.is_behind(other):
                self.wrong.append(f"{what} on {stream.name} and {other.what} on {other.stream} are not ordered")
        memory.accesses.append(Access(stream.name, stream.clock[stream.name], is_write, what))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made.current[-1])
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(
        Channel, "_stand_in", lambda self, x, num_rows: x[torch.arange(num_rows) % len(x)]
    )  # what is received is new memory
    return made


def streamed(kind: type[Lanes] = Lanes) -> Lanes:
    lanes, lowest = ((Stream(f"{name} 0"), Stream(f"{name} 1")) for name in ("lane", "lowest"))
    return kind(Stream("spine"), lanes, lowest)  # type: ignore[arg-type]  # what they do of a stream


def a_rank(mask: str, sharing: Sharing, lanes: Lanes) -> tuple[ContextParallel, tuple[torch.Tensor, ...]]:
    case = Case(mask=load(MASKS[mask]).default(128, 0), heads_q=16, heads_kv=8, head_dim=8, dtype="bf16")
    world, shards = World(1, sharing.world, is_connected=False), shards_of(case, sharing)
    bound = replace(bind(case, sharing, world, NaiveBlock(), shards), lanes=lanes)
    tokens = len(shards.of_rank(1))
    return bound, tuple(torch.randn(tokens, heads, 8, dtype=torch.bfloat16) for heads in (16, 8, 8, 16))


def run(bound: ContextParallel, inputs: tuple[torch.Tensor, ...]) -> None:
    """Three calls, so that the memory of one is given out again in the next; the caller reads and drops what it gets."""
    for _ in range(3):
        q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
        out, _ = bound(q, k, v)
        grads = torch.autograd.grad(out * 1, (q, k, v), inputs[3].clone())
        del out
        sum(grad.sum() for grad in grads)


SHARINGS = [*(Sharing(name, 4) for name in MECHANISMS), Sharing("usp", 8, Mesh(2, 2, 2)), Sharing("ring_allgather", 4, Mesh(2, 2, 1))]


@pytest.mark.parametrize("mask", ["causal", "causal_document"])
@pytest.mark.parametrize("sharing", SHARINGS, ids=str)
def test_no_stream_meets_memory_that_another_still_uses(watch: Watch, mask: str, sharing: Sharing) -> None:
    bound, inputs = a_rank(mask, sharing, streamed())
    with watch:
        run(bound, inputs)
    assert not watch.wrong, watch.wrong[:5]
    streams: list[Any] = [*bound.lanes.lanes, *bound.lanes.lowest]
    assert sum(stream.clock[stream.name] > 0 for stream in streams) > 1, "kernels ran beside each other"


class Careless(Lanes):
    """Results are not waited for."""

    def launch(self, key: object, call: Callable[[], Any], *, is_lowest: bool = False) -> Finish[Any]:
        finish = super().launch(key, call, is_lowest=is_lowest)
        result = next(
            cell.cell_contents for name, cell in zip(finish.__code__.co_freevars, finish.__closure__ or (), strict=True) if name == "result"
        )  # type: ignore[attr-defined]  # a function
        return lambda: result


class Forgetful(Lanes):
    """Operands are not kept until the lane has read them."""

    def launch(self, key: object, call: Callable[[], Any], *, is_lowest: bool = False) -> Finish[Any]:
        finish = super().launch(key, call, is_lowest=is_lowest)
        if getattr(finish, "__defaults__", None):
            finish.__defaults__ = (None,)  # type: ignore[attr-defined]  # a function
        return finish


@pytest.mark.parametrize("sharing", [Sharing("ring_p2p", 4), Sharing("ulysses", 2)], ids=str)
def test_result_that_is_not_waited_for_is_seen(watch: Watch, sharing: Sharing) -> None:
    bound, inputs = a_rank("causal", sharing, streamed(Careless))
    with watch:
        run(bound, inputs)
    assert any("are not ordered" in what for what in watch.wrong)


@pytest.mark.parametrize("kind", [Lanes, Forgetful])
def test_operands_are_kept_until_the_lane_has_read_them(watch: Watch, kind: type[Lanes]) -> None:
    lanes = streamed(kind)
    with watch, lanes.apart():
        lanes.launch("key", lambda: None)
        finish = lanes.launch("key", partial(torch.sum, torch.zeros(8)))
        torch.zeros(8)
        finish()
        del finish
        torch.zeros(8)
    assert bool(watch.wrong) == (kind is Forgetful)
    assert all("may get memory that aten.sum.default on lane 0 uses" in what for what in watch.wrong)


@pytest.mark.parametrize(
    "sharing", [Sharing("ring_p2p", 4), Sharing("ring_allgather", 4), Sharing("ulysses", 2), Sharing("usp", 4)], ids=str
)
def test_next_kernel_does_not_wait_for_the_one_before(watch: Watch, sharing: Sharing) -> None:
    starts: list[tuple[str, Clock, Clock]] = []

    class Recorded(NaiveBlock):
        def block_forward(self, *operands: Any) -> Any:
            return self._recorded(partial(super().block_forward, *operands))

        def block_backward(self, *operands: Any) -> Any:
            return self._recorded(partial(super().block_backward, *operands))

        def _recorded(self, call: Callable[[], Any]) -> Any:
            stream = watch.current[-1]
            start, result = stream.record_event(), call()
            starts.append((stream.name, start, stream.record_event()))
            return result

    bound, (q, k, v, do) = a_rank("full", sharing, streamed())
    bound.kernel = Recorded()
    with watch:
        run(bound, (q, k, v, do))
        starts.clear()
        _, _, saved = bound.forward(q, k, v)
        num_forward = len(starts)
        bound.backward(do, saved)
    for kernels in (starts[:num_forward], starts[num_forward:]):
        assert len(kernels) > 1
        for (lane, _, end), (_, start, _) in itertools.pairwise(kernels):
            assert start.get(lane, 0) < end[lane]


@pytest.mark.parametrize(("tensor", "method"), [(None, ""), ("out", "block_forward"), ("dq", "block_backward")])
def test_tensor_that_strays_from_one_lane_is_named(tensor: str | None, method: str) -> None:
    case = Case(mask=load(MASKS["causal"]).default(128, 0), heads_q=4, heads_kv=2, head_dim=8, dtype="bf16")

    class Late(NaiveBlock):
        calls = 0

        def __getattribute__(self, name: str) -> Any:
            honest = super().__getattribute__(name)
            return partial(self.late, honest) if name == method else honest

        def late(self, honest: Callable[..., Any], *operands: Any) -> Any:
            self.calls += 1
            first, *rest = honest(*operands)
            return (first * (1 + 0.2 * (self.calls > 2)), *rest)

    sharing = Sharing("ring_p2p", 1)
    found = strays_from_one_lane(World(0, 1, is_connected=False), case, sharing, Late(), shards_of(case, sharing))
    assert (found or "").split(" ")[0] == (tensor or "")


def test_first_call_of_a_segment_is_on_the_spine(watch: Watch) -> None:
    where = []
    lanes = streamed()
    with lanes.apart():
        for key in ("a", "a", "b", "a", "b"):
            lanes.launch(key, lambda: where.append(watch.current[-1].name))()
    assert where == ["spine", "lane 0", "spine", "lane 1", "lane 0"]


def test_rank_s_own_blocks_take_turns_on_the_lowest_lanes(watch: Watch) -> None:
    where: list[str] = []

    class Recorded(NaiveBlock):
        def block_backward(self, *operands: Any) -> Any:
            where.append(watch.current[-1].name)
            return super().block_backward(*operands)

    ring = ["lowest 0", "lane 0", "lane 1", "lane 0"]
    for sharing, wanted in (
        (Sharing("ring_p2p", 4), ring),
        (Sharing("ulysses", 4), ["lane 0", "lane 1"]),
        (Sharing("usp", 4), ["lowest 0", "lane 0", "lowest 1", "lane 1", "lowest 0", "lane 0"]),
    ):
        bound, (q, k, v, do) = a_rank("full", sharing, streamed())
        bound.kernel = Recorded()
        with watch:
            run(bound, (q, k, v, do))
            saved = bound.forward(q, k, v)[2]
            where.clear()
            bound.backward(do, saved)
        assert where == wanted


def test_ahead_finishes_each_after_the_next_two_are_launched() -> None:
    events: list[str] = []

    def launch(name: str) -> Finish[str]:
        events.append(f"launch {name}")
        return lambda: events.append(f"finish {name}") or name

    assert list(ahead(launch(name) for name in "abcd")) == ["a", "b", "c", "d"]
    assert events == [
        f"{what} {name}" for what, name in zip(["launch"] * 3 + ["finish", "launch"] + ["finish"] * 3, "abcadbcd", strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("dim", "offset"), [(8, 0), (6, 0), (8, 1), (8, 4)])
def test_copy_of_whole_words_and_of_numbers_alone(dtype: torch.dtype, dim: int, offset: int) -> None:
    buffer = torch.zeros(500, dtype=dtype)
    target = buffer[offset : offset + 5 * 7 * 12].view(5, 7, 12)[:, 2:5, :dim]
    source = torch.randn(3, 5, dim).to(dtype).transpose(0, 1)
    _copy(target, source)
    assert torch.equal(target, source)
    assert int((buffer != 0).sum()) == 5 * 3 * dim, "nothing else was written"


def test_exchange_of_heads_packs_keys_and_values_and_nobody_before_it() -> None:
    """They lie side by side for the rings; made so before anything is sent, that was a copy that the first group waited for."""
    bound, (q, k, v, _) = a_rank("full", Sharing("ulysses", 4), Lanes())
    bound.forward(q, k, v)  # the plan is made
    with Dispatched() as dispatched:
        bound.forward(q, k, v)
    assert dispatched.count["aten.cat.default"] == 1, "that of lse"
