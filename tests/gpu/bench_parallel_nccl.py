"""Context parallelism over NCCL on the GPUs of one host, what tells most first: stages, each a world of its own with its own time.

    python tests/gpu/bench_parallel_nccl.py --gpus 2 --minutes 7 --json cp.jsonl
    python tests/gpu/bench_parallel_nccl.py --gpus 2 --stages documents,fast --minutes 3 --json cp.jsonl
    python tests/gpu/bench_parallel_nccl.py --dry-run

A stage that hangs is killed when its time is over and costs the others nothing; records are appended as they come. The tables come last, of
everything in the file. Exit status 1 if a mechanism was wrong or nothing was measured.
"""

import argparse
import os
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_longca.parallel.tables import markdown
from pytest_longca.report.store import read_records

START_S = 25  # imports and NCCL, before the first cell of a stage; and a cell at its end that may still run


@dataclass(frozen=True, slots=True)
class Stage:
    """One run of the benchmark, after how many seconds it is killed on two GPUs, and after how many one of its cells counts as hung."""

    name: str
    seconds: float
    arguments: str
    cell_seconds: float = 40

    def on(self, gpus: int) -> "Stage":
        """The same on more GPUs: with as many tokens each, a rank computes in proportion to their number."""
        scale = max(1.0, gpus / 2)
        return replace(self, seconds=self.seconds * scale, cell_seconds=self.cell_seconds * scale)


PEERS = "--peers ring-flash-attn,yunchang"
ONCE = "--tokens 32768 --layouts zigzag --no-exposed"
STAGES = (
    Stage("fa2", 190, f"--kernels fa2 --masks causal,full --tokens 32768 --layouts striped {PEERS} --links"),
    Stage("fa2_8k", 80, f"--kernels fa2 --masks causal,full --tokens 8192 --layouts striped {PEERS}"),
    Stage("fast", 140, "--kernels cudnn_flex --masks causal,full --tokens 32768 --layouts striped", 75),
    Stage("torch", 45, "--kernels= --peers torch --masks causal,full --tokens 32768,8192"),
    Stage(
        "documents",
        75,
        "--kernels fa2 --masks causal_document,full_document --mechanisms ulysses,ring_p2p,ring_allgather --tokens 32768"
        " --layouts zigzag,striped --no-exposed --peers ring-flash-attn",
    ),
    Stage("zigzag", 100, f"--kernels fa2 --masks causal --layouts zigzag --tokens 32768,8192 {PEERS}"),
    Stage("heterogeneous", 90, f"--kernels flashmask --masks prefix_lm_causal,shared_question {ONCE}", 75),
    Stage("one_lane", 60, "--kernels fa2 --masks causal --tokens 32768 --lanes 1 --no-exposed"),
)
"""`striped` serves causal masks best, and on full ones all layouts are alike; `zigzag` is the paper's."""
GRACE_S = 3
EFFORT = "--warmup 2 --samples 12 --budget 0.7"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=7.0, help="all stages together (default: 7)")
    parser.add_argument("--stages", default=",".join(stage.name for stage in STAGES), help="which, in this order (default: all)")
    parser.add_argument("--json", type=Path, default=Path("cp.jsonl"), help="records are appended here (default: cp.jsonl)")
    parser.add_argument("--dry-run", action="store_true", help="print the command of each stage")
    options = parser.parse_args()
    known = {stage.name: stage for stage in STAGES}
    if unknown := [name for name in options.stages.split(",") if name not in known]:
        parser.error(f"no stage {unknown[0]!r}: {', '.join(known)}")
    end = time.monotonic() + options.minutes * 60
    for stage in (known[name].on(options.gpus) for name in options.stages.split(",")):
        seconds = min(stage.seconds, end - time.monotonic())
        if options.dry_run:
            launch = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus)]
            print(f"# {stage.name}, {stage.seconds:g} s\n{shlex.join([*launch, *command(stage, stage.seconds, options.json)])}")
        elif seconds > START_S:
            run(stage, options.gpus, seconds, options.json)
        else:
            print(f"# {stage.name}: no time left", flush=True)
    return 0 if options.dry_run else conclude(options.json)


def command(stage: Stage, seconds: float, json: Path) -> list[str]:
    """What a rank of the stage runs: no cell starts so late that it is sure to be killed."""
    minutes = max(1.0, seconds - START_S) / 60
    limits = f"--cell-timeout={stage.cell_seconds:g}", f"--minutes={minutes:.2f}"
    return ["-m", "pytest_longca.parallel.bench", *shlex.split(f"{EFFORT} {stage.arguments}"), *limits, f"--json={json}"]


def run(stage: Stage, gpus: int, seconds: float, json: Path) -> None:
    """Run a stage and kill its ranks when its time is over, or when one has failed.

    Not by torchrun: its ranks are in sessions of their own and outlive it when it is killed.
    """
    print(f"# {stage.name}: {seconds:.0f} s at most", flush=True)
    started = time.monotonic()
    world = {"WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, *command(stage, seconds, json)],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_NVLS_ENABLE": "0"},
        )
        for rank in range(gpus)
    ]
    while time.monotonic() < started + seconds and any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        time.sleep(0.2)
    time.sleep(GRACE_S if any(rank.poll() for rank in ranks) else 0)  # for what the others still say
    statuses = ["killed" if rank.poll() is None else f"status {rank.returncode}" for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.wait()
    print(f"# {stage.name}: {', '.join(statuses)} after {time.monotonic() - started:.0f} s", flush=True)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return int(sock.getsockname()[1])


def conclude(json: Path) -> int:
    """Print the tables of all records."""
    records = read_records(json) if json.exists() else []
    if not any(record.samples_ms for record in records):
        print("nothing was measured")
        return 1
    print(markdown(records))
    return int(any(record.kind == "wrong" for record in records))


if __name__ == "__main__":
    sys.exit(main())
