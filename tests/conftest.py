"""Tests run on the CPU everywhere, on 8 simulated devices, with rank promotion forbidden."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from importlib import metadata
from pathlib import Path

from support import oracles, times

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
# Code for the CPU that is cheaper to compile and as exact: half the time without LLVM's optimizations, a fifth of that
# without XLA's emitters of fusions, which jaxlib 0.10 can leave out, and less again where a program is not cut into
# parts for as many threads. None of it changes a buffer.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_use_fusion_emitters=false" if metadata.version("jaxlib").startswith("0.10.") else "",
    )
).strip()
# Threads for the collectives of simulated devices, as commands have them (memory/devices/platform.py); and devices that
# wait for a core, on a machine with more to do, are not taken for a deadlock.
os.environ["PJRT_NPROC"] = "64"
os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=180"
# Python writes bytecode. Otherwise each command in a process of its own would compile this package and its imports
# again, and each worker of pytest-xdist would compile the tests.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
# What is printed is as wide as without a terminal, wherever the tests run.
os.environ.pop("COLUMNS", None)
# Compiled for this machine's own processor each time; nothing from an older run is trusted, and nothing is left there.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="bytescope-tests-")
os.environ.update(oracles.without_assembler(Path(os.environ["XDG_CACHE_HOME"], "cuda")))

import jax
import pytest
from hypothesis import Phase, settings
from jax.experimental.compilation_cache import compilation_cache

sys.dont_write_bytecode = False  # for the modules that are imported from here on

# A suite that is started in the background, or by nohup, would hand its ignored signals on to all that it starts.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

jax.config.update("jax_numpy_rank_promotion", "raise")
# A failure is shown as it was found: looking for a smaller one compiles a hundred programs more.
# `pytest --hypothesis-profile=default` looks for it.
settings.register_profile("as found", phases=(Phase.explicit, Phase.reuse, Phase.generate))
settings.load_profile("as found")
# Tracing makes many objects, few of them garbage: the collector looks less often (a twentieth of the suite's time).
gc.set_threshold(200_000, 50, 100)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One Chromium for all tests of a process; each page that it opens starts anew."""
    from support.pages.chromium import Browser

    with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


def pytest_addoption(parser):
    parser.addoption(
        "--require-oracles",
        default="",
        metavar="NAMES",
        help=f"a missing one of these fails instead of skipping: {','.join(oracles.ORACLES)}",
    )
    parser.addoption(
        "--times", default=None, type=Path, metavar="FILE", help="write the CPU seconds of each test to FILE as JSON"
    )


def pytest_configure(config):
    asked = set(filter(None, config.getoption("--require-oracles").split(",")))
    if unknown := asked - set(oracles.ORACLES):
        raise pytest.UsageError(f"--require-oracles={','.join(sorted(unknown))}: of {', '.join(oracles.ORACLES)}")
    oracles.required.update(asked)
    marks = config.option.markexpr
    if marks and "exhaustive" not in marks:  # `-m quick` leaves out what is exhaustive too
        config.option.markexpr = f"({marks}) and not exhaustive"
    if config.option.times:
        config.pluginmanager.register(times.Times(config, config.option.times))
    if hasattr(config.option, "loadscopereorder"):  # pytest-xdist would put the files with most tests first
        config.option.loadscopereorder = False


def pytest_unconfigure():
    gc.freeze()  # pytest, jax and Python look for garbage before the process ends: seconds for all that jax has cached
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def pytest_runtest_setup(item):
    oracles.require(*(name for mark in item.iter_markers("oracle") for name in mark.args))


def pytest_collection_modifyitems(items):
    """The quick tests first: a mistake shows before anything long has compiled.

    Then the files that need an oracle, which take longest: the last ones of two workers are to end at the same time.
    """
    long = {item.path for item in items if item.get_closest_marker("oracle")}
    items.sort(key=lambda item: (item.get_closest_marker("quick") is None, item.path not in long))


def pytest_terminal_summary(terminalreporter):
    """Seconds of each folder, so that what a suite costs is seen where it grows, and of the default and the exhaustive
    set; those of several workers are added up."""
    seconds: Counter[str] = Counter()
    sets: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration") and hasattr(report, "nodeid"):
                seconds[str(Path(report.nodeid.split("::")[0]).parent)] += report.duration
                sets["exhaustive" if "exhaustive" in report.keywords else "default"] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("seconds by folder")
        for folder, spent in seconds.most_common():
            terminalreporter.write_line(f"{spent:8.1f}  {folder}")
        for name, spent in sets.items():
            terminalreporter.write_line(f"{spent:8.1f}  all tests of the {name} set")


@pytest.fixture(autouse=True)
def no_compilation_cache():
    """What a command in this process left on: a program out of jax's cache is another than a compiled one."""
    yield
    if jax.config.jax_compilation_cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module", name="assembler")
def real_assembler():
    """Compiles GPU programs to machine code, as for a real GPU. Without this fixture, no machine code is made
    (memory/devices/machine_code.py, and support/oracles.py for compiles that do not go through it)."""
    from bytescope.memory.devices import machine_code

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(oracles.ASSEMBLE, "1")
        patch.setattr(machine_code, "options_without", lambda device: {})
        yield


@pytest.fixture(scope="session")
def devices():
    """The 8 simulated CPU devices."""
    found = jax.devices()
    assert len(found) == 8, found
    return found
