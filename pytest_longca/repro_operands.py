"""The operands of a case as plain lines for a standalone file: the same values in the same layouts as `inputs.make_inputs`."""

from collections.abc import Callable

from pytest_longca.case import OPERANDS, Case, Layout, Values

SHAPES = {
    "q": "BATCH, SEQLEN_Q, HEADS_Q, HEAD_DIM",
    "k": "BATCH, SEQLEN_KV, HEADS_KV, HEAD_DIM",
    "v": "BATCH, SEQLEN_KV, HEADS_KV, HEAD_DIM_V",
    "do": "BATCH, SEQLEN_Q, HEADS_Q, HEAD_DIM_V",
}


def _logits(case: Case, logit: float) -> list[str]:
    product = logit / case.scale
    size = (abs(product) / case.head_dim) ** 0.5
    shifts = f"q.mul_(0.1).add_({size!r})", f"k.mul_(0.1).add_({size if product > 0 else -size!r})"
    return [f"# All scaled scores lie near {logit:g}.", *shifts]


VALUES: dict[Values, Callable[[Case], list[str]]] = {
    Values.NORMAL: lambda case: [],
    Values.BIASED: lambda case: ["k.add_(2.0)", "v.add_(3.0)"],
    Values.PEAKED: lambda case: ["q.mul_(4.0)", "k.mul_(4.0)"],
    Values.LARGE: lambda case: ["k.mul_(10.0)"],
    Values.LOW: lambda case: _logits(case, -120.0),
    Values.HIGH: lambda case: _logits(case, 100.0),
    Values.SENTINEL: lambda case: _logits(case, -60000.0),
    Values.FAINT: lambda case: ["do.mul_(2.0**-12)"],
    Values.LOUD: lambda case: ["do.mul_(2.0**8)"],
}
"""What is done to the drawn numbers, in place and before they are rounded."""

LAYOUTS: dict[Layout, str] = {
    Layout.CONTIGUOUS: "",
    Layout.BHSD: '''
def bhsd(x):
    """A transposed view of [batch, heads, seqlen, head_dim]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
''',
    Layout.FUSED: '''
def fused(x):
    """The middle slice of a buffer of three, as of fused q, k and v."""
    batch, seqlen, heads, dim = x.shape
    buffer = torch.full((batch, seqlen, 3, heads, dim), float("nan"), dtype=x.dtype, device=x.device)
    buffer[:, :, 1] = x
    return buffer[:, :, 1]
''',
    Layout.OFFSET: '''
def offset(x):
    """A view that starts inside its storage."""
    view = torch.empty(x.numel() + 64, dtype=x.dtype, device=x.device)[64:].view(x.shape)
    return view.copy_(x)
''',
    Layout.PADDED: '''
def padded(x):
    """Rows longer than head_dim."""
    buffer = torch.full((*x.shape[:-1], x.shape[-1] + 8), float("nan"), dtype=x.dtype, device=x.device)
    buffer[..., : x.shape[-1]] = x
    return buffer[..., : x.shape[-1]]
''',
    Layout.EXPANDED: '''
def expanded(x):
    """The first head, which all heads share in memory."""
    return x[:, :, :1].contiguous().expand(x.shape)
''',
    Layout.SHARED: '''
def shared(x):
    """The first batch element, which all share in memory."""
    return x[:1].contiguous().expand(x.shape)
''',
    Layout.SINGLE: '''
def single(x):
    """One number, which is all there is in memory."""
    return x[:1, :1, :1, :1].contiguous().expand(x.shape)
''',
}
"""A function for each layout that an operand may have."""


def operands_text(case: Case) -> str:
    """Python text that defines `operands()`, which gives q, k, v and do."""
    used = [LAYOUTS[layout].strip("\n") for layout in dict.fromkeys(case.layouts) if LAYOUTS[layout]]
    lines = ["generator = torch.Generator(DEVICE).manual_seed(SEED)"]
    lines += [f"{name} = torch.randn({shape}, generator=generator, device=DEVICE)" for name, shape in SHAPES.items()]
    lines += VALUES[case.values](case)
    lines += ["q, k, v, do = (x.to(DTYPE) for x in (q, k, v, do))"]
    given = [name if layout is Layout.CONTIGUOUS else f"{layout}({name})" for name, layout in zip(OPERANDS, case.layouts, strict=True)]
    lines += [f"return {', '.join(given)}"]
    body = "\n".join(f"    {line}" for line in lines)
    return "\n\n\n".join([*used, f'def operands():\n    """q, k, v, do: [batch, seqlen, heads, head_dim]"""\n{body}'])
