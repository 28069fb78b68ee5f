"""Checkpoints: what was saved comes back, on any mesh; damage is noticed, named and set aside."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytescope.train.checkpoints import checkpoint
from bytescope.train.checkpoints.checkpoint import Checkpoints, Position, checksums, describe
from bytescope.train.checkpoints.saved_state import portable
from bytescope.train.run.feed import calls
from bytescope.train.user_errors import UserError
from support.exhaustive import exhaustive
from support.toy import first_state, fixed_batches, small_program


@pytest.fixture(scope="module")
def program():
    return small_program({"model.n_layers": 1})


def bumped(program, amount):
    return jax.tree.map(lambda leaf: leaf + jnp.asarray(amount, leaf.dtype), first_state(program))


def open_checkpoints(path, keep=3):
    return Checkpoints(path, keep)


def assert_equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def fail(text):
    raise AssertionError(text)


def test_round_trip_on_another_mesh(tmp_path):
    """Of 8-bit moments too, whose codes and scales are laid out unlike the parameters."""
    keys = {"model.n_layers": 1, "model.d_model": 64, "model.d_ff": 128, "optimizer.name": "adamw_8bit"}
    checkpoints, state = open_checkpoints(tmp_path), bumped(small_program(keys), 3)
    assert {"int8", "uint8"} <= {leaf.dtype.name for leaf in jax.tree.leaves(state.opt_state)}
    checkpoints.save(state, Position(5, 40))
    checkpoints.wait()
    other = small_program({**keys, "mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}, 8)
    restored, position = checkpoints.restore(other.state, fail)
    assert position == Position(5, 40)
    assert_equal(restored, state)
    for found, wanted in zip(*map(jax.tree.leaves, (restored, other.state)), strict=True):
        assert (found.dtype, found.sharding) == (wanted.dtype, wanted.sharding)
    checkpoints.close()


# Every one of them trains the same global batch of 16.
LAYOUTS = {
    "ddp on 8": ({"mesh.strategy": "ddp", "batch.micro": 2}, 8),
    "ddp on 2, accumulated in the step": (
        {"mesh.strategy": "ddp", "batch.micro": 4, "batch.accumulation": 2, "batch.mode": "scan"},
        2,
    ),
    "1 device": ({"batch.micro": 4, "batch.accumulation": 4}, 1),
    "zero1 on 4": ({"mesh.strategy": "zero1", "batch.micro": 4}, 4),
    "replicas x zero3 x tensor": (
        {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "batch.micro": 2, "batch.accumulation": 2},
        8,
    ),
}
STEPS = 3  # before the save, and after


def updates(program, state, first, count):
    """The state after `count` updates on the fixed batches from number `first` on, and their losses."""
    hosts = list(
        fixed_batches(program.batch.global_rows, program.batch.seq_len, program.model.vocab_size, first + count)
    )[first:]
    losses = []
    for host in hosts:
        for batch in calls(program, host):
            state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """Layout -> the folder of a checkpoint made half-way; and the losses of the whole run on one device."""
    made = {}

    def of(name):
        if name not in made:
            folder, program = tmp_path_factory.mktemp("halfway"), small_program(*LAYOUTS[name])
            state, _ = updates(program, first_state(program), 0, STEPS)
            checkpoints = open_checkpoints(folder)
            checkpoints.save(state, Position(STEPS, STEPS * 16))
            checkpoints.close()
            made[name] = folder
        return made[name]

    whole = small_program(*LAYOUTS["1 device"])
    return of, updates(whole, first_state(whole), 0, 2 * STEPS)[1]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ddp on 8", "1 device"),
        *exhaustive(
            ("ddp on 8", "ddp on 2, accumulated in the step"),
            ("ddp on 8", "replicas x zero3 x tensor"),
            ("replicas x zero3 x tensor", "zero1 on 4"),
        ),
    ],
)
def test_a_run_goes_on_under_another_layout(halfway, before, after):
    """Other devices, strategy, tensor parallelism and accumulation: the losses are those of an unbroken run."""
    folder, whole = halfway
    program = small_program(*LAYOUTS[after])
    checkpoints = open_checkpoints(folder(before))
    state, position = checkpoints.restore(program.state, fail)
    checkpoints.close()
    assert position.step == STEPS and program.batch.global_rows == 16
    assert jax.tree.structure(state) == jax.tree.structure(program.state)
    state, losses = updates(program, state, STEPS, STEPS)
    np.testing.assert_allclose(losses, whole[STEPS:], rtol=1e-5)
    assert int(state.step) == 2 * STEPS


def test_the_accumulator_is_not_written(halfway):
    """It is zero between updates, and a layout without one must be able to go on."""
    folder, _ = halfway
    program = small_program(*LAYOUTS["1 device"])
    assert any("acc_grads" in path for path in describe(program.state))
    checkpoints = open_checkpoints(folder("1 device"))
    restored, _ = checkpoints.restore(program.state, fail)
    checkpoints.close()
    assert not any("acc_grads" in path for path in describe(portable(restored)))
    assert describe(restored) == describe(program.state)
    assert int(restored.opt_state.gradient_step) == STEPS
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(restored.opt_state.acc_grads))


def test_another_model_is_refused_and_nothing_is_moved(tmp_path, program):
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(first_state(program), Position(1, 8))
    checkpoints.wait()
    other = small_program({"model.n_layers": 1, "model.d_ff": 64})
    with pytest.raises(UserError, match=r"another model or optimizer \(.*w_\w+'\] is float32\[.*, not float32\["):
        checkpoints.restore(other.state, fail)
    assert checkpoints.steps() == [1]
    checkpoints.close()


def test_newest_and_best_are_kept(tmp_path, program):
    checkpoints = open_checkpoints(tmp_path, keep=2)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 2.5)):
        checkpoints.save(first_state(program), Position(step, step), loss)
    checkpoints.wait()
    assert checkpoints.steps() == [2, 4, 5]
    checkpoints.close()


def damage_data(root, step):
    """Flips one byte of the arrays' largest data file: Orbax alone would not notice.

    How many data files there are, and what is rewritten at their ends, depends on the moment of each write; what lies
    near the beginning of the largest is always an array's values.
    """
    victim = max(
        (path for path in (root / "checkpoints" / str(step)).rglob("d/*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    content = bytearray(victim.read_bytes())
    content[len(content) // 8] ^= 0xFF
    victim.write_bytes(content)


def remove_metadata(root, step):
    for path in (root / "checkpoints" / str(step)).rglob("*"):
        if path.is_file() and path.suffix != ".json":
            path.unlink()


def truncate_everything(root, step):
    for path in (root / "checkpoints" / str(step)).rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [damage_data, *exhaustive(remove_metadata, truncate_everything)])
def test_a_damaged_newest_is_named_and_set_aside(tmp_path, program, damage):
    first = open_checkpoints(tmp_path)
    for step in (1, 2):
        first.save(bumped(program, step), Position(step, 8 * step), eval_loss=1.0)
    first.close()
    damage(tmp_path, 2)
    warnings = []
    checkpoints = open_checkpoints(tmp_path)
    restored, position = checkpoints.restore(program.state, warnings.append)
    assert position == Position(1, 8)
    assert_equal(restored, bumped(program, 1))
    assert len(warnings) == 1 and "checkpoint 2 is damaged" in warnings[0]
    assert (tmp_path / "damaged" / "2.1").is_dir() and checkpoints.steps() == [1]
    checkpoints.save(bumped(program, 2), Position(2, 16))  # and the step can be written again
    checkpoints.close()
    assert checkpoints.steps() == [1, 2]


@pytest.mark.exhaustive
def test_a_first_checkpoint_that_cannot_be_read_back_is_an_error(tmp_path, program, monkeypatch):
    """Under a path with a wildcard Orbax writes no manifest, and says nothing."""
    folder = tmp_path / "[run1]"
    checkpoints = open_checkpoints(folder)
    with pytest.raises(
        UserError, match="checkpoint 1 in .* cannot be read back .*no checkpoint was saved. .* Choose another"
    ):
        checkpoints.save(first_state(program), Position(1, 8))
    assert checkpoints.steps() == [] and (folder / "damaged" / "1.1").is_dir()
    checkpoints.close()
    # Of a long one, arrays are opened when the time for values is over.
    monkeypatch.setattr(checkpoint, "READ_BACK_S", 0.0)
    checkpoints = open_checkpoints(tmp_path / "run")
    checkpoints.save(first_state(program), Position(1, 8))
    assert checkpoints.steps() == [1]
    folder = tmp_path / "run" / "checkpoints" / "1"
    checkpoint._read_from_disk(folder, math.inf)
    damage_data(tmp_path / "run", 1)
    checkpoint._read_from_disk(folder, 0.0)
    with pytest.raises(ValueError):
        checkpoint._read_from_disk(folder, math.inf)
    checkpoints.close()


@pytest.mark.parametrize("replaced", [False, *exhaustive(True)])
def test_a_run_directory_that_is_moved_is_noticed_at_the_next_save(tmp_path, program, replaced):
    checkpoints = open_checkpoints(tmp_path / "run")
    checkpoints.save(first_state(program), Position(1, 8))
    (tmp_path / "run").rename(tmp_path / "moved")
    if replaced:
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for write in (lambda: checkpoints.save(first_state(program), Position(2, 16)), checkpoints.wait):
        with pytest.raises(UserError, match="run/checkpoints was deleted or moved during the run: nothing more"):
            write()
    assert not list((tmp_path / "run").rglob("2*"))
    (tmp_path / "run").rename(tmp_path / "new") if replaced else None
    (tmp_path / "moved").rename(tmp_path / "run")
    checkpoints.save(first_state(program), Position(2, 16))
    checkpoints.close()
    assert checkpoints.steps() == [1, 2]


def test_a_lack_of_memory_is_no_damage(tmp_path, program, monkeypatch):
    def restore(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(first_state(program), Position(1, 8))
    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointHandler.restore", restore)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        checkpoints.restore(program.state, fail)
    assert checkpoints.steps() == [1]
    checkpoints.close()


def test_no_checkpoint_is_none(tmp_path, program):
    checkpoints = open_checkpoints(tmp_path)
    assert checkpoints.restore(program.state, fail) is None
    checkpoints.close()


def test_checksums_see_values_places_and_dtypes_but_not_the_mesh():
    x = jnp.arange(12.0).reshape(3, 4)
    base = checksums([x])
    assert checksums([x.at[1, 2].add(1e-6 * 8)]) != base
    assert checksums([x[::-1]]) != base and checksums([x.T.reshape(3, 4)]) != base
    assert checksums([x.astype(jnp.bfloat16)]) != base
    wide = jnp.arange(64.0)
    mesh = jax.make_mesh((8,), ("d",))
    split = jax.device_put(wide, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
    assert checksums([wide]) == checksums([split])


def test_keeping_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="train.keep=0"):
        Checkpoints(tmp_path, 0)
