"""A damaged entry of jax's persistent compilation cache is compiled again, replaced, and told in one line."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from bytescope.memory.devices.compile_cache import mend, remove_damaged

pytestmark = pytest.mark.quick


@pytest.fixture
def folder(tmp_path):
    """A cache of its own, for programs of any size."""
    names = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0,
             "jax_persistent_cache_min_entry_size_bytes": -1}
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compiled():
    def thrice(x):
        return 3 * x

    return float(jax.jit(thrice)(jnp.float32(2)))


def entries(folder):
    return {path.name: path.read_bytes() for path in folder.glob("jit_thrice-*-cache")}


@pytest.mark.parametrize("damage", [lambda content: content[: len(content) // 2], lambda content: b""])
def test_a_damaged_entry_is_replaced(folder, damage):
    assert compiled() == 6
    [(name, _)] = entries(folder).items()
    told = []
    for turn in range(2):
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
        with warnings.catch_warnings():
            mend(told.append)
            assert compiled() == 6
            assert len(told) == turn + 1 and told[-1].startswith(f"damaged entries of the compilation cache {folder}")
            assert compiled() == 6
        assert len(told) == turn + 1  # the entry is whole again


def test_whole_entries_stay(folder):
    assert compiled() == 6
    before = entries(folder)
    remove_damaged(folder, "jit_thrice")
    assert entries(folder) == before
