"""Settings of the process that must stand before jax starts its backend."""

import contextlib
import ctypes
import gc
import inspect
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

SETTLE_S = 0.5  # for threads to end that a failed read left behind


def prepare(config: ConfigDict) -> None:
    """The compilation cache and, where asked, deterministic kernels. Call before any array exists."""
    if config.train.deterministic:
        # Bit-equal reruns on GPUs: no atomics in reductions and scatters, no timing-dependent kernel choice.
        flags = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    import jax

    if config.train.cache_dir != "none":
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bytescope" / "xla"
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


class Held:
    """Standard error of a `with` block, held back: shown at its end unless `drop` was set."""

    drop = False


@contextlib.contextmanager
def stderr_held() -> Iterator[Held]:
    """For a call whose failure is told in one line: a library's threads go on about reads that nobody waits for
    any more, each with a traceback, some of them only when the failed coroutine is collected."""
    sys.stderr.flush()
    held, screen = Held(), os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield held
        finally:
            if held.drop:
                sys.unraisablehook = _but_coroutines  # some are collected only later
                gc.collect()
                time.sleep(SETTLE_S)
            sys.stderr.flush()
            os.dup2(screen, 2)
            os.close(screen)
            file.seek(0)
            if not held.drop:
                os.write(2, file.read())


def _but_coroutines(unraisable: Any) -> None:
    """Says what could not be raised, except by a coroutine that was given up with the read it belonged to."""
    if not inspect.iscoroutine(unraisable.object):
        sys.__unraisablehook__(unraisable)
