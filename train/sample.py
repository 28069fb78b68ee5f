"""Text from the model as it stands: temperature sampling over a fixed buffer.

The model is causal, so positions behind the last token do not matter and one compiled program
serves every length. Without a key/value cache each token costs a whole forward pass: this is for a
look at the end of training, not for serving.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bytescope.train.data.source import Data
from bytescope.train.program import Program


def _generate(program: Program, temperature: float, params: Any, tokens_BL: jax.Array, span: jax.Array) -> jax.Array:
    transformer = nnx.merge(program.graph, params)
    # A layout that divides sequences may want them in another order: positions_L[i] is what stands at place i.
    positions_L = program.layout.positions(tokens_BL.shape[1])
    key = jax.random.key(program.config.seed)

    def extend(place: jax.Array, tokens_BL: jax.Array) -> jax.Array:
        x_BLD = transformer.hidden(jnp.take(tokens_BL, positions_L, axis=1))
        last = jnp.argmax(positions_L == place - 1)
        x_B1D = jax.lax.dynamic_slice_in_dim(x_BLD, last, 1, axis=1)
        logits_BV = transformer.logits(x_B1D.astype(jnp.float32), jnp.float32)[:, 0]
        chosen_B = jax.random.categorical(jax.random.fold_in(key, place), logits_BV / temperature)
        return jax.lax.dynamic_update_slice_in_dim(
            tokens_BL, chosen_B.astype(tokens_BL.dtype)[:, None], place, axis=1)

    return jax.lax.fori_loop(span[0], span[1], extend, tokens_BL)


def _run(program: Program, temperature: float) -> Any:
    # Whole on every device, so that every process can read it.
    return jax.jit(partial(_generate, program, temperature), out_shardings=program.layout.sharding())


def lower_generate(program: Program) -> jax.stages.Lowered:
    """The program of `generate`, lowered for the program's devices, present or described."""
    # One row a rank: a batch of one would not divide over the mesh.
    tokens = jax.ShapeDtypeStruct((program.batch.ranks, program.batch.seq_len), jnp.int32,
                                  sharding=program.layout.sharding(("batch", None)))
    span = jax.ShapeDtypeStruct((2,), jnp.int32)
    return _run(program, program.config.train.sample_temperature).lower(program.state.params, tokens, span)


def generate(program: Program, params: Any, prompt: list[int], count: int, temperature: float) -> list[int]:
    """Up to `count` tokens after `prompt`, as many as the training length leaves room for."""
    length = program.batch.seq_len
    prompt = prompt[: length - 1] or [0]
    # The first row is shown; see lower_generate.
    tokens = np.zeros((program.batch.ranks, length), np.int32)
    tokens[:, : len(prompt)] = prompt
    end = min(len(prompt) + count, length)
    out = _run(program, temperature)(params, jax.device_put(tokens, program.layout.sharding(("batch", None))),
                                      np.asarray([len(prompt), end], np.int32))
    return np.asarray(out)[0, len(prompt): end].tolist()


def sample_text(program: Program, data: Data, params: Any) -> str:
    """Text that the trained model writes, the prompt first; "" where the config asks for none."""
    config = program.config.train
    if not config.sample_tokens:
        return ""
    prompt = data.encode(config.sample_prompt)
    return data.decode(prompt + generate(program, params, prompt, config.sample_tokens, config.sample_temperature))
