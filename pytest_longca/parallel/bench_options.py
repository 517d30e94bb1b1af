"""What one run of the benchmark measures, and its command line."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_longca.case import DTYPES, Case
from pytest_longca.catalogue import MASKS, load
from pytest_longca.errors import InvalidArgument, unknown_name
from pytest_longca.options import lengths
from pytest_longca.parallel.layout import LAYOUTS
from pytest_longca.parallel.mechanisms import MECHANISMS, Mesh, find_mechanism
from pytest_longca.parallel.setup import Sharing, check
from pytest_longca.parallel.timing import Effort
from pytest_longca.sampling import draw

PEER_PACKAGES = ("ring-flash-attn", "yunchang", "torch")
DOCUMENT_LAYOUTS = ("zigzag", "balanced")


class LongMix:
    """The paper's document lengths for context parallelism: 40 % of the tokens from the histogram, 60 % in documents of 8K to 30K."""

    def draw(self, total: int, seed: int) -> tuple[int, ...]:
        return draw(f"long:{total}:s{seed}")


@dataclass(frozen=True, slots=True)
class Settings:
    """What one run measures."""

    kernels: tuple[str, ...]
    masks: tuple[str, ...]
    mechanisms: tuple[str, ...]
    tokens: tuple[int, ...]
    heads: tuple[int, int]
    head_dim: int
    dtype: str
    world: int
    mesh: Mesh | None
    layouts: tuple[str, ...]
    groups: int
    lanes: int
    effort: Effort
    deadline_s: float
    cell_timeout_s: float
    check_tokens: int
    simulated_ranks: tuple[int, ...]
    json: Path | None
    peers: tuple[str, ...]
    exposed: bool
    links: bool

    def case(self, mask: str, tokens: int, shares: int = 1) -> Case:
        """The case of `tokens` tokens a rank; with `shares` a kernel alone gets that share of the heads, so that its work is one rank's."""
        length = tokens * self.world
        built = load(MASKS[mask]).default(length, 0, LongMix()) if tokens >= 1024 else load(MASKS[mask]).default(length, 0)
        q, kv = max(1, self.heads[0] // shares), max(1, self.heads[1] // shares)
        return Case(mask=built, heads_q=q, heads_kv=kv, head_dim=self.head_dim, dtype=self.dtype)

    def refuse_if_nothing_fits(self) -> None:
        """Raise InvalidArgument, the last reason, if no mechanism can share any of the lengths. Others become cells that say why."""
        refusals = []
        for mechanism in self.mechanisms:
            for tokens in self.tokens:
                try:
                    check(self.case("full", tokens), Sharing(mechanism, self.world, self.mesh))
                    return
                except InvalidArgument as error:
                    refusals.append(error)
        raise refusals[-1] if refusals else InvalidArgument("no mechanism or no length: give --mechanisms and --tokens at least one each")

    def sharings(self, mask: str) -> Iterator[Sharing]:
        """Every mechanism, with every layout that makes a difference to the mask."""
        for name in self.mechanisms:
            default = find_mechanism(name).layout
            has_documents = "document" in mask or mask in ("shared_question", "causal_blockwise")
            layouts = self.layouts or (DOCUMENT_LAYOUTS if has_documents else (default,))
            has_ring = default != "contiguous" or self.mesh is not None
            for layout in layouts if has_ring else (default,):
                yield Sharing(name, self.world, self.mesh, layout, self.groups, self.lanes)


def _names(kind: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if known and name not in known:
            raise unknown_name(kind, name, known)
    return names


def _tokens(text: str) -> tuple[int, ...]:
    try:
        return lengths(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"--tokens: {error}") from None


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    name, purpose = "python -m pytest_longca.parallel.bench", "Time the mechanisms of context parallelism, correctness first."
    parser = argparse.ArgumentParser(prog=name, description=purpose)
    parser.add_argument("--kernels", default="fa2", help="block kernels, as in fa2,cudnn_flex,fa4, or none for peers alone (default: fa2)")
    parser.add_argument("--masks", default="full,causal", help="static masks (default: full,causal)")
    parser.add_argument("--mechanisms", default=",".join(MECHANISMS), help="mechanisms (default: all five)")
    parser.add_argument("--tokens", default="8192,32768", help="tokens per device, as in 8k,32k (default: 8192,32768)")
    parser.add_argument("--heads", default="64:8", help="query and key/value heads (default: 64:8)")
    parser.add_argument("--head-dim", type=int, default=128, help="head dimension (default: 128)")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="dtype (default: bf16)")
    parser.add_argument("--mesh", default="", help="outer x inner x heads, as in 2x2x2 (default: each mechanism's own)")
    parser.add_argument("--layouts", default="", help="layouts (default: the mechanism's own; for documents zigzag and balanced)")
    parser.add_argument(
        "--groups", type=int, default=0, help="pipelined head groups of the Ulysses exchange (default: 3, the first and last small)"
    )
    parser.add_argument("--lanes", type=int, default=2, choices=(1, 2), help="streams on which block kernels take turns (default: 2)")
    parser.add_argument("--samples", type=int, default=20, help="calls that are sampled for each figure, at most (default: 20)")
    parser.add_argument("--warmup", type=int, default=3, help="calls before them (default: 3)")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds of samples for each figure (default: 4)")
    parser.add_argument("--minutes", type=float, default=9.0, help="no cell starts after this time (default: 9)")
    parser.add_argument("--cell-timeout", type=float, default=180.0, help="seconds after which a cell is taken for hung (default: 180)")
    parser.add_argument("--check-tokens", type=int, default=512, help="tokens per device of the correctness case (default: 512)")
    parser.add_argument("--simulate-world", type=int, default=0, help="run ranks of such a world one after another, communication off")
    parser.add_argument("--simulate-ranks", default="", help="which ranks (default: the first, the middle and the last)")
    parser.add_argument("--json", type=Path, help="append records to this JSON Lines file")
    parser.add_argument("--peers", nargs="?", default="", const=",".join(PEER_PACKAGES), help="time peers too (without names: all three)")
    parser.add_argument("--links", action="store_true", help="measure latency and bandwidth of the links first")
    parser.add_argument("--no-exposed", action="store_true", help="skip the second run without communication")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace, world_size: int) -> Settings:
    """The settings of a command line. Raises InvalidArgument."""
    size = options.simulate_world or world_size
    heads = options.heads.split(":")
    if len(heads) != 2 or not all(part.isdecimal() and int(part) > 0 for part in heads):
        raise InvalidArgument(f"--heads {options.heads!r}: two numbers, query heads:key/value heads, as in 64:8")
    ranks = _names("rank", options.simulate_ranks, list(map(str, range(size)))) or sorted({"0", str(size // 2), str(size - 1)}, key=int)
    return Settings(
        kernels=_names("block kernel", options.kernels, ()),
        masks=_names("mask", options.masks, list(MASKS)),
        mechanisms=_names("mechanism", options.mechanisms, list(MECHANISMS)),
        tokens=_tokens(options.tokens),
        heads=(int(heads[0]), int(heads[1])),
        head_dim=options.head_dim,
        dtype=options.dtype,
        world=size,
        mesh=Mesh.parse(options.mesh) if options.mesh else None,
        layouts=_names("layout", options.layouts, list(LAYOUTS)),
        groups=options.groups,
        lanes=options.lanes,
        effort=Effort(options.warmup, options.samples, options.budget),
        deadline_s=options.minutes * 60,
        cell_timeout_s=options.cell_timeout,
        check_tokens=options.check_tokens,
        simulated_ranks=tuple(map(int, ranks)),
        json=options.json,
        peers=_names("peer", options.peers, PEER_PACKAGES),
        exposed=not options.no_exposed,
        links=options.links,
    )
