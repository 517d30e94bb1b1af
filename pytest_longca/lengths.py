"""Lengths: how many tokens each document or block has, checked, and as the tensors that masks are made of."""

import itertools
import operator
from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor

from pytest_longca.errors import InvalidArgument
from pytest_longca.predicates import Device

MAX_SEQLEN = 1 << 30
"""Longest sequence: sums of two positions must fit into int32."""


class Lengths(tuple[int, ...]):
    """Lengths that know the recipe they were drawn by, so that an id need not spell them out. Otherwise a tuple.

    >>> Lengths((3, 5), "pile:8:s0") == (3, 5)
    True
    """

    recipe: str

    def __new__(cls, values: Iterable[int], recipe: str) -> Self:
        self = super().__new__(cls, values)
        self.recipe = recipe
        return self


def checked_count(field: str, value: object, minimum: int = 0) -> int:
    """`value` as an int. Raises InvalidArgument unless it is one, at least `minimum` and at most MAX_SEQLEN."""
    try:
        if isinstance(value, bool):  # an int to Python, and no count to anybody who wrote it
            raise TypeError
        count = operator.index(value)  # type: ignore[arg-type]  # what is no integer is what this finds out
    except TypeError:
        raise InvalidArgument(f"{field} is {value!r}: it must be an integer") from None
    if not minimum <= count <= MAX_SEQLEN:
        raise InvalidArgument(f"{field} is {count}: it must be between {minimum} and {MAX_SEQLEN}")
    return count


def checked_lengths(field: str, values: Iterable[int], minimum: int = 0) -> tuple[int, ...]:
    """`values` as a tuple (Lengths stay Lengths). Raises InvalidArgument if one cannot be a length, or if there is none."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InvalidArgument(f"{field} is {values!r}: it must be a sequence of integers, as in (3, 5)")
    checked = tuple(checked_count(f"{field}[{i}]", value, minimum) for i, value in enumerate(values))
    if not checked:
        raise InvalidArgument(f"{field} is empty: give at least one length; an empty sequence is ({minimum},)")
    checked_count(f"the sum of {field}", sum(checked))
    return values if isinstance(values, Lengths) else checked


def same_length(mask: str, seqlen_q: int, seqlen_kv: int | None) -> None:
    """Raise InvalidArgument if a mask that is defined over one sequence only is asked for two lengths."""
    if seqlen_kv is not None and seqlen_kv != seqlen_q:
        raise InvalidArgument(f"{mask} with seqlen_q {seqlen_q} and seqlen_kv {seqlen_kv}: this mask needs equal lengths")


def starts(lens: Iterable[int]) -> list[int]:
    """Where each document starts, and the total at the end.

    >>> starts((3, 0, 2))
    [0, 3, 3, 5]
    """
    return [0, *itertools.accumulate(lens)]


def spread(per_document: Iterable[int], lens: tuple[int, ...], device: Device) -> Tensor:
    """One value a document, repeated for each of its tokens: int32 `[sum of lens]`."""
    values = torch.tensor(list(per_document), dtype=torch.int32, device=device)
    repeats = torch.tensor(lens, dtype=torch.int64, device=device)
    return values.repeat_interleave(repeats, output_size=sum(lens))


def document_ids(lens: tuple[int, ...], device: Device) -> Tensor:
    """The document of each token: int32 `[sum of lens]`."""
    return spread(range(len(lens)), lens, device)


def document_starts(lens: tuple[int, ...], device: Device) -> Tensor:
    """Where each token's document starts: int32 `[sum of lens]`."""
    return spread(starts(lens)[:-1], lens, device)


def document_ends(lens: tuple[int, ...], device: Device) -> Tensor:
    """Where each token's document ends: int32 `[sum of lens]`."""
    return spread(starts(lens)[1:], lens, device)
