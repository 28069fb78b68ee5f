"""The MLP over tiles of the sequence: the same losses and gradients from fewer bytes."""

import jax
import numpy as np
import pytest

from bytescope import memory
from bytescope.memory.cost import flops
from bytescope.model.remat.tile import count_tiles
from support.exhaustive import exhaustive
from support.toy import run_losses, small_program

GPT2 = {"model.mlp": "gelu", "model.norm": "layernorm", "model.bias": "true"}


@pytest.mark.parametrize(
    ("keys", "layout", "devices"),
    [
        (
            {},
            {
                "model.mlp_chunk": 8,
                "remat.policy": "custom",
                "remat.save": "(mid,context)",
                "remat.granularity": "parts",
                "batch.micro": 4,
                "batch.accumulation": 2,
                "batch.mode": "scan",
            },
            1,
        ),
        *exhaustive(
            # A tile has biases, and the mask of dropout is that of whole sequences.
            (
                {**GPT2, "model.dropout": 0.1},
                {"model.mlp_chunk": 16, "remat.policy": "none", "model.scan": "false"},
                1,
            ),
            # Every device tiles its own positions.
            (
                {},
                {
                    "model.mlp_chunk": 4,
                    "remat.policy": "full",
                    "batch.micro": 4,
                    "mesh.context": 2,
                    "mesh.tensor": 2,
                    "mesh.sequence_parallel": "true",
                },
                8,
            ),
        ),
    ],
    ids=str,
)
def test_losses_are_those_of_the_whole_mlp(keys, layout, devices):
    """Under momentum: Adam's updates do not show by what factor a gradient is wrong."""
    keys = {**keys, "optimizer.name": "momentum", "optimizer.learning_rate": 0.3, "optimizer.warmup_steps": 0}
    whole = run_losses(small_program(keys), 3)
    np.testing.assert_allclose(run_losses(small_program({**keys, **layout}, devices), 3), whole, rtol=1e-6)


def largest_mlp_array(keys):
    """Elements of the largest float array that the step's jaxpr makes along d_ff, in any direction."""
    program = small_program({"model.d_ff": 56, "data.seq_len": 64, "remat.policy": "full", **keys})
    sizes = []

    def look(jaxpr):
        for equation in jaxpr.eqns:
            sizes.extend(
                v.aval.size
                for v in equation.outvars
                if 56 in getattr(v.aval, "shape", ()) and v.aval.shape[0] == program.batch.rows
            )
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(inner, "eqns"):
                    look(getattr(inner, "jaxpr", inner))

    look(program.step.trace(program.state, program.batch_shapes).jaxpr)
    return max(sizes)


def test_no_array_of_the_mlp_is_longer_than_a_tile():
    assert largest_mlp_array({}) == 8 * 64 * 56 and largest_mlp_array({"model.mlp_chunk": 16}) == 8 * 16 * 56


def test_the_peak_falls_and_the_work_does_not_grow_under_full_remat():
    """With every block made again anyway, tiles cost no product more."""
    reports, counts = [], []
    for chunk in (0, 32):
        program = small_program(
            {
                "data.seq_len": 256,
                "model.max_seq_len": 256,
                "model.d_ff": 512,
                "model.n_layers": 2,
                "remat.policy": "full",
                "model.mlp_chunk": chunk,
            }
        )
        traced = program.step.trace(program.state, program.batch_shapes)
        reports.append(memory.analyze(traced.lower()))
        counts.append(flops.count(traced.jaxpr))
    mlp = 8 * 256 * 512 * 4  # bytes of one array along d_ff
    assert reports[0].peak_bytes - reports[1].peak_bytes > 2 * mlp
    assert counts[0].model_flops == counts[1].model_flops and counts[0].recomputed == counts[1].recomputed


@pytest.mark.exhaustive
def test_more_tiles_send_no_more():
    """Parameters are gathered once for all tiles and their gradients reduced after the last."""
    sent = []
    for chunk in (16, 4):
        program = small_program({"model.mlp_chunk": chunk, "remat.policy": "full", "batch.micro": 1}, 4)
        found = memory.analyze(program.step.trace(program.state, program.batch_shapes).lower()).communication
        sent.append({row.kind: row.wire_bytes for row in found if row.wire_bytes > 1000})
    assert sent[0] == sent[1] and sent[0]["all-gather"]


@pytest.mark.parametrize(
    ("length", "chunk", "parts", "tiles"),
    [(32, 8, 1, 4), (32, 8, 2, 2), (32, 0, 1, 1), (32, 64, 1, 1), (30, 8, 1, 1), (32, 8, 4, 1)],
)
def test_tiles(length, chunk, parts, tiles):
    assert count_tiles(length, chunk, parts) == tiles


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model.mlp_chunk": -1}, "model.mlp_chunk=-1 is too small: give 0 or more"),
        ({"model.mlp_chunk": 12}, "does not divide the 32 positions .* of data.seq_len=32: use 8, which does"),
        ({"model.mlp_chunk": 8, "remat.policy": "custom", "remat.save": "(context,up)"}, "'up' cannot be saved with"),
    ],
)
def test_a_chunk_that_cannot_be(keys, message):
    with pytest.raises(ValueError, match=message):
        small_program(keys)
