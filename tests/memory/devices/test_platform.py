"""Simulated CPU devices: as many as a target asks for, with threads for their collectives."""

import logging

import pytest

from bytescope.memory.devices import platform
from bytescope.memory.devices.platform import simulate_devices


def test_simulated_devices_are_as_many_as_the_target_asks():
    for targets, env, count in (
        (["cpu:8"], {}, "8"),
        (["cpu:2", "cpu:4", "h100:8"], {}, "4"),
        (["h200"], {}, None),
        (["cpu:8"], {"JAX_NUM_CPU_DEVICES": "2"}, "2"),
        (["cpu:8"], {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, None),
    ):
        simulate_devices(targets, env)
        assert env.get("JAX_NUM_CPU_DEVICES") == count


@pytest.mark.quick
@pytest.mark.parametrize(
    ("driver", "error", "said"),
    [
        ("cpu", "Unable to load cuPTI. Is it installed?", 0),
        ("cuda", "Unable to load cuPTI. Is it installed?", 1),
        ("cpu", "cuDNN is too old", 1),
        ("cpu", "No AMD GPUs were found, skipping ROCm plugin initialization", 0),
        ("rocm", "No AMD GPUs were found, skipping ROCm plugin initialization", 1),
    ],
)
def test_the_traceback_of_a_missing_driver_is_not_logged(driver, error, said, monkeypatch, caplog):
    monkeypatch.setattr(platform, "accelerator", lambda: driver)
    try:
        raise RuntimeError(error)
    except RuntimeError:  # as jax's own discovery of plugins
        logging.getLogger("jax._src.xla_bridge").exception(
            "Exception when calling %s.initialize()", "jax_plugins.xla_cuda13"
        )
    assert len(caplog.records) == said


def test_simulated_devices_get_threads_for_their_collectives(tmp_path, monkeypatch):
    """With one a device, collectives that are under way at once take them all, and the devices wait for ever."""
    monkeypatch.setattr(platform.os, "cpu_count", lambda: 4)
    for env, threads in (
        ({"JAX_NUM_CPU_DEVICES": "8"}, "64"),
        ({}, None),
        ({"JAX_NUM_CPU_DEVICES": "1"}, None),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}, "16"),
        ({"JAX_NUM_CPU_DEVICES": "many"}, None),
        ({"JAX_NUM_CPU_DEVICES": "512"}, "1024"),
        ({"JAX_NUM_CPU_DEVICES": "8", "PJRT_NPROC": "9"}, "9"),
    ):
        platform.choose_platform(str(tmp_path), env)
        assert env.get(platform.THREADS_VARIABLE) == threads
    platform.simulate_devices(["cpu:2"], simulated := {})
    platform.give_threads(alone := {})
    assert (simulated[platform.THREADS_VARIABLE], alone[platform.THREADS_VARIABLE]) == ("16", "8")
