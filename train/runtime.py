"""Settings of the process that must stand before jax starts its backend."""

import ctypes
import os
import sys
from pathlib import Path

from ml_collections import ConfigDict


def prepare(config: ConfigDict) -> None:
    """The compilation cache and, where asked, deterministic kernels. Call before any array exists."""
    if config.train.deterministic:
        # Bit-equal reruns on GPUs: no atomics in reductions and scatters, no timing-dependent kernel choice.
        flags = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    import jax

    if config.train.cache_dir != "none":
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headroom" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(config.train.cache_dir or default))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def return_freed_memory() -> None:
    """Gives the host memory that compiling left free back to the system.

    glibc keeps freed blocks in its arenas; after a compile that is some 200 MB which a CPU run would
    otherwise hold to its end beside its buffers. Does nothing where there is no glibc.
    """
    if sys.platform == "linux":
        try:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        except (OSError, AttributeError):  # another C library
            return
