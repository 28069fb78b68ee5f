"""A value that a remat policy saves, and that XLA's rematerialization pass computes again above XLA's limit."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from bytescope import memory
from bytescope.memory.audit.pass_history import with_passes
from bytescope.memory.devices.compiler import pass_dumps

ROWS, WIDTH, LAYERS = 8192, 256, 4
SAVE_HIDDEN = jax.checkpoint_policies.save_only_these_names("hidden")


def step(weights, batch):
    def layer(w, x):
        return jnp.tanh(checkpoint_name(jnp.sin(x @ w), "hidden")) * x

    saving = jax.checkpoint(layer, policy=SAVE_HIDDEN, prevent_cse=False)

    def loss(weights):
        x = batch
        for number in range(LAYERS):
            x = saving(weights[number], x)
        return jnp.mean(x)

    return weights - jax.grad(loss)(weights)


@pytest.mark.oracle("cuda")
@pytest.mark.parametrize(("fraction", "done"), [(0.1, "kept"), (0.001, "recomputed")])
def test_a_saved_name_above_the_limit_of_xla(fraction, done, tmp_path):
    arguments = (
        jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
    )
    with pass_dumps(tmp_path):
        report = memory.analyze(step, *arguments, target=f"h100@{fraction}", donate_argnums=0)
    (row,) = [row for row in report.audit if row.kind == "name"]
    assert (row.subject, row.asked, row.done) == ("hidden", "save", done)
    assert bool(report.xla_recomputed) == (done == "recomputed")
    if done == "recomputed":
        assert row.undone_by == "rematerialization" and "exceeds XLA's memory limit" in row.message
        assert row.bytes % (ROWS * WIDTH * 4) == 0 and 0 < row.count <= LAYERS
        named = [each.compiler_pass for each in with_passes(report.audit, tmp_path) if each.kind == "name"]
        assert named == ["remat-pipeline/rematerialization"] and row.inferred
