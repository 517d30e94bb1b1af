"""The benchmark of context parallelism: correctness first, then the five mechanisms on masks, lengths and kernels.

    python -m torch.distributed.run --nproc-per-node N -m pytest_longca.parallel.bench --kernels fa2 --json cp.jsonl
    python -m pytest_longca.parallel.bench --simulate-world 8 --kernels fa2        # one GPU, communication switched off

Every result is appended to the JSON Lines file as soon as it exists; the table is printed last. docs/context-parallel.md explains both.
"""

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, TextIO

import torch

from pytest_longca.case import Case, Direction
from pytest_longca.conformance import commit
from pytest_longca.errors import DidNotRun, InvalidArgument, LongcaError
from pytest_longca.inputs import make_inputs
from pytest_longca.outcome import Crashed, NotInstalled, NotVerified, Outcome, OutOfMemory, Passed, TimedOut, Unsupported, Wrong
from pytest_longca.parallel.bench_options import Settings, parse, settings_of
from pytest_longca.parallel.job import assemble, compare, run_share, single_device
from pytest_longca.parallel.kernel import BlockKernel, find_block_kernel
from pytest_longca.parallel.links import fit, measure_links
from pytest_longca.parallel.setup import Shards, Sharing, bind, check, head_groups, shards_of
from pytest_longca.parallel.timing import Measured, measure, measure_alone, simulate, slowest_of, strays_from_one_lane
from pytest_longca.parallel.world import World, session_world
from pytest_longca.report.record import Record

DIRECTIONS = ("fwd", "bwd")
ERROR_RATIO = 2.0
ERROR_FLOOR = {"fp64": 1e-10, "fp32": 1e-6}
LSE_FLOOR = 1e-6
TIMED_OUT_STATUS = 3
DISTRIBUTIONS = ("torch", "triton", "flash-attn", "flash-attn-4", "nvidia-cudnn-frontend", "ring-flash-attn", "yunchang", "pytest-longca")


@dataclass(frozen=True, slots=True)
class Result:
    """What a cell found."""

    case: Case
    measured: Measured
    sharing: Sharing | None
    facts: dict[str, Any]


@dataclass(slots=True)
class Row:
    """One line of the table."""

    tokens: int
    mask: str
    kernel: str
    what: str
    fwd: str = ""
    bwd: str = ""
    note: str = ""


@dataclass(eq=False)
class Bench:
    """One run: the cells in order, their records and the table."""

    settings: Settings
    world: World
    is_simulated: bool
    command: str
    started: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)
    alone_ms: dict[tuple[int, str, str], dict[str, float]] = field(default_factory=dict)
    verified: dict[tuple[str, ...], Outcome] = field(default_factory=dict)

    def run(self) -> None:
        """Every cell that fits the time."""
        if self.settings.links and self.world.size > 1:
            self._links()
        for tokens in self.settings.tokens:
            for mask in self.settings.masks:
                for name in self.settings.kernels:
                    self._kernel_cells(tokens, mask, name)
                self._peer_cells(tokens, mask)

    def table(self) -> str:
        """The rows as aligned text: TFLOP/s per GPU, in brackets the share of the kernel alone."""
        head = Row(0, "mask", "kernel", "mechanism", "forward", "backward", "note")
        lines = [(row.mask, row.kernel, row.what, row.fwd, row.bwd, row.note) for row in (head, *self.rows)]
        cells = [("tokens", *lines[0]), *((str(row.tokens), *line) for row, line in zip(self.rows, lines[1:], strict=True))]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells)

    def _links(self) -> None:
        """Measure and record what transfers cost."""
        points = measure_links(self.world, self.settings.effort)
        fits = {kind: fit(found) for kind, found in points.items()}
        facts = {"points": points, "fits": {kind: dataclasses.asdict(link) for kind, link in fits.items()}}
        about: dict[str, Any] = {"stage": "parallel", "kernel": "none", "mask": "none", "mechanism": "links"}
        self._write(Record(outcome=Passed().to_json(), world_size=self.world.size, facts=facts, **about))
        for kind, link in fits.items():
            self.rows.append(Row(0, "", "", f"link {kind}", note=f"{link.latency_ms * 1e3:.1f} us + bytes sent / {link.gb_per_s:.1f} GB/s"))

    def _kernel_cells(self, tokens: int, mask: str, name: str) -> None:
        self._cell(tokens, mask, name, "alone", lambda: self._alone(tokens, mask, name))
        for sharing in self.settings.sharings(mask):
            what = f"{sharing.mechanism} {sharing.layout}" if sharing.layout != "contiguous" else sharing.mechanism
            self._cell(tokens, mask, name, what, partial(self._shared, tokens, mask, name, sharing))

    def _kernel(self, name: str, case: Case) -> BlockKernel:
        """The kernel of that name. Raises DidNotRun if it refuses the case's forward."""
        kernel = find_block_kernel(name)
        if reason := kernel.capabilities.refusal(replace(case, direction=Direction.FWD), self.world.machine):
            raise DidNotRun(Unsupported(f"{kernel.name} {reason}"))
        return kernel

    def _alone(self, tokens: int, mask: str, name: str) -> Result:
        case = self.settings.case(mask, tokens, shares=self.settings.world)
        kernel = self._kernel(name, case)
        self._require((mask, name), lambda short: _alone_verdict(self.world, short, kernel))
        if self.world.is_staged:
            raise DidNotRun(NotVerified("right on a short case, but not timed: ranks share a GPU"))
        measured = measure_alone(self.world, case, kernel, self.settings.effort)
        self.alone_ms[tokens, mask, name] = _medians(measured)
        facts = {"what": "the kernel alone, a rank's share of the heads"}
        return Result(case, measured, None, facts | {f"alone_{direction}_ms": ms for direction, ms in _medians(measured).items()})

    def _alone_around(self, tokens: int, mask: str, name: str, kernel: BlockKernel) -> dict[str, float]:
        """Milliseconds of the kernel alone, the mean of before and after what was just timed: devices drift as they warm up."""
        case = self.settings.case(mask, tokens, shares=self.settings.world)
        after = _medians(measure_alone(self.world, case, kernel, replace(self.settings.effort, warmup=0)))
        before = self.alone_ms.get((tokens, mask, name), after)
        self.alone_ms[tokens, mask, name] = after
        return {f"alone_{direction}_ms": (before[direction] + ms) / 2 for direction, ms in after.items()}

    def _shared(self, tokens: int, mask: str, name: str, sharing: Sharing) -> Result:
        case = self.settings.case(mask, tokens)
        kernel = self._kernel(name, case)
        check(case, sharing)
        self._require((mask, name), lambda short: _alone_verdict(self.world, short, kernel))
        if not self.is_simulated:
            key = mask, name, sharing.mechanism, sharing.layout_name
            self._require(key, lambda short: _verdict(self.world, short, sharing, kernel))
        if self.world.is_staged:
            raise DidNotRun(NotVerified("right on a short case, but not timed: ranks share a GPU"))
        shards = shards_of(case, sharing)
        facts = _facts(case, sharing, shards)
        if self.is_simulated:
            ranks = self.settings.simulated_ranks
            shares = [simulate(rank, case, sharing, kernel, self.settings.effort, self.world.device, shards) for rank in ranks]
            facts |= {"simulated_ranks": list(ranks), "communication": "off"} | self._alone_around(tokens, mask, name, kernel)
            return Result(case, slowest_of(shares), sharing, facts)
        measured = measure(self.world, case, sharing, kernel, self.settings.effort, shards)
        facts |= self._alone_around(tokens, mask, name, kernel)
        if (
            sharing.lanes > 1
            and self.world.device.type == "cuda"
            and (name_of := strays_from_one_lane(self.world, case, sharing, kernel, shards))
        ):
            raise DidNotRun(Wrong(f"{name_of} is another on two streams than on one"))
        if self.settings.exposed and self.world.size > 1:
            quiet = World(self.world.rank, self.world.size, self.world.device, is_connected=False)
            off = measure(quiet, case, sharing, kernel, replace(self.settings.effort, warmup=1), shards)
            timed = [d for d in DIRECTIONS if getattr(off, f"{d}_ms")]
            off_ms = self.world.slowest([off.median_ms(d) for d in timed])
            facts |= {f"exposed_{d}_ms": measured.median_ms(d) - t for d, t in zip(timed, off_ms, strict=True)}
        return Result(case, measured, sharing, facts)

    def _peer_cells(self, tokens: int, mask: str) -> None:
        from pytest_longca.parallel.peers import PEERS, measure_peer, measure_torch

        case, effort = self.settings.case(mask, tokens), self.settings.effort
        for peer in PEERS:
            if mask in peer.masks and peer.package in self.settings.peers:
                body = partial(measure_peer, peer, self._peer_world, case, effort)
                self._cell(tokens, mask, "fa2", peer.name, partial(self._peer, tokens, mask, body))
        if mask in ("full", "causal") and "torch" in self.settings.peers and not self.is_simulated:
            body = partial(measure_torch, self.world, case, effort)
            self._cell(tokens, mask, "sdpa flash", "torch context_parallel", lambda: Result(case, body(), None, {"what": "a peer"}))

    def _peer(self, tokens: int, mask: str, body: Callable[[], Measured]) -> Result:
        """A peer, and its kernel alone around it where that was measured."""
        case, measured, facts = self.settings.case(mask, tokens), body(), {"what": "a peer"}
        around = self._alone_around(tokens, mask, "fa2", self._kernel("fa2", case)) if (tokens, mask, "fa2") in self.alone_ms else {}
        return Result(case, measured, None, facts | around)

    @property
    def _peer_world(self) -> World:
        """Peers need a process group; simulated, it is torch's fake one, in which nothing is sent."""
        if not self.is_simulated:
            return self.world
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        rank = self.settings.simulated_ranks[0]
        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=self.settings.world)
        return World(rank, self.settings.world, self.world.device, is_connected=False)

    def _require(self, key: tuple[str, ...], judge: Callable[[Case], Outcome]) -> None:
        """Raise DidNotRun unless what `key` (mask, kernel, mechanism, layout) names is right on a short case of the mask; judged once."""
        if key not in self.verified:
            self.verified[key] = judge(self.settings.case(key[0], self.settings.check_tokens))
        outcome = self.verified[key]
        if not isinstance(outcome, Passed):
            raise DidNotRun(outcome)

    def _cell(self, tokens: int, mask: str, kernel: str, what: str, body: Callable[[], Result]) -> None:
        """Guard one cell: out of time, an error or a hang becomes a record, and the run goes on (a hang ends it)."""
        if self.world.slowest([time.monotonic() - self.started])[0] > self.settings.deadline_s:
            self._conclude(tokens, mask, kernel, what, NotVerified("the time of --minutes was spent"))
            return
        watchdog = threading.Timer(self.settings.cell_timeout_s, self._hung, (tokens, mask, kernel, what))
        watchdog.daemon = True
        watchdog.start()
        try:
            self._record(tokens, mask, kernel, what, body())
        except Exception as error:
            self._conclude(tokens, mask, kernel, what, _outcome(error))
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()
        finally:
            watchdog.cancel()

    def _hung(self, tokens: int, mask: str, kernel: str, what: str) -> None:
        self._conclude(tokens, mask, kernel, what, TimedOut(f"no end within {self.settings.cell_timeout_s:g} s; the run ends here"))
        if self.world.rank == 0:
            print(self.table(), flush=True)
        os._exit(TIMED_OUT_STATUS)

    def _conclude(self, tokens: int, mask: str, kernel: str, what: str, outcome: Outcome) -> None:
        self.rows.append(Row(tokens, mask, kernel, what, note=str(outcome)[:110]))
        about: dict[str, Any] = {"kernel": kernel, "mask": mask, "mechanism": what, "world_size": self.settings.world}
        self._write(Record(stage="parallel", outcome=outcome.to_json(), reason=str(outcome), facts={"tokens": tokens}, **about))

    def _record(self, tokens: int, mask: str, kernel: str, what: str, found: Result) -> None:
        case, result, sharing, facts = found.case, found.measured, found.sharing, found.facts
        row = Row(tokens, mask, kernel, what, note=_note(facts, result))
        for direction in DIRECTIONS:
            if not getattr(result, f"{direction}_ms"):
                continue
            flop = case.flop(Direction(direction)) // (1 if what == "alone" else self.settings.world)
            rate = flop / result.median_ms(direction) / 1e9
            alone_ms = facts.get(f"alone_{direction}_ms")
            share = alone_ms / result.median_ms(direction) if alone_ms else None  # the same work
            setattr(row, direction, f"{rate:.1f}" + (f" ({share:.1%})" if share and what != "alone" else ""))
            self._write(
                Record(
                    stage="parallel",
                    kernel=kernel,
                    mask=mask,
                    mechanism=sharing.mechanism if sharing else what,
                    case=case.id,
                    direction=direction,
                    outcome=Passed().to_json(),
                    samples_ms=getattr(result, f"{direction}_ms"),
                    peak_bytes=result.peak_bytes,
                    area=case.area,
                    flop=flop,
                    world_size=self.settings.world,
                    comm_bytes=sum(count for kind, count in result.traffic.items() if kind.endswith("_bytes")) if sharing else None,
                    device=torch.cuda.get_device_name() if self.world.device.type == "cuda" else "cpu",
                    clocks=result.clocks,
                    facts={**facts, "tokens": tokens, "tflop_per_s": rate, "of_alone": share, "traffic": result.traffic},
                    versions=_versions(),
                )
            )
        self.rows.append(row)
        if self.world.rank == 0:
            print(f"# {row.tokens} {row.mask} {row.kernel} {row.what}: {row.fwd} / {row.bwd} {row.note}", file=sys.stderr, flush=True)

    def _write(self, record: Record) -> None:
        if self.world.rank == 0 and self.settings.json:
            facts = {"date": datetime.now(UTC).date().isoformat(), **record.facts}
            dated = replace(record, command=self.command, commit=commit(), facts=facts)
            with self.settings.json.open("a") as file:
                file.write(dated.to_line() + "\n")


def _verdict(world: World, case: Case, sharing: Sharing, kernel: BlockKernel) -> Outcome:
    """Passed where every tensor's error against the reference is at most twice that of the kernel on one device."""
    shards = shards_of(case, sharing)
    inputs = make_inputs(case, world.device)
    bound, ids = bind(case, sharing, world, kernel, shards), shards.of_rank(world.rank)
    for _ in range(sharing.lanes):  # kernels take turns from the second call on
        local = run_share(bound, inputs, ids)
    whole = assemble(world, case, shards, local)
    ratio, worst = 0.0, "a tensor"
    if world.rank == 0:
        ours = compare(case, inputs, whole)["rms"]
        alone = compare(case, inputs, single_device(world, case, kernel, inputs))["rms"]
        floor = ERROR_FLOOR.get(case.dtype, 0.0)
        ratios = {name: ours[name] / max(alone[name], LSE_FLOOR if name == "lse" else floor, 1e-300) for name in ours}
        worst = max(ratios, key=lambda name: ratios[name])
        ratio = ratios[worst]
    (ratio,) = world.slowest([ratio])
    if ratio <= ERROR_RATIO:
        return Passed()
    return Wrong(f"{worst} is {ratio:.3g} times as far from the reference as the kernel alone: at most {ERROR_RATIO:g}")


def _alone_verdict(world: World, case: Case, kernel: BlockKernel) -> Outcome:
    """Passed where the kernel on one device, through the same segments, is within its limits on every rank."""
    inputs = make_inputs(case, world.device)
    verdicts = compare(case, inputs, single_device(world, case, kernel, inputs))["verdicts"]
    worst = max(verdicts, key=lambda verdict: float(verdict["error_over_limit"]))
    (ratio,) = world.slowest([worst["error_over_limit"]])
    if ratio <= 1:
        return Passed()
    return Wrong(f"the kernel alone: {worst['tensor']} is {ratio:.3g} times its limit: {worst['message']}")


def _facts(case: Case, sharing: Sharing, shards: Shards) -> dict[str, Any]:
    area = (shards.intervals[..., 1] - shards.intervals[..., 0]).sum(1, dtype=torch.int64)
    work = [int(area[ids].sum()) for ids in shards.ring]
    return {
        "mesh": str(shards.mesh),
        "placement": sharing.row.placement(shards.mesh, sharing.ranks_per_node),
        "layout": sharing.layout_name,
        "groups": sharing.groups,
        "head_groups": head_groups(case, shards.mesh, sharing.groups),
        "lanes": sharing.lanes,
        "imbalance": max(work) * len(work) / max(1, sum(work)),
    }


def _note(facts: dict[str, Any], result: Measured) -> str:
    parts = [facts["mesh"]] if "mesh" in facts else []
    parts += [f"imbalance {facts['imbalance']:.3f}"] if facts.get("imbalance", 1) > 1.001 else []
    parts += [f"exposed {facts[f'exposed_{d}_ms'] / result.median_ms(d):.1%} {d}" for d in DIRECTIONS if f"exposed_{d}_ms" in facts]
    parts += [f"{result.peak_bytes / 2**30:.1f} GiB"] if result.peak_bytes else []
    return ", ".join(parts)


def _outcome(error: Exception) -> Outcome:
    if isinstance(error, DidNotRun):
        return error.outcome
    if isinstance(error, InvalidArgument):
        return Unsupported(str(error))
    if isinstance(error, torch.OutOfMemoryError):
        return OutOfMemory(str(error).splitlines()[0])
    if isinstance(error, ModuleNotFoundError):
        return NotInstalled(str(error), f"pip install the package of {error.name}")
    return Crashed(f"{type(error).__name__}: {error}")


def _medians(measured: Measured) -> dict[str, float]:
    return {direction: measured.median_ms(direction) for direction in DIRECTIONS if getattr(measured, f"{direction}_ms")}


def _versions() -> dict[str, str]:
    """Versions of what decides a figure, as far as it is installed."""
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def main(arguments: Sequence[str] | None = None, output: TextIO = sys.stdout) -> int:
    """Run the benchmark in this process, as a rank of torchrun's world or alone. 2 if the command line cannot be right."""
    options = parse(arguments)
    try:
        settings = settings_of(options, int(os.environ.get("WORLD_SIZE", 1)))
        settings.refuse_if_nothing_fits()
        world = session_world()
    except LongcaError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return 2
    if not world.agrees_on(repr(settings)):
        if world.rank == 0:
            print("error: the ranks were started with different options: give every rank the same command line", file=sys.stderr)
        torch.distributed.destroy_process_group()
        return 2
    command = shlex.join(["python", "-m", "pytest_longca.parallel.bench", *(sys.argv[1:] if arguments is None else arguments)])
    bench = Bench(settings, world, options.simulate_world > 0, command)
    bench.run()
    if world.rank == 0:
        print(bench.table(), file=output, flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
