"""Presets: how much to run, by name. An option that is given beats what its preset says."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a preset asks for on one kind of device."""

    examples: int
    dtypes: tuple[str, ...]
    seqlens: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    head_dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Preset:
    """What a preset sets: sizes for each kind of device, masks and passes, and how long a timing is sampled."""

    cpu: Sizes
    gpu: Sizes
    min_samples: int
    sampling_s: float
    interpreted_examples: int = 10
    """Examples of a Triton kernel that the CPU interprets, which takes seconds for one."""
    masks: tuple[str, ...] = ("all",)
    passes: tuple[str, ...] = ("fwd", "bwd")
    block_sizes: tuple[int, ...] = (64, 128)
    densities: tuple[float, ...] = (0.5,)
    mechanisms: tuple[str, ...] | None = None
    table: str | None = None
    """A function, as module:attribute, of the run's records to a `report.appendix.Appendix` that ends the summary and the reports."""


BOTH_HEADS = ((64, 8), (64, 64))
K = 1024


def _paper(seqlens: tuple[int, ...], heads: tuple[tuple[int, int], ...] = BOTH_HEADS) -> Sizes:
    """The paper's sizes (arXiv:2510.17896): bf16, head_dim 128."""
    return Sizes(50, ("bf16",), tuple(K * length for length in seqlens), heads, (128,))


_DENSE = _paper((1, 2, 4, 8, 16, 24, 32, 40, 48))
_SPARSE = _paper((32, 64, 128))
_CP_CPU, _CP_GPU = (Sizes(50, (dtype,), (8 * K,), ((64, 8),), (128,)) for dtype in ("fp32", "bf16"))
_LONG = _paper((64, 128, 256, 512), ((64, 8),))

PRESETS: dict[str, Preset] = {
    "smoke": Preset(
        cpu=Sizes(4, ("fp32",), (256,), ((2, 1),), (32,)),
        gpu=Sizes(4, ("bf16",), (4 * K,), ((32, 8),), (128,)),
        min_samples=10,
        sampling_s=0.1,
        interpreted_examples=3,
    ),
    "default": Preset(
        cpu=Sizes(50, ("fp32", "bf16", "fp16"), (512,), ((4, 2),), (64,)),
        gpu=Sizes(50, ("bf16", "fp16"), (8 * K,), ((64, 8),), (128,)),
        min_samples=30,
        sampling_s=1.0,
    ),
    "full": Preset(
        cpu=Sizes(200, ("fp32", "bf16", "fp16"), (512, K), ((4, 2), (4, 4)), (64,)),
        gpu=Sizes(200, ("bf16", "fp16"), (K, 8 * K, 32 * K), BOTH_HEADS, (64, 128)),
        min_samples=50,
        sampling_s=3.0,
        interpreted_examples=40,
    ),
    "paper-dense": Preset(cpu=_DENSE, gpu=_DENSE, masks=("static",), min_samples=10, sampling_s=1.0),
    "paper-sparse": Preset(cpu=_SPARSE, gpu=_SPARSE, masks=("block",), densities=(0.1, 0.2, 0.5, 0.8, 1.0), min_samples=30, sampling_s=1.0),
    "paper-cp": Preset(
        cpu=_CP_CPU,
        gpu=_CP_GPU,
        masks=("full", "causal", "full_document", "causal_document"),
        mechanisms=("ulysses", "ring_p2p", "ring_allgather", "usp", "loongtrain"),
        table="pytest_longca.parallel.model:paper_table",
        min_samples=10,
        sampling_s=1.0,
    ),
    "long": Preset(
        cpu=_LONG,
        gpu=_LONG,
        masks=("causal_document", "block_causal_document", "uniform_block"),
        densities=(0.1,),
        block_sizes=(128,),
        min_samples=30,
        sampling_s=1.0,
    ),
}
