"""What every rank runs to judge a case: its share forward and backward, the shares gathered, and the whole against the reference."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_longca.case import Case
from pytest_longca.ids import parse_case
from pytest_longca.inputs import Inputs, make_inputs
from pytest_longca.outcome import Unsupported
from pytest_longca.parallel.attend import ContextParallel
from pytest_longca.parallel.comm import Channel
from pytest_longca.parallel.kernel import BlockKernel, find_block_kernel
from pytest_longca.parallel.mechanisms import Mechanism, Mesh
from pytest_longca.parallel.setup import Shards, Sharing, bind, shards_of
from pytest_longca.parallel.world import World
from pytest_longca.sources import Source, load_catalogue

TENSORS = ("out", "lse", "dq", "dk", "dv")


def sharing_to_json(case: Case, sharing: Sharing) -> dict[str, Any]:
    """The sharing of a case as plain values, nothing of it left to choose: ranks need not know the mechanism."""
    return {
        "mechanism": sharing.mechanism,
        "world": sharing.world,
        "mesh": str(sharing.mesh_for(case)),
        "layout": sharing.layout_name,
        "groups": sharing.groups,
        "lanes": sharing.lanes,
        "gathers": sharing.row.gathers,
    }


def sharing_from_json(data: dict[str, Any]) -> Sharing:
    """The sharing that `sharing_to_json` wrote."""
    mesh = Mesh.parse(data["mesh"])
    row = Mechanism(data["mechanism"], "as its row says", lambda world, heads, ranks_per_node: mesh, data["gathers"], data["layout"])
    return Sharing(row.name, data["world"], mesh, row.layout, data["groups"], data["lanes"], own=row)


def judge_case(world: World, request: dict[str, Any]) -> dict[str, Any]:
    """The rank's side of `run_parallel`. `request`: case (id), sharing, kernel (a block kernel's name), sources (of masks and kernels)."""
    catalogue = load_catalogue(Source(*source) for source in request.get("sources", ()))
    case, sharing = parse_case(request["case"], catalogue.masks()), sharing_from_json(request["sharing"])
    kernel = find_block_kernel(request["kernel"], catalogue)
    if reason := kernel.capabilities.refusal(case, world.machine):
        return {"outcome": Unsupported(f"as a block kernel, {kernel.name} {reason}").to_json()}
    shards = shards_of(case, sharing)
    return judge_bound(world, case, shards, bind(case, sharing, world, kernel, shards))


def judge_bound(world: World, case: Case, shards: Shards, bound: ContextParallel) -> dict[str, Any]:
    """Run one bound case on every rank; rank 0 adds `errors` of the whole against the reference."""
    inputs, ids = make_inputs(case, world.device), shards.of_rank(world.rank)
    if bound.lanes.lanes:
        run_share(bound, inputs, ids)  # kernels take turns from the second call on
    before = Counter(world.traffic)
    local = run_share(bound, inputs, ids)
    answer: dict[str, Any] = {"traffic": dict(world.traffic - before)}
    whole = assemble(world, case, shards, local)
    if world.rank == 0:
        answer |= compare(case, inputs, whole)
    return answer


def single_device(world: World, case: Case, kernel: BlockKernel, inputs: Inputs) -> dict[str, Tensor]:
    """The same tensors from the kernel alone, on the whole case: what sharing is measured against."""
    alone = World(0, 1, world.device)
    return run_share(bind(case, Sharing("ring_p2p", 1), alone, kernel), inputs, torch.arange(case.seqlen_q))


def run_share(bound: ContextParallel, inputs: Inputs, ids: Tensor) -> dict[str, Tensor]:
    """One rank's out and lse, and dq, dk and dv unless the kernel has no backward."""
    at = ids.to(inputs.q.device)
    q, k, v = (x[0, at].requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out, lse = bound(q, k, v)
    if not bound.kernel.capabilities.backward:
        return {"out": out.detach(), "lse": lse}
    grads = torch.autograd.grad(out, (q, k, v), inputs.do[0, at])
    return dict(zip(TENSORS, (out.detach(), lse, *grads), strict=True))


def assemble(world: World, case: Case, shards: Shards, local: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole tensors from every rank's share: `[tokens, heads, dim]`, lse `[heads_q, tokens]`."""
    ids = [shards.of_rank(rank) for rank in range(world.size)]
    whole = {}
    for name in (name for name in local if name != "lse"):  # the same order on every rank
        gathered = torch.cat(gather_all(world, local[name].contiguous(), [len(part) for part in ids]))
        whole[name] = torch.empty_like(gathered)
        whole[name][torch.cat(ids).to(gathered.device)] = gathered
    # A rank's lse has its heads and the tokens of its whole ring share.
    spans = [shards.ring[rank // shards.mesh.heads] for rank in range(world.size)]
    parts = gather_all(world, local["lse"].mT.contiguous(), [len(span) for span in spans])
    lse = parts[0].new_empty(case.seqlen_q, case.heads_q)
    for rank, (span, part) in enumerate(zip(spans, parts, strict=True)):
        first = rank % shards.mesh.heads * part.shape[1]
        lse[span.to(lse.device), first : first + part.shape[1]] = part
    return whole | {"lse": lse.mT}


def compare(case: Case, inputs: Inputs, whole: dict[str, Tensor]) -> dict[str, Any]:
    """Against the single-device reference: `verdicts`, and largest (`errors`) and root-mean-square error (`rms`) of each tensor.

    Errors are infinite if anything is not finite. A verdict has tensor, error_over_limit (of one device) and message.
    """
    from pytest_longca.judge import Result, judge
    from pytest_longca.reference import cached_reference

    reference = cached_reference(case, inputs, inputs.q.device)
    errors, rms = {}, {}
    for name in sorted(whole):
        found, truth = whole[name].double(), getattr(reference, name)[0].double()
        difference = (found - truth).masked_fill(found == truth, 0)  # -inf where both are
        errors[name] = float(difference.abs().max()) if bool(difference.isfinite().all()) else float("inf")
        rms[name] = float(difference.square().mean().sqrt()) if errors[name] != float("inf") else float("inf")
    out, lse, dq, dk, dv = (whole[name][None] if name in whole else None for name in TENSORS)
    verdicts = judge(case, inputs, reference, Result(out, lse, dq, dk, dv))
    kept = [{"tensor": verdict.tensor, "error_over_limit": verdict.error_over_limit, "message": verdict.message} for verdict in verdicts]
    return {"errors": errors, "rms": rms, "verdicts": kept}


def gather_all(world: World, x: Tensor, lengths: list[int]) -> list[Tensor]:
    """Every rank's rows, in rank order. Collective."""
    channel = everyone(world)
    parts = list(channel.gather(x, lengths)().split(channel.without_own(lengths)))
    parts[channel.rank] = x
    return parts


def everyone(world: World) -> Channel:
    """All ranks as one channel that counts nothing."""
    if world.size == 1 or not world.is_connected:
        return Channel(1, 0)
    return Channel(world.size, world.rank, dist.group.WORLD, world.is_staged)
