"""From a case, a mechanism and a world to a bound `ContextParallel`, with every refusal before anything runs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.errors import InvalidArgument
from pytest_longca.inputs import TORCH_DTYPES
from pytest_longca.mask import Mask
from pytest_longca.parallel.attend import ContextParallel
from pytest_longca.parallel.comm import Chain, Communicator, Gather, Ring
from pytest_longca.parallel.heads import HeadExchange
from pytest_longca.parallel.kernel import BlockKernel, VarlenBlock
from pytest_longca.parallel.lanes import Lanes
from pytest_longca.parallel.layout import find_layout
from pytest_longca.parallel.mechanisms import RANKS_PER_NODE, Heads, Mechanism, Mesh, check_mesh, find_mechanism
from pytest_longca.parallel.plan import Plan
from pytest_longca.parallel.world import World


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a case is shared: mechanism, mesh and layout. None asks for the mechanism's default.

    `groups` is the number of pipelined head groups of the Ulysses exchange (0: see `head_groups`), `lanes` the number of streams on which
    block kernels take turns on a GPU (1 or 2). `own` is the row of a mechanism that is not built in.
    """

    mechanism: str
    world: int
    mesh: Mesh | None = None
    layout: str | None = None
    groups: int = 0
    lanes: int = 2
    ranks_per_node: int = RANKS_PER_NODE
    own: Mechanism | None = None

    @property
    def row(self) -> Mechanism:
        return self.own or find_mechanism(self.mechanism)

    @property
    def layout_name(self) -> str:
        return self.layout or self.row.layout

    def mesh_for(self, case: Case) -> Mesh:
        """The mesh of a case. Raises InvalidArgument where it does not fit."""
        heads = Heads(case.heads_q, case.heads_kv)
        if self.mesh is None:
            return self.row.mesh(self.world, heads, self.ranks_per_node)
        check_mesh(self.mesh, self.world, heads)
        return self.mesh


def check(case: Case, sharing: Sharing) -> None:
    """Raise InvalidArgument, before any process starts, unless the ranks can share the case."""
    find_layout(sharing.layout_name)
    sharing.mesh_for(case)
    mask = case.mask
    if mask.seqlen_q != mask.seqlen_kv:
        raise InvalidArgument(f"queries and keys are laid out alike: seqlen_q {mask.seqlen_q} and seqlen_kv {mask.seqlen_kv} must be equal")
    if mask.heads != 1 or mask.batch != 1 or case.batch != 1:
        raise InvalidArgument(f"one packed sequence and one mask for all heads: batch is {case.batch}, the mask has {mask.heads} heads")
    if mask.seqlen_q < sharing.world:
        raise InvalidArgument(f"{mask.seqlen_q} tokens and {sharing.world} ranks: each rank needs at least one token")
    if mask.row_intervals() is None:
        raise InvalidArgument(f"mask {mask.name} has rows of more than two runs of visible keys: context parallel takes row intervals")


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Where the tokens of a case lie: ascending ids of each ring rank, and of each rank of the world."""

    mesh: Mesh
    ring: list[Tensor]
    intervals: Tensor  # int32 [tokens, 2, 2], global

    def of_rank(self, rank: int) -> Tensor:
        """The token ids that a rank holds: its part of its ring rank's share."""
        return self.ring[rank // self.mesh.heads].tensor_split(self.mesh.heads)[rank % self.mesh.heads]


def shards_of(case: Case, sharing: Sharing) -> Shards:
    """Lay out the tokens of a case."""
    mesh = sharing.mesh_for(case)
    found = case.mask.row_intervals()
    assert found is not None, "check was not called"
    intervals = found[0, 0]
    row_area = (intervals[..., 1] - intervals[..., 0]).sum(1, dtype=torch.int64)
    ring = find_layout(sharing.layout_name)(document_lengths(case.mask), row_area, mesh.ring)
    return Shards(mesh, ring, intervals)


def document_lengths(mask: Mask) -> tuple[int, ...]:
    """The lengths of a mask's documents: its field `doc_lens`, or the whole sequence."""
    return getattr(mask, "doc_lens", (mask.seqlen_q,))


def bind(case: Case, sharing: Sharing, world: World, kernel: BlockKernel, shards: Shards | None = None) -> ContextParallel:
    """This rank's differentiable attention for the case. Collective where groups are made for the first time."""
    shards = shards or shards_of(case, sharing)
    mesh = shards.mesh
    plan = Plan(shards.intervals, shards.ring, world.rank // mesh.heads, world.device, is_exact=isinstance(kernel, VarlenBlock))
    tokens = [len(part) for part in shards.ring[plan.own].tensor_split(mesh.heads)]
    exchange = HeadExchange(world.channel(mesh, "heads"), tokens, head_groups(case, mesh, sharing.groups))
    lanes = Lanes.on(world.device, sharing.lanes)
    return ContextParallel(plan, _communicator(sharing.row, mesh, world, plan), exchange, kernel, case.scale, lanes)


def _communicator(row: Mechanism, mesh: Mesh, world: World, plan: Plan) -> Communicator:
    outer = Ring(world.channel(mesh, "outer"), mesh.inner, plan.lengths, is_first=mesh.inner == 1)
    channel = world.channel(mesh, "inner")
    inner = Gather(channel, 1, plan.lengths, plan.order) if row.gathers else Ring(channel, 1, plan.lengths, is_last=mesh.outer == 1)
    return Chain(outer, inner)


def head_groups(case: Case, mesh: Mesh, wanted: int = 0) -> tuple[int, ...]:
    """How many of a rank's key/value heads each pipelined group of the exchange has: `wanted` near-equal groups, as far as heads go.

    0 asks for three: the first one's way in and the last one's way out are waited for, so those are an eighth at most, and all between are
    one, because each transfer beside a kernel takes processors from it.
    """
    heads = max(case.heads_kv, mesh.heads) // mesh.heads
    ends = max(1, heads // 8)
    if mesh.heads == 1:
        return (heads,)
    if wanted == 0 and heads > 2 * ends:
        return ends, heads - 2 * ends, ends
    count = min(wanted or heads, heads)
    return tuple(heads // count + (group < heads % count) for group in range(count))


def exchange_bytes(case: Case, mesh: Mesh) -> float:
    """What a rank sends forward in the exchange of heads (backward, as much): q, k and v to their heads, and out back."""
    widths = case.heads_q * (case.head_dim + case.head_dim_v) + max(case.heads_kv, mesh.heads) * (case.head_dim + case.head_dim_v)
    return (mesh.heads - 1) / mesh.heads * case.seqlen_q / mesh.size * widths * TORCH_DTYPES[case.dtype].itemsize
