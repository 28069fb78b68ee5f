"""Dynamic loss scaling: an overflow skips an update and halves the scale, whatever the mode; the history is kept."""

import dataclasses
import io
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from bytescope.train.data.batch_algebra import IGNORE
from bytescope.train.run.feed import calls
from bytescope.train.run.loop import run
from bytescope.train.step.optimizer.loss_scale import Scaling
from bytescope.train.user_errors import NonFinite
from support.exhaustive import exhaustive
from support.toy import compiled_once, first_state, fixed_batches, small_config, small_program

SUMMED = {"batch.micro": 4, "batch.accumulation": 2}


def test_the_scale_halves_and_doubles():
    rule, seen = Scaling(8.0, 2, positions=24), []
    state = rule.init()
    assert float(rule.factor(state)) == 8.0 / 32
    for finite in (True, True, True, False, True, True):
        state = rule.after(state, jnp.bool_(finite))
        seen.append((float(state.scale), int(state.good), int(state.skipped)))
    assert seen == [(8, 1, 0), (16, 0, 0), (16, 1, 0), (8, 0, 1), (8, 1, 1), (16, 0, 1)]


MODES = {"multisteps": SUMMED, "scan": {"batch.mode": "scan", **SUMMED}}


def steps_of(program, state, batches):
    seen = []
    for host in batches:
        for batch in calls(program, host):
            state, metrics = program.step(state, batch)
        seen.append({name: float(value) for name, value in metrics.items()})
    return state, seen


@pytest.mark.parametrize("mode", ["scan", *exhaustive("multisteps")])
def test_an_overflow_skips_the_update_and_is_recovered_from(mode):
    """Parameters, moments and schedule stay; afterwards losses are those of a run that began at that scale."""
    keys = {"precision.preset": "fp16", **MODES[mode]}
    program = small_program({**keys, "precision.loss_scale_init": 2.0**22})
    (host,) = fixed_batches(8, 32, 64, 1)
    before = jax.device_get(first_state(program))
    state, (first,) = steps_of(program, first_state(program), [host])
    assert first["skipped_steps"] == 1 and first["loss_scale"] == 2.0**21 and not np.isfinite(first["grad_norm"])
    assert np.isfinite(first["loss"]) and int(state.step) == 1
    kept = [(tree.params, inner(tree)[1:]) for tree in (before, jax.device_get(state))]
    jax.tree.map(np.testing.assert_array_equal, *kept)
    _, rows = steps_of(program, state, [host] * 10)
    skipped = [np.isfinite(row["grad_norm"]) for row in rows].index(True)
    done = rows[skipped : skipped + 2]  # later ones may overflow again, at gradients that grow
    assert {row["skipped_steps"] for row in done} == {skipped + 1}
    assert {row["loss_scale"] for row in done} == {2.0 ** (21 - skipped)}
    fresh = first_state(program)
    scale = jax.device_put(np.float32(done[0]["loss_scale"] / 4), fresh.loss_scale.scale.sharding)
    fresh = dataclasses.replace(fresh, loss_scale=dataclasses.replace(fresh.loss_scale, scale=scale))
    _, want = steps_of(program, fresh, [host] * 2)
    assert [row["lr"] for row in done] == [row["lr"] for row in want]
    np.testing.assert_allclose([row["loss"] for row in done], [row["loss"] for row in want], rtol=1e-3)


def inner(state):
    opt_state = state.opt_state
    return opt_state.inner_opt_state if isinstance(opt_state, optax.MultiStepsState) else opt_state


@pytest.mark.parametrize(("mode", "bad"), [("multisteps", 1), *exhaustive(("scan", 0))])
def test_an_overflow_in_any_micro_batch_skips_all(mode, bad):
    program = small_program({"precision.preset": "fp16", "precision.loss_scale_init": 2.0**26, **MODES[mode]})
    (host,) = fixed_batches(8, 32, 64, 1)
    quiet = slice(4, 8) if bad == 0 else slice(0, 4)
    host["targets"][quiet] = IGNORE  # no gradient at all from the other micro-batch
    before = jax.device_get(first_state(program).params)
    state, rows = steps_of(program, first_state(program), [host])
    assert rows[0]["skipped_steps"] == 1
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))
    if mode == "multisteps":
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(jax.device_get(state.opt_state.acc_grads)))


def test_other_programs_carry_no_scale():
    program = small_program({"precision.preset": "bf16"})
    assert program.state.loss_scale is None and program.parts.scaling is None


def train(folder, **keys):
    config = small_config(
        {
            "precision.preset": "fp16",
            "model.vocab_size": 256,
            "batch.micro": 1,
            "train.log_every": 1,
            "train.eval_sequences": 8,
            "train.sample_tokens": 0,
            "train.eval_every": 0,
            "train.checkpoint_every": 4,
            "train.cache_dir": "none",
            **keys,
        }
    )
    screen = io.StringIO()
    run(config, workdir=folder, extend=True, console=Console(file=screen, width=200))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return screen.getvalue(), [row for row in rows if "loss" in row]


def test_the_history_of_the_scale_is_in_the_metrics(tmp_path, monkeypatch):
    """Halved from far above, through a checkpoint; the console tells of it, and a skipped update has no norm."""
    compiled_once(monkeypatch)
    keys = {"precision.loss_scale_init": 2.0**24, "precision.loss_scale_growth_every": 3}
    train(tmp_path, **keys, **{"train.steps": 4})
    text, rows = train(tmp_path, **keys, **{"train.steps": 16})
    assert [row["step"] for row in rows] == list(range(1, 17))
    scales, skipped = [2.0**24], 0
    for row in rows:
        if row["grad_norm"] is None:
            skipped += 1
            assert row["loss_scale"] == scales[-1] / 2
        else:
            assert row["loss_scale"] in (scales[-1], 2 * scales[-1])
        assert row["skipped_steps"] == skipped
        scales.append(row["loss_scale"])
    assert skipped > 2 and any(b == 2 * a for a, b in itertools.pairwise(scales)) and rows[-1]["loss"] < rows[0]["loss"]
    assert "skipped  scale" in text and f"({skipped} skipped)" in text


def test_a_scale_without_a_floor_stops_the_run(tmp_path, monkeypatch):
    # Every update overflows: the scale falls below what any gradient needs.
    monkeypatch.setattr("bytescope.train.step.optimizer.loss_scale.grad_norm", lambda state: jnp.float32(jnp.inf))
    with pytest.raises(NonFinite, match="; no checkpoint yet. .*compute in bfloat16"):
        train(tmp_path, **{"precision.loss_scale_init": 2.0**-13, "train.steps": 8})
