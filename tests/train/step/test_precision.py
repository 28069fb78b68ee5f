"""Precision by role: presets and keys, bytes a parameter, narrow collectives, stochastic rounding."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytescope import memory
from bytescope.model import PRECISIONS, Precision
from bytescope.model.layers import look_up
from bytescope.train.plan.block_description import trace_gradient
from bytescope.train.program.program import build
from bytescope.train.step.optimizer.rounding import apply_updates, random_bits, round_stochastic
from bytescope.train.step.optimizer.rules import OPTIMIZERS
from support.described import described
from support.exhaustive import exhaustive
from support.hlo_text import collectives
from support.toy import first_state, run_losses, small_config, small_program

ROLES = ("param", "compute", "reduce", "accumulator", "norm", "logits")


# ---- keys ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "dtypes", "rest"),
    [
        ("fp32", "f f - f f f", ("nearest", "layer", "none")),
        ("bf16", "f b - f f f", ("nearest", "layer", "none")),
        ("bf16_grads", "f b b f f f", ("nearest", "step", "none")),
        ("fp32_grads", "f b f f f f", ("nearest", "step", "none")),
        ("bf16_params", "b b - f f f", ("stochastic", "layer", "none")),
        ("fp16", "f h - f f f", ("nearest", "layer", "dynamic")),
    ],
)
def test_presets_are_rows_of_dtypes(preset, dtypes, rest):
    precision = Precision.from_config(small_config({"precision.preset": preset}).precision)
    letters = {None: "-", jnp.float32: "f", jnp.bfloat16: "b", jnp.float16: "h"}
    assert [letters[getattr(precision, role)] for role in ROLES] == dtypes.split()
    assert (precision.rounding, precision.cast, precision.loss_scale) == rest
    assert precision == PRECISIONS[preset]


def test_every_role_has_a_key():
    keys = {
        "param": "bfloat16",
        "compute": "float16",
        "reduce": "float16",
        "accumulator": "bfloat16",
        "norm": "bfloat16",
        "logits": "float16",
        "rounding": "stochastic",
        "cast": "step",
        "loss_scale": "dynamic",
    }
    config = small_config({f"precision.{role}": name for role, name in keys.items()})
    precision = Precision.from_config(config.precision)
    assert precision == Precision(
        jnp.bfloat16, jnp.float16, jnp.float16, jnp.bfloat16, jnp.bfloat16, jnp.float16, "stochastic", "step", "dynamic"
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"preset": "bf61"}, r"did you mean bf16.? Else choose one of fp32, bf16, bf16_grads"),
        ({"compute": "int8"}, r"precision.compute='int8'.*: choose one of float32, bfloat16, float16"),
        ({"rounding": "stochastic"}, r"set precision.param=bfloat16 or precision.rounding=nearest"),
        ({"preset": "fp32", "cast": "step"}, r"the same dtype; set precision.cast=layer"),
        ({"preset": "bf16", "reduce": "bfloat16"}, r"set precision.cast=step"),
        ({"loss_scale_growth_every": 0}, r"precision.loss_scale_growth_every=0 is too small: give 1 or more"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(keys, message):
    with pytest.raises(ValueError, match=message):
        small_program({"precision.preset": "bf16", **{f"precision.{key}": value for key, value in keys.items()}})


def test_roles_reach_the_program():
    """Each dtype shows where it belongs, and nowhere before its key is set."""

    def traced(**keys):
        program = small_program(
            {
                "precision.preset": "fp32",
                "loss.kind": "full",
                **{f"precision.{key}": value for key, value in keys.items()},
            }
        )
        return str(trace_gradient(program))

    assert not re.search("bf16|f16", traced())
    assert "bf16[8,32,64]" in traced(logits="bfloat16")
    assert "bf16[8,32,32]" in traced(norm="bfloat16") and "bf16[8,32,64]" not in traced(norm="bfloat16")
    program = small_program({"precision.accumulator": "bfloat16", "batch.accumulation": 2})
    assert {leaf.dtype.name for leaf in jax.tree.leaves(program.state.opt_state.acc_grads)} == {"bfloat16"}


# ---- bytes -----------------------------------------------------------------------------------------------------

# Tied embeddings, as in Llama 3.2 1B: every gradient is there until the last.
LEDGER = {
    "model.tie_embeddings": True,
    "model.d_model": 128,
    "model.d_head": 64,
    "model.n_heads": 2,
    "model.n_kv_heads": 1,
    "model.d_ff": 256,
}
SUMMED = {"batch.micro": 4, "batch.accumulation": 2}


def ledger(keys, devices):
    report = memory.analyze(build(small_config({**LEDGER, **keys}), devices).compile())
    # As the report shows it: counters and norms are a few bytes over 400 thousand parameters.
    return {
        (row.role, row.dtype): round(row.bytes_per_param, 2) for row in report.ledger if row.bytes_per_param >= 0.005
    }


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        (
            {"preset": "fp32_grads", **SUMMED, "batch.mode": "scan"},
            {"params": 4, "copies": 2, "gradients": 2, "accumulator": 4, "optimizer": 8, "total": 20},
        ),
        *exhaustive(
            ({"preset": "bf16_grads"}, {"params": 4, "copies": 2, "gradients": 2, "optimizer": 8, "total": 16}),
            ({"preset": "bf16"}, {"params": 4, "gradients": 4, "optimizer": 8, "total": 16}),
            ({"preset": "bf16_params"}, {"params": 2, "gradients": 2, "optimizer": 8, "total": 12}),
        ),
    ],
    ids=["20 scan", "16", "16 bf16", "12"],
)
def test_the_ledger_shows_the_bytes_of_a_preset(keys, rows):
    keys = {key if "." in key else f"precision.{key}": value for key, value in keys.items()}
    found = ledger(keys, described("h200"))
    assert {role: size for (role, _), size in found.items()} == pytest.approx(rows) and len(found) == len(rows)
    narrow = {role for (role, dtype) in found if dtype == "bfloat16"}
    assert narrow == {"copies", "gradients"} & set(rows) - ({"gradients"} if rows["gradients"] == 4 else set()) | (
        {"params"} if rows["params"] == 2 else set()
    )


NARROW = {
    "zero3": {},
    "full loss, biases, ddp": {
        "loss.kind": "full",
        "mesh.strategy": "ddp",
        "model.norm": "layernorm",
        "model.bias": True,
    },
}


@functools.cache
def sent(layout):
    """(kind, result as printed) of every collective of `bf16_grads` on four GPUs."""
    keys = {"precision.preset": "bf16_grads", "model.d_model": 128, "model.d_ff": 256, "model.n_layers": 5}
    text = build(small_config({**keys, **NARROW[layout]}), described("h100:4")).compile().as_text()
    return [(kind, result) for ones in collectives(text).values() for kind, result, _ in ones]


@pytest.mark.parametrize("layout", ["zero3", *exhaustive(*(name for name in NARROW if name != "zero3"))])
def test_devices_sum_every_gradient_narrow(layout):
    """Nothing as long as a norm's vector is sent in float32: a few sums of squares of the gradient norm at most."""
    assert {kind for kind, result in sent(layout) if "bf16[" in result} & {"all-reduce", "reduce-scatter"}
    wide = [
        math.prod(map(int, dims.split(",")))
        for _, result in sent(layout)
        for dims in re.findall(r"f32\[([\d,]+)\]", result)
    ]
    assert max(wide, default=0) < 32


def test_gradients_and_gathers_of_matrices_are_narrow():
    """No collective of `bf16_grads` moves a float32 matrix; a gather holds one layer, never the stack."""
    matrices = [(kind, result) for kind, result in sent("zero3") if re.search(r"\[\d+,\d+", result)]
    assert {kind for kind, _ in matrices} >= {"all-gather", "reduce-scatter"}
    assert not [result for _, result in matrices if re.search(r"f32\[\d+,\d+", result)]
    assert not [result for _, result in sent("zero3") if re.search(r"\[5,", result)]


def test_the_gradient_of_a_narrow_table_is_summed_wide():
    """A thousand times 1/256 is 3.9 in float32; bfloat16 would stop growing at 1."""
    table, tokens = jnp.zeros((4, 2), jnp.bfloat16), jnp.zeros((1, 1000), jnp.int32)
    grad = jax.grad(lambda table: (look_up(table, tokens) * jnp.bfloat16(1 / 256)).sum().astype(jnp.float32))(table)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(grad[0], np.float32), 1000 / 256, rtol=2**-8)


# ---- stochastic rounding ---------------------------------------------------------------------------------------


def test_rounding_is_unbiased_and_leaves_what_fits():
    key, many = jax.random.key(0), 2**16
    for share in (0.1, 0.5, 0.9):  # of the way from 1 to the next bfloat16
        x = jnp.full(many, 1 + share * 2**-7, jnp.float32)
        rounded = np.asarray(round_stochastic(x, key), np.float32)
        assert set(np.unique(rounded)) == {1.0, 1 + 2**-7}
        assert abs((rounded > 1).mean() - share) < 4 * (share * (1 - share) / many) ** 0.5
    exact = jnp.asarray([0.0, -1.5, 3.0, jnp.inf, -jnp.inf, jnp.nan, 2.0**-133], jnp.float32)
    np.testing.assert_array_equal(np.asarray(round_stochastic(exact, key), np.float32), exact)
    negative = np.asarray(round_stochastic(jnp.full(many, -1 - 2**-9, jnp.float32), key), np.float32)
    assert abs(negative.mean() + 1 + 2**-9) < 2**-12


def test_bits_do_not_repeat_along_axes_or_between_keys():
    bits = np.asarray(random_bits(jax.random.key(0), (64, 64)))
    assert len(np.unique(bits)) > 4080 and not np.array_equal(bits[0], bits[1])
    assert abs(np.corrcoef(bits[:-1].ravel(), bits[1:].ravel())[0, 1]) < 0.06
    assert not np.array_equal(bits, random_bits(jax.random.key(1), (64, 64)))


def test_small_updates_arrive_on_average():
    """A hundred updates of a sixteenth of what bfloat16 resolves: nearest loses all of them."""

    def after(rounding):
        precision = Precision(param=jnp.bfloat16, rounding=rounding)
        params = {"w": jnp.ones((4096,), jnp.bfloat16)}
        for step in range(100):
            params = apply_updates(
                params,
                {"w": jnp.full((4096,), 2**-11, jnp.float32)},
                precision,
                jax.random.fold_in(jax.random.key(0), step),
            )
        return float(params["w"].astype(jnp.float32).mean())

    assert after("nearest") == 1.0
    assert after("stochastic") == pytest.approx(1 + 100 * 2**-11, abs=1e-3)


def test_rounding_is_the_same_on_every_mesh():
    precision = Precision(param=jnp.bfloat16, rounding="stochastic")
    alone, many = (
        small_program({"precision.preset": "bf16_params", **mesh}, devices)
        for mesh, devices in (({}, 1), ({"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}, 8))
    )
    rounded = []
    for program in (alone, many):
        params = first_state(program).params
        updates = jax.tree.map(lambda leaf: 1e-4 * jnp.ones(leaf.shape), params)
        apply = jax.jit(
            functools.partial(apply_updates, precision=precision),
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, params),
        )
        rounded.append(apply(params, updates, key=jax.random.key(3)))
    for one, other in zip(*map(jax.tree.leaves, rounded)):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


# ---- training --------------------------------------------------------------------------------------------------


@functools.cache
def losses(preset):
    return run_losses(small_program({"precision.preset": preset}))


@pytest.mark.parametrize(
    ("preset", "near"),
    [
        ("bf16_grads", 0.005),
        *exhaustive(("bf16_params", 0.01), ("fp16", 0.001), ("fp32_grads", 0.005)),
    ],
)
def test_twenty_steps_are_near_float32(preset, near):
    assert losses(preset)[-1] == pytest.approx(losses("fp32")[-1], rel=near)
    assert not np.array_equal(losses(preset), losses("fp32"))


LAYOUTS = {
    "ddp scan": ("fp16", {"batch.micro": 1, "batch.accumulation": 2, "batch.mode": "scan", "mesh.strategy": "ddp"}, 4),
    "unrolled multisteps": (
        "fp16",
        {"batch.micro": 2, "batch.accumulation": 2, "mesh.tensor": 2, "model.scan": False},
        4,
    ),
    "zero2, all axes": (
        "bf16_grads",
        {
            "batch.micro": 4,
            "mesh.strategy": "zero2",
            "mesh.context": 2,
            "mesh.tensor": 2,
            "mesh.sequence_parallel": True,
            "loss.kind": "full",
        },
        8,
    ),
}


@pytest.mark.parametrize("layout", ["ddp scan", *exhaustive(*(name for name in LAYOUTS if name != "ddp scan"))])
def test_layouts_train_alike(layout):
    preset, mesh, devices = LAYOUTS[layout]
    program = small_program({"precision.preset": preset, **mesh}, devices)
    np.testing.assert_allclose(run_losses(program, 4), losses(preset)[:4], rtol=2e-3)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *((name, {"precision.preset": "bf16_params"}) for name in OPTIMIZERS),
        *exhaustive(*((name, {"precision.preset": "fp16", **SUMMED}) for name in ("adamw_bf16", "muon"))),
    ],
    ids=str,
)
def test_state_keeps_its_dtypes_under_every_optimizer(name, keys):
    """What goes in comes out, so it can be donated; moments are float32 but for the rows that narrow them."""
    program = small_program({"optimizer.name": name, **keys})
    out, _ = jax.eval_shape(program.step, program.state, program.batch_shapes)
    describe = lambda tree: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]  # noqa: E731
    assert describe(out) == describe(program.state)
    narrow = {leaf.dtype.name for leaf in jax.tree.leaves(program.state.opt_state)} - {"float32", "int32"}
    assert narrow == {"adamw_bf16": {"bfloat16"}}.get(name, set())
