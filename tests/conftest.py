"""Tests run on the CPU everywhere, on 8 simulated devices, with rank promotion forbidden."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
# LLVM's optimizations double the time of the tests and change no buffer.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
# Compiled for this machine's own processor each time; nothing from an older run is trusted.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

import jax
import pytest

from support import oracles

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--require-oracles", default="", metavar="NAMES",
                     help=f"a missing one of these fails instead of skipping: {','.join(oracles.ORACLES)}")


def pytest_configure(config):
    asked = set(filter(None, config.getoption("--require-oracles").split(",")))
    if unknown := asked - set(oracles.ORACLES):
        raise pytest.UsageError(f"--require-oracles={','.join(sorted(unknown))}: of {', '.join(oracles.ORACLES)}")
    oracles.required.update(asked)


def pytest_runtest_setup(item):
    oracles.require(*(name for mark in item.iter_markers("oracle") for name in mark.args))


@pytest.fixture(scope="session")
def devices():
    """The 8 simulated CPU devices."""
    found = jax.devices()
    assert len(found) == 8, found
    return found
