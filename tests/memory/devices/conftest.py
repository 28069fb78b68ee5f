"""What the tests of this folder share."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture
def folder(tmp_path):
    """jax's persistent compilation cache in a folder of its own, for programs of any size."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
