"""Weight gradients of unrolled layers: computed in time, and only for parameters that are trained."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from bytescope.model import transformer
from bytescope.model.remat.offload import LAYERS_LATER, finish_gradients
from support.described import compile_described
from support.toy import small_program

UNROLLED = {
    "model.scan": False,
    "model.n_layers": 12,
    "model.d_model": 1024,
    "model.n_heads": 8,
    "model.n_kv_heads": 8,
    "model.d_ff": 4096,
    "model.vocab_size": 1024,
    "data.seq_len": 4096,
}


def temp_bytes():
    compiled = compile_described("h100:8", UNROLLED, "llama_8b").compiled
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.exhaustive
def test_operands_of_weight_gradients_do_not_stay_until_the_end(monkeypatch):
    ordered = temp_bytes()
    monkeypatch.setattr(transformer, "finish_gradients", lambda x_BLD, state: (x_BLD, state))
    assert ordered < 0.8 * temp_bytes()


def test_unrolled_layers_wait_for_the_gradients_of_later_layers():
    def barriers(scan):
        program = small_program({"model.n_layers": 6, "model.scan": scan, "remat.policy": "none"})
        return program.lower().as_text().count("optimization_barrier")

    assert barriers(False) - barriers(True) == len(range(1, 6 - LAYERS_LATER))


def test_frozen_parameters_are_not_waited_for():
    state = nnx.State({"w": nnx.Param(jnp.ones(3), frozen=False), "codes": nnx.Param(jnp.ones(2), frozen=True)})

    def loss(x, state):
        x, state = finish_gradients(x, state)
        return (x * state["w"][...]).sum() + state["codes"][...].sum()

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones(3), state))
    (barrier,) = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert barrier.count("f32[3]") == 2 and "f32[2]" not in barrier
