"""Loads jax's CUDA plugins only in processes that need them.

jax loads every installed plugin when it starts, even if JAX_PLATFORMS is "cpu". The CUDA plugin and NVIDIA's libraries
then take 350 MiB of host memory in a process that never uses them (jax 0.10.2 with CUDA 13). To compile for GPUs that
are not present, a process needs the plugin (80 MiB), but not the libraries of NVIDIA that jax loads before the plugin
(270 MiB).

This module does not import jax until a plugin is registered.
"""

import functools
import importlib
import logging
import sys

from bytescope.memory import environment

# jax's CUDA plugins that compile for a described GPU -> CUDA version of the described runtime.
CUDA_PLUGINS = {"xla_cuda13": (13, 0), "xla_cuda12": (12, 9)}
# Python raises ModuleNotFoundError when a module is imported whose value in `sys.modules` is None.
_DEFERRED = {f"jax_plugins.{plugin}": None for plugin in CUDA_PLUGINS}


def defer() -> None:
    """Keeps jax from loading its CUDA plugins when jax starts. `register` can load a plugin later. No-op for a plugin
    that is already imported."""
    for name in _DEFERRED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # Python's own convention


def make_importable() -> None:
    """Makes the CUDA plugins importable again after `defer`."""
    for name in _DEFERRED:
        if name in sys.modules and sys.modules[name] is None:
            del sys.modules[name]


def register(plugin: str, gpu_present: bool) -> None:
    """Makes jax register a CUDA plugin: when jax starts, or now if jax has started already.

    When jax starts, it checks the versions of NVIDIA's libraries. Some of the libraries need a driver, so without a GPU
    the check fails, and jax drops the plugin, unless JAX_PLATFORMS names only other platforms. Without a GPU, this
    function therefore sets JAX_SKIP_CUDA_CONSTRAINTS_CHECK, which skips the check, and lets jax load only cuDNN before
    the plugin, because the compiler uses no other library of NVIDIA.

    Args:
        plugin: a key of `CUDA_PLUGINS`.
        gpu_present: whether this machine has an NVIDIA GPU.
    """
    from jax._src import xla_bridge  # no public API registers a plugin

    make_importable()
    started, factories = getattr(xla_bridge, "_plugins_registered", False), xla_bridge._backend_factories
    if "cuda" in factories or (gpu_present and not started):
        return
    module = importlib.import_module(f"jax_plugins.{plugin}")
    if not gpu_present:
        environment.set_defaults({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"})
        if hasattr(module, "_load"):
            load_cudnn = functools.partial(module._load, "cudnn", ["libcudnn.so.9"])
            setattr(module, "_load_nvidia_libraries", load_cudnn)  # noqa: B010  # no attribute that mypy knows
    if started:
        module.initialize()
        for callback in xla_bridge._plugin_callbacks:  # such as the registration of custom partitioners
            callback(c_api=factories["cuda"].c_api)


def _is_not_deferred(record: logging.LogRecord) -> bool:
    """A logging filter: returns False for jax's warning that a plugin does not exist, if `defer` has postponed loading
    this plugin, so that the warning is not printed. Returns True for all other records."""
    deferred = [name for name in _DEFERRED if name in sys.modules and sys.modules[name] is None]
    return not ("does not exist" in str(record.msg) and any(name in record.getMessage() for name in deferred))


logging.getLogger("jax._src.xla_bridge").addFilter(_is_not_deferred)
