"""Which jax platform this process should use, decided before jax starts its backends.

jax with the CUDA plugin installed logs a traceback about cuPTI on a machine without an NVIDIA
driver, unless the platform is named beforehand. So this module must not import jax, and a command
calls `choose_platform()` in its first lines. A user's program chooses its own platform: for that
program this module only hides the traceback.
"""

import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

from bytescope.memory.devices.host_memory import free_host_bytes
from bytescope.memory.units import GIB

# What a GPU's preallocation takes of the card when the user names no fraction: jax's own 0.75 leaves
# a quarter of the card idle, and 0.92 leaves NCCL, cuDNN and the CUDA context their share.
MEMORY_FRACTION = 0.92

# jax reads both spellings, and raises when both are set (jaxlib/xla_client.py).
FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

# XLA pins no more than 64 GiB of host memory for a GPU's buffers unless this says otherwise (gpu_helpers.cc,
# GetGpuHostAllocator): too little for the state of a large model or the activations of a long sequence. Its pool
# grows by regions of twice the size each, so it may pin up to twice what is used; a tenth is left to other processes.
HOST_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
HOST_SHARE = 0.9

# What the kernel driver of each accelerator leaves on the file system of the machine. /dev/dxg is the
# GPU of the Windows Subsystem for Linux; /dev/vfio and /dev/accel* are how Cloud TPU machines show chips.
DEVICE_NODES = {
    "cuda": ("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/dxg"),
    "rocm": ("/dev/kfd",),
    "tpu": ("/dev/accel0", "/dev/vfio/0", "/dev/vfio/1"),
}

# XLA runs what simulated devices do on a pool of one thread per device, and each collective under way holds a thread of
# every device that has come to it. Where a step has several at once the pool may run out, and all wait for ever.
THREADS_VARIABLE = "PJRT_NPROC"
THREADS_PER_DEVICE, MOST_THREADS = 8, 1024

# jax's own names for a GPU platform in JAX_PLATFORMS.
GPU_NAMES = {"cuda", "gpu"}


def accelerator(root: str = "/", env: MutableMapping[str, str] | None = None) -> str:
    """The accelerator whose driver this machine shows: "cuda", "rocm", "tpu" or "cpu" for none.

    A GPU hidden with an empty CUDA_VISIBLE_DEVICES (or -1) does not count. `root` is the file system to
    look in, for tests.
    """
    env = os.environ if env is None else env
    for platform, nodes in DEVICE_NODES.items():
        if platform == "cuda" and env.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
            continue
        if any((Path(root) / node.lstrip("/")).exists() for node in nodes):
            return platform
    return "tpu" if env.get("TPU_NAME") else "cpu"


def _is_no_missing_driver(record: logging.LogRecord) -> bool:
    """Returns False for the traceback that jax's CUDA plugin logs on a machine without a driver, else True."""
    error = record.exc_info[1] if record.exc_info else None
    return "cuPTI" not in str(error) or "xla_cuda" not in record.getMessage() or accelerator() == "cuda"


# At import, because jax logs the traceback when the program's first array starts the backends.
logging.getLogger("jax._src.xla_bridge").addFilter(_is_no_missing_driver)


def simulate_devices(targets: Iterable[str], env: MutableMapping[str, str] | None = None) -> None:
    """Gives the process as many CPU devices as the largest of `targets` like cpu:8 asks for, unless the user set
    a count. To be called before jax starts; the simulated devices share the host.
    """
    env = os.environ if env is None else env
    counts = [
        int(count)
        for name, _, count in (target.partition(":") for target in targets)
        if name == "cpu" and count.isdigit()
    ]
    if counts and "xla_force_host_platform_device_count" not in env.get("XLA_FLAGS", ""):
        env.setdefault("JAX_NUM_CPU_DEVICES", str(max(counts)))
    if simulated(env) > 1:
        give_threads(env)


def simulated(env: Mapping[str, str]) -> int:
    """How many CPU devices the environment asks jax for; 1 where it says nothing, or nothing that is a count."""
    asked = re.search(r"xla_force_host_platform_device_count=(\d+)", env.get("XLA_FLAGS", ""))
    count = asked[1] if asked else env.get("JAX_NUM_CPU_DEVICES", "")
    return max(int(count), 1) if count.isdecimal() else 1


def give_threads(env: MutableMapping[str, str] | None = None) -> None:
    """Gives XLA's pools threads for the collectives of its CPU devices, unless the user set their number.

    To be called before jax starts, where devices of the CPU send to each other: several are simulated, or several
    processes have some each.
    """
    env = os.environ if env is None else env
    count = min(THREADS_PER_DEVICE * simulated(env), MOST_THREADS)
    env.setdefault(THREADS_VARIABLE, str(max(count, os.cpu_count() or 1)))


def choose_platform(root: str = "/", env: MutableMapping[str, str] | None = None) -> str:
    """Settles JAX_PLATFORMS and the GPU's memory fraction before jax starts; returns what will be used.

    With JAX_PLATFORMS unset and no accelerator in sight it becomes "cpu"; a choice the user made is left
    alone. XLA_PYTHON_CLIENT_MEM_FRACTION becomes 0.92 where a GPU will be used and the user set neither
    spelling of it, and XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB nine tenths of the host memory that is free. Simulated
    devices get threads (`give_threads`). Calling it twice, or after `import jax` but before the first array, is fine.

    Returns "cpu", "cuda", "rocm" or "tpu", or the first name in the user's own JAX_PLATFORMS.
    """
    env = os.environ if env is None else env
    chosen = env.get("JAX_PLATFORMS", "").split(",")[0].strip() or env.get("JAX_PLATFORM_NAME", "")
    platform = chosen or accelerator(root, env)
    if not chosen and platform == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
        if env is os.environ and "jax" in sys.modules:  # jax read the variable when it was imported
            sys.modules["jax"].config.update("jax_platforms", "cpu")
    if platform == "cpu" and simulated(env) > 1:
        give_threads(env)
    if platform in GPU_NAMES and not any(env.get(name) for name in FRACTION_VARIABLES):
        env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(MEMORY_FRACTION)
    if platform in GPU_NAMES and not env.get(HOST_LIMIT_VARIABLE):
        env[HOST_LIMIT_VARIABLE] = str(max(int(HOST_SHARE * free_host_bytes(root) / GIB), 1))
    return platform


def memory_fraction(env: MutableMapping[str, str] | None = None) -> float:
    """The share of a GPU that jax's allocator may take: the user's fraction, else 0.92.

    1.0 for the `platform` allocator, which asks CUDA for each buffer and keeps no pool. A value that is not a number is
    jax's error to raise; here it reads as unset.
    """
    env = os.environ if env is None else env
    if env.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform":
        return 1.0
    for name in FRACTION_VARIABLES:
        try:
            return float(env[name])
        except (KeyError, ValueError):
            continue
    return MEMORY_FRACTION
