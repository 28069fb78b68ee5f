"""Checks process limits and applies settings before jax starts, and works around two library problems."""

import contextlib
import gc
import inspect
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from bytescope.memory import environment
from bytescope.memory.devices.platform import MEMORY_FRACTION, MemoryFraction, choose_platform, give_threads, simulated
from bytescope.memory.files import cache_folder
from bytescope.memory.host.node_memory import address_space_limit, cgroup_room
from bytescope.memory.units import human
from bytescope.train.user_errors import DoesNotFit

# The part of a GPU's memory that this trainer gives to jax's pool, when it runs and when a program is only compiled.
TRAIN_FRACTION = MemoryFraction(MEMORY_FRACTION, "the trainer's default")

SETTLE_S = 0.5  # seconds for the threads of a failed read to end
# Host memory in bytes that a start needs before the step's memory is known: libraries, and compiling the smallest
# config (jax 0.10.2 on a CPU; measured in a cgroup).
START_BYTES = 320 * 2**20
# Address space in bytes for threads after jax has started: 8 MiB of stack per thread, and 64 MiB per glibc arena.
THREADS_BYTES = 2**30
MAX_FILES = 65536  # open files that a start requests
# When this remedy is printed, the soft limit is already as high as the hard limit.
RAISE_FILES = "raise the hard limit (ulimit -Hn as root, /etc/security/limits.conf, a container's --ulimit nofile)"
_PROBE = (
    "import mmap, resource, sys; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); import jax; jax.devices(); "
    "mmap.mmap(-1, int(sys.argv[1]))"
)


def check_limits() -> None:
    """Raises the soft limit of open files, and checks that the limits of memory are large enough to start jax.

    Call it before jax is imported.

    Raises:
      DoesNotFit: the cgroup has too little memory left, or the address space is too small.
    """
    raise_file_limit()
    room = cgroup_room()
    if room is not None and room < START_BYTES:
        raise DoesNotFit(
            f"only {human(max(room, 0))} are left under the memory limit of this process's cgroup, but starting needs "
            f"{human(START_BYTES)} in addition to the step: raise the limit of the container or job"
        )
    limit = address_space_limit()
    if limit is None:
        return
    # In a subprocess, because jax may abort.
    probe = [sys.executable, "-c", _PROBE, str(THREADS_BYTES)]
    env = environment.child_variables({environment.PLATFORMS: "cpu"})
    if subprocess.run(probe, capture_output=True, check=False, env=env).returncode:
        raise DoesNotFit(
            f"ulimit -v {limit // 1024} ({human(limit)}) is too little address space to start jax and its "
            "threads: remove the limit with ulimit -v unlimited"
        )


def raise_file_limit() -> None:
    """Raises the soft limit of open files as far as allowed, up to MAX_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the system may have a lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def prepare(*, deterministic: bool, cache_dir: str, processes: int = 1, index: int = 0) -> None:
    """Configures jax's compilation cache and, if requested, deterministic kernels. Call it before any array exists.

    deterministic, cache_dir: the keys of the config group `train`. processes: number of processes. index: number of
    this process.

    With several CPU devices, simulated or in several processes, the cache is not used. XLA loses the order of a
    program's collectives when it reads the program from the cache (thunk_serdes_proto.cc in jaxlib 0.10.2), so devices
    could wait for each other forever.
    """
    if deterministic:
        # Bit-equal reruns on GPUs: no atomics in reductions and scatters, no timing-dependent kernel choice.
        environment.add_xla_flags("--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0")
    import jax

    if choose_platform(fraction=TRAIN_FRACTION.value) == "cpu" and simulated() * processes > 1:
        give_threads()
        if cache_dir not in ("", "none") and index == 0:
            print(
                f"note: train.cache_dir={cache_dir} is not used: several CPU devices compile at each "
                "start, since XLA's cache loses the order of their collectives",
                file=sys.stderr,
            )
        jax.config.update("jax_compilation_cache_dir", None)  # the user's environment may name one
    elif cache_dir != "none":
        jax.config.update("jax_compilation_cache_dir", str(cache_dir or cache_folder("xla")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@contextlib.contextmanager
def captured_stderr() -> Iterator[SimpleNamespace]:
    """A context manager that captures standard error, for calls whose failure is reported in one line. At the end it
    prints what was captured, unless the attribute `drop` of its value was set to True.

    If one of several concurrent reads fails, library threads print tracebacks of the other reads too, some only when a
    coroutine is garbage-collected.
    """
    sys.stderr.flush()
    captured, screen = SimpleNamespace(drop=False), os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield captured
        finally:
            if captured.drop:
                silence_abandoned()  # some coroutines are garbage-collected later
                gc.collect()
                time.sleep(SETTLE_S)
            sys.stderr.flush()
            os.dup2(screen, 2)
            os.close(screen)
            file.seek(0)
            if not captured.drop:
                os.write(2, file.read())


def silence_abandoned() -> None:
    """From now on, suppresses errors of abandoned reads and writes of a checkpoint, which Python would print. A read or
    write is abandoned if another one has failed.

    The errors come from coroutines that are garbage-collected unfinished, and from tensorstore writes whose event loop
    is already closed.
    """
    if getattr(sys.unraisablehook, "func", None) is not _skip_abandoned:
        sys.unraisablehook = partial(_skip_abandoned, sys.unraisablehook)


def _skip_abandoned(before: Callable[[Any], Any], unraisable: Any) -> None:
    """A hook for sys.unraisablehook. Errors that do not come from abandoned reads and writes go to the hook `before`,
    which was installed earlier."""
    error = unraisable.exc_value
    late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    if not late and not inspect.iscoroutine(unraisable.object):
        before(unraisable)
