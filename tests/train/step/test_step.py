"""The step: accumulation, sharding and kernels leave the loss where it was; golden losses; bytes divided."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bytescope.train.program.program import build
from support.exhaustive import exhaustive
from support.toy import first_state, fixed_batches, run_losses, small_config, small_program

EQUAL = 1e-5  # relative, fp32, over 20 steps

# jax 0.10.2, CPU; jax 0.12.0 gives the same to 1e-6.
GOLDEN = [
    4.160879,
    3.989358,
    3.832259,
    3.719957,
    3.776655,
    3.288044,
    3.127672,
    2.967676,
    2.75288,
    2.660755,
    2.535107,
    2.40488,
    2.317882,
    2.257781,
    2.198876,
    2.193487,
    2.140524,
    2.078594,
    2.079658,
    2.036103,
]


@pytest.fixture(scope="module")
def one_large_batch():
    """Losses of 20 steps of one batch of 16 on one device: what every layout must give.

    Micro-batches of it are masked unevenly: if they weighed alike, the losses of other layouts would differ.
    """
    counts = (next(fixed_batches(16, 32, 64, 1))["targets"] >= 0).reshape(4, 4, 32).sum((1, 2))
    assert counts.max() > 1.3 * counts.min()
    return run_losses(small_program({"batch.micro": 16}))


def test_golden_losses():
    """The curve of a run from its own first state does not move from one commit to the next."""
    program = small_program({"batch.micro": 16})
    np.testing.assert_allclose(run_losses(program, state=program.init()), GOLDEN, rtol=2e-4)


LAYOUTS = {
    "multisteps": ({"batch.micro": 4, "batch.accumulation": 4}, 1),
    "scan": ({"batch.micro": 4, "batch.accumulation": 4, "batch.mode": "scan"}, 1),
    "full loss, unrolled, nothing recomputed, chunked attention": (
        {
            "batch.micro": 16,
            "loss.kind": "full",
            "model.scan": False,
            "remat.policy": "none",
            "model.attention": "chunked",
            "model.attention_chunk": 8,
        },
        1,
    ),
}


FIRST = ("scan",)


@pytest.mark.parametrize("name", [*FIRST, *exhaustive(*(name for name in LAYOUTS if name not in FIRST))])
def test_losses_equal_one_large_batch(name, one_large_batch):
    overrides, devices = LAYOUTS[name]
    np.testing.assert_allclose(run_losses(small_program(overrides, devices)), one_large_batch, rtol=EQUAL)


def test_dropout_does_not_depend_on_how_the_batch_is_cut(one_large_batch):
    dropout = {"model.dropout": 0.2, "batch.micro": 16}
    whole = run_losses(small_program(dropout), 4)
    cut = run_losses(small_program({**dropout, "batch.micro": 2, "batch.accumulation": 2, "batch.mode": "scan"}, 4), 4)
    np.testing.assert_allclose(cut, whole, rtol=EQUAL)
    assert not np.allclose(whole, one_large_batch[:4], rtol=1e-3)


def test_multisteps_holds_one_more_tree_only_when_it_accumulates():
    """Bytes as described; tests/train/step/optimizer/test_rules.py has them as compiled."""
    plain, multi, scan = (
        small_program({"batch.accumulation": accumulation, "batch.mode": mode}).state
        for accumulation, mode in ((1, "multisteps"), (2, "multisteps"), (2, "scan"))
    )
    sizes = [sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) for state in (plain, multi)]
    assert sizes[1] - sizes[0] == pytest.approx(4 * sum(leaf.size for leaf in jax.tree.leaves(plain.params)), abs=64)
    assert isinstance(multi.opt_state, optax.MultiStepsState)
    assert jax.tree.structure(scan) == jax.tree.structure(plain)


@pytest.mark.parametrize(
    "mesh",
    [
        {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
        *exhaustive(
            {"mesh.strategy": "zero2", "mesh.data": 2, "batch.mode": "scan", "batch.accumulation": 2},
            {"mesh.strategy": "zero1", "mesh.tensor": 2, "mesh.context": 4, "mesh.sequence_parallel": True},
        ),
    ],
    ids=str,
)
def test_a_first_state_is_the_same_on_every_mesh(mesh):
    program = small_program({"batch.micro": 8, **mesh}, 8)
    alone = small_program({key: value for key, value in mesh.items() if key.startswith(("model.", "batch."))})
    jax.tree.map(np.testing.assert_array_equal, program.init(), alone.init())


def test_tests_start_from_a_state_like_the_first():
    """The same shapes, dtypes, shardings and zeros; matrices of the same size."""
    for overrides in ({"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}, {"model.scan": False}):
        program = small_program({"precision.preset": "fp16", "optimizer.freeze": "w_token", **overrides}, 8)
        for one, other in zip(*map(jax.tree.leaves, (program.init(), first_state(program))), strict=True):
            assert (one.shape, one.dtype, one.sharding) == (other.shape, other.dtype, other.sharding)
            one, other = (np.asarray(leaf, np.float32) for leaf in (one, other))
            np.testing.assert_allclose(other.std(), one.std(), rtol=0.5)
            np.testing.assert_allclose(other.mean(), one.mean(), atol=0.01)


def test_state_is_donated_and_arguments_carry_their_path():
    text = small_program().lower().as_text(debug_info=True)
    assert "state.params['blocks']['attention']['w_q']" in text and "batch['inputs']" in text
    assert "jax.buffer_donor" in text or "tf.aliasing_output" in text


def test_matrices_decay_and_norms_do_not():
    from bytescope.train.step.optimizer.rules import decayed

    program = small_program({"model.bias": True, "model.norm": "layernorm"})
    mask = decayed(program.state.params)
    assert mask["blocks"]["attention"]["w_q"] and mask["w_token"]
    assert not mask["blocks"]["attention"]["b_q"] and not mask["final_norm"]["scale"]
    assert not mask["final_norm"]["bias"]


def test_clipping_bounds_the_update_and_reports_the_norm_before_it():
    from bytescope.train.step.optimizer.rules import mean_and_clip

    grads = {"w": jnp.full((4,), 6.0)}
    for max_norm, expected in ((1.0, 0.5), (0.0, 3.0)):
        transform = mean_and_clip(max_norm)
        updates, state = transform.update(grads, transform.init(grads), tokens=jnp.int32(2))
        np.testing.assert_allclose(updates["w"], expected)
        assert float(state.grad_norm) == 6.0


def test_learning_rate_warms_up_and_ends_where_it_should():
    from bytescope.train.step.optimizer.rules import make_schedule

    config = small_config({"optimizer.warmup_steps": 10}).optimizer
    schedule = make_schedule(config, 100)
    assert float(schedule(9)) == pytest.approx(config.learning_rate, rel=0.1)
    assert max(float(schedule(step)) for step in range(100)) == pytest.approx(config.learning_rate)
    assert float(schedule(100)) == pytest.approx(config.learning_rate * config.end_fraction)


@pytest.mark.parametrize(
    ("overrides", "devices", "message"),
    [
        ({"batch.micro": 0}, 1, "batch.micro=0"),
        ({"batch.accumulation": 0}, 1, "batch.accumulation=0"),
        ({"data.seq_len": 65}, 1, "data.seq_len=65 is longer than model.max_seq_len=64"),
        ({"loss.kind": "x"}, 1, "full, chunked"),
        ({"loss.chunk": 0}, 1, "loss.chunk=0"),
        ({"train.log_every": 0}, 1, "log_every=0 is too small: give 1 or more"),
        ({"optimizer.clip_norm": -1.0}, 1, "clip_norm=-1.0"),
        ({"optimizer.learning_rate": "nan"}, 1, "learning_rate=nan"),
        ({"optimizer.name": "adam"}, 1, "'adam'.*adamw, adamw_bf16, adamw_8bit, adafactor"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_made(overrides, devices, message):
    with pytest.raises(ValueError, match=message):
        build(small_config(overrides), jax.devices()[:devices])


def test_deep_scan_compiles_as_one_layer():
    """The program of 24 layers is no longer than that of 6."""
    sizes = [len(small_program({"model.n_layers": layers}).lower().as_text()) for layers in (6, 24)]
    assert sizes[1] < 1.01 * sizes[0]
