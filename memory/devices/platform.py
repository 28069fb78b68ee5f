"""Chooses the jax platform of this process before jax starts its backends.

On a machine without an NVIDIA driver, jax with the CUDA plugin logs a traceback about cuPTI unless the platform is
already set. So this module must not import jax, and commands call `choose_platform()` in their first lines. A user's
program chooses its platform itself; for it, this module only hides the traceback.
"""

import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from bytescope.memory import environment
from bytescope.memory.devices import cuda_plugins
from bytescope.memory.host.node_memory import free_host_bytes
from bytescope.memory.units import GIB


class MemoryFraction(NamedTuple):
    """The fraction (0 to 1) of a GPU's memory that is in the pool of jax's allocator, and what set it, for messages."""

    value: float
    source: str


# What jax takes if no variable sets another fraction (xla_gpu_allocator_config.h, memory_fraction).
JAX_FRACTION = MemoryFraction(0.75, "jax's default")

# A fraction that a training run can use: the rest is enough for NCCL, cuDNN and the CUDA context.
MEMORY_FRACTION = 0.92

# jax reads both names, and raises if both are set (jaxlib/xla_client.py).
FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

# The value that `choose_platform` wrote to XLA_PYTHON_CLIENT_MEM_FRACTION. Child processes inherit both variables, and
# must not take the value for one that the user set.
OWN_FRACTION_VARIABLE = "BYTESCOPE_MEM_FRACTION"

# Without this variable, XLA pins at most 64 GiB of host memory for a GPU's buffers (gpu_helpers.cc,
# GetGpuHostAllocator), which is too little for the state of a large model or the activations of a long sequence. Each
# new region of XLA's pool doubles in size, so it may pin up to twice the used bytes. A tenth is left for others.
HOST_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
HOST_SHARE = 0.9
PREALLOCATE_HOST_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
# The limit that `choose_platform` wrote to HOST_LIMIT_VARIABLE, which is not a value that the user set.
OWN_HOST_LIMIT_VARIABLE = "BYTESCOPE_HOST_LIMIT_GB"

# Files of each accelerator's kernel driver. /dev/dxg is the GPU of the Windows Subsystem for Linux; /dev/vfio and
# /dev/accel* are the chips of Cloud TPU machines.
DEVICE_NODES = {
    "cuda": ("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/dxg"),
    "rocm": ("/dev/kfd",),
    "tpu": ("/dev/accel0", "/dev/vfio/0", "/dev/vfio/1"),
}

# XLA runs simulated devices on a pool of one thread per device, and each collective in progress holds a thread of every
# device that has reached it. With several concurrent collectives the pool may run out, and all devices wait forever.
THREADS_VARIABLE = "PJRT_NPROC"
THREADS_PER_DEVICE, MAX_THREADS = 8, 1024

# jax's own names for a GPU platform in JAX_PLATFORMS.
GPU_NAMES = {"cuda", "gpu"}


def accelerator(root: str = "/", env: Mapping[str, str] | None = None) -> str:
    """Returns the kind of accelerator whose driver is installed on this machine: "cuda", "rocm" or "tpu"; "cpu" if
    there is none.

    GPUs do not count if CUDA_VISIBLE_DEVICES hides them (empty or -1). root: the root of the file system to read, for
    tests.
    """
    for platform, nodes in DEVICE_NODES.items():
        if platform == "cuda" and environment.hides_gpus(env):
            continue
        if any((Path(root) / node.lstrip("/")).exists() for node in nodes):
            return platform
    return "tpu" if environment.text("TPU_NAME", env) else "cpu"


def _is_no_missing_driver(record: logging.LogRecord) -> bool:
    """A logging filter that removes the tracebacks that jax's plugins for GPUs log on a machine without a driver.
    Returns True for all other records."""
    error = record.exc_info[1] if record.exc_info else None
    if "No AMD GPUs were found" in str(error):
        return accelerator() == "rocm"
    return "cuPTI" not in str(error) or "xla_cuda" not in record.getMessage() or accelerator() == "cuda"


# The filter is added at import, because jax logs the traceback when the program's first array starts the backends.
logging.getLogger("jax._src.xla_bridge").addFilter(_is_no_missing_driver)


def simulate_devices(targets: Iterable[str], env: MutableMapping[str, str] | None = None) -> None:
    """Makes jax simulate as many CPU devices as the largest target of the form `cpu:N` needs. A number set by the user
    is not changed.

    Must be called before jax starts.
    """
    env = environment.variables(env)
    counts = []
    for target in targets:
        name, _, count = target.partition(":")
        if name == "cpu" and count.isdigit():
            counts.append(int(count))
    if counts and "xla_force_host_platform_device_count" not in environment.xla_flags(env):
        env.setdefault(environment.CPU_DEVICES, str(max(counts)))
    if simulated(env) > 1:
        give_threads(env)


def simulated(env: Mapping[str, str] | None = None) -> int:
    """Returns the number of CPU devices that the environment variables request from jax; 1 if none or an invalid
    number is requested."""
    asked = re.search(r"xla_force_host_platform_device_count=(\d+)", environment.xla_flags(env))
    count = asked[1] if asked else environment.text(environment.CPU_DEVICES, env)
    return max(int(count), 1) if count.isdecimal() else 1


def give_threads(env: MutableMapping[str, str] | None = None) -> None:
    """Sets the size of XLA's thread pools so that CPU devices can run collectives. A size set by the user is not
    changed.

    Must be called before jax starts. It is needed if CPU devices exchange data, whether they are simulated or belong
    to several processes.
    """
    env = environment.variables(env)
    count = min(THREADS_PER_DEVICE * simulated(env), MAX_THREADS)
    env.setdefault(THREADS_VARIABLE, str(max(count, os.cpu_count() or 1)))


def choose_platform(root: str = "/", env: MutableMapping[str, str] | None = None, fraction: float | None = None) -> str:
    """Sets the environment variables that decide on which platform jax runs. Must be called before jax creates the
    first array. Returns the platform: "cpu", "cuda", "rocm" or "tpu", or the first name in the user's JAX_PLATFORMS.

    Variables that the user set are not changed. Without an accelerator, JAX_PLATFORMS becomes "cpu". If it is "cpu",
    jax does not load its CUDA plugins when it starts (`cuda_plugins.defer`). For a GPU,
    XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB becomes nine tenths of the free host memory, and XLA_PYTHON_CLIENT_MEM_FRACTION
    becomes `fraction`; if it is None, jax's default remains. For simulated devices, the size of XLA's thread pools is
    set (`give_threads`). The function may be called again.

    root: the root of the file system to read, for tests. env: the environment to change (default: that of this
    process). fraction: fraction of a GPU's memory for jax's pool.
    """
    is_own = env is None
    env = environment.variables(env)
    chosen = env.get(environment.PLATFORMS, "").split(",")[0].strip() or env.get("JAX_PLATFORM_NAME", "")
    platform = chosen or accelerator(root, env)
    if not chosen and platform == "cpu":
        env[environment.PLATFORMS] = "cpu"
        if is_own and "jax" in sys.modules:  # jax read the variable when it was imported
            sys.modules["jax"].config.update("jax_platforms", "cpu")
    if is_own and env.get(environment.PLATFORMS) == "cpu":
        cuda_plugins.defer()
    if platform == "cpu" and simulated(env) > 1:
        give_threads(env)
    if fraction and platform in GPU_NAMES and not any(env.get(name) for name in FRACTION_VARIABLES):
        env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = env[OWN_FRACTION_VARIABLE] = str(fraction)
    if platform in GPU_NAMES and not env.get(HOST_LIMIT_VARIABLE):
        limit = str(max(int(HOST_SHARE * free_host_bytes(root) / GIB), 1))
        env[HOST_LIMIT_VARIABLE] = env[OWN_HOST_LIMIT_VARIABLE] = limit
    return platform


def allocates_singly(env: Mapping[str, str] | None = None) -> bool:
    """Returns whether the user chose jax's `platform` allocator. It has no pool: it requests each buffer from CUDA."""
    return environment.text("XLA_PYTHON_CLIENT_ALLOCATOR", env).lower() == "platform"


def pool_can_grow(env: Mapping[str, str] | None = None) -> bool:
    """Returns whether the user chose jax's `cuda_async` allocator. It requests each buffer from a pool of CUDA. This
    pool takes the memory fraction at its start, but grows up to the whole GPU if a program needs more: XLA passes the
    fraction as the pool's release threshold, not as its maximum (gpu_cudamallocasync_allocator.cc).

    XLA's out-of-memory message recommends TF_GPU_ALLOCATOR=cuda_malloc_async instead, which TensorFlow reads and jax
    does not.
    """
    return environment.text("XLA_PYTHON_CLIENT_ALLOCATOR", env).lower() == "cuda_async"


def user_fraction(env: Mapping[str, str] | None = None) -> MemoryFraction | None:
    """Returns the fraction of a GPU's memory that the user's environment sets for jax's pool. Returns None if it sets
    none.

    A value that is not a number is ignored here, because jax raises an error for it. A value that `choose_platform` set
    is not the user's.
    """
    own = environment.text(OWN_FRACTION_VARIABLE, env)
    for name in FRACTION_VARIABLES:
        text = environment.text(name, env)
        if not text or (name == "XLA_PYTHON_CLIENT_MEM_FRACTION" and text == own):
            continue
        try:
            return MemoryFraction(float(text), name)
        except ValueError:
            continue
    return None
