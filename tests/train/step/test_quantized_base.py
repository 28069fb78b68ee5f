"""lora.base: a step over quantized weights is that over the weights they stand for, under every policy and mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytescope.model.placement import ONE_DEVICE
from bytescope.model.quantized.quantized_formats import BASES, dequantize
from bytescope.model.quantized.weight import quantized_weights
from support.exhaustive import exhaustive
from support.toy import first_state, run_losses, small_program

STEPS = 3
SHAPE = {"model.d_model": 128, "model.d_head": 32, "model.d_ff": 128, "model.n_layers": 2, "lora.rank": 4}
QUANTIZED = [base for base, row in BASES.items() if row]


def program(base="nf4", devices=1, **overrides):
    return small_program({**SHAPE, "lora.base": base, **overrides}, devices)


def wide(program, frozen):
    """The frozen parameters of a quantized program with each weight in float32."""
    found = jax.tree.map(lambda leaf: leaf, frozen)
    for name, (base, matrix) in quantized_weights(program.abstract()).items():
        *folders, last = name.split(".")
        node = found
        for folder in folders:
            node = node[folder]
        node[last] = jax.vmap(
            lambda arrays, base=base, matrix=matrix: dequantize(base, matrix, arrays, jnp.float32, ONE_DEVICE)
        )(node[last])
    return found


@pytest.fixture(scope="module")
def expected():
    """A format's losses of steps over the dequantized weights."""
    plain = program("bf16")
    step = plain.step.lower(plain.state, plain.batch_shapes).compile()

    @functools.cache
    def losses_of(base):
        state = first_state(program(base))
        state = dataclasses.replace(state, frozen=wide(program(base), state.frozen))
        return run_losses(plain, STEPS, state=state, step=step)

    return losses_of


@pytest.mark.parametrize("base", ["nf4", *exhaustive(*(base for base in QUANTIZED if base != "nf4"))])
def test_a_step_is_that_over_the_dequantized_weights(base, expected):
    np.testing.assert_allclose(run_losses(program(base), STEPS), expected(base), rtol=2e-6)
    if base != "nf4":
        assert abs(expected("nf4") - expected(base)).max() > 1e-4  # the formats are told apart


@pytest.mark.parametrize(
    ("devices", "overrides"),
    [
        (1, {"remat.policy": "minimal"}),
        *exhaustive(
            (
                2,
                {
                    "model.scan": "false",
                    "remat.policy": "full",
                    "model.mlp_chunk": 8,
                    "mesh.fsdp": 2,
                    "mesh.strategy": "zero1",
                    "batch.micro": 2,
                    "batch.accumulation": 2,
                },
            ),
            (
                8,
                {
                    "mesh.data": 2,
                    "mesh.fsdp": 2,
                    "mesh.tensor": 2,
                    "batch.micro": 1,
                    "batch.accumulation": 2,
                    "batch.mode": "scan",
                    "remat.policy": "full",
                },
            ),
        ),
    ],
    ids=str,
)
def test_policies_meshes_and_accumulation_change_nothing(devices, overrides, expected):
    np.testing.assert_allclose(run_losses(program("nf4", devices, **overrides), STEPS), expected("nf4"), rtol=2e-6)


@pytest.mark.parametrize(
    "overrides",
    [
        {"remat.policy": "minimal"},
        *exhaustive(
            {"remat.policy": "dots"},
            {"remat.policy": "none", "model.scan": "false"},
        ),
    ],
    ids=str,
)
def test_no_policy_keeps_what_is_dequantized(overrides):
    """Nothing that the forward pass gives to the backward pass has the elements of a weight, in any of its shapes."""
    made = program("nf4", **{"model.d_ff": 192, "model.d_model": 64, "data.seq_len": 8, "batch.micro": 1, **overrides})
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    batch = {"inputs": jax.ShapeDtypeStruct((1, 8), jnp.int32), "targets": jax.ShapeDtypeStruct((1, 8), jnp.int32)}
    kept = jax.eval_shape(
        lambda params, frozen, batch, keys: jax.vjp(
            lambda params: made.parts.objective(params, batch, keys, frozen), params
        )[1],
        made.state.params,
        made.state.frozen,
        batch,
        keys,
    )
    floats = [leaf for leaf in jax.tree.leaves(kept) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    sizes = {
        matrix.sizes[0] * matrix.sizes[1] * layers
        for layers in (1, made.model.n_layers)
        for _, matrix in quantized_weights(made.abstract()).values()
    }
    assert floats and not [leaf for leaf in floats if leaf.size in sizes and leaf.shape[-1] != 64]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("devices", "overrides", "message"),
    [
        (1, {"model.d_model": 96}, "the 96 inputs of w_[a-z]+ cannot be split into blocks of 64: change the size"),
        (
            8,
            {"mesh.fsdp": 8, "batch.micro": 1},
            "the 128 inputs of blocks.attention.w_k .* on each of 8 devices: change",
        ),
        (2, {"mesh.tensor": 2, "model.d_ff": 192}, "the 192 inputs of blocks.mlp.w_down .* on each of 2 devices"),
        (1, {"lora.rank": 0, "optimizer.freeze": "blocks.attention.w_*"}, "=nf4 cannot train blocks.mlp.w_down, "),
        (1, {"lora.base": "nf5"}, "lora.base='nf5': did you mean nf4"),
    ],
    ids=str,
)
def test_what_cannot_be_quantized_is_refused(devices, overrides, message):
    with pytest.raises(ValueError, match=message):
        program("nf4", devices, **overrides)


@pytest.mark.exhaustive
def test_frozen_weights_are_made_again_alike():
    """What a resumed run has instead of a checkpoint of them: bit for bit what it began with, on another mesh too."""
    sharded = program("nf4", 4, **{"mesh.fsdp": 2, "mesh.tensor": 2, "batch.micro": 4})
    jax.tree.map(np.testing.assert_array_equal, sharded.init_frozen(), first_state(program()).frozen)
    codes = sharded.state.frozen["blocks"]["mlp"]["w_down"]["codes"]
    assert codes.sharding.shard_shape(codes.shape)[1:] == (codes.shape[1] // 2, codes.shape[2] // 2)
