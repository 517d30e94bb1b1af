"""Ids: every case survives the way to text and back, and malformed text is pointed at."""

import contextlib
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_longca.block_map import BlockMap, ExplicitMap
from pytest_longca.case import DTYPES, Case, Direction, Layout, Values
from pytest_longca.catalogue import MASKS, load
from pytest_longca.errors import InvalidArgument
from pytest_longca.ids import format_case, format_mask, parse_case, parse_mask
from pytest_longca.lengths import Lengths
from pytest_longca.mask import Device, Mask, MaskMod, PredicateMask, from_mask_mod
from pytest_longca.sampling import draw


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    cls = load(MASKS[draw(st.sampled_from(sorted(MASKS)))])
    rng = Random(draw(st.integers(0, 1 << 20)))
    seqlen = draw(st.integers(1, 200))
    if draw(st.booleans()):
        return cls.default(seqlen * (64 if cls.name == "uniform_block" else 1), draw(st.integers(0, 99)))  # type: ignore[no-any-return]  # a mask
    return cls.sample(rng, seqlen, draw(st.integers(1, 200)) if cls.unequal_lengths else None)  # type: ignore[no-any-return]  # a mask


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mask = draw(masks())
    heads_kv = 1 if mask.heads > 1 else draw(st.integers(1, 3))
    return Case(
        mask=mask,
        batch=draw(st.integers(1, 4)),
        heads_q=mask.heads if mask.heads > 1 else heads_kv * draw(st.integers(1, 7)),
        heads_kv=heads_kv,
        head_dim=draw(st.integers(1, 256)),
        head_dim_v=draw(st.just(0) | st.integers(1, 256)),
        dtype=draw(st.sampled_from(DTYPES)),
        direction=draw(st.sampled_from(list(Direction))),
        scale=draw(st.just(0.0) | st.floats(1e-6, 100) | st.floats(-1e3, -1e-9)),
        values=draw(st.sampled_from(list(Values))),
        layouts=draw(st.tuples(*[st.sampled_from(list(Layout))] * 4)),
        seed=draw(st.integers(0, 1 << 31)),
    )


@settings(deadline=None, max_examples=300)
@given(cases())
def test_a_case_survives_its_id(case: Case) -> None:
    again = parse_case(case.id)
    assert again == case and hash(again) == hash(case)
    assert again.id == case.id
    assert not set(case.id) & set(" \t\n'\"\\;&|<>$")


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal(seqlen_q=16,seqlen_kv=20)", load(MASKS["causal"])(16, 20)),
        ("full_document(doc_lens=3+1+2*7)", load(MASKS["full_document"])((3, 1, 7, 7))),
        ("full_document(doc_lens=0,doc_lens_kv=2)", load(MASKS["full_document"])((0,), (2,))),
        ("full_document(doc_lens=pile:8192:s7)", load(MASKS["full_document"])(draw("pile:8192:s7"))),
        ("prefix_lm_document(doc_lens=2*3,prefixes=0+3)", load(MASKS["prefix_lm_document"])((3, 3), (0, 3))),
        (
            "uniform_block(seqlen_q=256,seqlen_kv=128,block_size=64,block_map=topk:0.5:h8:g2:s3)",
            load(MASKS["uniform_block"])(256, 128, 64, BlockMap("topk", 0.5, 8, 2, 3)),
        ),
        (
            "variable_block(block_sizes_q=1+2,block_sizes_kv=2*3,block_map=bits:1x2x2:90)",
            load(MASKS["variable_block"])((1, 2), (3, 3), ExplicitMap(1, 2, 2, "90")),
        ),
    ],
)
def test_a_mask_is_written_so(text: str, mask: Mask) -> None:
    assert format_mask(mask) == text
    assert parse_mask(text) == mask


def test_a_case_is_written_so() -> None:
    mask = load(MASKS["causal"])(16, 20)
    case = Case(mask=mask, batch=2, heads_q=4, heads_kv=2, head_dim=64, dtype="bf16")
    assert format_case(case) == "causal(seqlen_q=16,seqlen_kv=20)/b2/h4:2/d64/bf16/fwd_bwd/s0"
    layouts = (Layout.FUSED, Layout.CONTIGUOUS, Layout.CONTIGUOUS, Layout.EXPANDED)
    case = Case(mask=mask, head_dim=64, head_dim_v=32, scale=0.37, values=Values.PEAKED, layouts=layouts, seed=9, direction=Direction.FWD)
    assert case.id.endswith("/b1/h1:1/d64/fp32/fwd/s9/dv32/scale=0.37/in=peaked/layout=q:fused,do:expanded")


def test_parts_left_out_have_their_defaults() -> None:
    mask = load(MASKS["causal"])(4, 4)
    assert parse_case("causal(seqlen_q=4,seqlen_kv=4)") == Case(mask=mask)
    assert parse_case("causal(seqlen_kv=4,seqlen_q=4)/s3/b2") == Case(mask=mask, batch=2, seed=3)


def test_a_recipe_is_kept_and_not_spelled_out() -> None:
    mask = load(MASKS["causal_document"]).default(64 * 1024, 3)
    again = parse_mask(format_mask(mask))
    assert format_mask(mask) == "causal_document(doc_lens=prolong64k:65536:s3)"
    assert isinstance(again.doc_lens, Lengths) and again.doc_lens.recipe == "prolong64k:65536:s3"  # type: ignore[attr-defined]  # a document mask


CAUSAL = "causal(seqlen_q=4,seqlen_kv=4)"


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("", 0, "expected the name of a mask at position 0, found the end"),
        ("causal", 6, r"expected '\(' at position 6, found the end"),
        ("causal[4]", 6, r"expected '\(' at position 6, found '\['"),
        ("causal(seqlen_q=4", 17, r"expected '\)' at position 17, found the end"),
        ("causal(seqlen_q=4/b2", 17, r"expected '\)' at position 17, found '/'"),
        ("causal(seqlen_q=4)", 17, r"expected seqlen_kv= of causal at position 17, found '\)'"),
        ("causal(seqlen_q=four,seqlen_kv=4)", 16, "expected an integer at position 16, found 'four'"),
        ("causal(seqlen_q=4,,seqlen_kv=4)", 18, "expected FIELD=VALUE at position 18"),
        ("causal(seqlen_q=4,seqlen_q=4)", 18, "expected seqlen_q only once at position 18"),
        ("full_document(doc_lens=3++4)", 23, r"expected lengths, as in 3\+1\+2\*7 or pile:8192:s7 at position 23, found '3\+\+4'"),
        ("full_document(doc_lens=__import__)", 23, "expected lengths"),
        ("full_document(doc_lens=pile:x)", 23, "lengths 'pile:x': a recipe reads NAME:TOTAL:sSEED"),
        ("full_document(doc_lens=pole:9:s1)", 23, "unknown histogram 'pole': did you mean 'pile'"),
        (f"full_document(doc_lens={10**15}*1)", 23, "more than 1073741824 documents"),
        ("uniform_block(seqlen_q=4,seqlen_kv=4,block_size=2,block_map=topk)", 60, "block map 'topk': it reads KIND:DENSITY"),
        (f"{CAUSAL}/b2/b3", 34, "expected batch only once at position 34, found 'b3'"),
        (f"{CAUSAL}/h4", 31, "expected one of b2, h4:2, d64, .* at position 31, found 'h4'"),
        (f"{CAUSAL}/", 31, "at position 31, found the end"),
        (f"{CAUSAL}/b2/scale=nan", 34, "found 'scale=nan'"),
        (f"{CAUSAL}) ", 30, r"expected '\)'|malformed"),
    ],
)
def test_a_malformed_id_is_pointed_at(text: str, position: int, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        parse_case(text)
    shown, caret = str(caught.value).splitlines()[-2:]
    assert shown == f"  {text}" and caret.index("^") in (position + 2, len(text) + 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("casual(seqlen_q=4,seqlen_kv=4)", "unknown mask 'casual': did you mean 'causal'"),
        ("causal(seqlenq=4,seqlen_kv=4)", "unknown causal parameter 'seqlenq': did you mean 'seqlen_q'"),
        (f"{CAUSAL}/fp17", "dtype 'fp17': one of fp32, bf16"),
        (f"{CAUSAL}/fwd_bw", "unknown direction 'fwd_bw': did you mean 'fwd_bwd'"),
        (f"{CAUSAL}/in=peeked", "unknown input 'peeked': did you mean 'peaked'"),
        (f"{CAUSAL}/layout=q:fuse", "unknown layout 'fuse': did you mean 'fused'"),
        (f"{CAUSAL}/layout=z:fused", "unknown operand 'z'"),
        (f"{CAUSAL}/h3:2", "heads 3:2: the query heads must be a multiple"),
        ("causal(seqlen_q=-4,seqlen_kv=4)", "seqlen_q is -4"),
    ],
)
def test_a_name_or_value_that_cannot_be_is_explained(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse_case(text)


@settings(deadline=None, max_examples=200)
@given(st.text("causl()=,/+*:_seqndtokv0123456789-. bh", max_size=60) | st.text(max_size=20))
def test_any_text_is_a_case_or_an_invalid_argument(text: str) -> None:
    with contextlib.suppress(InvalidArgument):
        assert isinstance(parse_case(text), Case)


@dataclass(frozen=True, slots=True)
class Dilated(Mask):
    """A third party's mask with fields of every type that an id holds."""

    seqlen_q: int
    seqlen_kv: int
    step: float = 1.5
    is_causal: bool = False
    kind: str = "plain"
    lens: tuple[int, ...] = ()
    name: ClassVar[str] = "dilated"

    def predicate(self, device: Device = "cpu") -> MaskMod:
        return lambda b, h, q, kv: q == kv


def test_a_third_partys_mask_goes_through_the_same_grammar() -> None:
    known: dict[str, Any] = {"dilated": Dilated, "strided": from_mask_mod("strided", lambda b, h, q, kv: q == kv)}
    mask = Dilated(3, 4, 0.25, True, "odd-one", (1, 1))
    assert format_mask(mask) == "dilated(seqlen_q=3,seqlen_kv=4,step=0.25,is_causal=true,kind=odd-one,lens=2*1)"
    assert parse_mask(format_mask(mask), known) == mask
    assert parse_mask("dilated(seqlen_q=3,seqlen_kv=4)", known) == Dilated(3, 4)
    strided = known["strided"].default(5)
    assert parse_mask(format_mask(strided), known) == strided
    with pytest.raises(InvalidArgument, match="unknown mask 'dilated'"):
        parse_mask(format_mask(mask))


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="field mod of mask 'custom'"):
        format_mask(PredicateMask(lambda b, h, q, kv: q == kv, 3, 3))
    with pytest.raises(InvalidArgument, match="kind of mask 'dilated' is 'a,b': an id cannot hold that"):
        format_mask(Dilated(3, 4, kind="a,b"))
