"""Where the compilation cache is used, and where its programs would hang."""

import os

import jax
import pytest

from bytescope.configs import tiny
from bytescope.memory.devices.platform import THREADS_VARIABLE
from bytescope.train.run import runtime

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("platform", "devices", "processes", "cached"), [
    ("cpu", "1", 1, True), ("cpu", "8", 1, False), ("cpu", "1", 2, False), ("cuda", "8", 1, True),
    ("cuda", "1", 2, True)])
def test_programs_over_several_cpu_devices_do_not_come_from_a_cache(
        tmp_path, monkeypatch, capsys, platform, devices, processes, cached):
    """XLA reads them without the order of their collectives: the devices would wait for each other for ever."""
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", devices)
    monkeypatch.setenv("XLA_FLAGS", "")
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
        monkeypatch.setenv(name, "1")  # what a GPU would have set is not left behind
    monkeypatch.delenv(THREADS_VARIABLE)
    config = tiny.get_config()
    config.train.cache_dir = str(tmp_path / "asked")
    assert jax.config.jax_compilation_cache_dir is None  # the test before has left none on
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "of the environment"))
    runtime.prepare(config, processes)
    assert jax.config.jax_compilation_cache_dir == (str(tmp_path / "asked") if cached else None)
    assert ("asked is not used" in capsys.readouterr().err) == (not cached)
    assert (THREADS_VARIABLE in os.environ) == (not cached)
