"""What a machine with GPUs has to show, in one go: timings one after another, verdicts side by side, each killed when its time is over.

    python tests/gpu/everything.py --minutes 25 --out results
    python tests/gpu/everything.py --minutes 8 --jobs gate,examples --out results
    python tests/gpu/everything.py --dry-run

Timings have a GPU to themselves: the first of several, while the last does the verdicts; on one GPU the verdicts come after them. What
needs all GPUs comes last. Each job has a log and records in `--out`; what it had written when it was killed stays. Last: how each ended.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GRACE_S = 10.0
"""After an interrupt, for a last table and the records."""
PYTEST = "-m pytest -p no:cacheprovider --longca-json={out}"
TIMED = f"{PYTEST} -k timing"
DRAWN = f"{PYTEST} -k examples --benchmark-skip"
MAPS = f"{DRAWN} --longca-examples=510 --maxschedchunk=1 --longca-masks=block"
SIMULATED = "-m pytest_longca.parallel.bench --budget 0.5 --samples 3 --minutes 4.5 --json {out}"
RANK = f"{SIMULATED} --warmup 0 --simulate-world 8 --simulate-ranks 3 --layouts striped"
RANKS = f"{SIMULATED} --warmup 1 --simulate-world 64"
DENSE = "{root}/tests/gpu/bench_dense.py --processes 12 --records {out}"
TILES = "{root}/tests/gpu/bench_flashmask.py --sweep --parts fwd,dq,dkdv --processes 12 --out {out}"
REGULAR = "full,causal,full_sliding_window,causal_sliding_window,full_document,causal_document"
DENSITY = "{root}/tests/gpu/bench_sparse.py --do density --json {out}"
SPARSE = "vsa_triton,vsa,cudnn_sparse,fa2_sparse,flashinfer"
NCCL = "{root}/tests/gpu/bench_parallel_nccl.py --gpus {gpus} --json {out}"


@dataclass(frozen=True, slots=True)
class Job:
    """A Python command line, and after how many seconds it is killed; `{out}` is its file of records, `{gpus}` how many there are.

    `part` is the part of the cores that a job of verdicts keeps busy with xdist's processes, 0 if it needs none.
    """

    name: str
    seconds: float
    command: str
    part: float = 0.0

    def line(self, out: Path, gpus: int) -> list[str]:
        """The command line."""
        words = shlex.split(self.command.format(out=out / f"{self.name}.jsonl", root=ROOT, gpus=gpus))
        return [sys.executable, *words, *(["-n", str(max(1, int(self.part * (os.cpu_count() or 1))))] if self.part else [])]


TIMINGS = (
    Job("reference", 130, "{root}/tests/gpu/test_reference_gpu.py --seconds 125 --only 512K --figures {out}"),
    Job("plans", 60, "{root}/tests/gpu/bench_plans.py --figures {out}"),
    Job("calls", 60, "{root}/tests/gpu/bench_calls.py --kernels fa3,cudnn,cudnn_sparse --minutes 0.9 --figures {out}"),
    Job("fa3", 110, f"{DENSE} --kernels flex,fa2,fa3 --masks {REGULAR} --minutes 1.7"),
    Job("gate", 320, "{root}/tests/gpu/bench_gate.py --minutes 5 --out {out}"),
    Job("naive", 60, f"{DRAWN} --longca-examples=250 --longca-masks=static --longca-kernels=naive --maxschedchunk=1", 1.0),
    Job("tiles", 240, f"{TILES} --heads 64:64 --compare --minutes 3.8"),
    Job("density", 240, f"{DENSITY} --kernels {SPARSE} --lengths 32768 --minutes 3.9"),
    Job("density_64k", 150, f"{DENSITY} --kernels {SPARSE} --lengths 65536 --densities 1.0,0.8 --minutes 2.4"),
    Job(
        "density_128k",
        100,
        f"{DENSITY} --kernels vsa_triton,vsa,cudnn_sparse --sizes 128 --lengths 131072 --densities 1.0,0.1 --minutes 1.6",
    ),
    Job("verified", 300, f"{DENSE} --check-seqlens 16384,32768 --seqlens 32768 --verdicts {{out}}.verdicts --minutes 4.9"),
    Job("mha", 320, f"{DENSE} --heads 64:64 --minutes 5.2"),
    Job("simulated", 280, f"{RANK} --kernels fa2 --masks full,causal --tokens 32768 --peers ring-flash-attn,yunchang"),
    Job("simulated_fast", 180, f"{RANK} --kernels cudnn_flex --masks full,causal --tokens 32768"),
    Job("simulated_lane", 180, f"{RANK} --kernels cudnn_flex --masks full,causal --tokens 32768 --lanes 1"),
    Job(
        "simulated_documents",
        60,
        f"{RANKS} --simulate-ranks 0,21,42,63 --kernels fa2 --mechanisms ring_p2p --masks causal_document,full_document --tokens 8192",
    ),
    Job("dense_slice", 540, f"{TIMED} --longca-preset=paper-dense --longca-kernels=flex,fa2,fa4,cudnn_flex,flashmask --longca-budget=8m"),
    Job("long", 320, f"{TIMED} --longca-preset=long --longca-kernels=flashmask,fa4,cudnn_flex --longca-budget=3m"),
)
VERDICTS = (
    Job("maps", 400, f"{MAPS} --longca-kernels=flashinfer", 0.4),
    Job("drift", 150, f"{MAPS} --longca-kernels=vsa --longca-seed=3", 0.1),
    Job("smoke", 220, f"{PYTEST} --longca-kernels=all --longca-preset=smoke --benchmark-skip --durations=100"),
    Job("known", 100, f"{PYTEST} --longca-kernels=all -k known"),
)
WORLDS = (Job("nccl", 560, f"{NCCL} --minutes 9.2 --stages fa2_8k,fa2,fast,documents,heterogeneous"),)


class Session:
    """The jobs' processes, their ends, and the time that is left."""

    def __init__(self, out: Path, gpus: int, minutes: float) -> None:
        self.out, self.gpus = out, gpus
        self.deadline = time.monotonic() + 60 * minutes
        self.ends: list[str] = []

    def run(self, job: Job, devices: Iterable[int]) -> None:
        """Run a job on these GPUs until it ends or its time is over; say how it ended."""
        seconds = min(job.seconds, self.deadline - time.monotonic())
        if seconds < job.seconds / 2:
            return self.tell(f"{job.name}: no time left")
        folder, started = self.out / job.name, time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), "PYTHONUNBUFFERED": "1", "NCCL_NVLS_ENABLE": "0"}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with (self.out / f"{job.name}.txt").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                job.line(self.out, self.gpus), cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                end = f"status {process.wait(seconds)}"
            except subprocess.TimeoutExpired:
                end = f"interrupted, status {interrupt(process)}"
        self.tell(f"{job.name}: {end} after {time.monotonic() - started:.0f} s")

    def tell(self, end: str) -> None:
        self.ends.append(end)
        print(end, flush=True)

    def one_after_another(self, jobs: Iterable[Job], devices: Sequence[int]) -> None:
        for job in jobs:
            self.run(job, devices)

    def side_by_side(self, jobs: Iterable[Job], devices: Sequence[int]) -> None:
        join([threading.Thread(target=self.run, args=(job, devices)) for job in jobs])


def heed_interrupts() -> None:
    """What a shell starts in the background ignores SIGINT, and so would the jobs: they heed it as at a terminal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupt(process: subprocess.Popen[bytes]) -> int:
    """End a job as Ctrl-C does, and by force whatever is left of it and of what it started."""
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def main(arguments: Sequence[str] | None = None) -> int:
    heed_interrupts()
    known = {job.name: job for job in (*TIMINGS, *VERDICTS, *WORLDS)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=25.0, help="all jobs together (default: 25)")
    parser.add_argument("--jobs", default=",".join(known), help="which (default: all)")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="a folder for logs and records (default: gpu-results)")
    parser.add_argument("--dry-run", action="store_true", help="print the command of each job")
    options = parser.parse_args(arguments)
    names = options.jobs.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no job {unknown[0]!r}: {', '.join(known)}")
    out = options.out.resolve()
    if options.dry_run:
        for name in names:
            print(f"# {name}, {known[name].seconds:g} s\n{shlex.join(known[name].line(Path(options.out), 2))}")
        return 0
    timings, verdicts, worlds = ([job for job in jobs if job.name in names] for jobs in (TIMINGS, VERDICTS, WORLDS))
    if not (gpus := count_gpus()):
        parser.error("there is no GPU here; --dry-run prints what would run")
    session = Session(out, gpus, options.minutes)
    first = threading.Thread(target=session.one_after_another, args=(timings, [0]))
    last = threading.Thread(target=session.side_by_side, args=(verdicts, [gpus - 1]))
    for threads in ([first, last],) if gpus > 1 else ([first], [last]):
        join(threads)
    session.one_after_another(worlds if gpus > 1 else [], range(gpus))
    print("\n" + "\n".join(session.ends))
    return 0


if __name__ == "__main__":
    sys.exit(main())
