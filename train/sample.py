"""Text from the trained model: temperature sampling, at 0 greedy, into a buffer of fixed length.

The model is causal, so positions behind the last token do not matter and one compiled program
serves every length. There is no key/value cache: each token costs a forward pass over the whole buffer, which is
enough for a sample at the end of training, but not for serving.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bytescope.train.data.source import Data
from bytescope.train.pipeline.forward import PipelineForward
from bytescope.train.program import Program


def _generate(program: Program, temperature: float, params: Any, tokens_BL: jax.Array, span: jax.Array) -> jax.Array:
    """tokens_BL, int32, with the positions from span[0] up to span[1] filled in; span: int32 [2]."""
    transformer, hidden = nnx.merge(program.graph, params), _hidden(program, params)
    # A layout that shards sequences may order them differently: positions_L[i] is the position stored at index i.
    positions_L = program.layout.positions(tokens_BL.shape[1])
    key = jax.random.key(program.config.seed)

    def extend(place: jax.Array, tokens_BL: jax.Array) -> jax.Array:
        x_BLD = hidden(jnp.take(tokens_BL, positions_L, axis=1))
        last = jnp.argmax(positions_L == place - 1)
        x_B1D = jax.lax.dynamic_slice_in_dim(x_BLD, last, 1, axis=1)
        logits_BV = transformer.logits(x_B1D.astype(jnp.float32), jnp.float32)[:, 0]
        if temperature:
            chosen_B = jax.random.categorical(jax.random.fold_in(key, place), logits_BV / temperature)
        else:
            chosen_B = jnp.argmax(logits_BV, axis=-1)
        return jax.lax.dynamic_update_slice_in_dim(
            tokens_BL, chosen_B.astype(tokens_BL.dtype)[:, None], place, axis=1)

    return jax.lax.fori_loop(span[0], span[1], extend, tokens_BL)


def _hidden(program: Program, params: Any) -> Callable[[jax.Array], jax.Array]:
    """The function of int32 tokens [B, L] that gives the normed output of the last block."""
    if (stages := program.parts.pipeline) is None:
        return nnx.merge(program.graph, params).hidden
    return partial(PipelineForward(stages.graph, stages.schedule, stages.units).hidden, params)


def _jitted(program: Program, temperature: float) -> Any:
    # Replicated, so that every process can read the result.
    return jax.jit(partial(_generate, program, temperature), out_shardings=program.layout.sharding())


def lower_generate(program: Program) -> jax.stages.Lowered:
    """The program of `generate`, lowered for the devices of `program`, which may be described ones."""
    # One row per rank: a batch of one would not divide over the mesh.
    tokens = jax.ShapeDtypeStruct((program.batch.ranks, program.batch.seq_len), jnp.int32,
                                  sharding=program.layout.sharding(("batch", None)))
    span = jax.ShapeDtypeStruct((2,), jnp.int32)
    return _jitted(program, program.config.train.sample_temperature).lower(program.state.model_params, tokens, span)


def read_part(prompt: list[int], count: int, length: int) -> list[int]:
    """The tokens of a prompt that the model reads where `length` positions hold them and what follows.

    All of them if they leave room for one token; of a longer prompt its end: it leaves room for `count` tokens, but is
    at least half of the positions.
    """
    if len(prompt) < length:
        return prompt
    return prompt[-min(max(length - count, length // 2), length - 1):]


def generate(program: Program, params: Any, prompt: list[int], count: int, temperature: float) -> list[int]:
    """Up to `count` tokens that follow `prompt` (`read_part` of it), as many as `data.seq_len` leaves room for."""
    length = program.batch.seq_len
    prompt = read_part(prompt, count, length) or [0]
    # Only the first row is used; see lower_generate.
    tokens = np.zeros((program.batch.ranks, length), np.int32)
    tokens[:, : len(prompt)] = prompt
    end = min(len(prompt) + count, length)
    out = _jitted(program, temperature)(params, jax.device_put(tokens, program.layout.sharding(("batch", None))),
                                        np.asarray([len(prompt), end], np.int32))
    return np.asarray(out)[0, len(prompt): end].tolist()


def sample_text(program: Program, data: Data, params: Any) -> str:
    """Text that the model generates, with the prompt before it; "" where `train.sample_tokens` is 0."""
    config = program.config.train
    if not config.sample_tokens:
        return ""
    prompt = data.encode(config.sample_prompt)
    return data.decode(prompt + generate(program, params, prompt, config.sample_tokens, config.sample_temperature))
