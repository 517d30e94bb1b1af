"""The five mechanisms: rows of a table. Each is a mesh of ranks and the kind of its inner communicator."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from pytest_longca.errors import InvalidArgument, unknown_name

RANKS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks as (outer ring, inner ring, heads); heads vary fastest, so that Ulysses stays among neighbouring ranks."""

    outer: int = 1
    inner: int = 1
    heads: int = 1

    @property
    def size(self) -> int:
        return self.outer * self.inner * self.heads

    @property
    def ring(self) -> int:
        """Ranks among which tokens are laid out before Ulysses cuts each share once more."""
        return self.outer * self.inner

    def members(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks along one axis through `rank`, in order."""
        stride = {"outer": self.inner * self.heads, "inner": self.heads, "heads": 1}[axis]
        size = getattr(self, axis)
        first = rank - rank // stride % size * stride
        return tuple(first + place * stride for place in range(size))

    def __str__(self) -> str:
        return f"{self.outer}x{self.inner}x{self.heads}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The mesh of "2x2x2" (outer, inner, heads). Raises InvalidArgument."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
        if not match:
            raise InvalidArgument(f"mesh {text!r}: three sizes, outer ring x inner ring x heads, as in 2x2x2")
        return cls(*map(int, match.groups()))


@dataclass(frozen=True, slots=True)
class Heads:
    """Query and key/value heads, and what they allow Ulysses."""

    q: int
    kv: int

    def refusal(self, ranks: int) -> str | None:
        """Why `ranks` ranks cannot share these heads, or None. Fewer key/value heads than ranks are replicated."""
        if ranks > self.q:
            return f"{ranks} ranks on the heads axis and {self.q} query heads: at most one rank for each head"
        if self.q % ranks:
            return f"{self.q} query heads do not divide among {ranks} ranks"
        if self.kv % ranks and ranks % self.kv:
            return f"{self.kv} key/value heads neither divide among {ranks} ranks nor into them"
        return None


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A way to share one attention among ranks. `factor(world, heads, ranks_per_node)` is its default mesh."""

    name: str
    summary: str
    factor: Callable[[int, Heads, int], Mesh]
    gathers: bool = False
    layout: str = "zigzag"

    def mesh(self, world: int, heads: Heads, ranks_per_node: int = RANKS_PER_NODE) -> Mesh:
        """The default mesh. Raises InvalidArgument where there is none."""
        mesh = self.factor(world, heads, ranks_per_node)
        check_mesh(mesh, world, heads)
        return mesh

    def placement(self, mesh: Mesh, ranks_per_node: int = RANKS_PER_NODE) -> str:
        """In words, where the mesh lies."""
        where = "inside the node" if mesh.heads <= ranks_per_node else "across nodes"
        ulysses = f"Ulysses over {mesh.heads} neighbouring ranks ({where})" if mesh.heads > 1 else "no Ulysses"
        kind = "all-gather" if self.gathers else "ring"
        ring = f"{kind} over {mesh.inner} at stride {mesh.heads}" if mesh.inner > 1 else f"no inner {kind}"
        outer = f", outer ring over {mesh.outer} at stride {mesh.inner * mesh.heads}" if mesh.outer > 1 else ""
        return f"{ulysses}, {ring}{outer}"


def check_mesh(mesh: Mesh, world: int, heads: Heads) -> None:
    """Raise InvalidArgument unless `world` ranks and these heads fit the mesh."""
    if mesh.size != world:
        raise InvalidArgument(f"mesh {mesh} has {mesh.size} ranks and the world {world}: their product must be the world size")
    if reason := heads.refusal(mesh.heads):
        raise InvalidArgument(f"mesh {mesh}: {reason}; give a smaller last number to --longca-mesh, or another mechanism")


def _hybrid(world: int, heads: Heads, ranks_per_node: int, least_ring: int) -> int:
    """Ranks on the heads axis: the most that stay inside a node and leave a ring of `least_ring`, or of less where the world is small."""
    allowed = [n for n in range(1, min(ranks_per_node, world) + 1) if world % n == 0 and not heads.refusal(n)]
    for ring in (least_ring, 2, 1):
        if fitting := [n for n in allowed if world // n >= ring]:
            return max(fitting)
    raise InvalidArgument(f"no rank: the world size is {world}, it must be at least 1")


def _usp(world: int, heads: Heads, ranks_per_node: int) -> Mesh:
    ulysses = _hybrid(world, heads, ranks_per_node, least_ring=2)
    return Mesh(inner=world // ulysses, heads=ulysses)


def _loongtrain(world: int, heads: Heads, ranks_per_node: int) -> Mesh:
    ulysses = _hybrid(world, heads, ranks_per_node, least_ring=4)
    ring = world // ulysses
    outer = max(n for n in range(1, math.isqrt(ring) + 1) if ring % n == 0)
    return Mesh(outer, ring // outer, ulysses)


MECHANISMS: dict[str, Mechanism] = {
    row.name: row
    for row in (
        Mechanism("ulysses", "all-to-all from tokens to heads and back", lambda world, heads, node: Mesh(heads=world), layout="contiguous"),
        Mechanism("ring_p2p", "key/value blocks hop from rank to rank", lambda world, heads, node: Mesh(inner=world)),
        Mechanism("ring_allgather", "keys and values are gathered once", lambda world, heads, node: Mesh(inner=world), gathers=True),
        Mechanism("usp", "Ulysses inside the node, a ring among nodes", _usp),
        Mechanism("loongtrain", "Ulysses inside the node, a double ring among nodes", _loongtrain),
    )
}


def find_mechanism(name: str) -> Mechanism:
    """The mechanism of that name, or InvalidArgument with the closest names."""
    if name not in MECHANISMS:
        raise unknown_name("mechanism", name, MECHANISMS)
    return MECHANISMS[name]
