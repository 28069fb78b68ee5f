"""Compiled programs that tests of several folders read."""

import pytest

from bytescope.memory.devices.compiler import compile_lowered
from support import programs


def compiled(traced):
    return compile_lowered(traced.lower(), jaxpr=traced.jaxpr)


@pytest.fixture(scope="session")
def training_step(devices):
    """(the training step of support/programs.py, traced for one device; its compilation)."""
    traced = programs.trace_step(devices[:1])
    return traced, compiled(traced)


@pytest.fixture(scope="session")
def data_parallel(devices):
    """The compilation of the training step over 8 devices of the axis data: state whole, all activations recomputed."""
    return compiled(programs.trace_step(devices, "full"))


@pytest.fixture(scope="session")
def fully_sharded(devices):
    """The compilation of the training step over 8 devices of the axis data, whose state is sharded over them."""
    return compiled(programs.trace_step(devices, shard_state=True))
