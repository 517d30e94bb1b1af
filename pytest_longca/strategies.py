"""Cases drawn by Hypothesis, and the fixed cases of the exact probes. Only integers and a seed are drawn, never tensors.

@given(strategies.cases(masks=["causal_document"], kernel=kernel))
def test_it(case): ...
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import isqrt
from random import Random
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_longca.case import DTYPES, Case, Direction, Layout, Values
from pytest_longca.catalogue import MASKS, load
from pytest_longca.errors import InvalidArgument, unknown_name
from pytest_longca.kernel import Capabilities, Kernel
from pytest_longca.machine import CPU, Machine
from pytest_longca.mask import Form, Mask
from pytest_longca.outcome import Unsupported
from pytest_longca.subject import declared, is_interpreted

TILE_EDGES = tuple(tile + step for tile in (16, 32, 64, 128) for step in (-1, 0, 1))
"""Lengths where tiles begin and end."""
EDGE_WEIGHT = 4
"""How often each edge is repeated after the plain lengths: with 160 tokens, a third of all lengths then lie at an edge."""
ORDINARY_LENGTH = 160
ORDINARY_FORMS, LONG_FORMS = 8, 4
"""So many examples have at most ORDINARY_LENGTH tokens for so many with more, which are more tiles than a pipeline has stages."""
LONGEST = 1100
"""Keys of a long example of few queries."""
FEW_QUERIES = 16
"""Queries of every second long example, where lengths may differ: as many as decoding has, with keys that a kernel splits."""
LONG_EDGES = tuple(tile + step for tile in (256, 384, 512, 1024) for step in (-1, 0, 1))
COMPILED_LENGTHS = (17, 64, 129)
"""The lengths of a kernel that compiles for each shape, on a GPU: a compile takes seconds."""
COMPILED_CASES = 4
"""How many cases such a kernel has on a mask; its examples differ in values and seed beyond them."""
COMPILED_HEAD_DIMS = (64, 128)
"""The head dims, equal for q, k and v, that a kernel always has on a GPU which compiles for each: those that models have."""
MORE_HEAD_DIMS = 2
"""How many others it has besides on a mask."""
GROUPS = (1, 2, 3, 7, 4, 8)
HEADS_KV = (1, 2, 3, 4, 4)
AS_HEAD_DIM = 0
"""A head_dim_v that is head_dim, as a Case takes it."""
HEAD_DIMS = (16, 24, 32, 40, 56, 64, 64, 72, 96, 128, 128, 192, 256)
"""Even and odd multiples of 8, and twice those that models have."""
SCALES = (0.0, 0.0, 0.37, 1.0, 1.7)
"""The usual scale, mostly (0 is head_dim ** -0.5), one that no kernel has built in, none, and one above 1."""
SCORES = 100_000
"""How many scores (batch * heads_q * seqlen_q * seqlen_kv) an example holds: a few milliseconds for naive on one core."""
LONG_SCORES = 300_000
"""The same of a long example."""
INTERPRETED_SCORES = 2_000
"""The same for a Triton kernel on the CPU, where one 16 x 16 tile takes milliseconds."""
KERNEL_BLOCKS = (64, 128)
"""Block sizes of the kernels that take only one."""
MOST_BLOCKS = 4
MOST_HEADS = 6
"""The most heads that a block mask samples for itself."""
INTERPRETED_BLOCK = 16
PROBE_LENGTHS = tuple(range(12, 21))
PROBE_EDGES = (64, 65, 128, 129)
PROBE_HEAD_DIMS = (32, 64, 128)
INTERPRETED_LENGTHS = (17, 35)
"""The lengths of the probes of a kernel in Triton's interpreter, each once."""

MaskClass = type[Mask]


def cases(
    masks: Sequence[str | MaskClass] | None = None,
    kernel: Kernel | None = None,
    machine: Machine = CPU,
    *,
    max_seqlen: int = LONGEST,
    dtypes: Sequence[str] = ("fp32", "bf16", "fp16"),
    values: Sequence[Values] = tuple(Values),
    layouts: Sequence[Layout] = tuple(Layout),
    directions: Sequence[Direction] = (Direction.FWD_BWD,),
    seed: int = 0,
) -> SearchStrategy[Case]:
    """Cases that the kernel supports on the machine: awkward lengths, documents, head groups, head dims, dtypes, layouts and values.

    `masks` are names or classes, all built-in ones if None. With a kernel, what it cannot do is not drawn; where it compiles for each head
    dim, `seed` decides which few there are on a mask. Shrinks to few heads, short sequences, contiguous normal fp32 operands. Raises
    InvalidArgument if nothing is left to draw.
    """
    classes = [mask_class(mask) for mask in (MASKS if masks is None else masks)]
    if max_seqlen < 1:
        raise InvalidArgument(f"max_seqlen is {max_seqlen}: it must be at least 1")
    pools = _Pools(kernel, machine, max_seqlen, dtypes, values, layouts, directions, seed)
    return _cases(classes, pools)


def mask_class(mask: str | MaskClass) -> MaskClass:
    """The class of a built-in mask's name; a class is itself. Raises InvalidArgument for an unknown name."""
    if not isinstance(mask, str):
        return mask
    if mask not in MASKS:
        raise unknown_name("mask", mask, MASKS)
    return load(MASKS[mask])  # type: ignore[no-any-return]  # a "module:attribute" string


class _Pools:
    """What can be drawn for a kernel: each pool's first entry is the plainest, towards which cases shrink."""

    def __init__(
        self,
        kernel: Kernel | None,
        machine: Machine,
        max_seqlen: int,
        dtypes: Sequence[str],
        values: Sequence[Values],
        layouts: Sequence[Layout],
        directions: Sequence[Direction],
        seed: int,
    ) -> None:
        can = kernel.capabilities if kernel else Capabilities(empty_sequences=True)
        self.kernel = kernel
        self.machine = machine
        self.ordinary, self.longest = min(max_seqlen, ORDINARY_LENGTH), max_seqlen
        self.values, self.layouts_do = tuple(values), tuple(layouts)
        # Nobody asks with q, k or v of one number, and with them every score and every rounding is the same.
        self.layouts = tuple(layout for layout in layouts if layout is not Layout.SINGLE) or (Layout.CONTIGUOUS,)
        self.dtypes = _some("dtype", [dtype for dtype in DTYPES if dtype in dtypes and dtype in can.dtypes], kernel, dtypes)
        self.head_dims = [dim for dim in HEAD_DIMS if dim in can.head_dims] or [can.head_dims[0]]
        self.groups: tuple[int, ...] = GROUPS if can.gqa else (1,)
        # Every second time v's is that of q and k, as most models have it.
        self.head_dims_v = [AS_HEAD_DIM] * len(self.head_dims) + (self.head_dims if can.unequal_head_dims else [])
        self.shortest = 0 if can.empty_sequences else 1
        wanted = [d for d in directions if can.backward or not d.needs_backward] or [Direction.FWD]
        self.directions = wanted
        self.is_compiled = kernel is not None and kernel.compiles_per_shape and machine.device == "cuda"
        self.has_few_codes = kernel is not None and kernel.compiles_per_head_dim and machine.device == "cuda"
        self.seed = seed
        self.heads_kv: tuple[int, ...] = HEADS_KV
        self.batches, self.scores = 3, SCORES
        self.is_interpreted = kernel is not None and is_interpreted(kernel, machine)
        self.has_long = not (self.is_interpreted or self.is_compiled) and max_seqlen > ORDINARY_LENGTH
        if self.is_interpreted:  # its programs are counted, not their sizes
            self.groups, self.heads_kv, self.batches, self.scores = self.groups[:3], HEADS_KV[:2], 2, INTERPRETED_SCORES

    def of_one_code(self, rng: Random, cls: MaskClass) -> "_Pools":
        """The same with one of the few combinations of group, dtype and head dims that a mask has if each is compiled; else all."""
        if not self.has_few_codes:
            return self
        one = copy.copy(self)
        one.groups, one.dtypes, one.head_dims, one.head_dims_v = rng.choice(self._codes(cls))
        return one

    def _codes(self, cls: MaskClass) -> list[tuple[tuple[int, ...], list[str], list[int], list[int]]]:
        """Pools of one group, dtype, head dim and head dim of v each, drawn for mask and seed: first a usual head dim, all else plain.

        Of the head dims that are not usual the first has another one for v, where there may be.
        """
        rng = Random(f"{cls.name}:{self.seed}")
        usual = [dim for dim in COMPILED_HEAD_DIMS if dim in self.head_dims]
        others = [dim for dim in self.head_dims if dim not in usual]
        found, turn = [], rng.randrange(len(self.dtypes))
        for number, dim in enumerate(rng.sample(usual, len(usual)) + rng.sample(others, min(MORE_HEAD_DIMS, len(others)))):
            groups = self.groups[:1] if number == 0 else (rng.choice(self.groups),)
            dims_v = [other for other in self.head_dims_v if other not in (AS_HEAD_DIM, dim)] if number == len(usual) else []
            dtype = self.dtypes[(turn + number) % len(self.dtypes) if number else 0]
            found.append((groups, [dtype], [dim], [rng.choice(dims_v) if dims_v else AS_HEAD_DIM]))
        return found


def _some(what: str, left: list[Any], kernel: Kernel | None, wanted: Sequence[Any]) -> list[Any]:
    if left:
        return left
    who = f"kernel {kernel.name}" if kernel else "any case"
    raise InvalidArgument(f"no {what} is left to draw: {who} takes none of {', '.join(map(str, wanted))}")


@st.composite
def _cases(draw: DrawFn, classes: list[MaskClass], pools: _Pools) -> Case:
    # One draw, from which all else comes: of an example with two draws alike Hypothesis makes up to five near copies before the next
    # fresh one, and of 50 examples ten would be left.
    return _draw_case(draw(st.randoms(use_true_random=False)), classes, pools)


def _draw_case(rng: Random, classes: list[MaskClass], pools: _Pools) -> Case:
    """A case from random numbers, which Hypothesis draws and shrinks towards 0: to the first of each pool, and few tokens."""
    cls = rng.choice(classes)
    if pools.is_compiled:
        case = _compiled_case(rng.randrange(COMPILED_CASES), cls, pools)
        return _supported(replace(case, values=rng.choice(pools.values), seed=rng.randint(0, 2**16)), pools.kernel, pools.machine)
    return _supported(_any_case(rng, cls, pools), pools.kernel, pools.machine)


def _compiled_case(number: int, cls: MaskClass, pools: _Pools) -> Case:
    """One of the few cases of a mask that are compiled, always the same."""
    return _any_case(Random(f"{cls.name}:{number}"), cls, pools)


def _any_case(rng: Random, cls: MaskClass, pools: _Pools) -> Case:
    """A case of a mask, whether the kernel supports it or not."""
    pools = pools.of_one_code(rng, cls)
    form = rng.randrange(ORDINARY_FORMS + LONG_FORMS) - ORDINARY_FORMS if pools.has_long else -1
    group, heads_kv = rng.choice(pools.groups), rng.choice(pools.heads_kv)
    batch = rng.randint(1, pools.batches)
    if form >= 0 and cls.unequal_lengths and rng.randrange(2):
        mask = _few_queries(rng, cls, pools, batch * heads_kv * group)
    elif form >= 0:
        batch, heads_kv, group = _few_heads(form, batch, heads_kv, group, pools.groups[0])
        mask = _long_mask(rng, cls, pools, batch, heads_kv * group)
    else:
        longest = min(pools.ordinary, max(1, isqrt(pools.scores // (batch * group * heads_kv))))
        sizes = [_length(rng, pools, longest) for _ in range(2 if cls.unequal_lengths and rng.randrange(3) == 2 else 1)]
        mask = _sample(rng, cls, pools, *sizes)
    if mask.heads > 1:
        heads_kv, group = split_heads(mask.heads, group)
    return Case(
        mask=mask,
        batch=mask.batch if mask.batch > 1 else batch,
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        head_dim=rng.choice(pools.head_dims),
        head_dim_v=rng.choice(pools.head_dims_v),
        dtype=rng.choice(pools.dtypes),
        direction=rng.choice(pools.directions),
        scale=rng.choice(SCALES),
        values=rng.choice(pools.values),
        layouts=(*(rng.choice(pools.layouts) for _ in range(3)), rng.choice(pools.layouts_do)),  # type: ignore[arg-type]  # four of them
        seed=rng.randint(0, 2**16),
    )


def _sample(rng: Random, cls: MaskClass, pools: _Pools, *sizes: int) -> Mask:
    """A mask over `seqlen` or `seqlen, seqlen_kv`, by its own `sample`."""
    if Form.BLOCK_MAP in cls.forms:  # such a mask needs at least one token
        sizes = tuple(max(1, size) for size in sizes)
    mask = cls.sample(rng, *sizes)
    return _coarse(mask) if pools.is_interpreted else mask


def _length(rng: Random, pools: _Pools, longest: int) -> int:
    """A length from one integer range, so that it shrinks across: plain ones first, then the tile edges, repeated."""
    if pools.is_compiled:
        return rng.choice(COMPILED_LENGTHS)
    edges = [edge for edge in TILE_EDGES if edge <= longest] * EDGE_WEIGHT
    number = rng.randint(pools.shortest, longest + len(edges))
    return number if number <= longest else edges[number - longest - 1]


def _few_queries(rng: Random, cls: MaskClass, pools: _Pools, heads: int) -> Mask:
    """A mask over as few queries as decoding has, and more keys than an ordinary example."""
    heads = max(heads, MOST_HEADS) if Form.BLOCK_MAP in cls.forms else heads
    queries = rng.choice((1, 2, rng.randint(1, FEW_QUERIES)))
    return _sample(rng, cls, pools, queries, _long_length(rng, min(pools.longest, LONG_SCORES // (heads * queries))))


def _few_heads(form: int, batch: int, heads_kv: int, group: int, plain: int) -> tuple[int, int, int]:
    """`(batch, heads_kv, group)` that leave a sequence longer than an ordinary one: as few as can be, or two of the three as drawn."""
    few = 1, 1, plain
    batch, heads_kv, group = (few, few, (1, heads_kv, group), (batch, 1, group))[form]
    most = LONG_SCORES // (ORDINARY_LENGTH + 1) ** 2
    heads_kv = min(heads_kv, most // group)
    return min(batch, most // (heads_kv * group)), heads_kv, group


def _long_mask(rng: Random, cls: MaskClass, pools: _Pools, batch: int, heads: int) -> Mask:
    """A mask over more tokens than an ordinary example has."""
    heads = max(heads, MOST_HEADS) if Form.BLOCK_MAP in cls.forms else heads
    longest = min(pools.longest, isqrt(LONG_SCORES // (batch * heads)))
    return _sample(rng, cls, pools, _long_length(rng, max(longest, ORDINARY_LENGTH + 1)))


def _long_length(rng: Random, longest: int) -> int:
    """A length beyond the ordinary ones from one integer range, whose upper half maps to tile edges where there are some."""
    edges = [edge for edge in LONG_EDGES if edge <= longest]
    number = rng.randint(ORDINARY_LENGTH + 1, longest + (longest - ORDINARY_LENGTH if edges else 0))
    return number if number <= longest else edges[number % len(edges)]


def _coarse(mask: Mask) -> Mask:
    """The mask, or if it has many blocks one of few: a kernel in Triton's interpreter pays for each."""
    cls = type(mask)
    if Form.BLOCK_MAP not in cls.forms or mask.seqlen_q * mask.seqlen_kv == 0 or num_blocks(mask) <= MOST_BLOCKS**2:
        return mask
    size = INTERPRETED_BLOCK
    return cls.default(size * min(MOST_BLOCKS, -(-mask.seqlen_q // size)), mask.seqlen_q, block_size=size)  # type: ignore[call-arg]  # a block mask's


def num_blocks(mask: Mask) -> int:
    """Blocks of a block mask's map, of one head."""
    return len(mask.sizes_q()) * len(mask.sizes_kv())  # type: ignore[attr-defined]  # block masks have them


def split_heads(heads_q: int, group: int) -> tuple[int, int]:
    """`(heads_kv, group)` for a mask that fixes the query heads: the wanted group if it divides them."""
    return (heads_q // group, group) if heads_q % group == 0 else (heads_q, 1)


def _supported(case: Case, kernel: Kernel | None, machine: Machine) -> Case:
    """The case, or the first plainer one that the kernel supports."""
    if kernel is None:
        return case
    found = next((plain for plain in _candidates(case) if _takes(kernel, plain, machine)), None)
    return found if found is not None else reject()


def _takes(kernel: Kernel, case: Case, machine: Machine) -> bool:
    """Whether a case is one for the kernel. So is one about which its declaration raises: whoever judges the case says so."""
    return not isinstance(declared(kernel, case, machine), Unsupported)


def _candidates(case: Case) -> Iterator[Case]:
    yield from plainer(case)
    if Form.BLOCK_MAP in case.mask.forms:
        for mask in tiled_masks(type(case.mask), 1 + case.seqlen_q % MOST_BLOCKS, case.heads_q, case.group, case.seed):
            yield from plainer(replace(case, mask=mask))


def tiled_masks(cls: MaskClass, num_blocks: int, heads: int, group: int, seed: int) -> Iterator[Mask]:
    """Block masks in the block sizes that hardware kernels are built for, a map for each group of query heads."""
    for size in KERNEL_BLOCKS:
        yield cls.default(size * num_blocks, seed, block_size=size, heads=heads, group=group)  # type: ignore[call-arg]  # block masks take these


def plainer(case: Case) -> Iterator[Case]:
    """The case, then the same with less and less that a kernel could refuse."""
    yield case
    steps: tuple[dict[str, Any], ...] = (
        {"layouts": (Layout.CONTIGUOUS,) * 4},
        {"scale": 0.0},
        {"head_dim_v": case.head_dim},
        {"head_dim": 64, "head_dim_v": 64, "scale": 0.0},
        {"head_dim": 128, "head_dim_v": 128, "scale": 0.0},
        {"direction": Direction.FWD},
        {"heads_kv": case.heads_q},
    )
    for step in steps:
        case = replace(case, **step)
        yield case


def probe_cases(mask: str | MaskClass, kernel: Kernel, machine: Machine = CPU) -> list[Case]:
    """The cases of the exact probes on a mask: every length from 12 to 20, twice, and lengths around tile edges; those the kernel supports.

    The same ones every time. Where the mask allows it, every second one has another number of keys. A kernel that compiles each shape on a
    GPU has three lengths, one that is interpreted two, each once.
    """
    cls = mask_class(mask)
    candidates = [_probe_case(value, kernel, machine, seed) for seed, value in enumerate(_probe_masks(cls, kernel, machine))]
    found = [case for case in candidates if case is not None]
    if not found and Form.BLOCK_MAP in cls.forms:
        tiled = [value for blocks in range(1, MOST_BLOCKS + 1) for value in tiled_masks(cls, blocks, 2, 1, blocks)]
        found = [case for seed, value in enumerate(tiled) if (case := _probe_case(value, kernel, machine, seed)) is not None]
    return found


def _probe_masks(cls: MaskClass, kernel: Kernel, machine: Machine) -> Iterator[Mask]:
    lengths, times = PROBE_LENGTHS + PROBE_EDGES, 2
    if kernel.compiles_per_shape and machine.device == "cuda":
        lengths, times = COMPILED_LENGTHS, 1
    elif is_interpreted(kernel, machine):
        lengths, times = INTERPRETED_LENGTHS, 1
    for number, seqlen in enumerate(seqlen for seqlen in lengths for _ in range(times)):
        rng = Random(f"{cls.name}:{number}")
        sizes = {"seqlen_kv": rng.choice(lengths)} if number % 2 and cls.unequal_lengths else {}
        mask = cls.sample(rng, seqlen, **sizes)
        yield _coarse(mask) if is_interpreted(kernel, machine) else mask


def _probe_case(mask: Mask, kernel: Kernel, machine: Machine, seed: int) -> Case | None:
    """The first form of a probe case that the kernel supports: both passes before one, grouped heads before equal, fp32 before half."""
    groups = (2, 1) if is_interpreted(kernel, machine) else (3, 2, 1)
    directions, dtypes, can = (Direction.FWD_BWD, Direction.FWD), ("fp32", "bf16", "fp16"), kernel.capabilities.head_dims
    head_dims = [dim for dim in PROBE_HEAD_DIMS if dim in can] or can[:1]
    for direction, group, dtype, head_dim in product(directions, groups, dtypes, head_dims):
        heads_kv, group = split_heads(mask.heads, group) if mask.heads > 1 else (2, group)
        case = Case(
            mask=mask,
            batch=max(2, mask.batch),
            heads_q=heads_kv * group,
            heads_kv=heads_kv,
            head_dim=head_dim,
            dtype=dtype,
            direction=direction,
            seed=seed,
        )
        if _takes(kernel, case, machine):
            return case
    return None
