"""Checkpoints: what was saved comes back, on any mesh; damage is noticed, named and set aside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import small_program

from train.checkpoint import Checkpoints, Position, checksums
from train.errors import UserError


@pytest.fixture(scope="module")
def program():
    return small_program({"model.n_layers": 1})


def bumped(program, amount):
    return jax.tree.map(lambda leaf: leaf + jnp.asarray(amount, leaf.dtype), program.init())


def open_checkpoints(path, keep=3):
    return Checkpoints(path, keep)


def assert_equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def fail(text):
    raise AssertionError(text)


@pytest.mark.parametrize(("mesh", "devices"), [({}, 1), ({"mesh.data": 1, "mesh.fsdp": 4}, 4),
                                               ({"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}, 8)], ids=str)
def test_round_trip_on_another_mesh(tmp_path, program, mesh, devices):
    checkpoints = open_checkpoints(tmp_path)
    state = bumped(program, 3)
    checkpoints.save(state, Position(5, 40))
    checkpoints.wait()
    other = small_program({"model.n_layers": 1, **mesh}, devices)
    restored, position = checkpoints.restore(other.state, fail)
    assert position == Position(5, 40)
    assert_equal(restored, state)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, other.state)
    checkpoints.close()


def test_unrolled_layers_come_back_too(tmp_path):
    program = small_program({"model.scan": False, "model.n_layers": 2})
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(program.init(), Position(1, 8))
    checkpoints.wait()
    assert_equal(checkpoints.restore(program.state, fail)[0], program.init())
    checkpoints.close()


def test_newest_and_best_are_kept(tmp_path, program):
    checkpoints = open_checkpoints(tmp_path, keep=2)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 2.5)):
        checkpoints.save(program.init(), Position(step, step), loss)
    checkpoints.wait()
    assert checkpoints.steps() == [2, 4, 5]
    checkpoints.close()


def damage_data(root, step):
    """Flips one byte of the largest data file: Orbax alone would not notice."""
    victim = max((path for path in (root / "checkpoints" / str(step)).rglob("*") if path.is_file()),
                 key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 0xFF
    victim.write_bytes(content)


def remove_metadata(root, step):
    for path in (root / "checkpoints" / str(step)).rglob("*"):
        if path.is_file() and path.suffix != ".json":
            path.unlink()


def truncate_everything(root, step):
    for path in (root / "checkpoints" / str(step)).rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [damage_data, remove_metadata, truncate_everything])
def test_a_damaged_newest_is_named_and_set_aside(tmp_path, program, damage):
    first = open_checkpoints(tmp_path)
    for step in (1, 2):
        first.save(bumped(program, step), Position(step, 8 * step))
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
