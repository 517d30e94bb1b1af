"""Ids: a mask or a case as one line of text, written and read by a grammar. Nothing is evaluated.

mask   NAME(FIELD=VALUE,...)                 fields at their default are left out
case   MASK/b2/h4:2/d64/bf16/fwd_bwd/s0      then, where not the default, /dv32 /scale=0.37 /in=peaked /layout=q:fused,do:expanded
value  an integer; a number; true or false; a word; lengths 3+1+2*7 (2*7 is 7 twice) or a recipe pile:8192:s7;
       a block map topk:0.5:h8:g1:s3 or bits:HxQxKV:HEX
"""

import dataclasses
import functools
import itertools
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pytest_longca.block_map import AnyBlockMap, parse_block_map
from pytest_longca.case import OPERANDS, Case, Direction, Layout, Values
from pytest_longca.catalogue import Catalogue
from pytest_longca.errors import InvalidArgument, unknown_name
from pytest_longca.lengths import MAX_SEQLEN, Lengths
from pytest_longca.mask import Mask
from pytest_longca.sampling import draw

Masks = Mapping[str, type[Mask]]


def format_mask(mask: Mask) -> str:
    """The mask's id. Raises InvalidArgument if a field of it cannot be written, as the function of a bare PredicateMask."""
    fields = {field.name: getattr(mask, field.name) for field in _fields(type(mask)) if getattr(mask, field.name) != field.default}
    return f"{mask.name}({','.join(f'{name}={_format_value(mask, name, value)}' for name, value in fields.items())})"


def parse_mask(text: str, masks: Masks | None = None) -> Mask:
    """The mask of an id. `masks` are the classes by name, by default the built-in ones.

    Raises InvalidArgument that points at what it does not understand, or with the mask's own objection to a value.

    >>> parse_mask("causal(seqlen_q=16,seqlen_kv=20)")
    Causal(seqlen_q=16, seqlen_kv=20)
    """
    return _parse_mask(text, text, Catalogue().masks() if masks is None else masks)


def format_case(case: Case) -> str:
    """The case's id."""
    sizes = f"b{case.batch}/h{case.heads_q}:{case.heads_kv}/d{case.head_dim}/{case.dtype}/{case.direction}/s{case.seed}"
    extras = (
        (case.head_dim_v != case.head_dim, f"dv{case.head_dim_v}"),
        (case.scale != case.head_dim**-0.5, f"scale={case.scale!r}"),
        (case.values is not Values.NORMAL, f"in={case.values}"),
        (set(case.layouts) != {Layout.CONTIGUOUS}, f"layout={_format_layouts(case.layouts)}"),
    )
    return "/".join([format_mask(case.mask), sizes, *(text for differs, text in extras if differs)])


def parse_case(text: str, masks: Masks | None = None) -> Case:
    """The case of an id; parts that are missing have their defaults. Raises InvalidArgument as `parse_mask` does."""
    head, *parts = text.split("/")
    mask = _parse_mask(text, head, Catalogue().masks() if masks is None else masks)
    found: dict[str, Any] = {}
    position = len(head) + 1
    for part in parts:
        values = _parse_part(text, position, part)
        if twice := found.keys() & values.keys():
            raise _malformed(text, position, f"{min(twice)} only once", part)
        found |= values
        position += len(part) + 1
    return Case(mask=mask, **found)


def _malformed(text: str, position: int, expected: str, found: str) -> InvalidArgument:
    shown = repr(found) if found else "the end"
    return InvalidArgument(f"malformed id: expected {expected} at position {position}, found {shown}\n  {text}\n  {' ' * position}^")


def _fields(cls: type[Mask]) -> tuple[dataclasses.Field[Any], ...]:
    if not dataclasses.is_dataclass(cls):
        raise InvalidArgument(f"mask {cls.name!r} is no dataclass: its fields are its id, so make it @dataclass(frozen=True)")
    return dataclasses.fields(cls)


def _parse_mask(whole: str, text: str, masks: Masks) -> Mask:
    name = re.match(r"[\w.-]*", text)[0]  # type: ignore[index]  # the pattern matches anything
    if not name:
        raise _malformed(whole, 0, "the name of a mask", text[:1])
    if name not in masks:
        raise unknown_name("mask", name, masks)
    if text[len(name) : len(name) + 1] != "(":
        raise _malformed(whole, len(name), "'('", text[len(name) : len(name) + 1])
    if not text.endswith(")"):
        raise _malformed(whole, len(text), "')'", whole[len(text) : len(text) + 1])
    cls = masks[name]
    arguments = _parse_arguments(whole, text, len(name) + 1, cls)
    missing = [field.name for field in _fields(cls) if _is_required(field) and field.name not in arguments]
    if missing:
        raise _malformed(whole, len(text) - 1, f"{', '.join(f'{name}=' for name in missing)} of {name}", ")")
    return cls(**arguments)


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _parse_arguments(whole: str, text: str, position: int, cls: type[Mask]) -> dict[str, Any]:
    """The fields between the parentheses that start at `position` and end the text."""
    readers = {field.name: _reader(cls, field.name) for field in _fields(cls)}
    arguments: dict[str, Any] = {}
    inside = text[position:-1]
    for item in inside.split(",") if inside else ():
        key, equals, value = item.partition("=")
        if not equals:
            raise _malformed(whole, position, "FIELD=VALUE", item or ",")
        if key not in readers:
            raise unknown_name(f"{cls.name} parameter", key, readers)
        if key in arguments:
            raise _malformed(whole, position, f"{key} only once", item)
        arguments[key] = _read(whole, position + len(key) + 1, value, readers[key])
        position += len(item) + 1
    return arguments


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """How values of one type are read: the pattern that they match, what to call it, and the function."""

    pattern: str
    expected: str
    read: Callable[[str], Any]


def _read(whole: str, position: int, value: str, reader: _Reader) -> Any:
    if not re.fullmatch(reader.pattern, value):
        raise _malformed(whole, position, reader.expected, value)
    try:
        return reader.read(value)
    except InvalidArgument as error:
        raise InvalidArgument(f"{error}\n  {whole}\n  {' ' * position}^") from None


def _parse_lengths(text: str) -> tuple[int, ...]:
    if ":" in text:
        return draw(text)
    runs = [(int(repeat or 1), int(length)) for repeat, length in re.findall(r"(?:(\d+)\*)?(\d+)", text)]
    if sum(repeat for repeat, _ in runs) > MAX_SEQLEN:
        raise InvalidArgument(f"lengths {text!r}: more than {MAX_SEQLEN} documents")
    return tuple(length for repeat, length in runs for _ in range(repeat))


_LENGTHS = r"(?:\d+\*)?\d+(?:\+(?:\d+\*)?\d+)*|[a-z][\w:-]*"
_NUMBER = r"-?\d+(?:\.\d*)?(?:e[+-]?\d+)?"
_READERS: dict[Any, _Reader] = {
    int: _Reader(r"-?\d{1,18}", "an integer", int),
    float: _Reader(_NUMBER, "a number", float),
    bool: _Reader(r"true|false", "true or false", lambda text: text == "true"),
    str: _Reader(r"[\w.-]+", "a word", str),
    tuple[int, ...]: _Reader(_LENGTHS, "lengths, as in 3+1+2*7 or pile:8192:s7", _parse_lengths),
    AnyBlockMap: _Reader(r"[a-z][\w:.+-]*", "a block map, as in topk:0.5:h8:g1:s3", parse_block_map),
}


@functools.cache
def _reader(cls: type[Mask], field: str) -> _Reader:
    hint = typing.get_type_hints(cls)[field]
    choices = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else ()
    for choice in (hint, *choices):  # the whole first: a block map is a union itself, others may be None
        if choice in _READERS:
            return _READERS[choice]
    raise InvalidArgument(f"field {field} of mask {cls.name!r} is a {hint}: an id holds {', '.join(r.expected for r in _READERS.values())}")


def _format_value(mask: Mask, field: str, value: Any) -> str:
    if isinstance(value, Lengths):
        return value.recipe
    if isinstance(value, tuple):
        return "+".join(_format_run(length, len(list(run))) for length, run in itertools.groupby(value))
    if isinstance(value, AnyBlockMap):
        return value.token
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if not re.fullmatch(_reader(type(mask), field).pattern, text):
        raise InvalidArgument(f"{field} of mask {mask.label!r} is {value!r}: an id cannot hold that")
    return text


def _format_run(length: int, count: int) -> str:
    return f"{count}*{length}" if count > 1 else str(length)


def _format_layouts(layouts: tuple[Layout, ...]) -> str:
    return ",".join(f"{name}:{layout}" for name, layout in zip(OPERANDS, layouts, strict=True) if layout is not Layout.CONTIGUOUS)


def _parse_layouts(text: str) -> tuple[Layout, ...]:
    found = dict.fromkeys(OPERANDS, Layout.CONTIGUOUS)
    for item in text.split(","):
        operand, _, layout = item.partition(":")
        if operand not in found:
            raise unknown_name("operand", operand, OPERANDS)
        found[operand] = _member(Layout, "layout", layout)
    return tuple(found.values())


def _member(enum: Any, kind: str, value: str) -> Any:
    known = [member.value for member in enum]
    if value not in known:
        raise unknown_name(kind, value, known)
    return enum(value)


_COUNT = r"\d{1,18}"
_PARTS: tuple[tuple[str, Callable[..., dict[str, Any]]], ...] = (
    (rf"b({_COUNT})", lambda n: {"batch": int(n)}),
    (rf"h({_COUNT}):({_COUNT})", lambda q, kv: {"heads_q": int(q), "heads_kv": int(kv)}),
    (rf"d({_COUNT})", lambda n: {"head_dim": int(n)}),
    (rf"dv({_COUNT})", lambda n: {"head_dim_v": int(n)}),
    (rf"s({_COUNT})", lambda n: {"seed": int(n)}),
    (rf"scale=({_NUMBER})", lambda x: {"scale": float(x)}),
    (r"((?:fp|bf)\d+)", lambda dtype: {"dtype": dtype}),
    (r"(fwd\w*|bwd\w*)", lambda direction: {"direction": _member(Direction, "direction", direction)}),
    (r"in=(\w+)", lambda values: {"values": _member(Values, "input", values)}),
    (r"layout=([\w:,]+)", lambda layouts: {"layouts": _parse_layouts(layouts)}),
)


def _parse_part(whole: str, position: int, part: str) -> dict[str, Any]:
    for pattern, read in _PARTS:
        if match := re.fullmatch(pattern, part):
            return read(*match.groups())
    expected = "one of b2, h4:2, d64, dv64, bf16, fwd, bwd, fwd_bwd, s0, scale=0.5, in=peaked, layout=q:fused"
    raise _malformed(whole, position, expected, part)
