"""The file of known failures: what an entry excuses, what it does not, and when it is stale."""

import types
from pathlib import Path

import pytest

from pytest_longca import known_failures
from pytest_longca.block_map import ExplicitMap
from pytest_longca.case import Case, Values
from pytest_longca.catalogue import KERNELS, MASKS
from pytest_longca.catalogue import load as load_kernel
from pytest_longca.checks import Verification
from pytest_longca.errors import CheckFailed, InvalidArgument
from pytest_longca.ids import parse_case
from pytest_longca.inputs import Inputs
from pytest_longca.kernel import Call, Kernel, Requirement
from pytest_longca.known_failures import (
    ANY,
    Entry,
    all_end_in_half_a_tile,
    due,
    ends_in_half_a_tile,
    find,
    has_gaps_between_queries,
    has_half_padded_head_dims,
    has_one_query_over_whole_tiles,
    has_rows_without_keys,
    has_scores_far_from_zero,
    load,
    reads_many_key_blocks,
    stale,
)
from pytest_longca.machine import CPU, H200, Machine
from pytest_longca.mask import Mask
from pytest_longca.masks.block import UniformBlock
from pytest_longca.masks.document import FullDocument
from pytest_longca.masks.regular import Causal, Full
from pytest_longca.outcome import Crashed, NotInstalled, NotVerified, Outcome, OutOfMemory, Passed, TimedOut, Unsupported, Wrong
from pytest_longca.search import Search


class Fake(Kernel):
    """A kernel whose package is always here: pytest."""

    name = "fake"
    requires = (Requirement(distribution="pytest", how="pip install pytest"),)

    def bind(self, case: Case, inputs: Inputs) -> Call:
        raise AssertionError("not asked")


CASE = Case(mask=Causal(9, 5), dtype="bf16")
WRONG = Wrong("truth: dk: 3.1 times its limit in rows 4 to 8")


def entry(**fields: object) -> Entry:
    return Entry(
        **({"name": "fake-dk", "kernel": "fake", "case": CASE.id, "message": "dk: .* times its limit", "why": "upstream"} | fields)
    )  # type: ignore[arg-type]  # a table's values


def test_entry_describes_its_failure() -> None:
    known = entry(versions=">=7", device="sm90", mask="causal")
    assert find(Fake(), CASE, H200, WRONG, [known]) is known
    assert find(Fake(), CASE, H200, Crashed("fake raised RuntimeError: dk: 9 times its limit"), [known]) is known


@pytest.mark.parametrize(
    "fields",
    [
        {"kernel": "other"},
        {"versions": "<7"},
        {"device": "cpu"},
        {"device": "sm100"},
        {"mask": "full"},
        {"message": "dq: .* times its limit"},
    ],
    ids=str,
)
def test_entry_of_another_scope_excuses_nothing(fields: dict[str, str]) -> None:
    assert find(Fake(), CASE, H200, WRONG, [entry(**fields)]) is None


@pytest.mark.parametrize(
    ("device", "machine", "fits"), [("cuda", H200, True), ("cpu", CPU, True), ("sm80", Machine("cuda", (8, 0)), True), ("sm80", CPU, False)]
)
def test_device_is_a_kind_or_an_architecture(device: str, machine: Machine, fits: bool) -> None:
    assert entry(device=device).covers("fake", "1", machine, "causal") is fits


def test_prerelease_is_in_the_range_of_its_release() -> None:
    assert entry(versions=">=4.0.0b36,<5").covers("fake", "4.0.0b40", H200, "causal")


def test_kernel_that_is_not_installed_is_only_in_any_version() -> None:
    assert not entry(versions=">=1").covers("fake", None, H200, "causal")
    assert entry().covers("fake", None, H200, "causal")


@pytest.mark.parametrize(
    "outcome", [Passed(), TimedOut("slow"), OutOfMemory("dk: 1 times its limit"), Unsupported("dk: 1 times its limit")], ids=str
)
def test_only_wrong_results_and_crashes_are_known_failures(outcome: Outcome) -> None:
    assert find(Fake(), CASE, H200, outcome, [entry()]) is None


def test_entry_whose_case_passes_is_stale() -> None:
    reason = stale(entry(), Passed())
    assert reason is not None and "fake passes its smallest case" in reason and CASE.id in reason


def test_entry_that_fails_otherwise_is_stale() -> None:
    reason = stale(entry(), Wrong("truth: dv: 5 times its limit"))
    assert reason is not None and "dv: 5 times its limit" in reason


def test_intermittent_entry_may_pass() -> None:
    assert stale(entry(intermittent=True), Passed()) is None
    assert stale(entry(intermittent=True), Wrong("other")) is not None


@pytest.mark.parametrize("outcome", [WRONG, NotVerified("no time"), Unsupported("no"), NotInstalled("no", "pip")], ids=str)
def test_nothing_is_said_where_the_failure_is_still_there_or_nothing_ran(outcome: Outcome) -> None:
    assert stale(entry(), outcome) is None


def test_due_entries_are_those_of_the_installed_version() -> None:
    mine, old, other = entry(name="a", mask="causal"), entry(name="b", versions="<7"), entry(name="c", kernel="other")
    assert due(Fake(), H200, [mine, old, other]) == [mine]


def test_version_is_that_of_the_package_or_of_torch() -> None:
    import pytest as package
    import torch

    class Plain(Fake):
        requires = ()

    class Missing(Fake):
        requires = (Requirement(distribution="no-such-package", how=""),)

    assert Fake().version() == package.__version__
    assert str(torch.__version__).startswith(Plain().version() or "?")
    assert Missing().version() is None


ENTRY = """
[[failure]]
name = "{name}"
kernel = "fake"
case = "full(seqlen_q=1,seqlen_kv=1)"
message = "dk"
why = "because"
{more}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "known_failures.toml"
    path.write_text(text)
    return path


def test_file_is_read(tmp_path: Path) -> None:
    (found,) = load(written(tmp_path, ENTRY.format(name="a", more='link = "https://example.org/1"\nintermittent = true')))
    assert found.link == "https://example.org/1" and found.intermittent and found.versions == ANY
    assert parse_case(found.case).mask == Full(1, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ENTRY.format(name="a", more='maks = "full"'), "unknown field of known failure 'a', 'maks': did you mean 'mask'"),
        ('[[failure]]\nname = "a"\nkernel = "fake"', "known failure 'a' lacks case, message, why"),
        (ENTRY.format(name="a", more='versions = "2.8"'), "known failure 'a': versions '2.8': write a specifier"),
        (ENTRY.format(name="a", more="").replace('"dk"', '"dk("'), "message 'dk\\(' is no regular expression"),
        (ENTRY.format(name="a", more="") * 2, "several known failures named a"),
        ("[[failure", "known_failures.toml is no TOML"),
    ],
)
def test_file_that_cannot_be_right_says_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        load(written(tmp_path, text))


def test_head_dims_of_an_odd_number_of_16s() -> None:
    padded = [dim for dim in range(8, 136, 8) if has_half_padded_head_dims(Case(mask=Full(4, 4), head_dim=dim))]
    assert padded == [8, 16, 40, 48, 72, 80, 104, 112]
    assert has_half_padded_head_dims(Case(mask=Full(4, 4), head_dim=64, head_dim_v=16))


@pytest.mark.parametrize(
    ("layout", "gaps"), [("", False), ("/layout=q:padded", True), ("/layout=q:fused", True), ("/layout=k:padded", False)]
)
def test_queries_with_gaps_between_them(layout: str, gaps: bool) -> None:
    assert has_gaps_between_queries(parse_case("full(seqlen_q=4,seqlen_kv=4)/b1/h2:1/d16/bf16/fwd_bwd/s0" + layout)) is gaps


@pytest.mark.parametrize(
    ("mask", "ends", "all_end"),
    [
        (Full(4, 64), True, True),
        (Full(4, 192), True, True),
        (Full(64, 128), False, False),
        (Full(4, 65), False, False),
        (FullDocument((5, 64)), True, False),
        (FullDocument((32, 32)), False, True),
    ],
    ids=str,
)
def test_keys_that_end_in_half_a_tile(mask: Mask, ends: bool, all_end: bool) -> None:
    case = Case(mask=mask)
    assert (ends_in_half_a_tile(case), all_end_in_half_a_tile(case)) == (ends, all_end)


def test_one_query_over_whole_tiles() -> None:
    lengths = [(1, 128), (1, 256), (1, 64), (1, 97), (2, 128)]
    assert [has_one_query_over_whole_tiles(Case(mask=Full(*both))) for both in lengths] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("mask", "many"),
    [
        (UniformBlock(2, 41, 1, ExplicitMap.of([[[True] * 41, [False] * 41]])), True),
        (UniformBlock(2, 41, 1, ExplicitMap.of([[[True] * 40 + [False], [False] + [True] * 40]])), False),
        (UniformBlock(65, 21 * 65, 65, ExplicitMap.of([[[False] * 21], [[True] * 21]])), True),
        (UniformBlock(64, 40 * 64, 64, ExplicitMap.of([[[True] * 40]])), False),
        (Full(64, 64 * 64), False),
    ],
    ids=["41 of 1", "40 of 1 in each row", "21 of 65 in the second head", "40 of 64", "no blocks"],
)
def test_rows_of_many_key_blocks(mask: Mask, many: bool) -> None:
    assert reads_many_key_blocks(Case(mask=mask, heads_q=2, heads_kv=2)) is many


def test_scores_far_from_zero() -> None:
    far = [values for values in Values if has_scores_far_from_zero(Case(mask=Full(1, 1), values=values))]
    assert far == [Values.SENTINEL]


ONE_KEY = "uniform_block(seqlen_q=1,seqlen_kv={keys},block_size=1,block_map=topk:1.0:h1:g1:s0)/b1/h1:1/d64/bf16/fwd_bwd/s1/in={values}"
PLACE = "batch 0, head 0, row 0 (16-row tile 0, 128-row tile 0)"
DRIFTED = f"truth: lse: {PLACE} error 0.000371 is 1.06 times its limit 0.000348; 1 of 1 rows are beyond their limits, in rows 0 to 0"
WHOLE = f"truth: dv: {PLACE} error 0, along the row itself or over its 128-row tile 1.59 times what rounding explains"
GARBAGE = f"truth: dv: {PLACE} error 1.55e+19 is 4.27e+19 times its limit 0.364; all of it is 2.775e+18 times what it should be"


@pytest.mark.parametrize(
    ("kernel", "keys", "values", "reason", "name"),
    [
        ("vsa", 255, "peaked", DRIFTED, "vsa-lse-drift"),
        ("vsa", 255, "peaked", DRIFTED.replace("lse", "dk"), "vsa-lse-drift"),
        ("vsa", 129, "sentinel", WHOLE, "vsa-lse-drift"),
        ("vsa", 40, "peaked", DRIFTED, None),
        ("vsa", 255, "peaked", DRIFTED.replace("lse", "out"), None),
        ("vsa", 255, "peaked", DRIFTED.replace("1.06", "106"), None),
        ("vsa_fastvideo_triton", 1, "sentinel", GARBAGE, "fastvideo-triton-rounded-keys-far-from-zero"),
        ("vsa_fastvideo_triton", 1, "sentinel", GARBAGE.replace("dv", "out"), None),
        ("vsa_fastvideo_triton", 1, "low", GARBAGE, None),
    ],
)
def test_what_is_excused_of_fastvideos_kernels(
    kernel: str, keys: int, values: str, reason: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_kernel(KERNELS[kernel])()
    monkeypatch.setattr(type(loaded), "version", lambda self: "0.3.2")
    found = find(loaded, parse_case(ONE_KEY.format(keys=keys, values=values)), H200, Wrong(reason))
    assert (found.name if found else None) == name


LOST = f"truth: out: {PLACE} error 8.11 is 8.19 times its limit 0.99; 1 of 1 rows are beyond their limits, in rows 0 to 0; it is all zeros"


@pytest.mark.parametrize(
    ("values", "reason", "is_known"),
    [
        ("sentinel", LOST, True),
        ("sentinel", LOST.replace("out", "lse"), True),
        ("sentinel", LOST.replace("error 8.11 is 8.19 times its limit 0.99", "holds NaN"), False),
        ("low", LOST, False),
    ],
)
@pytest.mark.parametrize(("version", "has_it"), [("0.6.6", True), ("0.6.17", True), ("0.6.18", False)])
def test_flashinfer_is_excused_for_scores_below_its_minus_infinity_alone(
    values: str, reason: str, is_known: bool, version: str, has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = load_kernel(KERNELS["flashinfer"])()
    monkeypatch.setattr(type(kernel), "version", lambda self: version)
    case = parse_case(ONE_KEY.format(keys=1, values=values).replace("fwd_bwd", "fwd"))
    found = find(kernel, case, H200, Wrong(reason))
    assert (found is not None and found.name == "flashinfer-finite-minus-infinity") is (is_known and has_it)


def test_entry_is_only_about_cases_with_its_property() -> None:
    known = entry(only="rows without keys")
    assert find(Fake(), CASE, H200, WRONG, [known]) is known
    assert find(Fake(), Case(mask=Causal(5, 9), dtype="bf16"), H200, WRONG, [known]) is None


@pytest.mark.parametrize(
    ("mask", "empty"),
    [
        (Causal(9, 5), True),
        (Causal(5, 9), False),
        (FullDocument((3, 2), (4, 0)), True),
        (FullDocument((3, 0), (4, 2)), False),
        (UniformBlock(4, 4, 2, ExplicitMap.of([[[True, False], [False, False]]])), True),
        (UniformBlock(4, 4, 2, ExplicitMap.of([[[True, False], [False, True]]])), False),
    ],
    ids=repr,
)
def test_rows_without_keys_are_seen_in_intervals_and_in_dense_masks(mask: Mask, empty: bool) -> None:
    assert has_rows_without_keys(Case(mask=mask)) is empty


@pytest.mark.parametrize(
    ("reason", "is_known"),
    [
        ("truth: out: batch 0, head 0, row 0, column 94 (16-row tile 0, 128-row tile 0) is not 0 (norm 0.626), and it sees no key", True),
        ("count: out: batch 0, head 0, query 0 reads key 0, which the mask hides; 520 pairs (query, key) in all", True),
        ("truth: dk: batch 0, head 1, row 666, column 50 error 0.3 is 300 times its limit 0.001", False),
    ],
)
def test_sdpa_cudnn_is_excused_for_rows_without_keys_alone(reason: str, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = load_kernel(KERNELS["sdpa_cudnn"])()
    monkeypatch.setattr(type(kernel), "version", lambda self: "2.11.0+cu130")
    with_empty_rows, without = (Case(mask=Causal(seqlen_q, 100), dtype="bf16") for seqlen_q in (120, 90))
    found = find(kernel, with_empty_rows, H200, Wrong(reason))
    assert (found is not None and found.name == "sdpa-cudnn-rows-without-keys") is is_known
    assert find(kernel, without, H200, Wrong(reason)) is None


NAN = "truth: {}: batch 0, head 0, row 0, column 0 (16-row tile 0, 128-row tile 0) holds NaN; 4 of 1344 rows are beyond their limits"
ONE_QUERY = "causal(seqlen_q=1,seqlen_kv={})/b1/h1:1/d16/bf16/fwd_bwd/s0/in=low"
DOCUMENTS = "causal_document(doc_lens={})/b3/h7:1/d16/fp16/fwd_bwd/s4/scale=0.61/in=biased"


@pytest.mark.parametrize(
    ("case", "tensor", "name"),
    [
        (DOCUMENTS.format("2*32"), "dq", "sdpa-cudnn-nan-after-half-a-tile"),
        (DOCUMENTS.format("64+1"), "dq", None),
        (DOCUMENTS.format("2*32"), "dk", None),
        (ONE_QUERY.format(256), "dk", "sdpa-cudnn-nan-of-one-query"),
        (ONE_QUERY.format(256), "dq", None),
        (ONE_QUERY.format(97), "dk", None),
    ],
)
def test_what_is_excused_of_sdpa_cudnn_that_is_not_a_number(
    case: str, tensor: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = load_kernel(KERNELS["sdpa_cudnn"])()
    monkeypatch.setattr(type(kernel), "version", lambda self: "2.11.0+cu130")
    found = find(kernel, parse_case(case), H200, Wrong(NAN.format(tensor)))
    assert (found.name if found else None) == name


class _Verdicts:
    """A session whose kernel fails as it is told: for the search, which a known failure must not end."""

    options = types.SimpleNamespace(checks=("default",))
    machine = H200
    catalogue = types.SimpleNamespace(kernel=lambda name: Fake())

    def __init__(self, *reasons: str, ran: tuple[str, ...] = (), alone: Outcome | None = None) -> None:
        self._reasons = list(reasons)
        self._ran, self._alone = ran, alone
        self.num_anew = 0

    def verify(self, kernel: str, case: Case, checks: object) -> Verification:
        return Verification(Wrong(self._reasons.pop(0)), after=self._ran)

    def verify_anew(self, kernel: str, case: Case, checks: object) -> Verification:
        assert self._alone is not None, "nothing is due in a new process"
        self.num_anew += 1
        return Verification(self._alone)


def test_known_failure_does_not_end_the_search_and_another_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_failures, "load", lambda: (entry(),))
    search = Search(_Verdicts(WRONG.reason, "truth: dv: 5 times its limit"), "fake")  # type: ignore[arg-type]  # what it asks of a session
    search.example(CASE)
    assert search.excused is not None and search.failed is None
    with pytest.raises(CheckFailed):
        search.example(Case(mask=Causal(9, 4), dtype="bf16"))
    assert search.failed is not None and search.excused[0] == CASE


OWN_CASES = "right in a process of its own, but after other cases of"
SECOND = {"after": Case(mask=Causal(5, 9), dtype="bf16").id, "message": f"{OWN_CASES} fake .*dk: "}


def test_a_failure_that_comes_of_the_kernels_earlier_cases_is_known_if_the_case_is_right_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_failures, "load", lambda: (entry(**SECOND),))
    session = _Verdicts(WRONG.reason, ran=("fake",), alone=Passed())
    search = Search(session, "fake")  # type: ignore[arg-type]  # as above
    search.example(CASE)
    assert search.failed is None and search.excused is not None and session.num_anew == 1
    outcome = search.excused[1].outcome
    assert isinstance(outcome, Wrong) and outcome.reproducible is False
    known = find(Fake(), CASE, H200, outcome)
    assert known is not None and known.name == "fake-dk"


@pytest.mark.parametrize(
    ("reason", "ran", "alone"),
    [
        (WRONG.reason, ("fake",), Wrong("truth: dk: 2 times its limit")),
        (WRONG.reason, ("naive", "fake"), None),
        (WRONG.reason, (), None),
        ("truth: dv: 5 times its limit", ("fake",), None),
    ],
    ids=["wrong alone", "after another kernel", "after nothing", "another tensor"],
)
def test_such_an_entry_excuses_nothing_else_and_costs_no_process(
    reason: str, ran: tuple[str, ...], alone: Outcome | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_failures, "load", lambda: (entry(**SECOND),))
    search = Search(_Verdicts(reason, ran=ran, alone=alone), "fake")  # type: ignore[arg-type]  # as above
    with pytest.raises(CheckFailed):
        search.example(CASE)
    assert search.excused is None


def test_unknown_condition_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'rows without keys'"):
        entry(only="rows without key")


def test_shipped_entries_are_about_kernels_and_cases_that_exist() -> None:
    for known in load():
        assert known.kernel in KERNELS, known.name
        assert known.mask in (ANY, *MASKS), known.name
        assert known.concerns(parse_case(known.case)), known.name
        assert not known.after or known.concerns(parse_case(known.after)), known.name
        assert bool(known.after) == known.message.startswith(f"{OWN_CASES} {known.kernel} "), known.name
