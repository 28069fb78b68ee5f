"""A compiled step run on zeros: the seconds of an update, and the highest peak of a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from bytescope.memory.devices.compiler import Compilation
from bytescope.memory.errors import ReportError

# Updates run before the clock starts, and how long it runs: at least so many updates and about so many seconds.
_WARM_UP, _LEAST, _MOST, _SECONDS = 2, 5, 50, 4.0


def time_updates(update: Callable[[], float], devices: Iterable[Any], tokens: int | None) -> dict[str, float | None]:
    """Runs updates; returns (median seconds of one, tokens/s over all devices, highest peak of a device in bytes).

    tokens/s is None if `tokens` is None; the peak is None if the backend does not report it.

    update: runs one update to its end and returns its seconds. tokens: per update, over all devices.
    """
    times: list[float] = []
    for number in range(_WARM_UP + _MOST):
        seconds = update()
        if number >= _WARM_UP:
            times.append(seconds)
        if len(times) >= _LEAST and sum(times) >= _SECONDS:
            break
    median = statistics.median(times)
    stats = [device.memory_stats() or {} for device in devices]
    peaks = [found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found]
    return {
        "step_seconds": median,
        "tokens_per_s": tokens / median if tokens else None,
        "peak_bytes": max(peaks, default=None),
    }


def measure_program(compilation: Compilation, tokens: int | None) -> dict[str, float | None]:
    """Measures the step of a user's program, its arguments being zeros. What a call donates is made again before the
    next one, off the clock.

    tokens: of an update, None where that is not known. Raises ReportError for a program without an executable.
    """
    import jax
    import jax.numpy as jnp

    compiled = compilation.compiled
    if compiled is None:
        raise ReportError("--measure: the program is no step that can be run here")
    infos, tree = jax.tree.flatten(compiled.args_info, is_leaf=lambda node: hasattr(node, "donated"))
    places = jax.tree.leaves(compiled.input_shardings)

    def make_zeros(info: Any, place: Any) -> Callable[[], Any]:
        if jnp.issubdtype(info.dtype, jax.dtypes.prng_key):
            return lambda: jax.device_put(jnp.broadcast_to(jax.random.key(0), info.shape), place)
        return jax.jit(lambda: jnp.zeros(info.shape, info.dtype), out_shardings=place)

    zeros = [make_zeros(info, place) for info, place in zip(infos, places)]  # each is compiled once
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
