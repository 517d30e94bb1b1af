"""The parts of a standalone file that are the same for every failure: reference, comparison, main. Text, never run here."""

IMPORTS = """
import itertools
import sys

import torch
"""

NO_CALL = '''
def attention(q, k, v):
    """BSHD q, k, v -> (out, lse or None), differentiable; the mask is VISIBLE, bool [batch or 1, heads or 1, seqlen_q, seqlen_kv]."""
    print("{kernel} was not called, so nothing was judged: write its call into attention() in this file", file=sys.stderr)
    sys.exit(2)
'''

ALIGNED = '''
def aligned(x):
    """x, copied if vectorised loads and TMA do not take its strides or its address."""
    unit = 16 // x.element_size()
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1]) if size > 1]
    fits = x.stride(-1) == 1 and all(stride > 0 and stride % unit == 0 for stride in strides) and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)
'''

REFERENCE = '''
def reference(q, k, v, do):
    """The truth in float64, and for each row of a tensor how large an error rounding explains.

    A kernel may round P, dS, each head's gradients and its results to the dtype, and scores to fp32. `moved` adds up the squares of what
    one such rounding moves a row by; an error beyond 6 times that (and 4 roundings of the row itself) is no rounding.
    A query that sees no key has out 0, lse -inf and no gradients.
    """
    q, k, v, do = (x.double() for x in (q, k, v, do))
    truth = {name: torch.zeros(x.shape, dtype=x.dtype, device=x.device) for name, x in zip(("out", "dq", "dk", "dv"), (do, q, k, v))}
    truth["lse"] = torch.zeros(BATCH, HEADS_Q, SEQLEN_Q, dtype=torch.float64, device=DEVICE)
    moved = {name: torch.zeros(x.shape[:3], dtype=x.dtype, device=x.device) for name, x in truth.items()}
    tiny = torch.finfo(DTYPE).smallest_normal
    for b, h in itertools.product(range(BATCH), range(HEADS_Q)):
        of_q, of_kv = (b, slice(None), h), (b, slice(None), h // (HEADS_Q // HEADS_KV))
        seen = VISIBLE[b % VISIBLE.shape[0], h % VISIBLE.shape[1]]
        scores = (SCALE * q[of_q] @ k[of_kv].T).masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1)
        p = (scores - lse[:, None]).exp().masked_fill(~seen, 0.0)
        out = p @ v[of_kv]
        delta = do[of_q] * out
        ds = SCALE * p * (do[of_q] @ v[of_kv].T - delta.sum(-1, keepdim=True))
        dq, dk, dv = ds @ k[of_kv], ds.T @ q[of_q], p.T @ do[of_q]
        for name, at, x in (("out", of_q, out), ("lse", (b, h), lse), ("dq", of_q, dq), ("dk", of_kv, dk), ("dv", of_kv, dv)):
            truth[name][at] += x
        largest = SCALE * (q[of_q].abs() @ k[of_kv].abs().T).amax() if seen.numel() else 0.0
        growth = largest * (1 + 0.3 * HEAD_DIM**0.5) + max(SEQLEN_Q, SEQLEN_KV) ** 0.5  # of roundings in sums of products of one sign
        unit2 = (UNIT + SCORE_UNIT * growth) ** 2
        p2, delta2 = (p + tiny * seen).square(), delta.square().sum(-1, keepdim=True)
        ds2 = 2 * (ds.abs() + tiny * seen).square() + SCALE**2 * delta2 * p2
        moved["out"][of_q] += unit2 * (p2 @ norm2(v[of_kv]))
        moved["lse"][b, h] += (SCORE_UNIT * (2 + largest + lse.abs())).square()
        moved["dq"][of_q] += unit2 * (ds2 @ norm2(k[of_kv]) + SCALE**2 * delta2[:, 0] * norm2(p @ k[of_kv]))
        moved["dk"][of_kv] += unit2 * (ds2.T @ norm2(q[of_q]) + norm2(dk))
        moved["dv"][of_kv] += unit2 * (p2.T @ norm2(do[of_q]) + norm2(dv))
    limits = {name: 6 * x.sqrt() for name, x in moved.items()}
    # P and dS below what fp32 holds in full may be lost.
    q_most, k_most, v_most, do_most = (norm2(x).amax().sqrt() if x.numel() else 0.0 for x in (q, k, v, do))
    ds_most = SCALE * (2 * do_most * v_most + 1)
    lost = {"out": v_most, "dq": ds_most * k_most, "dk": ds_most * q_most, "dv": do_most}
    for name in ("out", "dq", "dk", "dv"):
        limits[name] += 2.0**-126 * max(SEQLEN_KV, SEQLEN_Q * HEADS_Q // HEADS_KV) * lost[name]
        limits[name] += UNIT * (4 * norm2(truth[name]).sqrt() + 8 * tiny * truth[name].shape[-1] ** 0.5)
    return truth, limits


def norm2(x):
    """Squared norms of rows."""
    return x.square().sum(-1)
'''

AGREES = '''
def agrees(name, got, truth, limit):
    """Print the row that is worst for its limit; whether it is within."""
    if got.shape != truth.shape:
        print(f"{name}: shape {list(got.shape)}, due {list(truth.shape)}")
        return False
    if name == "lse":  # [batch, heads, seqlen] to rows of one number, ordered as those of the others
        got, truth, limit = got.transpose(1, 2)[..., None], truth.transpose(1, 2)[..., None], limit.transpose(1, 2)
    if not got.numel():
        return True
    error = (got.double() - truth).masked_fill(got == truth.to(got.dtype), 0.0)  # an infinity that is due is no error
    error = error.nan_to_num(nan=torch.inf).norm(dim=-1)
    over = (error / limit).nan_to_num(nan=0.0, posinf=torch.inf)
    batch, row, head = (int(index) for index in torch.unravel_index(over.argmax(), over.shape))
    worst = float(over[batch, row, head])
    print(f"{name}: {'WRONG' if worst > 1 else 'ok'}, {int((over > 1).sum())} of {over.numel()} rows are beyond their limits")
    print(f"  worst: batch {batch}, head {head}, row {row}: error {float(error[batch, row, head]):.3g}, {worst:.3g} times its limit")
    for what, x in (("is ", got), ("due", truth)):
        print(f"  {what}", *(f"{value:10.4g}" for value in x[batch, row, head, :8].tolist()))
    return worst <= 1
'''

MAIN = """
def main():
    q, k, v, do = operands()
    leaves = [x.detach().requires_grad_(BACKWARD) for x in (q, k, v)]
    out, lse = attention(*leaves)
    got = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    if BACKWARD:
        got |= zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, GRADIENT))
    truth, limits = reference(q, k, v, do)
    wrong = [name for name, x in got.items() if not agrees(name, x, truth[name], limits[name])]
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}")
    print("right: every tensor is within its limits")


if __name__ == "__main__":
    main()
"""
