"""Devices that are not here, from the plugins of jax that compile for them."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from typing import Any

from bytescope.memory.devices.chips import CUDA_13_FROM, Chip, target_config
from bytescope.memory.devices.compiler_log import kept_back
from bytescope.memory.devices.platform import accelerator
from bytescope.memory.errors import ReportError, one_line
from bytescope.memory.hlo.jax_types import JaxDevice

# The CUDA plugins of jax that can compile for a described GPU, and the CUDA version each describes.
CUDA_PLUGINS = {"xla_cuda13": (13, 0), "xla_cuda12": (12, 9)}

# libtpu looks for a TPU machine around it and takes a lock file; none of it matters to a compiler.
_LIBTPU_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


def local_gpus() -> tuple[str, int]:
    """(device_kind, number) of this machine's NVIDIA GPUs, by NVML; a machine has one kind.

    Raises pynvml's errors without a driver.
    """
    import pynvml

    pynvml.nvmlInit()
    kind = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    return kind.decode() if isinstance(kind, bytes) else kind, pynvml.nvmlDeviceGetCount()


def gpu_devices(name: str, chip: Chip, shape: tuple[int, ...]) -> list[JaxDevice]:
    """Described GPUs, compile-only jax devices: `shape` is (hosts, devices per host).

    Raises ReportError without the extra that compiles for them, and where its compiler refuses them.
    """
    if chip.gpu is None:
        raise ReportError(f"target {name}: the table of chips lacks the shape of this GPU")
    old = chip.gpu.capability < CUDA_13_FROM
    able = [plugin for plugin, version in CUDA_PLUGINS.items() if version < (13, 0) or not old]
    found = [plugin for plugin in able if installed(f"jax_plugins.{plugin}")]
    if not found and old:
        major, minor = chip.gpu.capability
        raise ReportError(
            f"target {name}: CUDA 13 no longer compiles for sm_{major}{minor}; in an environment of "
            "its own, pip install 'bytescope[cuda12]' (it needs no GPU)"
        )
    if not found:
        raise ReportError(f"target {name}: no CUDA compiler here; pip install 'bytescope[cuda]' (it needs no GPU)")
    topology = f"1x{shape[0]}x{shape[1]}"  # slices x hosts x devices
    config = target_config(chip, CUDA_PLUGINS[found[0]])
    _register_without_gpu(f"jax_plugins.{found[0]}")
    return _topology(name, "cuda", topology=topology, target_config=config)


def _register_without_gpu(plugin: str) -> None:
    """Makes jax take a CUDA plugin on a machine without a GPU.

    jax asks the libraries that need a driver for their versions, and leaves the plugin out when they do not answer,
    unless JAX_PLATFORMS names other platforms alone. That has happened already where the program made arrays before.
    """
    if accelerator() == "cuda":
        return
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    from jax._src import xla_bridge  # nothing public tells which plugins jax took

    if getattr(xla_bridge, "_plugins_registered", False) and "cuda" not in xla_bridge._backend_factories:
        importlib.import_module(plugin).initialize()


def tpu_devices(name: str, chip: Chip, shape: tuple[int, ...]) -> list[JaxDevice]:
    """Described TPUs, compile-only jax devices: `shape` is chips along each axis.

    Raises ReportError without the extra that compiles for them, and where its compiler refuses them.
    """
    if not installed("libtpu"):
        raise ReportError(f"target {name}: no TPU compiler here; pip install 'bytescope[tpu]' (it needs no TPU)")
    if accelerator() != "tpu":  # on a TPU machine these describe the real one
        for variable, value in _LIBTPU_QUIET.items():
            os.environ.setdefault(variable, value)
    bounds = {"chips_per_host_bounds": [1, 1, 1]} if math.prod(shape) == 1 else {}
    return _topology(name, "tpu", name=f"{chip.name}:{'x'.join(map(str, shape))}", **bounds)


def _topology(target: str, platform: str, *, name: str | None = None, **options: Any) -> list[JaxDevice]:
    from jax.experimental import topologies

    with kept_back():
        try:
            return topologies.get_topology_desc(name or target, platform=platform, **options).devices
        except Exception as error:  # the plugins raise RuntimeError, NotImplementedError and kinds of their own
            refused = error
    reason = one_line(refused, 160)
    extra = {"cuda": "cuda", "tpu": "tpu"}[platform]
    raise ReportError(
        f"target {target}: the {platform} compiler refused it ({reason}); pip install -U 'bytescope[{extra}]'"
    ) from refused


def installed(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that would hold it is missing
        return False
