"""Packed batches through the step: loss and gradients are those of every example alone, on every mesh and path."""

import re

import jax
import numpy as np
import pytest

from bytescope.train.data.batch_algebra import IGNORE
from bytescope.train.plan.block_description import trace_gradient
from bytescope.train.program.program import build
from bytescope.train.run.feed import calls
from support.described import described
from support.exhaustive import exhaustive
from support.toy import first_state, small_config, small_program

LENGTH, ROWS = 32, 8
PACKED = {"data.format": "pairs", "model.n_layers": 2, "batch.micro": ROWS}


def examples():
    """(row, tokens, targets) of three examples a row of uneven lengths; half of the targets count."""
    rng = np.random.default_rng(11)
    for row in range(ROWS):
        for size in (5 + row, 1 + row % 3, 12):
            tokens = rng.integers(0, 64, size + 1).astype(np.int32)
            yield row, tokens[:-1], np.where(rng.random(size) < 0.5, IGNORE, tokens[1:]).astype(np.int32)


def packed_batch():
    batch = {
        "inputs": np.zeros((ROWS, LENGTH), np.int32),
        "targets": np.full((ROWS, LENGTH), IGNORE, np.int32),
        "segments": np.zeros((ROWS, LENGTH), np.int32),
    }
    for row, inputs, targets in examples():
        start, number = np.count_nonzero(batch["segments"][row]), batch["segments"][row].max() + 1
        for name, values in (("inputs", inputs), ("targets", targets), ("segments", number)):
            batch[name][row, start : start + len(inputs)] = values
    return batch


def one_by_one():
    """The same examples, each in a row of its own without segments, behind it what does not count."""
    pad = lambda values, fill: np.pad(values, (0, LENGTH - len(values)), constant_values=fill)  # noqa: E731
    rows = [(pad(inputs, 0), pad(targets, IGNORE)) for _, inputs, targets in examples()]
    return dict(zip(("inputs", "targets"), map(np.stack, zip(*rows))))


def loss_and_gradients(program, batch):
    grads = jax.jit(jax.value_and_grad(program.parts.objective))
    loss, grads = jax.device_get(grads(first_state(program).params, batch, None))
    if not program.model.scan:
        grads["blocks"] = jax.tree.map(lambda *layers: np.stack(layers), *grads["blocks"].values())
    return loss, grads


@pytest.fixture(scope="module")
def alone():
    program = small_program({"model.n_layers": 2, "batch.micro": 3 * ROWS, "model.attention": "naive"})
    return loss_and_gradients(program, one_by_one())


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        ({"mesh.fsdp": 4, "mesh.tensor": 2, "mesh.sequence_parallel": True, "batch.micro": 2}, 8),
        *exhaustive(
            ({"remat.policy": "full", "model.attention": "chunked", "model.attention_chunk": 7}, 1),
            ({"remat.policy": "selective", "remat.granularity": "parts", "model.scan": False, "model.mlp_chunk": 8}, 1),
            (
                {
                    "mesh.fsdp": 2,
                    "mesh.context": 4,
                    "batch.micro": 4,
                    "model.attention_chunk": 3,
                    "remat.policy": "full",
                },
                8,
            ),
        ),
    ],
    ids=str,
)
def test_loss_and_every_gradient_are_those_of_the_examples_alone(alone, changes, devices):
    program = small_program({**PACKED, **changes}, devices)
    assert list(program.batch_shapes) == ["inputs", "targets", "segments"] == list(program.eval_shapes)
    (batch,) = calls(program, packed_batch())
    loss, grads = loss_and_gradients(program, batch)
    np.testing.assert_allclose(loss, alone[0], rtol=1e-5)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(alone[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        ({"optimizer.fused_backward": True, "optimizer.clip_norm": 0.0, "remat.policy": "full"}, 1),
        ({"mesh.data": 2, "mesh.strategy": "ddp", "batch.mode": "scan", "batch.accumulation": 2, "batch.micro": 2}, 2),
    ],
    ids=["fused", "reduced once"],
)
def test_steps_report_the_loss_and_the_norm_of_the_examples_alone(alone, changes, devices):
    program = small_program({**PACKED, **changes}, devices)
    (batch,) = calls(program, packed_batch())
    _, metrics = program.step(first_state(program), batch)
    tokens = np.count_nonzero(packed_batch()["targets"] != IGNORE)
    norm = np.sqrt(sum(np.sum(np.square(grad)) for grad in jax.tree.leaves(alone[1])))
    assert metrics["tokens"] == tokens
    np.testing.assert_allclose([metrics["loss"], metrics["grad_norm"]], [alone[0] / tokens, norm / tokens], rtol=1e-4)
    tally = program.evaluate(
        first_state(program).params, {name: x[: program.batch.rows] for name, x in packed_batch().items()}
    )
    assert np.isfinite(tally.loss)


@pytest.mark.quick
def test_rows_of_one_text_or_one_example_have_no_segments():
    for changes in ({}, {"data.format": "chat", "data.packing": False}):
        program = small_program(changes)
        assert list(program.batch_shapes) == ["inputs", "targets"] == list(program.eval_shapes)


def test_the_gradient_is_traced_with_segments():
    """For checkpoint names that a config asks for, and for those that a report lists."""
    program = small_program({**PACKED, "remat.policy": "custom", "remat.save": "q_rot,v"})
    assert "segments" in str(trace_gradient(program).jaxpr.debug_info.arg_names)


def test_cudnn_has_one_mask_for_all_layers_and_each_device_that_of_its_rows():
    changes = {
        "precision.preset": "bf16",
        "model.attention": "cudnn",
        "data.seq_len": 64,
        "batch.micro": 3,
        "mesh.fsdp": 2,
        "mesh.tensor": 2,
        "model.n_layers": 5,
        "remat.policy": "selective",
    }
    program = build(small_config({**PACKED, **changes}), described("h100:4"))
    masks = re.findall(r"(\w+)\[([\d,]+),64,64\]", program.compile().as_text())
    assert ("bf16", "3,1") in masks and {rows for _, rows in masks} <= {"3,1", "3"}


@pytest.mark.parametrize(
    "changes",
    [
        {"remat.policy": "selective"},
        {"optimizer.fused_backward": True, "optimizer.clip_norm": 0.0},
        *exhaustive(
            {"remat.policy": "full"},
            {"remat.policy": "none"},
            {"remat.policy": "selective", "model.attention": "chunked", "model.attention_chunk": 8},
        ),
    ],
    ids=str,
)
def test_no_layer_keeps_ids_or_positions_of_its_own(changes):
    """Stacks over layers, of the packed program and of that without segments, are the same."""

    def stacks(format):
        program = small_program({**PACKED, **changes, "data.format": format, "model.n_layers": 5})
        text = str(program.step.trace(program.state, program.batch_shapes).jaxpr)
        return set(re.findall(rf"\w+\[5,{ROWS},{LENGTH}[,\]][\d,]*", text))

    assert stacks("pairs") == stacks("text")
