"""The scaling model: a rank's compute time, measured with communication off, plus what latency and bandwidth leave exposed.

    python -m pytest_longca.parallel.model --records cp.jsonl            # the paper's table, 8 to 96 GPUs

Compute is data (records of simulated ranks), or the rate of the kernel alone is assumed; links are fitted on what is there, the others are
named assumptions.
A ring hides a hop behind the block that it computes meanwhile, a gather hides both its ways, in and its gradients' back, behind the rank's
own block, and an exchange of heads hides all but the first group's way in and the last one's way out. Links that are busy while a rank
computes slow it down by the factor 1 + `contention`.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pytest_longca.case import Case, Direction
from pytest_longca.catalogue import MASKS, load
from pytest_longca.errors import InvalidArgument
from pytest_longca.ids import parse_case
from pytest_longca.parallel.bench_options import LongMix
from pytest_longca.parallel.links import Link, fit
from pytest_longca.parallel.mechanisms import MECHANISMS, RANKS_PER_NODE, Mesh, find_mechanism
from pytest_longca.parallel.published import PUBLISHED
from pytest_longca.parallel.setup import Sharing, exchange_bytes, head_groups
from pytest_longca.report.appendix import Appendix
from pytest_longca.report.record import Record
from pytest_longca.report.store import read_records

Computed = dict[tuple[str, str, int, int, str], float]
WORLDS = (8, 16, 32, 64, 96)
PAPER_MASKS = ("full", "causal", "full_document", "causal_document")
PAPER_TOKENS = 8192
BF16_BYTES, FP32_BYTES = 2, 4
H200_FA2: dict[tuple[str, str], float] = {
    (mask, direction): rate
    for mask, rates in {"full": (382, 328), "causal": (381, 341), "full_document": (378, 331), "causal_document": (366, 317)}.items()
    for direction, rate in zip(("fwd", "bwd"), rates, strict=True)
}
"""TFLOP/s of fa2 alone on an H200, half the heads at 64K tokens."""
ASSUMED = {"fa2": H200_FA2}
"""Rates of a kernel for masks that a run did not measure; fa2's where a run measured no rate at all."""


@dataclass(frozen=True, slots=True)
class Network:
    """Links inside a node and between nodes, and how much a busy link slows computation.

    The defaults are assumptions: inside 280 GB/s and 20 us (NVLink of one host), between 45 GB/s and 30 us (a 400 Gbit/s card a GPU).
    """

    inside: Link = field(default_factory=lambda: Link(0.02, 280.0))
    between: Link = field(default_factory=lambda: Link(0.03, 45.0))
    contention: float = 0.0
    ranks_per_node: int = RANKS_PER_NODE

    def along(self, mesh: Mesh, axis: str) -> Link:
        """The slowest link that a neighbour transfer along the axis crosses."""
        members = mesh.members(0, axis)
        return self.inside if members[-1] < self.ranks_per_node else self.between

    def exchange_ms(self, num_bytes: float, mesh: Mesh, axis: str) -> float:
        """A rank's bytes spread evenly over all ranks of an axis, inside and between at once: the slower part counts."""
        members = mesh.members(0, axis)
        if len(members) == 1:
            return 0.0
        near = sum(rank < self.ranks_per_node for rank in members) - 1
        far = len(members) - 1 - near
        each = num_bytes / (len(members) - 1)
        return max(self.inside.ms(each * near), self.between.ms(each * far))


def predict_ms(case: Case, sharing: Sharing, direction: str, compute_ms: float, network: Network) -> float:
    """A step's time on one rank: its compute, and the communication that is not hidden. `direction` is "fwd" or "bwd"."""
    mesh = sharing.mesh_for(case)
    heads = _exchange_exposed_ms(case, sharing, mesh, compute_ms, network)
    exposed = _gather_ms if sharing.row.gathers else _ring_exposed_ms
    ring = exposed(case, mesh, direction, compute_ms, network)
    slowed = compute_ms * (1 + network.contention) if mesh.size > 1 else compute_ms
    return slowed + heads + ring


def _block_bytes(case: Case, mesh: Mesh, element_bytes: int) -> float:
    """The keys and values of one block of the ring."""
    return max(case.heads_kv, mesh.heads) * (case.head_dim + case.head_dim_v) * (case.seqlen_q / mesh.size) * element_bytes


def _exchange_exposed_ms(case: Case, sharing: Sharing, mesh: Mesh, compute_ms: float, network: Network) -> float:
    """Both ways of the exchange; forward and backward move the same: q, kv in and out back, or do in and dq, dkv back.

    The first group's way in is waited for, and all others' are hidden behind the work on it; so is the last one's way out, and the others'.
    """
    if mesh.heads == 1:
        return 0.0
    groups = head_groups(case, mesh, sharing.groups)
    shares = [heads / sum(groups) for heads in groups]
    ways = [network.exchange_ms(share * exchange_bytes(case, mesh) / 2, mesh, "heads") for share in shares]
    return sum(ways[end] + max(0.0, sum(ways) - ways[end] - shares[end] * compute_ms) for end in (0, -1))


def _ring_exposed_ms(case: Case, mesh: Mesh, direction: str, compute_ms: float, network: Network) -> float:
    """What hops outlast the blocks behind which they are hidden; in the backward a gradient travels with each block but the rank's own.

    The way home is hidden behind that.
    """
    step = compute_ms / mesh.ring
    kv, grad = _block_bytes(case, mesh, BF16_BYTES), _block_bytes(case, mesh, FP32_BYTES) * (direction == "bwd")
    inner, outer = network.along(mesh, "inner"), network.along(mesh, "outer")
    exposed = mesh.outer * (mesh.inner - 1) * max(0.0, inner.ms(kv) + inner.ms(grad) - step)
    exposed += (mesh.outer - 1) * max(0.0, outer.ms(kv) + outer.ms(grad) - step * mesh.inner)
    return exposed


def _gather_ms(case: Case, mesh: Mesh, direction: str, compute_ms: float, network: Network) -> float:
    """What a gather outlasts the rank's own block: the keys' and values' way, and backward their gradients' too, in the operands' dtype."""
    one_way = network.exchange_ms((mesh.inner - 1) * _block_bytes(case, mesh, BF16_BYTES), mesh, "inner")
    return max(0.0, one_way * (2 if direction == "bwd" else 1) - compute_ms / mesh.ring)


def compute_table(records: Sequence[Record]) -> Computed:
    """(mechanism, mask, world, tokens, direction) to the median compute time of the slowest simulated rank; the last record wins."""
    table: Computed = {}
    for record in records:
        if record.stage == "parallel" and record.samples_ms and is_quiet(record):
            key = record.mechanism or "", record.mask, record.world_size, int(record.facts["tokens"]), record.direction or ""
            table[key] = statistics.median(record.samples_ms)
    return table


def paper_case(mask: str, world: int, tokens: int = PAPER_TOKENS) -> Case:
    """The paper's configuration: 64:8 heads of 128, bf16, so many tokens a device."""
    return Case(mask=load(MASKS[mask]).default(tokens * world, 0, LongMix()), heads_q=64, heads_kv=8, head_dim=128, dtype="bf16")


def rates_alone(records: Sequence[Record], kernel: str) -> dict[tuple[str, str], float]:
    """(mask, direction) to the TFLOP/s of the kernel alone, of the longest sequence that was measured."""
    found = [record for record in records if record.mechanism == "alone" and record.kernel == kernel and record.samples_ms]
    longest_last = sorted(found, key=lambda record: int(record.facts["tokens"]))
    return {(record.mask, record.direction or ""): float(record.facts["tflop_per_s"]) for record in longest_last}


def paper_rows(records: Sequence[Record], network: Network, rate: float | None = None, kernel: str = "fa2") -> list[str]:
    """The paper's table: predicted TFLOP/s per GPU for 8 to 96 GPUs, beside MagiAttention's published figures for the same mechanisms.

    Compute time comes from records of simulated ranks. Where there is none, every rank is assumed to compute at `rate` TFLOP/s, or at what
    the kernel alone did in these records, or what `ASSUMED` has for a mask that they lack, and the figure is marked ~: it leaves out
    imbalance and what short blocks cost.
    """
    measured, alone = compute_table(records), ASSUMED.get(kernel, {}) | rates_alone(records, kernel) or H200_FA2
    worlds = " ".join(f"{world:>7}" for world in WORLDS)
    rows = [f"{'mask, pass, mechanism; predicted TFLOP/s at':<54}{worlds}   published by MagiAttention, H100, 8 16 32 64"]
    for mask in PAPER_MASKS:
        cases = {world: paper_case(mask, world) for world in WORLDS}
        areas = {world: case.area for world, case in cases.items()}
        for direction in ("fwd", "bwd"):
            factor = cases[WORLDS[0]].flop(Direction(direction)) // areas[WORLDS[0]]
            flops = {world: areas[world] * factor / world for world in WORLDS}
            assumed = rate or alone.get((mask, direction))
            for mechanism in MECHANISMS:
                computed = {world: measured.get((mechanism, mask, world, PAPER_TOKENS, direction)) for world in WORLDS}
                cells = [
                    _cell(cases[world], Sharing(mechanism, world), direction, flops[world], computed[world], network, assumed)
                    for world in WORLDS
                ]
                theirs = " ".join(map(str, PUBLISHED.get((mask, direction, mechanism), ())))
                rows.append(f"{mask + ' ' + direction + ' ' + mechanism:<54}" + " ".join(f"{cell:>7}" for cell in cells) + f"   {theirs}")
    return rows


def paper_table(records: Sequence[Record], kernel: str = "fa2") -> Appendix:
    """The paper's table as the end of a run, with every assumption."""
    network = fitted(records, Network())
    machine = "the GPU of these records" if rates_alone(records, kernel) else "an H200"
    title = f"Predictions, {kernel} on {machine}: context parallel on 8 to 96 GPUs, 8K tokens each, 64:8 heads of 128, bf16; TFLOP/s a GPU"
    return Appendix(title, (*paper_rows(records, network), *assumptions(records, network)))


def assumptions(records: Sequence[Record], network: Network, rate: float | None = None, kernel: str = "fa2") -> list[str]:
    """What the predictions rest on, a line each."""
    points = any(record.mechanism == "links" for record in records)
    found = rates_alone(records, kernel)
    measured = f"the rate of {kernel} alone in these records" if found else "the rate of fa2 alone on an H200, measured"
    if found and ASSUMED.get(kernel, {}).keys() - found:
        measured += " (for masks that they lack, that on an H200)"
    whence = f"{rate:g} TFLOP/s, as given" if rate else measured
    return [
        "Predictions, not measurements, except the published column, which is MagiAttention's: its kernel and machine are others.",
        f"~: each rank is assumed to compute at {whence}, balanced and without loss to short blocks, which for documents is optimistic.",
        f"Inside a node, {'fitted on these records' if points else 'assumed'}: {_words(network.inside)}.",
        f"Between nodes of {network.ranks_per_node} GPUs, assumed: {_words(network.between)}. Contention {network.contention:.3g}.",
        "n/a: more ranks than heads.",
    ]


def _words(link: Link) -> str:
    return f"{link.latency_ms * 1e3:.3g} us + bytes / {link.gb_per_s:.3g} GB/s"


def _cell(case: Case, sharing: Sharing, direction: str, flop: float, compute_ms: float | None, network: Network, rate: float | None) -> str:
    """Predicted TFLOP/s of a rank that computes `flop`; marked ~ if its compute time is assumed, - if nothing is known of it."""
    if compute_ms is None and rate is None:
        return "-"
    try:
        predicted = predict_ms(case, sharing, direction, compute_ms or flop / (rate or 1) / 1e9, network)
    except InvalidArgument:  # more ranks than heads
        return "n/a"
    return f"{'' if compute_ms else '~'}{flop / predicted / 1e9:.0f}"


def fitted(records: Sequence[Record], assumed: Network) -> Network:
    """The network of a run: its links' line where the run measured them (all kinds together), and its contention.

    Contention is what the longest rings lose beyond the model, as a fraction of their compute: the median over all meshes of rings alone.
    """
    points = [
        tuple(point) for record in records if record.mechanism == "links" for kind in record.facts["points"].values() for point in kind
    ]
    network = replace(assumed, inside=fit(points)) if points else assumed
    rings = [record for record in _compared(records) if _is_ring(record)]
    longest = max((record.facts["tokens"] for record in rings), default=0)
    losses = [
        (statistics.median(record.samples_ms or ()) - predicted_ms(record, network)) / compute_ms(record)
        for record in rings
        if record.facts["tokens"] == longest
    ]
    return replace(network, contention=max(0.0, statistics.median(losses))) if losses else network


def _is_ring(record: Record) -> bool:
    return Mesh.parse(record.facts["mesh"]).heads == 1 and not find_mechanism(record.mechanism or "").gathers


def check_rows(records: Sequence[Record], network: Network) -> list[str]:
    """Measured and predicted milliseconds of every step that was run with and without communication, and the largest error."""
    rows, worst = [], 0.0
    for record in _compared(records):
        measured, error = statistics.median(record.samples_ms or ()), model_error(record, network)
        worst = max(worst, abs(error))
        what = f"{record.world_size} x {record.facts['tokens']} {record.mask} {record.kernel} {record.mechanism} {record.direction}"
        rows.append(f"{what:<60} measured {measured:9.3f} ms, predicted {measured * (1 + error):9.3f} ms, error {error:+.1%}")
    return [*rows, f"largest error {worst:.1%} over {len(rows)} steps"]


def model_error(record: Record, network: Network) -> float:
    """How far the prediction of a measured step is from it, as a fraction."""
    return predicted_ms(record, network) / statistics.median(record.samples_ms or ()) - 1


def _compared(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if is_compared(record)]


def is_compared(record: Record) -> bool:
    """Whether the step was also run without communication."""
    return bool(record.samples_ms) and f"exposed_{record.direction}_ms" in record.facts


def compute_ms(record: Record) -> float:
    """The step with communication off, as a simulated rank's always is."""
    return statistics.median(record.samples_ms or ()) - (0.0 if is_quiet(record) else record.facts[f"exposed_{record.direction}_ms"])


def is_quiet(record: Record) -> bool:
    """Whether the step ran with communication off, as one rank of a world that was not there."""
    return record.facts.get("communication") == "off"


def predicted_ms(record: Record, network: Network) -> float:
    """The step's time by the model, from its compute time: the record must be one that `is_compared` or `is_quiet`."""
    facts = record.facts
    sharing = Sharing(record.mechanism or "", record.world_size, Mesh.parse(facts["mesh"]), facts["layout"], facts["groups"])
    return predict_ms(parse_case(record.case or ""), sharing, record.direction or "", compute_ms(record), network)


def _link(text: str) -> Link:
    """The link of "0.02:280", latency in ms and GB/s. Raises InvalidArgument."""
    try:
        latency_ms, gb_per_s = map(float, text.split(":"))
    except ValueError:
        raise InvalidArgument(f"link {text!r}: latency in ms, a colon, bandwidth in GB/s, as in 0.02:280") from None
    return Link(latency_ms, gb_per_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the paper's table, or with --check how far the model is from what was measured."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_longca.parallel.model", description="Predict the five mechanisms on 8 to 96 GPUs."
    )
    parser.add_argument("--records", help="JSON Lines with simulated ranks, as the benchmark writes them")
    parser.add_argument("--rate", type=float, help="TFLOP/s assumed where no rank was simulated (default: the kernel's alone; marked ~)")
    parser.add_argument("--kernel", default="fa2", help="whose rate alone is assumed (default: fa2)")
    parser.add_argument("--inside", default="0.02:280", help="latency in ms:GB/s inside a node, unless the records say (default 0.02:280)")
    parser.add_argument("--between", default="0.03:45", help="latency in ms:GB/s between nodes (an assumption; default 0.03:45)")
    parser.add_argument("--contention", type=float, default=0.0, help="slow-down of computation, unless the records say (default 0)")
    parser.add_argument("--check", action="store_true", help="compare with the records' measured steps")
    options = parser.parse_args(arguments)
    try:
        records = read_records(options.records) if options.records else []
        inside, between = (_link(text) for text in (options.inside, options.between))
    except InvalidArgument as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    network = fitted(records, Network(inside, between, options.contention))
    if options.check:
        print("\n".join(check_rows(records, network)))
        return 0
    chosen = options.rate, options.kernel
    print("\n".join([*paper_rows(records, network, *chosen), *assumptions(records, network, *chosen)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
