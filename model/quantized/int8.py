"""8-bit weights with one scale per output (Dettmers et al. 2022, arXiv 2208.07339, section 2): round(127 w / largest).

The paper's vector-wise quantization of weights alone. It keeps activations in 16 bits and has no outlier columns, which
the paper needs where activations are quantized too.
"""

import jax
import jax.numpy as jnp
import numpy as np

LARGEST, STEP = np.float32(127), np.float32(1 / 127)


def encode(w_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes int8 [outputs, inputs] and scales float32 [outputs], the largest magnitudes over 127; 0 for zeros alone."""
    x = w_OI.astype(np.float32, order="C")
    largest = np.maximum(x.max(-1), -x.min(-1))
    x *= (LARGEST / np.where(largest > 0, largest, 1))[:, None]
    return np.rint(x, out=x).astype(np.int8), largest * STEP


def encode_on_device(w_IO: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same of weights [inputs, outputs] that are on a device: codes [inputs, outputs]."""
    x = w_IO.astype(jnp.float32)
    largest = jnp.abs(x).max(0)
    return jnp.round(x * (LARGEST / jnp.where(largest > 0, largest, 1))[None]).astype(jnp.int8), largest * STEP


def decode(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """The float32 weights [inputs, ...] of codes of that shape and scales [...]."""
    return codes.astype(jnp.float32) * scale[None]
