"""TFLOP/s per GPU against the number of GPUs: which points a page gets from which records."""

from dataclasses import replace
from typing import Any

import pytest

from pytest_longca.case import Case, Direction
from pytest_longca.catalogue import MASKS, load
from pytest_longca.outcome import Passed, Wrong
from pytest_longca.parallel.bench_options import LongMix
from pytest_longca.parallel.mechanisms import MECHANISMS
from pytest_longca.parallel.model import Network, fitted, model_error, paper_case
from pytest_longca.parallel.scaling import ALONE, Kind, Point, errors, points
from pytest_longca.report.record import Record
from pytest_longca.report.view import view

TOKENS = 8192
RATE = 300.0


def step(mechanism: str, world: int = 2, direction: str = "fwd", rate: float = RATE, mask: str = "full", **more: Any) -> Record:
    """A record of the benchmark at `rate` TFLOP/s, 10 % of whose time the communication shows; the kernel alone does a fifth more."""
    case = paper_case(mask, world, TOKENS)
    flop = case.flop(Direction(direction)) // world
    time_ms = flop / rate / 1e9
    shared = mechanism in MECHANISMS
    facts = {"tokens": TOKENS, "of_alone": 1 / 1.2}
    facts |= {"layout": MECHANISMS[mechanism].layout, "groups": 1} if shared else {}
    facts |= (
        {"mesh": f"1x1x{world}" if mechanism == "ulysses" else f"1x{world}x1", f"exposed_{direction}_ms": 0.1 * time_ms} if shared else {}
    )
    record = Record(
        stage="parallel", kernel="fa2", mask=mask, mechanism=mechanism, outcome=Passed().to_json(), case=case.id, direction=direction,
        samples_ms=[time_ms] * 3, flop=flop, world_size=world, facts=facts,
    )  # fmt: skip
    return replace(record, facts=facts | more.pop("facts", {}), **more)


def quiet(mechanism: str, world: int = 8, direction: str = "fwd", rate: float = 320.0) -> Record:
    """One rank of a world that is not there."""
    record = step(mechanism, world, direction, rate)
    facts = {name: fact for name, fact in record.facts.items() if not name.startswith("exposed")}
    return replace(record, facts=facts | {"communication": "off", "simulated_ranks": [3]})


def scaling_records() -> list[Record]:
    """Ulysses on two GPUs, and a rank of eight, in both passes."""
    return [make("ulysses", direction=direction) for make in (step, quiet) for direction in ("fwd", "bwd")]  # type: ignore[operator]  # of one kind


def at(found: list[Point], world: int, kind: Kind, line: str = "ulysses") -> Point:
    (point,) = (point for point in found if (point.world, point.kind, point.line) == (world, kind, line))
    return point


def test_a_measured_point_has_the_records_rate_and_the_model_beside_it() -> None:
    record = step("ring_p2p")
    found = points([record])
    measured, predicted = (at(found, 2, kind, "ring_p2p") for kind in (Kind.MEASURED, Kind.PREDICTED))
    assert measured.tflop_per_s == pytest.approx(RATE)
    assert measured.setting == "fa2, 8,192 tokens a GPU, 64:8 d128 bf16"
    assert predicted.tflop_per_s == pytest.approx(RATE / (1 + model_error(record, fitted([record], Network()))))
    assert at(found, 2, Kind.MEASURED, ALONE).tflop_per_s == pytest.approx(1.2 * RATE)


def test_a_simulated_rank_is_marked_and_its_compute_time_is_what_the_model_predicts_from() -> None:
    found = points([quiet("ulysses")])
    assert at(found, 8, Kind.SIMULATED).tflop_per_s == pytest.approx(320.0)
    assert at(found, 8, Kind.PREDICTED).tflop_per_s < 320.0
    assert Kind.MEASURED not in {point.kind for point in found}
    peer = step("yunchang ulysses", world=8, command="python -m pytest_longca.parallel.bench --simulate-world 8")
    assert at(points([quiet("ulysses"), peer]), 8, Kind.SIMULATED, "yunchang ulysses").tflop_per_s == pytest.approx(RATE)


def test_the_model_reaches_the_whole_node_at_the_compute_rate_of_the_nearest_measured_world() -> None:
    found = points([step("ring_p2p", 2, rate=300.0), step("ring_p2p", 8, rate=200.0)])
    kinds = {(point.world, point.kind) for point in found if point.line == "ring_p2p"}
    assert kinds == {(2, Kind.MEASURED), (2, Kind.PREDICTED), (4, Kind.ASSUMED), (8, Kind.MEASURED), (8, Kind.PREDICTED)}
    beyond = points([step("ring_p2p", 2, rate=300.0), step("ring_p2p", 16, rate=200.0)])
    assert at(beyond, 8, Kind.ASSUMED, "ring_p2p").tflop_per_s < 230 < at(beyond, 4, Kind.ASSUMED, "ring_p2p").tflop_per_s


def test_without_a_compute_time_the_kernel_alone_is_assumed() -> None:
    record = step("ring_p2p")
    record.facts.pop("exposed_fwd_ms")
    found = points([record])
    assert at(found, 2, Kind.ASSUMED, "ring_p2p").tflop_per_s > RATE, "the model of a rank that computes as the kernel alone"
    assert Kind.PREDICTED not in {point.kind for point in found}


def test_a_mask_that_does_not_grow_as_the_benchmarks_do_is_not_predicted_elsewhere() -> None:
    short = load(MASKS["causal_document"])((TOKENS,) * 2)
    case = Case(mask=short, heads_q=64, heads_kv=8, head_dim=128, dtype="bf16")
    assert {point.world for point in points([step("ring_p2p", mask="causal_document", case=case.id)])} == {2}
    grown = load(MASKS["causal_document"]).default(2 * TOKENS, 0, LongMix())
    assert {point.world for point in points([step("ring_p2p", mask="causal_document", case=replace(case, mask=grown).id)])} == {2, 4, 8}


def test_layouts_are_lines_of_their_own_and_the_last_measurement_counts() -> None:
    records = [step("ring_p2p", rate=100.0), step("ring_p2p"), step("ring_p2p", rate=200.0, facts={"layout": "balanced"}), step("usp")]
    found = [point for point in points(records) if point.kind is Kind.MEASURED]
    assert [(point.line, round(point.tflop_per_s)) for point in found[:3]] == [("ring_p2p", 300), ("usp", 300), ("ring_p2p balanced", 200)]


def test_a_peer_stands_beside_every_kernel_of_its_setting_and_only_there() -> None:
    peer = step("torch context_parallel", kernel="sdpa flash")
    both = points([step("usp"), step("usp", kernel="cudnn_flex"), peer, step("yunchang ulysses", mask="causal")])
    settings = {point.setting.split(",")[0] for point in both if point.line == "torch context_parallel"}
    assert settings == {"fa2", "cudnn_flex"}
    assert {point.mask for point in both} == {"full"}, "no mechanism ran on the other mask"


def test_no_speed_of_what_is_wrong_and_none_of_other_records_is_shown() -> None:
    wrong = Record(stage="parallel", kernel="fa2", mask="full", mechanism="usp", outcome=Wrong("off").to_json(), facts={"tokens": TOKENS})
    assert points([step("usp"), wrong]) == []
    assert view([replace(step("usp"), stage="timing", facts={})])["scaling"] is None
    assert view([replace(step("usp"), facts={})])["scaling"] is None


def test_the_models_error_is_told_for_each_number_of_gpus() -> None:
    said = errors([step("ulysses"), step("usp"), step("ulysses", 8), quiet("ulysses")])
    assert [line.split(":")[0] for line in said] == ["2 GPUs", "8 GPUs"]
    assert said[0].endswith("measured steps: 2") and said[1].endswith("measured steps: 1")


def test_the_page_carries_the_points() -> None:
    page = view(scaling_records())["scaling"]
    assert page is not None
    assert [ALONE, *MECHANISMS][:2] == [page["alone"], "ulysses"]
    assert ["fa2, 8,192 tokens a GPU, 64:8 d128 bf16", "full", "fwd", "ulysses", 2, "measured", 300.0] in page["points"]
