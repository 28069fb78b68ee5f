"""Runs a compiled step on zeros and measures the seconds of an update and the peak memory of a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from bytescope.memory.devices.compiler import Compilation
from bytescope.memory.errors import ReportError

# Updates before timing starts; then minimum and maximum timed updates, and the approximate seconds of timing.
_WARM_UP, _MIN_UPDATES, _MAX_UPDATES, _SECONDS = 2, 5, 50, 4.0


def time_updates(update: Callable[[], float], devices: Iterable[Any], tokens: int | None) -> dict[str, float | None]:
    """Runs and times optimizer updates. Returns {"step_seconds": the median seconds of one update, "tokens_per_s": over
    all devices, "peak_bytes": the maximum over the devices}.

    Args:
        update: runs one update to its end and returns its seconds.
        devices: the devices that the updates use. The peak is None if their backend does not report it.
        tokens: tokens per update, over all devices; if None, tokens/s is None.
    """
    times: list[float] = []
    for number in range(_WARM_UP + _MAX_UPDATES):
        seconds = update()
        if number >= _WARM_UP:
            times.append(seconds)
        if len(times) >= _MIN_UPDATES and sum(times) >= _SECONDS:
            break
    median = statistics.median(times)
    stats_by_device = [device.memory_stats() or {} for device in devices]
    peaks = [stats["peak_bytes_in_use"] for stats in stats_by_device if "peak_bytes_in_use" in stats]
    return {
        "step_seconds": median,
        "tokens_per_s": tokens / median if tokens else None,
        "peak_bytes": max(peaks, default=None),
    }


def measure_program(compilation: Compilation, tokens: int | None) -> dict[str, float | None]:
    """Runs and times the step of a user's program, called with zeros as arguments. Returns {"step_seconds",
    "tokens_per_s", "peak_bytes"}, as `time_updates` does.

    Donated arguments are created again before each call; this time is not counted.

    compilation: the compiled step. tokens: tokens per update, None if unknown. Raises ReportError for a program without
    an executable.
    """
    import jax
    import jax.numpy as jnp

    compiled = compilation.compiled
    if compiled is None:
        raise ReportError(
            "--measure cannot run the program, because it has no executable for this machine: leave out --measure"
        )
    infos, tree = jax.tree.flatten(compiled.args_info)
    places = jax.tree.leaves(compiled.input_shardings, is_leaf=lambda node: node is None)  # None: an unused argument

    def make_zeros(info: Any, place: Any) -> Callable[[], Any]:
        if jnp.issubdtype(info.dtype, jax.dtypes.prng_key):
            return lambda: jax.device_put(jnp.broadcast_to(jax.random.key(0), info.shape), place)
        return jax.jit(lambda: jnp.zeros(info.shape, info.dtype), out_shardings=place)

    zeros = [make_zeros(info, place) for info, place in zip(infos, places)]  # compiled once per argument
    arrays = [make() for make in zeros]

    def update() -> float:
        for number, info in enumerate(infos):
            if info.donated:
                arrays[number] = zeros[number]()
        jax.block_until_ready(arrays)
        args, kwargs = jax.tree.unflatten(tree, arrays)
        began = time.perf_counter()
        jax.block_until_ready(compiled(*args, **kwargs))
        return time.perf_counter() - began

    return time_updates(update, jax.local_devices(), tokens)
