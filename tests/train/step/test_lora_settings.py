"""Adapters with each optimizer and precision: the settings that treat parameters by what they are."""

import dataclasses

import jax
import numpy as np
import pytest

from bytescope.train.run.feed import calls
from support.exhaustive import exhaustive
from support.toy import fixed_batches, made_state, small_program

ONE = {
    "model.n_layers": 1,
    "lora.rank": 4,
    "lora.alpha": 6,
    "batch.micro": 4,
    "remat.policy": "none",
    "optimizer.warmup_steps": 0,
}
SETTINGS = {
    "muon, unrolled": ({"optimizer.name": "muon", "model.scan": "false", "model.n_layers": 2}, 1),
    "adafactor": ({"optimizer.name": "adafactor"}, 1),
    "adamw_8bit": ({"optimizer.name": "adamw_8bit"}, 1),
    "fp16": ({"precision.preset": "fp16"}, 1),
    "context, bf16_params": ({"mesh.context": 2, "precision.preset": "bf16_params"}, 2),
}


@pytest.mark.parametrize("name", ["adamw_8bit", *exhaustive(*(name for name in SETTINGS if name != "adamw_8bit"))])
def test_adapters_are_trained_and_the_base_is_left_as_it_was(name):
    overrides, devices = SETTINGS[name]
    program = small_program({**ONE, **overrides}, devices)
    state, losses = made_state(program), []
    if program.parts.scaling:
        state = dataclasses.replace(state, loss_scale=program.parts.scaling.init())
    base, before = jax.device_get((state.frozen, state.params))
    host = next(fixed_batches(program.batch.global_rows, program.batch.seq_len, 64, 1))
    for _ in range(6):
        for batch in calls(program, host):
            state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.05, losses
    jax.tree.map(np.testing.assert_array_equal, base, jax.device_get(state.frozen))
    moved = jax.tree.map(lambda one, other: np.any(one != other), before, jax.device_get(state.params))
    assert all(jax.tree.leaves(moved))
