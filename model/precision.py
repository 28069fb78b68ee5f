"""Dtypes by role, one row per preset.

Mixed precision as in Micikevicius et al. 2018 (arXiv 1710.03740): matmuls use 16 bits, the master parameters and all
sums float32. bfloat16 has the exponent range of float32 and needs no loss scaling; float16 does. Two presets keep a
16-bit copy of all parameters, like the byte counts of Rajbhandari et al. 2020 (arXiv 1910.02054, section 3.1): 16
bytes per parameter with Adam, and 20 if gradients are also summed in float32.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes that numbers are stored and computed in, by role.

    Fields:
      param: parameters between steps. The optimizer updates them in float32 for any stored dtype.
      compute: matrix products and activations.
      reduce: gradients between the backward pass and the update, and thus the dtype that devices send. None means the
        dtype of the matrix product that computes the gradient.
      accumulator: the sum of gradients over micro-batches.
      norm: the computation of RMSNorm or LayerNorm.
      logits: the stored logits. Sums over logits are float32.
      rounding: how updated parameters are rounded to `param`, one of ROUNDINGS.
      cast: when parameters are cast to `compute`. `layer`: each matrix when a layer reads it. `step`: all once per
        step.
      loss_scale: whether the loss is scaled so that small gradients do not underflow, `none` or `dynamic`
        (train/step/optimizer/loss_scale.py).
      matmul: operands of the blocks' weight matmuls: `wide` (unquantized, in `compute`) or `fp8` (block-scaled). In a
        compiled program `fp8` is replaced by the name of the way to multiply on its device, a row of PRODUCTS
        (model/fp8.py).
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
        """True if a step first casts all parameters to the compute dtype (`cast` is `step`) and computes with the
        copy."""
        return self.cast == "step"

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> "Precision":
        """Returns the dtypes for the config group `precision`: the dtypes of the preset, replaced by each key of the
        group that is not "".

        Raises:
          ValueError: a value is unknown, or the values cannot be combined.
        """
        _choose("preset", values["preset"], PRECISIONS)
        chosen = {role: _choose(role, values[role], table) for role, table in ROLES.items() if values[role] != ""}
        precision = dataclasses.replace(PRECISIONS[values["preset"]], **chosen)
        for wrong, remedy in CLASHES:
            if wrong(precision):
                raise ValueError(
                    f"precision.preset={values['preset']} cannot be combined with {precision.describe()}: {remedy}"
                )
        return precision

    def describe(self) -> str:
        """Returns text for the user: the config keys that differ from the default preset and their values, or "default
        roles"."""
        default = Precision()
        rows = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        }
        return ", ".join(f"{role}={_name(role, value)}" for role, value in rows.items()) or "default roles"


# Values in the config -> dtypes or values of the fields.
STORED_DTYPES, COMPUTED_DTYPES = {"float32": F32, "bfloat16": BF16}, {"float32": F32, "bfloat16": BF16, "float16": F16}
ROUNDINGS, CASTS, LOSS_SCALES = ("nearest", "stochastic"), ("layer", "step"), ("none", "dynamic")
ROLES: Mapping[str, Mapping[str, Any]] = {
    "param": STORED_DTYPES,
    "compute": COMPUTED_DTYPES,
    "reduce": {"as_made": None, **COMPUTED_DTYPES},
    "accumulator": STORED_DTYPES,
    "norm": STORED_DTYPES,
    "logits": COMPUTED_DTYPES,
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
        "stochastic rounding works only for bfloat16 parameters; set precision.param=bfloat16 or "
        "precision.rounding=nearest",
    ),
    (lambda p: p.copied and p.param == p.compute, "param and compute are the same dtype; set precision.cast=layer"),
    (
        lambda p: p.reduce is not None and not p.copied and _bytes(p.reduce) < _bytes(p.param),
        "gradients have the dtype of the parameters that a step differentiates; set precision.cast=step, which "
        "differentiates a copy in the compute dtype",
    ),
)


def _choose(role: str, value: Any, table: Mapping[str, Any]) -> Any:
    if value not in table:
        raise ValueError(f"precision.{role}={value!r} is unknown: choose one of {', '.join(table)}")
    return table[value]


def _name(role: str, value: Any) -> str:
    return next(name for name, meant in ROLES[role].items() if meant == value)
