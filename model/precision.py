"""Dtypes by role, one row a preset.

Mixed precision as in Micikevicius et al. 2018 (arXiv 1710.03740) with bfloat16 in the place of
float16: compute is narrow, the master parameters and everything that sums are wide. No loss
scaling: bfloat16 has float32's exponents.
"""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes of the master parameters, of matrix products, of norms and softmax, of logits and loss."""

    param: DTypeLike
    compute: DTypeLike
    norm: DTypeLike = jnp.float32
    logits: DTypeLike = jnp.float32
    accumulator: DTypeLike = jnp.float32


PRECISIONS = {
    "fp32": Precision(param=jnp.float32, compute=jnp.float32),
    "bf16": Precision(param=jnp.float32, compute=jnp.bfloat16),
}
