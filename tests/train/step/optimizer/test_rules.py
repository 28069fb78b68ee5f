"""Every row of the optimizer table: its bytes as compiled, its losses on every layout; 8-bit moments."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bytescope.memory.formulas.training_state import state_bytes_per_parameter
from bytescope.train.plan.config_facts import OPTIMIZERS as FORMULAS
from bytescope.train.plan.config_facts import PRECISIONS
from bytescope.train.program.config_files import load
from bytescope.train.program.program import build
from bytescope.train.run.feed import calls
from bytescope.train.step.optimizer.rules import OPTIMIZERS
from support.exhaustive import exhaustive
from support.toy import first_state, fixed_batches, small_program

# Matrices of 4096 elements and more, so that 8-bit moments are some.
SHAPE = {"model.d_model": 64, "model.d_head": 16, "model.n_kv_heads": 4, "model.d_ff": 128, "model.n_layers": 2}
LAYOUTS = {
    "one device": ({"batch.micro": 16}, 1),
    "multisteps, data fsdp tensor": (
        {
            "batch.micro": 2,
            "batch.accumulation": 2,
            "mesh.data": 2,
            "mesh.fsdp": 2,
            "mesh.tensor": 2,
        },
        8,
    ),
}
STEPS, FEW = 10, 4
# name -> (learning rate, by how many nats the loss falls in ten steps at least)
TRAINS = {
    "adamw": (3e-3, 1.0),
    "adamw_bf16": (3e-3, 1.0),
    "adamw_8bit": (3e-3, 1.0),
    "adafactor": (3e-3, 0.5),
    "adagrad": (1e-2, 0.5),
    "rmsprop": (3e-3, 0.5),
    "momentum": (0.3, 1.0),
    "lion": (1e-3, 0.5),
    "muon": (3e-3, 0.5),
}


def program_of(name, layout="one device", **more):
    overrides, devices = LAYOUTS[layout]
    chosen = {"optimizer.name": name, "optimizer.learning_rate": TRAINS[name][0]}
    return small_program({**SHAPE, **overrides, **chosen, **more}, devices)


def losses(program, step, steps):
    """Loss of each update, float64 [steps]."""
    state, seen = first_state(program), []
    for host in fixed_batches(program.batch.global_rows, program.batch.seq_len, program.model.vocab_size, steps):
        for batch in calls(program, host):
            state, metrics = step(state, batch)
        seen.append(float(metrics["loss"]))
    return np.asarray(seen)


@functools.cache
def trained(name, layout):
    """(program, executable, losses)."""
    program = program_of(name, layout)
    compiled = program.compile()
    return program, compiled, losses(program, compiled, STEPS if layout == "one device" else FEW)


def parameters(program):
    """(name, shape, elements on one device) of every parameter."""
    return [
        (path[-1].key, leaf.shape, math.prod(leaf.sharding.shard_shape(leaf.shape)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(program.state.params)
    ]


# ---- bytes ---------------------------------------------------------------------------------------------------

HIDDEN = {"w_q", "w_k", "w_v", "w_o", "w_up", "w_gate", "w_down"}
# Elements that share a scale, by formula: 128 along an axis; heads of 16 make up 64 together, tables are 64 wide.
BLOCK = {
    "w_q": 64,
    "w_k": 64,
    "w_v": 64,
    "w_o": 64,
    "w_up": 128,
    "w_gate": 128,
    "w_down": 128,
    "w_token": 64,
    "w_head": 64,
}
BYTES = {"adamw": 8, "adamw_bf16": 6, "adagrad": 4, "rmsprop": 4, "momentum": 4, "lion": 4}
# int32 counters of updates: the optimizer's own, and the schedule's.
COUNTERS = {
    "adamw": 2,
    "adamw_bf16": 2,
    "adamw_8bit": 2,
    "adafactor": 1,
    "adagrad": 1,
    "rmsprop": 1,
    "momentum": 1,
    "lion": 2,
    "muon": 2,
}


def factored_bytes(name, shape, unused):
    """Adafactor: float32 rows and columns of each matrix, whole vectors, for each a counter; and the place of what it
    does not use of the three, which an argument list leaves out unless MultiSteps reads it."""
    if name not in {*HIDDEN, "w_token", "w_head"}:
        vectors = math.prod(shape[:-1])
        return 4 * (math.prod(shape) + vectors * (1 + 2 * unused))
    layers = shape[0] if name in HIDDEN else 1
    rows, columns = {"w_o": (64, 64), "w_q": (64, 64), "w_k": (64, 64), "w_v": (64, 64), "w_down": (128, 64)}.get(
        name, (64, 128 if name in HIDDEN else 64)
    )
    return layers * 4 * (rows + columns + 1 + unused)


def expected_state(name, program):
    """Bytes of one row's state on one device, by formula."""
    total = 4 * COUNTERS[name]
    for leaf, shape, local in parameters(program):
        if name == "adamw_8bit" and leaf in BLOCK:
            total += 2 * local
        elif name == "adafactor":
            total += factored_bytes(leaf, shape, isinstance(program.state.opt_state, optax.MultiStepsState))
        elif name == "muon":
            total += local * (4 if leaf in HIDDEN else 8)
        else:
            total += local * BYTES.get(name, 8)
    return total


def scales(program):
    """(bytes on all devices as if there were one, bytes on one device) of the scales of 8-bit moments."""
    found = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(program.state.opt_state)
        if any(getattr(key, "name", "").endswith("_scale") for key in path)
    ]
    return (
        sum(4 * leaf.size for leaf in found),
        sum(4 * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in found),
    )


# Rows with state of their own shapes, on every layout; the state of all others lies like the parameters.
OWN = ("adamw_8bit", "adafactor", "muon")
CASES = [(name, layout) for name in OPTIMIZERS for layout in LAYOUTS if name in OWN or layout == "one device"]
# The usual row and those of OWN on one device, and one whose state is laid out unlike the parameters on a mesh.
FIRST_NAMES = ("adamw", *OWN)
FIRST = [case for case in CASES if (case[0] in FIRST_NAMES and case[1] == "one device") or case[0] == "adamw_8bit"]


@pytest.mark.parametrize(("name", "layout"), [*FIRST, *exhaustive(*(case for case in CASES if case not in FIRST))])
def test_state_bytes_are_the_formulas(name, layout):
    program, compiled, _ = trained(name, layout)
    local = sum(size for _, _, size in parameters(program))
    state = expected_state(name, program)
    if name == "adamw_8bit":
        whole, own = scales(program)
        assert whole == sum(
            2 * 4 * math.prod(shape) // BLOCK[leaf] for leaf, shape, _ in parameters(program) if leaf in BLOCK
        )
        state += own
    if layout.startswith("multisteps"):
        state += 4 * local + 2 * 4  # summed gradients; two counters
        state += 4 + 2 * 4  # the norm, and the tally's two; where every call updates, none of them is read
    batch = sum(4 * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(program.batch_shapes))
    assert compiled.memory_analysis().argument_size_in_bytes == 4 * local + state + 4 + batch  # int32 step


def test_moments_and_scales_are_divided_like_their_parameters():
    """Over fsdp 2 x tensor 2 a quarter of every matrix' codes is on each device. Of scales, one for 128 of the MLP's
    width, the model's width is divided."""
    program, _, _ = trained("adamw_8bit", "multisteps, data fsdp tensor")
    state = program.state.opt_state.inner_opt_state[1][0]
    for moments, dtype in ((state.mu, jnp.int8), (state.root_nu, jnp.uint8)):
        codes = moments["blocks"]["mlp"]["w_down"]
        assert codes.dtype == dtype and codes.sharding.shard_shape(codes.shape) == (2, 64, 32)
    assert state.mu["final_norm"]["scale"].dtype == jnp.float32
    for scales in (state.mu_scale, state.nu_scale):
        for name, shape, local in (("w_up", (2, 64, 1), (2, 32, 1)), ("w_down", (2, 1, 64), (2, 1, 32))):
            leaf = scales["blocks"]["mlp"][name]
            assert leaf.shape == shape and leaf.sharding.shard_shape(shape) == local


@pytest.mark.parametrize(
    "config, ratio", [("tiny", 0.2610), ("gpt2_small", 0.2603), ("llama_1b", 0.2589), ("llama_8b", 0.2578)]
)
def test_8bit_moments_take_a_quarter(config, ratio):
    """At most 0.27 of AdamW's bytes, embeddings, norms, biases and scales included."""

    def size(name):
        asked = load(config)
        asked.optimizer.name, asked.mesh.fsdp = name, 1
        asked.mesh.tensor = asked.mesh.data = asked.batch.accumulation = 1
        state = build(asked, jax.devices()[:1]).state.opt_state
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

    assert size("adamw_8bit") / size("adamw") == pytest.approx(ratio, abs=1e-4)


# Blocks of 128 that share a scale in every matrix, so that the formula's scales are the program's.
WIDE = {"model.d_model": 256, "model.d_head": 128, "model.n_heads": 2, "model.n_kv_heads": 2, "model.d_ff": 512}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_per_parameter_are_the_formulas(name):
    """State of the blocks' float32 matrices as the program makes it. The formulas say that they leave out Adafactor's
    rows and columns; tables and norms, of which Muon and 8-bit Adam keep more, are in no block's matrix."""
    program = small_program({**WIDE, "optimizer.name": name})
    sizes = {}
    for tree in ("params", "opt_state"):
        leaves = jax.tree_util.tree_leaves_with_path(getattr(program.state, tree))
        sizes[tree] = [
            leaf.size * leaf.dtype.itemsize
            for path, leaf in leaves
            if any(str(getattr(key, "key", "")) in HIDDEN for key in path)
        ]
    parameters = sum(sizes["params"]) / 4
    formula = state_bytes_per_parameter(PRECISIONS["fp32"], FORMULAS[name])["optimizer"]
    left_out = 0.05 if name == "adafactor" else 0
    assert 0 <= sum(sizes["opt_state"]) / parameters - formula <= left_out


# ---- losses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FIRST_NAMES, *exhaustive(*(name for name in OPTIMIZERS if name not in FIRST_NAMES))])
def test_it_trains(name):
    _, _, seen = trained(name, "one device")
    assert seen[0] - seen[-1] > TRAINS[name][1], seen


# Rounding to a code, and dividing a tiny gradient by itself, turn the last bit of a sum into more.
LOOSE = {"adamw_8bit": 1e-4, "adafactor": 1e-4}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(case for case in FIRST if case[1] != "one device"),
        *exhaustive(*(case for case in CASES if case[1] != "one device" and case not in FIRST)),
    ],
)
def test_losses_are_equal_on_every_layout(name, layout):
    one = trained(name, "one device")[2][:FEW]
    np.testing.assert_allclose(trained(name, layout)[2], one, rtol=LOOSE.get(name, 1e-5))


@pytest.mark.parametrize("name", ["muon", *exhaustive("adamw_8bit", "adafactor")])
def test_stacked_layers_are_updated_each_on_its_own(name):
    program, one = program_of(name, **{"model.scan": False}), trained(name, "one device")[2][:FEW]
    np.testing.assert_allclose(losses(program, program.step, FEW), one, rtol=LOOSE.get(name, 1e-5))


def test_8bit_moments_leave_the_loss_where_it_is():
    """Within 0.5 % of AdamW over 60 steps."""
    ends = [
        losses(program, compiled, 60)[-10:].mean()
        for program, compiled, _ in (trained(name, "one device") for name in ("adamw", "adamw_8bit"))
    ]
    assert abs(ends[1] / ends[0] - 1) < 0.005, ends


def test_muon_leaves_tables_norms_and_head_to_adamw():
    program, _, _ = trained("muon", "one device")
    states = program.state.opt_state[1][0].inner_states
    paths = {
        kind: {
            jax.tree_util.keystr(path[-1:]).strip("[]'")
            for path, leaf in jax.tree_util.tree_leaves_with_path(states[kind])
            if leaf.ndim
        }
        for kind in states
    }
    assert paths == {"muon": HIDDEN, "rest": {"w_token", "w_head", "scale"}}
