"""Where the compilation cache is used, and where its programs would hang; limits under which jax would abort."""

import os
import resource
import subprocess
import sys

import jax
import pytest

from bytescope.configs import tiny
from bytescope.memory.devices.platform import THREADS_VARIABLE
from bytescope.train.launch import runtime
from bytescope.train.user_errors import DoesNotFit

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("platform", "devices", "processes", "cached"),
    [
        ("cpu", "1", 1, True),
        ("cpu", "8", 1, False),
        ("cpu", "1", 2, False),
        ("cuda", "8", 1, True),
        ("cuda", "1", 2, True),
    ],
)
def test_programs_over_several_cpu_devices_do_not_come_from_a_cache(
    tmp_path, monkeypatch, capsys, platform, devices, processes, cached
):
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
    runtime.prepare(deterministic=config.train.deterministic, cache_dir=config.train.cache_dir, processes=processes)
    assert jax.config.jax_compilation_cache_dir == (str(tmp_path / "asked") if cached else None)
    assert ("asked is not used" in capsys.readouterr().err) == (not cached)
    assert (THREADS_VARIABLE in os.environ) == (not cached)


@pytest.fixture
def file_limit():
    """Sets the soft limit of open files; afterwards it is as before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_of_open_files_is_raised(file_limit):
    file_limit(200)
    runtime.raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 200


def test_a_cgroup_without_memory_for_a_start_is_refused(monkeypatch):
    monkeypatch.setattr(runtime, "cgroup_room", lambda: 200 * 2**20)
    with pytest.raises(DoesNotFit, match="200.00 MiB are left under the memory limit of this process's cgroup, but"):
        runtime.check_limits()
    monkeypatch.setattr(runtime, "cgroup_room", lambda: None)
    runtime.check_limits()


def test_too_little_address_space_is_refused():
    script = (
        "import resource; from bytescope.train.launch import runtime; "
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)); runtime.check_limits()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "DoesNotFit: ulimit -v 1048576 (1.00 GiB) is too little address space to start jax" in done.stderr
