"""What one pytest session knows: options, catalogue, machine, and the executor that runs its cases."""

import functools
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_longca.budget import Budget
from pytest_longca.catalogue import Catalogue
from pytest_longca.errors import DidNotRun, InvalidArgument, asked
from pytest_longca.kernel import refusal_of
from pytest_longca.launched import agreement, launched_size
from pytest_longca.machine import Machine
from pytest_longca.options import Options, select
from pytest_longca.outcome import Crashed, NotInstalled, Outcome, TimedOut, Unsupported
from pytest_longca.sources import Source, catalogue_of, mechanisms_of, sources_of
from pytest_longca.spent import KERNELS, TIME, add, shares
from pytest_longca.workers import START_TIMEOUT_S, Executor, InProcess, Worker, patience_s

if TYPE_CHECKING:
    from pytest_longca.case import Case
    from pytest_longca.checks import Verification
    from pytest_longca.kernel import Kernel
    from pytest_longca.parallel.mechanisms import Mechanism, Mesh
    from pytest_longca.parallel.pool import Ranks
    from pytest_longca.sampling import LengthSource


def _picked(
    option: str, kind: str, wanted: Sequence[str] | None, known: Iterable[str], groups: dict[str, tuple[str, ...]] | None = None
) -> tuple[str, ...]:
    """The wanted names, as `select` has them; its error names the option."""
    try:
        return select(kind, wanted, known, groups)
    except InvalidArgument as error:
        raise InvalidArgument(f"--longca-{option}: {error}") from None


class Session:
    """Options, catalogue and machine of one pytest session; everything is made when it is first needed."""

    def __init__(self, options: Options, pluginmanager: Any) -> None:
        self.options = options
        self._pluginmanager = pluginmanager
        self._executors: dict[str, Executor] = {}
        self._pools: dict[int, Ranks] = {}
        self._process = 0
        self._verified: dict[tuple[str, str], Outcome] = {}
        self.warming = ""
        """What was compiled ahead, and how long it took; empty where nothing is."""
        self.compile_ms: dict[tuple[str, Case], float] = {}
        """What compiling the cases of timings ahead took, by kernel and `compiled_alike` case."""
        self.passed_ahead: dict[tuple[str, str, tuple[str, ...]], Verification] = {}
        """Cases that passed their checks while they were compiled ahead, by kernel, id and checks: they are not run again."""
        self.spent: dict[str, float] = {}
        """Seconds that workers spent on kernels and on the reference."""
        self.began: float | None = None
        """When the first item began, on the monotonic clock."""
        self.budget = Budget(options.budget) if options.budget else None

    @functools.cached_property
    def catalogue(self) -> Catalogue:
        """All kernels and masks, third parties' included. Raises InvalidArgument if a hook is wrong."""
        return catalogue_of(self._pluginmanager)

    @functools.cached_property
    def kernels(self) -> tuple[str, ...]:
        """The kernels to judge: those asked for, or all that are installed and run on this kind of device.

        For mechanisms these are the block kernels among them; one that the CPU interprets takes minutes a cell, and must be asked for.
        """
        wanted = _picked("kernels", "kernel", self.options.kernels, self.catalogue.kernel_names, self.catalogue.kernel_groups)
        if self.options.kernels is not None:
            return wanted
        return tuple(name for name in wanted if self._is_at_home(self.catalogue.kernel(name)))

    def missing(self, kernel: str) -> NotInstalled | None:
        """What the kernel needs and is not installed, or None. Raises InvalidArgument, naming the kernel, if it raises."""
        return asked(f"kernel {kernel}: missing", self.catalogue.kernel(kernel).missing)

    def _is_at_home(self, kernel: "Kernel") -> bool:
        if self.missing(kernel.name) is not None:
            return False
        if not self.mechanisms:
            return self.machine.device in kernel.capabilities.devices
        from pytest_longca.parallel.kernel import find_block_kernel, serves_blocks

        is_interpreted = kernel.is_triton and self.machine.interpret
        if is_interpreted or not serves_blocks(kernel.name, self.catalogue):
            return False
        return self.machine.device in find_block_kernel(kernel.name, self.catalogue).capabilities.devices

    @functools.cached_property
    def masks(self) -> tuple[str, ...]:
        """The masks to judge kernels on. Raises InvalidArgument for one of a hook whose predicate is none, if it will be used."""
        wanted = self.options.chosen("masks", "cpu")  # a preset's masks are the same on every device
        names = _picked("masks", "mask", wanted, self.catalogue.mask_names, self.catalogue.mask_groups)
        if self.options.case is None and self.options.selftest is None:  # these two have masks of their own
            for name in names:
                self.catalogue.mask(name)
        return names

    @functools.cached_property
    def mechanisms(self) -> "tuple[Mechanism, ...]":
        """The mechanisms that were asked for. Raises InvalidArgument for one that does not exist, or a mesh that no world has."""
        from pytest_longca.parallel.mechanisms import Mesh

        wanted = self.options.chosen("mechanisms", "cpu")  # the same on every device
        if not wanted:
            return ()
        if self.options.mesh:
            self._check_mesh(Mesh.parse(self.options.mesh))
        known = mechanisms_of(self._pluginmanager)
        return tuple(known[name] for name in _picked("mechanisms", "mechanism", wanted, known))

    def _check_mesh(self, mesh: "Mesh") -> None:
        """Raise InvalidArgument where the mesh fits none of the worlds: every cell would be skipped, which is green."""
        if mesh.size in self.world_sizes:
            return
        worlds = "the world of torchrun" if launched_size() else self.options.place("world-sizes")
        sizes = ", ".join(map(str, self.world_sizes))
        raise InvalidArgument(
            f"--longca-mesh: {mesh} are {mesh.size} ranks, and {worlds} has none but {sizes}: their product must be one of them"
        )

    @functools.cached_property
    def sources(self) -> tuple[Source, ...]:
        """What workers and ranks import beside the built-in kernels and masks."""
        return sources_of(self._pluginmanager)

    @property
    def num_sharing(self) -> int:
        """How many xdist workers run on this machine at once, this process among them; they all use its first GPU."""
        return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

    @functools.cached_property
    def peaks(self) -> dict[str, float]:
        """The device's own ceilings, measured once a session; empty on a CPU, or if they could not be measured."""
        if self.machine.device != "cuda":
            return {}
        try:
            return dict(self.call(self.kernels[0], {"op": "peaks"}).get("peaks", {}))
        except DidNotRun:
            return {}

    @functools.cached_property
    def anchor(self) -> str | None:
        """The kernel that others are timed in turns with. Raises InvalidArgument if it is none, or alone in the gate."""
        from pytest_longca.closing import check_anchor

        name = self.options.anchor
        if not name:
            return None
        (found,) = _picked("anchor", "kernel", (name,), self.catalogue.kernel_names)
        check_anchor(self.options, self.kernels)
        return found

    @functools.cached_property
    def processes(self) -> int:
        """How many processes time each case: enough for the gate, where there is one."""
        from pytest_longca.closing import BASELINE_PROCESSES, COMPARED_PROCESSES

        baseline = self.options.baseline
        needed = 1 if not baseline else COMPARED_PROCESSES if Path(baseline).exists() else BASELINE_PROCESSES
        return self.options.processes or needed

    @functools.cached_property
    def lengths(self) -> "LengthSource | None":
        """The user's own document lengths; None for the built-in histograms. Raises InvalidArgument if the file is not right."""
        from pytest_longca.sampling import read_lengths

        try:
            return read_lengths(self.options.lengths) if self.options.lengths else None
        except InvalidArgument as error:
            raise InvalidArgument(f"--longca-lengths: {error}") from None

    @functools.cached_property
    def replayed(self) -> "Case | None":
        """The case of --longca-case. Raises InvalidArgument, pointing at the place, if the id is malformed."""
        from pytest_longca.ids import parse_case

        if self.options.case is None:
            return None
        try:
            return parse_case(self.options.case, self.catalogue.masks())
        except InvalidArgument as error:
            raise InvalidArgument(f"--longca-case: {error}") from None

    def num_examples(self, kernel: str) -> int:
        """Hypothesis examples for each of a kernel's masks; few for one that the CPU interprets, unless the option says otherwise."""
        is_interpreted = self.catalogue.kernel(kernel).is_triton and self.machine.interpret
        if is_interpreted and self.options.examples is None:
            return self.options.preset_values.interpreted_examples
        return int(self.options.chosen("examples", self.machine.device))

    @functools.cached_property
    def machine(self) -> Machine:
        """The machine as a worker sees it; this process never initialises CUDA."""
        fields = self.executor("").call({"op": "machine"}, START_TIMEOUT_S)
        capability, _ = fields.pop("capability"), fields.pop(TIME)
        return Machine(capability=tuple(capability) if capability else None, **fields)

    def executor(self, kernel: str) -> Executor:
        """The executor for a kernel's cases, by --longca-isolate."""
        mode = self.options.isolate
        key = kernel if mode == "kernel" else "all"
        if key not in self._executors:
            if mode == "off":
                self._executors[key] = InProcess((), self._pluginmanager)
            else:
                self._executors[key] = Worker(self.sources)
        elif mode == "case":
            self._executors[key].close()
        return self._executors[key]

    def enter_process(self, number: int) -> None:
        """End all workers where the process to time in is not the one of the last timing, so that the next case starts a new one."""
        if number != self._process:
            self._end_workers()
            self._process = number

    def call(self, kernel: str, request: dict[str, Any], case: "Case | None" = None) -> dict[str, Any]:
        """A worker's answer, about a case or not. Raises DidNotRun(Crashed | TimedOut), and NotVerified where the budget ended."""
        began = time.monotonic()
        try:
            answer = self._answer(kernel, request, self.timeout_s(kernel, case))
        except DidNotRun:  # what died or hung was the kernel
            add(self.spent, {KERNELS: time.monotonic() - began})
            raise
        add(self.spent, answer.pop(TIME))
        return answer

    def _answer(self, kernel: str, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        budget = self.budget
        if budget is None:
            return self.executor(kernel).call(request, timeout_s)
        if budget.left_s <= 0:
            raise DidNotRun(budget.postponed())
        try:
            return self.executor(kernel).call(request, min(timeout_s, budget.left_s))
        except DidNotRun as stopped:
            if isinstance(stopped.outcome, TimedOut) and budget.left_s <= 0:
                raise DidNotRun(budget.postponed()) from None
            raise

    def timeout_s(self, kernel: str, case: "Case | None") -> float:
        """How long one case of the kernel may take before it counts as a hang: longer for one that compiles, and for much work."""
        candidate = self.catalogue.kernel(kernel)
        per_head_dim = candidate.compiles_per_head_dim and self.machine.device == "cuda"
        compiles = candidate.compiles_per_shape or per_head_dim or candidate.compiles_to_disk(self.machine)
        return patience_s(self.options.timeout, compiles, case.flop() if case else 0, self.machine.device)

    def verify(self, kernel: str, case: "Case", checks: Iterable[str]) -> "Verification":
        """Run the case and the checks in a worker, unless they passed there ahead. A crash or a hang is the verification's outcome."""
        names = tuple(checks)
        return self.passed_ahead.get((kernel, case.id, names)) or self._judged(kernel, case, names)

    def verify_anew(self, kernel: str, case: "Case", checks: Iterable[str]) -> "Verification":
        """As `verify`, in a worker that ran nothing before: what earlier cases left behind is gone. (In-process there is no other.)"""
        self.executor(kernel).close()
        return self._judged(kernel, case, tuple(checks))

    def _judged(self, kernel: str, case: "Case", checks: tuple[str, ...]) -> "Verification":
        from pytest_longca.checks import Verification

        request = {"op": "verify", "kernel": kernel, "case": case.id, "checks": list(checks)}
        after = self.executor(kernel).ran
        try:
            verification = Verification.from_json(self.call(kernel, request, case))
        except DidNotRun as stopped:
            verification = Verification(outcome=stopped.outcome)
        except InvalidArgument as error:  # a mask whose predicate raises: no kernel can be judged on it
            verification = Verification(outcome=Crashed(str(error)))
        verification.after = after
        return verification

    def verified_outcome(self, kernel: str, case: "Case") -> Outcome:
        """What the truth says of a kernel on a case, asked once a session: for an anchor, which many cases are timed beside."""
        key = (kernel, case.id)
        if key not in self._verified:
            self._verified[key] = self.verify(kernel, case, ("truth",)).outcome
        return self._verified[key]

    def refusal(self, kernel: str, case: "Case") -> NotInstalled | Unsupported | None:
        """Why the kernel cannot run the case here, before anything runs. Raises InvalidArgument, naming the kernel, if it raises."""
        return self.missing(kernel) or refusal_of(self.catalogue.kernel(kernel), case, self.machine)

    def cell_refusal(self, kernel: str, mask: str) -> Outcome | None:
        """Why the kernel takes no case of that mask at all on this machine, or None."""
        from pytest_longca.cells import typical_cases

        if missing := self.missing(kernel):
            return missing
        refusals = []
        for case in typical_cases(self, kernel, mask):
            refusals.append(self.refusal(kernel, case))
            if refusals[-1] is None:
                return None
        return refusals[0]

    def taken(self, name: str, kernel: str) -> tuple[Any, ...]:
        """The "dtypes" or "head_dims" that a kernel is judged on: what was asked for, or the preset's that it takes, or its own."""
        wanted = tuple(self.options.chosen(name, self.machine.device))
        if self.options.values.get(name) is not None:
            return wanted
        declared = getattr(self.catalogue.kernel(kernel).capabilities, name)
        return tuple(value for value in wanted if value in declared) or tuple(sorted(declared))

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """The numbers of ranks that cases are shared among: under torchrun, those that it started."""
        size = launched_size()
        return (size,) if size else tuple(self.options.world_sizes)

    def pool(self, world: int) -> "Ranks":
        """The ranks of a world of that size, kept for all its cases."""
        from pytest_longca.parallel.own_ranks import OwnRanks
        from pytest_longca.parallel.pool import Pool

        if world not in self._pools:
            self._pools[world] = OwnRanks(agreement(self.options)) if launched_size() else Pool(world, self.machine.device)
        return self._pools[world]

    def times(self) -> list[str]:
        """Where the time went, for the end of a run: what was compiled ahead, and the items' time."""
        lines = [self.warming] if self.warming else []
        return [*lines, shares(self.spent, time.monotonic() - self.began)] if self.spent and self.began else lines

    def close(self) -> None:
        """End all workers and ranks."""
        for pool in self._pools.values():
            pool.close()
        self._end_workers()

    def _end_workers(self) -> None:
        for executor in self._executors.values():
            executor.close()
        self._executors.clear()
