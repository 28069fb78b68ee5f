"""Dtypes by role, one row per preset.

Mixed precision as in Micikevicius et al. 2018 (arXiv 1710.03740): compute is narrow, the master parameters and
all sums are wide. bfloat16 has float32's exponents and needs no loss scaling; float16 does. Two rows count bytes as
Rajbhandari et al. 2020 (arXiv 1910.02054, section 3.1) do, with a narrow copy of all parameters: 16 bytes per parameter
with Adam, 20 where gradients are summed in float32 besides.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


@dataclasses.dataclass(frozen=True)
class Precision:
    """What numbers are kept and computed in, by role.

    param: the parameters between steps; the optimizer updates them in float32 whatever their dtype.
    compute: matrix products and activations; norm: norms; logits: the logits as they are held, summed in float32.
    reduce: gradients from the backward pass to the update, and so what devices send; None: each in the dtype of the
      product that makes it.
    accumulator: the sum of gradients over micro-batches.
    rounding: of updated parameters to `param`: a row of ROUNDINGS.
    cast: to `compute`: as each `layer` reads a matrix, or once a `step` all parameters.
    matmul: products of the blocks, `wide` in `compute` or `fp8` of block-scaled operands. In a program's own precision
      `fp8` is replaced by the row of PRODUCTS (model/fp8.py) that its device runs.
    loss_scale: `none` or `dynamic` (train/step/optimizer/loss_scale.py).
    """

    param: DTypeLike = F32
    compute: DTypeLike = BF16
    reduce: DTypeLike | None = None
    accumulator: DTypeLike = F32
    norm: DTypeLike = F32
    logits: DTypeLike = F32
    rounding: str = "nearest"
    cast: str = "layer"
    loss_scale: str = "none"
    matmul: str = "wide"

    @property
    def copied(self) -> bool:
        """Whether a step computes with a copy of all parameters that it casts first."""
        return self.cast == "step"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Precision":
        """Reads `config.precision`: the roles of the preset, replaced by the keys that are not "".

        Raises:
          ValueError: a value that is not in its table, or values that cannot be combined.
        """
        _choose("preset", values["preset"], PRECISIONS)
        chosen = {role: _choose(role, values[role], table) for role, table in ROLES.items() if values[role] != ""}
        precision = dataclasses.replace(PRECISIONS[values["preset"]], **chosen)
        for wrong, remedy in CLASHES:
            if wrong(precision):
                raise ValueError(f"precision.preset={values['preset']} with {precision.shown()}: {remedy}")
        return precision

    def shown(self) -> str:
        """The roles that differ from the default preset's, as keys."""
        usual = Precision()
        rows = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(usual, field.name)
        }
        return ", ".join(f"{role}={_name(role, value)}" for role, value in rows.items()) or "default roles"


# What is written to the config -> what it means.
WIDE, NARROW = {"float32": F32, "bfloat16": BF16}, {"float32": F32, "bfloat16": BF16, "float16": F16}
ROUNDINGS, CASTS, LOSS_SCALES = ("nearest", "stochastic"), ("layer", "step"), ("none", "dynamic")
ROLES: Mapping[str, Mapping[str, Any]] = {
    "param": WIDE,
    "compute": NARROW,
    "reduce": {"as_made": None, **NARROW},
    "accumulator": WIDE,
    "norm": WIDE,
    "logits": NARROW,
    "rounding": {name: name for name in ROUNDINGS},
    "cast": {name: name for name in CASTS},
    "loss_scale": {name: name for name in LOSS_SCALES},
}

PRECISIONS = {
    "fp32": Precision(compute=F32),
    "bf16": Precision(),
    "bf16_grads": Precision(reduce=BF16, cast="step"),
    "fp32_grads": Precision(reduce=F32, cast="step"),
    "bf16_params": Precision(param=BF16, rounding="stochastic"),
    "fp16": Precision(compute=F16, loss_scale="dynamic"),
    "fp8": Precision(matmul="fp8"),
}


def _bytes(dtype: DTypeLike) -> int:
    return jnp.dtype(dtype).itemsize


# (roles that cannot be combined, the remedy).
CLASHES = (
    (
        lambda p: p.rounding == "stochastic" and p.param != BF16,
        "stochastic rounding is to bfloat16 only; set precision.param=bfloat16 or precision.rounding=nearest",
    ),
    (lambda p: p.copied and p.param == p.compute, "there is nothing to cast; set precision.cast=layer"),
    (
        lambda p: p.reduce is not None and not p.copied and _bytes(p.reduce) < _bytes(p.param),
        "gradients have the dtype of the parameters that a step differentiates; set precision.cast=step, which "
        "differentiates a narrow copy",
    ),
)


def _choose(role: str, value: Any, table: Mapping[str, Any]) -> Any:
    if value not in table:
        raise ValueError(f"precision.{role}={value!r}: choose one of {', '.join(table)}")
    return table[value]


def _name(role: str, value: Any) -> str:
    return next(name for name, meant in ROLES[role].items() if meant == value)
