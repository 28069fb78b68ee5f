"""Frozen parameters: chosen by pattern, in the compute dtype, unchanged by training; without gradient and state, and
in no checkpoint."""

import math

import jax
import numpy as np
import pytest

from bytescope.memory.cost import flops
from bytescope.model.frozen import dotted, merge_parameters, split_parameters
from bytescope.train.checkpoints.checkpoint import Checkpoints, Position
from bytescope.train.checkpoints.saved_state import portable
from bytescope.train.program.program import build
from bytescope.train.step.optimizer.trainable import frozen_names
from support.exhaustive import exhaustive
from support.toy import made_state, run_losses, small_config, small_program

NAMES = (
    "blocks.0.attention.w_q",
    "blocks.0.mlp.w_up",
    "blocks.1.attention.w_q",
    "blocks.1.mlp.w_up",
    "w_token",
    "final_norm.scale",
)
# All matrices of the blocks and the head: what is left has no product in the backward pass but those of its inputs.
ALL_PRODUCTS = "blocks.*.w_*,w_head"
MOST = {"optimizer.freeze": "w_token,w_head,blocks.attention.w_*,blocks.mlp.w_up", "batch.micro": "8"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (("w_token",), {"w_token"}),
        (("blocks.attention.*",), {NAMES[0], NAMES[2]}),
        (("blocks.0.*",), set(NAMES[:2])),
        (("*norm*", "blocks.1.mlp.w_up"), {NAMES[5], NAMES[3]}),
    ],
)
def test_patterns_choose_parameters(patterns, found):
    assert frozen_names(NAMES, patterns, scan=False) == found


@pytest.mark.quick
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optimizer.freeze": "blocks.attention.w_x"}, r"matches no parameter: .*blocks\.attention\.w_"),
        ({"optimizer.freeze": "blocks.0.*"}, "set model.scan=false"),
        ({"optimizer.freeze": "*"}, "every parameter"),
        ({"optimizer.freeze": "w_head", "offload.params": "true"}, "set offload.params=false"),
        ({"optimizer.freeze": "*w_q", "precision.preset": "fp8"}, "frozen blocks.attention.w_q; .*preset=bf16"),
        (
            {"optimizer.freeze": "blocks.*", "optimizer.fused_backward": "true", "optimizer.clip_norm": "0"},
            "when all blocks are frozen",
        ),
    ],
)
def test_what_cannot_be_frozen_is_refused(overrides, message, monkeypatch):
    monkeypatch.setattr("bytescope.train.program.checks.has_host_memory", lambda device: True)
    with pytest.raises(ValueError, match=message):
        build(small_config(overrides), jax.devices()[:1])


@pytest.mark.quick
def test_a_tree_is_parted_and_joined():
    tree = {"a": {0: {"w": 1, "v": 2}, 1: {"w": 3, "v": 4}}, "b": {"w": 5}}
    trained, frozen = split_parameters(tree, {"a.0.w", "a.1.w", "b.w"})
    assert trained == {"a": {0: {"v": 2}, 1: {"v": 4}}} and frozen == {"a": {0: {"w": 1}, 1: {"w": 3}}, "b": {"w": 5}}
    assert (
        merge_parameters(trained, frozen) == tree
        and split_parameters(tree, ()) == (tree, None)
        and merge_parameters(tree, None) is tree
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    "overrides",
    [
        {"remat.policy": "minimal"},
        {"loss.kind": "full"},
        *exhaustive(
            {"model.scan": "false", "remat.policy": "offload"},
            {"model.mlp_chunk": 8, "remat.policy": "full"},
            {"remat.policy": "sqrt", "model.n_layers": 4},
        ),
    ],
    ids=str,
)
def test_no_product_makes_the_gradient_of_a_frozen_matrix(overrides):
    """FLOPs of the traced step: exactly 2 per matrix parameter and token less, recomputation left out: without the
    gradient of the output projection nothing needs the attention's result again."""
    every, some = (
        small_program({**overrides, "model.max_seq_len": 32, **own}) for own in ({}, {"optimizer.freeze": ALL_PRODUCTS})
    )
    counts = []
    for program in (every, some):
        by = flops.count(program.step.trace(program.state, program.batch_shapes).jaxpr).by
        counts.append(sum(number for (phase, _), number in by.items() if phase != "recompute"))
    matrices = sum(
        math.prod(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(some.state.frozen)
        if dotted(path).rpartition(".")[2].startswith("w_")
    )
    tokens = some.batch.rows * some.batch.seq_len
    assert counts[0] - counts[1] == 2 * matrices * tokens


def test_the_step_holds_a_frozen_parameter_once_and_in_the_compute_dtype():
    program = small_program({**MOST, "precision.preset": "bf16"})
    trained, frozen = (
        sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (program.state.params, program.state.frozen)
    )
    assert trained and frozen and {str(leaf.dtype) for leaf in jax.tree.leaves(program.state.frozen)} == {"bfloat16"}
    stats = program.compile().memory_analysis()
    batch = 2 * 4 * program.batch.rows * program.batch.seq_len
    assert stats.argument_size_in_bytes == pytest.approx(12 * trained + 2 * frozen + batch, abs=64)
    assert stats.alias_size_in_bytes == pytest.approx(12 * trained + 2 * frozen, abs=64)


LAYOUTS = {
    "data, fsdp and tensor": ({"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "batch.micro": 2}, 8),
    "zero1, summed in the step": (
        {"mesh.strategy": "zero1", "batch.mode": "scan", "batch.accumulation": 2, "batch.micro": 2},
        2,
    ),
    "updated in the backward pass": ({"optimizer.fused_backward": "true"}, 1),
}


@pytest.fixture(scope="module")
def one_device():
    """Losses of three updates with most matrices frozen."""
    program = small_program({**MOST, "optimizer.clip_norm": "0"})
    return run_losses(program, 3, state=made_state(program))


@pytest.mark.parametrize(
    "name", ["data, fsdp and tensor", *exhaustive(*(name for name in LAYOUTS if name != "data, fsdp and tensor"))]
)
def test_losses_are_those_of_one_device_and_nothing_frozen_moves(name, one_device):
    overrides, devices = LAYOUTS[name]
    program = small_program({**MOST, "optimizer.clip_norm": "0", **overrides}, devices)
    state = made_state(program)
    before, results = jax.device_get(state), []

    def step(*args):
        results.append(program.step(*args))
        return results[-1]

    np.testing.assert_allclose(run_losses(program, 3, state=state, step=step), one_device, rtol=1e-5)
    after = jax.device_get(results[-1][0])
    jax.tree.map(np.testing.assert_array_equal, after.frozen, before.frozen)
    assert all((one != other).any() for one, other in zip(*map(jax.tree.leaves, (after.params, before.params))))


def test_a_checkpoint_has_what_is_trained_alone(tmp_path):
    program = small_program({**MOST, "model.n_layers": 1})
    state = made_state(program)
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(state, Position(1, 8))
    checkpoints.wait()
    restored, _ = checkpoints.restore(program.state, pytest.fail)
    checkpoints.close()
    assert restored.frozen is None
    jax.tree.map(np.testing.assert_array_equal, portable(restored), portable(state))
    assert not any("w_token" in str(path) for path in (tmp_path / "checkpoints" / "1" / "state").rglob("*"))


def test_what_is_frozen_comes_again_from_the_seed():
    program = small_program({**MOST, "model.n_layers": 1})
    jax.tree.map(np.testing.assert_array_equal, program.init_frozen(), program.init().frozen)
