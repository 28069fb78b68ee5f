"""Training state in host memory: losses unchanged, bytes where they are said to be, what cannot be is refused."""

import jax
import numpy as np
import optax
import pytest

from bytescope import memory
from bytescope.memory.devices import targets
from bytescope.train.checkpoints.checkpoint import Checkpoints, Position
from bytescope.train.program.config_files import load, override
from bytescope.train.program.program import build
from bytescope.train.step.optimizer.host_offload import KIND, is_hosted
from bytescope.train.step.optimizer.partwise import PIECE, rows_of_table
from bytescope.train.step.optimizer.rules import OPTIMIZERS
from support.exhaustive import exhaustive
from support.facts import facts_of
from support.toy import made_state, run_losses, small_config, small_program

TINY = {"model.d_model": 16, "model.d_ff": 16, "model.n_layers": 2, "batch.micro": 2}
OPTIMIZER = {"offload.optimizer": True}
BOTH = {**OPTIMIZER, "offload.params": True}
described = pytest.mark.oracle("cuda")


def losses(overrides, devices=1):
    program = small_program({**TINY, **overrides}, devices)
    return run_losses(program, 3, state=made_state(program))


# The same operations on every number; where a compiler fuses a layer's otherwise the last bit of a loss may differ.
ULPS = 2 * np.finfo(np.float32).eps


@pytest.mark.parametrize(
    ("hosted", "overrides", "devices", "rtol"),
    [
        (OPTIMIZER, {"batch.accumulation": 2, "batch.micro": 1}, 1, ULPS),
        (BOTH, {"remat.policy": "none"}, 1, ULPS),
        (BOTH, {"mesh.fsdp": 4, "batch.micro": 1}, 4, 0),
        *exhaustive(
            (OPTIMIZER, {"batch.accumulation": 2, "batch.mode": "scan", "optimizer.name": "muon"}, 1, ULPS),
            (OPTIMIZER, {"model.scan": False}, 1, ULPS),
            # A rule over whole matrices takes layers in turn.
            (OPTIMIZER, {"optimizer.name": "adamw_8bit", "model.d_model": 64, "model.d_ff": 64}, 1, 1e-6),
        ),
    ],
    ids=str,
)
def test_state_in_host_memory_leaves_losses_as_they_are(hosted, overrides, devices, rtol):
    np.testing.assert_allclose(losses({**overrides, **hosted}, devices), losses(overrides, devices), rtol=rtol)


def test_state_is_made_in_host_memory_and_stays_there(tmp_path):
    program = small_program({**TINY, **BOTH})
    state = program.init()

    def hosted(tree):
        return [leaf.sharding.memory_kind == KIND for leaf in jax.tree.leaves(tree) if leaf.ndim]

    assert all(hosted(state.params)) and all(hosted(state.opt_state))
    batch = {name: np.zeros(array.shape, np.int32) for name, array in program.batch_shapes.items()}
    state, _ = program.step(state, batch)
    assert all(hosted(state.params)) and all(hosted(state.opt_state))
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(state, Position(1, 2))
    checkpoints.wait()
    plain = small_program(TINY)
    for wanted, there in ((plain, False), (program, True)):  # read into either memory
        restored, _ = checkpoints.restore(wanted.state, pytest.fail)
        assert set(hosted(restored.params)) == {there}
        jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)
        jax.tree.map(np.testing.assert_array_equal, restored.opt_state, state.opt_state)
    checkpoints.close()


def test_sums_of_multisteps_stay_on_the_device():
    state = small_program({**TINY, **OPTIMIZER, "batch.accumulation": 2}).state.opt_state
    assert isinstance(state, optax.MultiStepsState)
    assert not any(map(is_hosted, jax.tree.leaves(state.acc_grads)))
    assert all(is_hosted(leaf) for leaf in jax.tree.leaves(state.inner_opt_state) if leaf.ndim)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"batch.accumulation": 2}, "cannot be summed there"),
        ({"mesh.strategy": "zero1"}, "choose zero3 or ddp"),
        ({"mesh.strategy": "zero2"}, "choose zero3 or ddp"),
    ],
)
def test_what_parameters_in_host_memory_cannot_be_combined_with(overrides, words):
    with pytest.raises(ValueError, match=words):
        small_program({**TINY, "offload.params": True, **overrides})


def test_the_cpu_says_that_it_has_one_memory():
    program = small_program({**TINY, **OPTIMIZER})
    report = memory.analyze(program.lower(), facts=facts_of(program))
    assert [finding.message for finding in report.findings if finding.kind == "idle_offload"] == [
        "offload.optimizer asks for offload, but nothing is in host memory"
    ]
    assert report.transfers == ()


GPU = {
    "precision.preset": "bf16",
    "model.d_model": 256,
    "model.d_head": 64,
    "model.d_ff": 1024,
    "model.n_layers": 8,
    "data.seq_len": 64,
    "batch.micro": 1,
    "remat.policy": "full",
}


def report_on(overrides, target="h200"):
    program = build(small_config({**GPU, **overrides}), targets.parse(target).devices())
    return program, memory.analyze(program.lower(), target=target)


def device_bytes(tree):
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.ndim
    )


@described
@pytest.mark.parametrize(("name", "target"), exhaustive(("adamw_8bit", "h200"), ("adamw", "h100:8")))
def test_host_bytes_are_the_moments(name, target):
    assert name in OPTIMIZERS
    program, report = report_on({**OPTIMIZER, "optimizer.name": name, "mesh.fsdp": -1}, target)
    moments = device_bytes(program.state.opt_state)
    held = sum(b.bytes for b in report.buffers if b.memory == "host" and b.phase == "argument")
    assert held == moments and report.host_bytes < 1.02 * moments + 4096
    assert report.breakdown["optimizer"] < 100  # counters
    assert report.xla.argument_bytes < device_bytes(program.state.params) + 10_000
    for direction in ("to device", "to host"):
        rows = [row for row in report.transfers if row.direction == direction]
        moved = sum(row.bytes for row in rows)
        assert 0.99 * moments < moved < 1.02 * moments + 4096
        assert sum(row.seconds for row in rows) == moved / targets.parse(target).host_link_bytes_per_s


@pytest.mark.exhaustive
@described
def test_nothing_of_the_state_is_left_on_the_device():
    program, report = report_on(BOTH)
    assert report.breakdown["optimizer"] < 100 and report.breakdown["params"] < 100
    _, whole = report_on({})
    state = device_bytes(program.state.params) + device_bytes(program.state.opt_state)
    assert whole.peak_bytes - report.peak_bytes > state and report.host_bytes > state
    layers = [b for b in report.buffers if b.memory == "device" and b.bytes >= 8 * 256 * 1024 * 4]
    assert not layers  # no stack of all layers' masters, moments or gradients


@pytest.mark.exhaustive
@described
def test_llama_8b_trains_on_a_gaming_card():
    config = load("llama_8b")
    for key in ("offload.optimizer", "offload.params", "optimizer.fused_backward"):
        override(config, key, "true")
    override(config, "optimizer.clip", "layer")
    program = build(config, targets.parse("rtx4090").devices())
    report = memory.analyze(program.lower(), target="rtx4090")
    parameters = sum(leaf.size for leaf in jax.tree.leaves(program.state.params))
    assert report.fits and report.allocated_bytes < 8 * 2**30 and 12 * parameters <= report.host_bytes


def test_rows_of_a_table_divide_it_evenly():
    sharding = small_program(TINY).state.step.sharding

    def pieces(rows, width):
        return rows_of_table(jax.ShapeDtypeStruct((rows, width), np.float32, sharding=sharding))

    assert pieces(128256, 4096) == 8 and pieces(4096, 128256) == 8
    assert pieces(64, 16) == 0 and 3 * PIECE // 4 % 3 == 0 and pieces(3, PIECE // 4) == 3
