"""Engines for tests: of a folder of weights, or of a config's random ones."""

from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.model import Transformer
from bytescope.train.generate.engine import Engine
from bytescope.train.generate.model_source import describe_model, open_source
from bytescope.train.generate.steps import EngineSizes, Steps
from support.toy import small_config

NOTHING = MappingProxyType({})
TINY = {
    "model.n_layers": 2,
    "model.d_model": 16,
    "model.n_heads": 2,
    "model.n_kv_heads": 1,
    "model.d_head": 8,
    "model.d_ff": 32,
    "model.vocab_size": 64,
    "model.vocab_multiple": 1,
    "model.max_seq_len": 128,
    "precision.preset": "fp32",
    "model.init_std": 0.3,
    "model.attention": "naive",
}
LATENT = {
    "model.attention_kind": "mla",
    "model.n_kv_heads": 2,
    "model.mla_kv_rank": 12,
    "model.mla_q_rank": 0,
    "model.mla_d_rope": 4,
    "model.mla_d_value": 6,
}


def random_model(keys=NOTHING):
    """(Model, parameters) of the tiny config with these keys."""
    model = describe_model(small_config({**TINY, **keys}), jax.devices()[:1], dtype="float32")
    made = Transformer(model.config, model.precision, rngs=nnx.Rngs(params=0))
    return model, nnx.to_pure_dict(nnx.state(made, nnx.Param))


def random_engine(keys=NOTHING, *, pages=24, sequences=4, chunk=16, stored=jnp.float32, steps=None):
    """An engine of random weights; `steps`: programs of another engine of the same model, which are used again."""
    model, params = random_model(keys)
    steps = steps or Steps(model, stored)
    return Engine(steps, params, EngineSizes(pages, sequences, chunk, model.config.max_seq_len))


def engine_of(folder, *, pages=40, sequences=4, chunk=16, length=None, fsdp=1, tensor=1):
    """An engine of a folder's or run's weights."""
    source = open_source(folder)
    model = describe_model(source.config, jax.devices(), fsdp, tensor, base=source.base)
    return Engine(
        Steps(model, model.precision.compute),
        source.read(model, lambda done, total: None),
        EngineSizes(pages, sequences, chunk, length or source.length),
    )


def alone(engine, asked):
    """The answer to each request, one after the other."""
    found = []
    for one in asked:
        running = engine.submit(one)
        while engine.busy:
            engine.step()
        found.append(list(running.answer))
    return found


def together(engine, asked):
    """The answer to each request, all submitted at once."""
    found = {one.number: list(one.answer) for one in engine.answers(asked)}
    return [found[number] for number in sorted(found)]
