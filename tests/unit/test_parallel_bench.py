"""The benchmark's command on the CPU: its table, its records, its refusals; the model's arithmetic."""

import io
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pytest_longca.case import Case
from pytest_longca.catalogue import MASKS, load
from pytest_longca.parallel import bench, model
from pytest_longca.parallel.bench import main
from pytest_longca.parallel.kernel import NaiveBlock, find_block_kernel
from pytest_longca.parallel.links import Link, fit
from pytest_longca.parallel.mechanisms import MECHANISMS, Heads, Mesh
from pytest_longca.parallel.model import (
    H200_FA2,
    Network,
    assumptions,
    check_rows,
    fitted,
    paper_rows,
    paper_table,
    predict_ms,
    rates_alone,
)
from pytest_longca.parallel.peers import own_data_received
from pytest_longca.parallel.setup import Sharing, bind, head_groups
from pytest_longca.parallel.timing import Measured, share_inputs
from pytest_longca.parallel.world import World
from pytest_longca.report.record import Record

SMALL = (
    "--kernels=naive",
    "--tokens=16",
    "--heads=16:2",
    "--head-dim=8",
    "--dtype=fp32",
    "--samples=3",
    "--budget=0.05",
    "--warmup=1",
    "--check-tokens=16",
)


def records(path: Path) -> list[Record]:
    return [Record.from_line(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _not_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_simulated_world_measures_every_mechanism_and_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "commit", lambda: "0123456789ab+")
    output, path = io.StringIO(), tmp_path / "cp.jsonl"
    assert main([*SMALL, "--masks=causal_document", "--simulate-world=8", "--simulate-ranks=3", f"--json={path}"], output) == 0
    table = output.getvalue()
    assert all(f"{name} zigzag" in table and f"{name} balanced" in table for name in MECHANISMS if name != "ulysses")
    found = records(path)
    assert {record.outcome["kind"] for record in found} == {"passed"}
    shared = [record for record in found if record.mechanism in MECHANISMS]
    assert len(shared) == 2 * (1 + 4 * 2)
    assert all(record.facts["communication"] == "off" and record.world_size == 8 and record.comm_bytes for record in shared)
    first = json.loads(path.read_text().splitlines()[0])
    assert first["schema"] == 1 and len(first["facts"]["date"].split("-")) == 3 and first["commit"] == "0123456789ab+"
    assert first["command"].startswith("python -m pytest_longca.parallel.bench --kernels=naive --tokens=16")


def test_share_is_of_the_mean_of_the_kernel_alone_before_and_after_also_of_simulated_ranks_and_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device under its power cap drifts by some per cent in a run of minutes."""
    slower = itertools.count(10)

    def drifting(*_: object) -> Measured:
        return Measured([float(next(slower))] * 3, [], None)

    for place in ("bench.measure_alone", "peers.measure_peer"):
        monkeypatch.setattr(f"pytest_longca.parallel.{place}", drifting)
    monkeypatch.setattr(bench, "find_block_kernel", lambda name: NaiveBlock())
    path = tmp_path / "cp.jsonl"
    run = ("--kernels=fa2", "--mechanisms=ring_p2p,usp", "--masks=full", "--peers=yunchang", "--simulate-world=2", "--simulate-ranks=0")
    assert main([*SMALL, *run, f"--json={path}"], io.StringIO()) == 0
    found = {record.mechanism: record for record in records(path) if record.direction == "fwd"}
    around = {name: record.facts["alone_fwd_ms"] for name, record in found.items()}
    peer = (12 + 14) / 2  # it has 13 itself
    assert around == {"alone": 10, "ring_p2p": (10 + 11) / 2, "usp": (11 + 12) / 2, "yunchang ulysses": peer}
    for name, record in found.items():
        assert record.facts["of_alone"] == pytest.approx(around[name] / statistics.median(record.samples_ms or ()))


@pytest.fixture
def memory_of_nan() -> Iterator[None]:
    """Memory that is allocated and not written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_simulated_rank_computes_on_data(mechanism: str) -> None:
    """Attention over memory that was never written takes less power, and was 8 to 18 % faster than over data."""
    case = Case(mask=load(MASKS["causal"]).default(256), heads_q=16, heads_kv=8, head_dim=8, dtype="fp32")
    sharing = Sharing(mechanism, 8)
    world = World(3, 8, is_connected=False)
    bound = bind(case, sharing, world, find_block_kernel("naive"))
    q, k, v, do = share_inputs(case, 32, world)
    out, _ = bound(q, k, v)
    assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out, (q, k, v), do)))


def test_simulated_exchange_in_groups_of_equal_width_lands_where_nothing_is_kept(tmp_path: Path) -> None:
    """One key/value head's q, k and v are as wide as the gradient of out of the two in the middle."""
    path = tmp_path / "cp.jsonl"
    main([*SMALL, "--heads=16:8", "--masks=full", "--mechanisms=loongtrain", "--simulate-world=8", f"--json={path}"], io.StringIO())
    assert {record.outcome["kind"] for record in records(path)} == {"passed"}


def test_peer_in_a_world_that_sends_nothing_receives_what_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    sent, received, gathered = torch.randn(4), torch.full((4,), torch.nan), torch.full((2, 2), torch.nan)
    try:
        with own_data_received():
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, 1), dist.P2POp(dist.irecv, received, 1)]):
                work.wait()
            dist.all_to_all_single(gathered, sent.view(2, 2))
    finally:
        dist.destroy_process_group()
    assert torch.equal(received, sent) and torch.equal(gathered.flatten(), sent)


def test_mechanism_that_cannot_share_the_heads_says_why_and_the_others_run(tmp_path: Path) -> None:
    output = io.StringIO()
    assert main([*SMALL, "--heads=4:2", "--masks=full", "--mechanisms=ulysses,ring_p2p", "--simulate-world=8"], output) == 0
    ulysses, ring = (next(line for line in output.getvalue().splitlines() if name in line) for name in ("ulysses", "ring_p2p"))
    assert "unsupported: mesh 1x1x8: 8 ranks on the heads axis and 4 query heads" in ulysses
    assert "(" in ring and "unsupported" not in ring


def test_layout_is_named_only_where_there_is_a_ring() -> None:
    output = io.StringIO()
    assert main([*SMALL, "--masks=causal", "--mechanisms=ulysses,ring_p2p", "--layouts=balanced", "--simulate-world=2"], output) == 0
    assert "ulysses " in output.getvalue() and "ulysses balanced" not in output.getvalue() and "ring_p2p balanced" in output.getvalue()


def test_time_that_is_spent_leaves_cells_not_verified() -> None:
    output = io.StringIO()
    assert main([*SMALL, "--masks=full", "--simulate-world=2", "--minutes=0"], output) == 0
    assert output.getvalue().count("not verified: the time of --minutes was spent") == 6


def test_peers_alone_are_cells_that_say_what_is_not_installed(tmp_path: Path) -> None:
    output, path = io.StringIO(), tmp_path / "cp.jsonl"
    arguments = ("--kernels=", "--masks=full", "--peers=yunchang", "--simulate-world=2", "--simulate-ranks=0", f"--json={path}")
    assert main([*SMALL, *arguments], output) == 0
    assert [(record.mechanism, record.outcome["kind"]) for record in records(path)] == [("yunchang ulysses", "not_installed")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--simulate-world=6", "--mesh=2x2x2"), "mesh 2x2x2 has 8 ranks and the world 6"),
        (("--mechanisms=usb",), "did you mean 'usp'"),
        (("--masks=casual",), "did you mean 'causal'"),
        (("--heads=64",), "as in 64:8"),
        (("--tokens=0",), "--tokens: '0' is not a positive whole number"),
        (("--tokens=long",), "such as 512 or 8k"),
        (("--layouts=zigzga",), "did you mean 'zigzag'"),
        (("--peers=yunchan",), "did you mean 'yunchang'"),
    ],
)
def test_bad_command_line_is_refused_with_what_to_do(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("argument", "words"), [("--records=no/such.jsonl", "cannot be read"), ("--inside=fast", "as in 0.02:280")])
def test_the_model_says_what_it_cannot_read(argument: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert model.main([argument]) == 2
    assert words in capsys.readouterr().err


def test_torchrun_runs_correctness_first_then_times_and_the_model_reads_the_records(tmp_path: Path) -> None:
    path = tmp_path / "cp.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--rdzv-endpoint=localhost:{_free_port()}"]
    command += [
        "--rdzv-backend=c10d",
        "-m",
        "pytest_longca.parallel.bench",
        *SMALL,
        "--masks=causal",
        "--check-tokens=16",
        "--links",
        f"--json={path}",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    found = records(path)
    assert {record.mechanism for record in found} == {"links", "alone", *MECHANISMS}
    shared = [record for record in found if record.mechanism in MECHANISMS]
    assert all(f"exposed_{record.direction}_ms" in record.facts for record in shared)
    for record in shared:  # beside the mean of the kernel alone before and after
        share = record.facts[f"alone_{record.direction}_ms"] / statistics.median(record.samples_ms or ())
        assert record.facts["of_alone"] == pytest.approx(share)
    network = fitted(found, Network())
    assert network.inside != Network().inside
    assert len(check_rows(found, network)) == len(shared) + 1


def ranks(port: int, *of_each: str) -> list[tuple[int, str]]:
    """Exit status and errors of one process for each command line, as the ranks of one world."""
    world = {"WORLD_SIZE": str(len(of_each)), "LOCAL_WORLD_SIZE": str(len(of_each)), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest_longca.parallel.bench", *SMALL, "--masks=full", *arguments.split()],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
        )
        for rank, arguments in enumerate(of_each)
    ]  # fmt: skip
    said = [process.communicate(timeout=100)[1] for process in started]
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def test_ranks_with_different_options_are_refused_on_rank_0_and_end() -> None:
    (first, why), (second, silence) = ranks(_free_port(), "--groups=1", "--groups=2")
    assert (first, second) == (2, 2)
    assert "the ranks were started with different options" in why and "different options" not in silence


def test_port_in_use_is_refused_with_its_reason() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        # The other rank is not started: a stranger on the port would keep it waiting, and a launcher ends it when rank 0 has ended.
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": "0"}
        command = [sys.executable, "-m", "pytest_longca.parallel.bench", *SMALL]
        run = subprocess.run(command, env={**os.environ, **world, "LOCAL_RANK": "0"}, capture_output=True, text=True, timeout=100)
    assert run.returncode == 2
    assert f"error: the ranks did not meet at localhost:{port}" in run.stderr and "Traceback" not in run.stderr


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return int(sock.getsockname()[1])


CASE = Case(mask=load(MASKS["full"])(65536, 65536), heads_q=64, heads_kv=8, head_dim=128, dtype="bf16")


def test_model_hides_a_hop_behind_a_block_and_exposes_what_outlasts_it() -> None:
    ring = Sharing("ring_p2p", 8, Mesh(1, 8, 1))
    quick, slow = Network(inside=Link(0.0, 1e6)), Network(inside=Link(0.0, 1.0))
    assert predict_ms(CASE, ring, "fwd", 100.0, quick) == 100.0
    hop = 8192 * 8 * 256 * 2 / 1e6
    assert predict_ms(CASE, ring, "fwd", 100.0, slow) == pytest.approx(100 + 7 * (hop - 100 / 8))


def test_model_exposes_one_group_of_the_exchange() -> None:
    network = Network(inside=Link(0.0, 100.0))
    one, four = (predict_ms(CASE, Sharing("ulysses", 2, groups=groups), "fwd", 100.0, network) - 100 for groups in (1, 4))
    sent = 32768 * (2 * 64 + 2 * 8) * 128 * 2 / 2
    assert one == pytest.approx(sent / 1e8)
    assert four == pytest.approx(one / 4)


def test_model_exposes_what_the_other_groups_outlast_the_first_and_the_last() -> None:
    network, way = Network(inside=Link(0.0, 100.0)), 32768 * (2 * 64 + 2 * 8) * 128 * 2 / 2 / 1e8 / 8
    step = predict_ms(CASE, Sharing("ulysses", 2, groups=4), "fwd", 4.0, network)
    assert step == pytest.approx(4 + 2 * (way + 3 * way - 4 / 4))


GROUPS = [
    (8, 2, 0, (1, 2, 1)),
    (64, 2, 0, (4, 24, 4)),
    (6, 2, 0, (1, 1, 1)),
    (4, 2, 0, (1, 1)),
    (8, 2, 1, (4,)),
    (10, 2, 2, (3, 2)),
    (8, 8, 0, (1,)),
    (2, 4, 0, (1,)),
]


@pytest.mark.parametrize(("heads_kv", "ranks", "wanted", "groups"), GROUPS)
def test_head_groups_share_the_key_value_heads_of_a_rank(heads_kv: int, ranks: int, wanted: int, groups: tuple[int, ...]) -> None:
    case = Case(mask=load(MASKS["full"])(64, 64), heads_q=8 * heads_kv, heads_kv=heads_kv, head_dim=128, dtype="bf16")
    assert head_groups(case, Mesh(heads=ranks), wanted) == groups
    assert head_groups(case, Mesh(inner=ranks), wanted) == (heads_kv,)


def test_rates_that_are_assumed_without_records_are_those_that_were_measured() -> None:
    folder = Path(__file__).parents[2] / "docs" / "results"
    earlier, latest = (rates_alone(records(folder / f"context-parallel-2xh200{name}.jsonl"), "fa2") for name in ("-earlier", ""))
    measured = earlier | latest
    assert {key: round(measured[key]) for key in H200_FA2} == H200_FA2


def test_papers_table_names_what_it_assumes() -> None:
    table = paper_table([])
    assert table.title.startswith("Predictions, fa2 on an H200") and "published by MagiAttention, H100" in table.lines[0]
    ring = next(line for line in table.lines if line.startswith("full fwd ring_p2p"))
    assert "~382" in ring and ring.endswith("504 528 509 506")
    said = "\n".join(table.lines[-5:])
    for words in (
        "not measurements",
        "rate of fa2 alone on an H200",
        "Inside a node, assumed",
        "Between nodes of 8 GPUs, assumed",
        "45 GB/s",
    ):
        assert words in said


def test_assumed_rate_is_that_of_the_kernel_alone_on_the_longest_sequence() -> None:
    about = {"stage": "parallel", "kernel": "fa2", "mask": "full", "mechanism": "alone", "direction": "fwd", "outcome": {"kind": "passed"}}
    found = [Record(**about, samples_ms=[1.0], facts={"tokens": n, "tflop_per_s": rate}) for n, rate in ((32768, 386.0), (8192, 378.0))]
    assert rates_alone(found, "fa2") == {("full", "fwd"): 386.0}
    ring = next(row for row in paper_rows(found, Network()) if row.startswith("full fwd ring_p2p"))
    assert "~386" in ring


def test_masks_that_a_run_lacks_have_the_measured_rate_of_the_same_kernel_alone() -> None:
    about = {"stage": "parallel", "mask": "full", "mechanism": "alone", "direction": "fwd", "outcome": {"kind": "passed"}}
    found = {name: [Record(**about, kernel=name, samples_ms=[1.0], facts={"tokens": 8, "tflop_per_s": 300.0})] for name in ("fa2", "fa4")}
    rows = {name: paper_rows(found[name], Network(), kernel=name) for name in found}
    ring = {name: next(row for row in rows[name] if row.startswith("causal fwd ring_p2p")) for name in rows}
    assert "~381" in ring["fa2"] and "~" not in ring["fa4"]
    said = {name: "\n".join(assumptions(found[name], Network(), kernel=name)) for name in found}
    assert "masks that they lack" in said["fa2"] and "masks that they lack" not in said["fa4"]


def test_fit_finds_latency_and_bandwidth() -> None:
    link = fit([(size, 0.02 + size / 250e6) for size in (1e5, 1e6, 1e7, 1e8)])
    assert (link.latency_ms, link.gb_per_s) == (pytest.approx(0.02), pytest.approx(250))


def test_paper_table_marks_assumed_rates_and_missing_mechanisms() -> None:
    rows = paper_rows([], Network(), rate=600)
    assert len(rows) == 1 + 4 * 2 * 5
    ulysses = next(row for row in rows if row.startswith("full fwd ulysses"))
    assert "~" in ulysses and "n/a" in ulysses and ulysses.endswith("599 567 575 613")


@pytest.mark.parametrize(
    ("mechanism", "meshes"),
    [
        ("usp", {2: "1x2x1", 8: "1x2x4", 16: "1x2x8"}),
        ("loongtrain", {2: "1x2x1", 8: "2x2x2", 64: "2x4x8", 96: "3x4x8"}),
    ],
)
def test_default_meshes_keep_ulysses_inside_the_node(mechanism: str, meshes: dict[int, str]) -> None:
    assert {world: str(MECHANISMS[mechanism].mesh(world, Heads(64, 8))) for world in meshes} == meshes
