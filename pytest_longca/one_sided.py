"""Rounding to one side: what a key's roundings cost where its P or dS are alike in all queries.

Values that all lie within a step of the dtype round to the same side, and their errors add up instead of averaging out: below fp16's
normal range, where the step is 2^-24 whatever the value, and where dS comes from the few values that a rounded P has.
"""

import math

import torch
from torch import Tensor

from pytest_longca.inputs import TORCH_DTYPES
from pytest_longca.limits import UNDERFLOW, of_chance
from pytest_longca.operands import Operands
from pytest_longca.sweep import Piece

HARMONICS = (1, 2, 3, 4)
"""Of a rounding error. Values that are spread over q places in a step have every q-th one in common, and 1/q of the error."""


class OneSided:
    """What the roundings of each key's terms have in common: the harmonics of their errors.

    A rounding error is periodic in what is rounded, with the step h as its period. Of terms x_i w_i its m-th harmonic is at most
    |sum of h_i / 2 w_i exp(2 pi i m x_i / h_i)| / m: all of it where the x_i are one number, what chance explains where they are spread
    over a few steps. It is a modulus, as an error that all x_i share (in D) turns all phases by the same angle.
    """

    def __init__(self, ops: Operands, lost: float | None) -> None:
        """Values below `lost` count elsewhere, as lost (None: where the dtype has the range of fp32)."""
        self.ops = ops
        self.lost = lost or UNDERFLOW[ops.case.dtype]
        keys = (ops.case.batch * ops.case.heads_kv, ops.case.seqlen_kv, 1)
        self.waves = ops.q.new_zeros((len(HARMONICS), *keys[:-1], 2), dtype=ops.arithmetic.work)  # real and imaginary parts
        self.squares = ops.q.new_zeros(keys, dtype=ops.arithmetic.work)

    def add(self, piece: Piece, x: Tensor, weights: Tensor, factor: Tensor | float = 1.0) -> None:
        """Terms `x * factor` `[stacks, group * rows, keys]` of which x is rounded, times `weights` `[stacks, group * rows]`."""
        ar, half_step = self.ops.arithmetic, self._half_step(x)
        phase = x / half_step * math.pi
        size = torch.where(x.abs() >= self.lost, half_step, 0.0) * factor
        of_rows = ar.columns(weights)
        turn = torch.complex(phase.cos(), phase.sin())
        wave = turn * size
        for number, total in enumerate(self.waves):
            if number:  # the next harmonic: a product takes a tenth of the time of a sine
                wave = wave * turn
            parts = torch.view_as_real(wave).flatten(-2)  # [stacks, group * rows, keys * 2]
            self.ops.add_keys(total, piece, ar.bound(ar.rough(parts).mT, of_rows)[..., 0].unflatten(-1, (-1, 2)))
        self.ops.add_keys(self.squares, piece, ar.bound(ar.rough(size.square()).mT, ar.columns(weights.square()))[..., :1])

    def _half_step(self, x: Tensor) -> Tensor:
        """Half of the dtype's spacing at x."""
        rounding = self.ops.rounding
        power = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1)  # the largest that is not above |x|
        return (power * (2 * rounding.unit)).clamp_min(rounding.flush or UNDERFLOW[self.ops.case.dtype])

    def error(self) -> Tensor:
        """How large the error along the weights' direction may be beyond what chance explains, `[batch * heads_kv, seqlen_kv]`."""
        by_chance = of_chance(self.ops.key_deviations) * self.squares
        orders = self.waves.new_tensor(HARMONICS)[:, None, None, None]
        beyond = (self.waves.square().sum(-1, keepdim=True) - by_chance).clamp_min(0.0) / orders.square()
        return beyond.sum(0).sqrt()[..., 0]


class Alike:
    """What it costs a key in dk and dv that its P, or its dS, are rounded to one side in all queries.

    A kernel forms dS from P or from the P that it rounded, and then rounds dS or scale * dS.
    """

    def __init__(self, ops: Operands) -> None:
        self.ops = ops
        lost, lost_ds = (4 * threshold if threshold else None for threshold in (ops.rounding.flush, ops.flush_ds))
        self.of_p, self.of_p_in_ds = OneSided(ops, lost), OneSided(ops, lost)
        forms = [(rounds_p, scale) for rounds_p in (False, True) for scale in {1.0, ops.scale}]
        self.of_ds = {form: OneSided(ops, lost_ds and lost_ds * form[1]) for form in forms}

    def add(self, piece: Piece, q: Tensor, do: Tensor, p: Tensor, ds: Tensor) -> None:
        """A piece's P and dS `[stacks, group * rows, keys]`, and the rows of q and do `[stacks, group * rows, ...]`."""
        ops = self.ops
        along_q, along_do = ops.along_mean(q, ops.q), ops.along_mean(do, ops.do)
        dp = torch.where(p > 0, ds / p, 0.0)
        self.of_p.add(piece, p, along_do)
        self.of_p_in_ds.add(piece, p, along_q, dp)
        rounded = p.to(TORCH_DTYPES[ops.case.dtype]).to(p.dtype) * dp
        for (rounds_p, scale), of_ds in self.of_ds.items():
            of_ds.add(piece, (rounded if rounds_p else ds) * scale, along_q, 1 / scale)

    def of_dv(self) -> Tensor:
        """What rounding P costs at most, `[batch * heads_kv, seqlen_kv]`, beyond what chance explains."""
        return self.of_p.error()

    def of_dk(self) -> Tensor:
        """The same of rounding P, if the kernel does, and dS in whichever form costs most."""
        of_ds = torch.stack([of_ds.error() for of_ds in self.of_ds.values()]).amax(0)
        return self.ops.scale * (self.of_p_in_ds.error() + of_ds)
