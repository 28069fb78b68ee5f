"""The post-mortem of a device that ran out of memory: collected, printed, and written as a page and as JSON."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bytescope.memory.devices.live import sample
from bytescope.memory.errors import in_one_line
from bytescope.memory.findings.post_mortem import HeldArrays, PostMortem
from bytescope.memory.hlo.jax_types import JaxDevice

# The status code of a failed allocation, in the text of XLA's exceptions.
EXHAUSTED = "RESOURCE_EXHAUSTED"
# The name of the two files.
NAME = "memory-post-mortem"


def is_exhausted(error: BaseException) -> bool:
    """Returns whether an error, or one of its causes, says that a device or the compiler ran out of memory."""
    return any(EXHAUSTED in str(each) and not isinstance(each, OSError) for each in _chain(error))


def _chain(error: BaseException | None) -> list[BaseException]:
    """Returns an error, its cause, the cause of that, and so on."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def told_by(error: BaseException) -> str:
    """Returns the line of an error's text about memory, from the status code on; else the whole text in one line."""
    text = "\n".join(str(each) for each in _chain(error))
    found = next((line for line in text.splitlines() if EXHAUSTED in line), text)
    return in_one_line(found[max(found.find(EXHAUSTED), 0) :])


def held_arrays(device: JaxDevice, arguments: Sequence[Any]) -> tuple[HeldArrays, ...]:
    """Returns the live arrays of one device, grouped by shape and dtype, the largest group first.

    Args:
        arguments: the leaves of the step's arguments: arrays, or their shapes and dtypes. For a shape and dtype, that
            many arrays count as arguments.
    """
    import jax

    own = {id(getattr(leaf, "_base_array", leaf)) for leaf in arguments if isinstance(leaf, jax.Array)}  # of keys too
    shapes = collections.Counter(
        _type(leaf) for leaf in arguments if not isinstance(leaf, jax.Array) and hasattr(leaf, "shape")
    )
    groups: dict[tuple[tuple[int, ...], str], list[int]] = {}
    places: set[int] = set()
    # A part of an array is an array too, in the same memory: the whole ones count.
    for array in sorted(jax.live_arrays(), key=lambda array: (id(array) not in own, -len(array.sharding.device_set))):
        with contextlib.suppress(Exception):  # deleted since, or of a kind that has no bytes
            if (size := _bytes_on(array, device)) is None or not _is_new(array, device, places):
                continue
            found, argument = groups.setdefault(_type(array), [0, 0, 0, 0]), id(array) in own
            if not argument and shapes[_type(array)] > 0:
                shapes[_type(array)] -= 1
                argument = True
            for at, value in enumerate((1, size, not argument, size * (not argument))):
                found[at] += int(value)
    held = [HeldArrays(shape, dtype, *counts) for (shape, dtype), counts in groups.items()]
    return tuple(sorted(held, key=lambda group: (-group.bytes, group.name)))


def _type(leaf: Any) -> tuple[tuple[int, ...], str]:
    return tuple(leaf.shape), str(leaf.dtype)


def _bytes_on(array: Any, device: JaxDevice) -> int | None:
    """Returns the bytes of an array in the memory of a device; None if the array is not on the device."""
    sharding = array.sharding
    if device not in sharding.device_set or sharding.memory_kind == "pinned_host":
        return None
    return math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _is_new(array: Any, device: JaxDevice, places: set[int]) -> bool:
    """Returns whether an array has memory on a device that is not in `places`; adds its addresses to `places`."""
    try:
        found = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards if shard.device == device}
    except Exception:  # a runtime without addresses, or an array that was never computed
        return True
    new = found - places
    places |= found
    return bool(new)


def allocator_of(device: JaxDevice) -> dict[str, int]:
    """Returns the statistics of a device's allocator by jax's names; for a CPU, the memory of the process."""
    try:
        stats = device.memory_stats()
    except Exception:  # plugins raise errors of kinds of their own
        stats = None
    if stats:
        return {str(name): int(value) for name, value in stats.items() if isinstance(value, int | float)}
    live = sample(device)
    known = {"bytes_in_use": live.in_use_bytes, "peak_bytes_in_use": live.peak_bytes} if live else {}
    return {name: value for name, value in known.items() if value is not None}


def write(found: PostMortem, folder: Path, number: int = 0) -> tuple[str, ...]:
    """Writes the page and the JSON. Returns the names of the files that could be written.

    Args:
        number: of the process; the names of the files contain it unless it is 0.
    """
    from bytescope.memory.report import report_page

    stem = folder / (f"{NAME}-{number}" if number else NAME)
    texts = {".json": lambda: json.dumps(found.to_json(), indent=1) + "\n"}
    report = found.report
    if report is not None:
        texts = {".html": lambda: report_page.render(report, found), **texts}
    written = []
    for suffix, text in texts.items():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            stem.with_suffix(suffix).write_text(text())
            written.append(str(stem.with_suffix(suffix)))
    return tuple(written)


def as_text(found: PostMortem, files: Iterable[str] = (), width: int | None = None) -> str:
    """Returns the post-mortem as printed text, at most 40 lines, without colours."""
    from bytescope.memory.report import post_mortem_text
    from bytescope.memory.view.console import columns, make_console, put

    out = io.StringIO()
    put(post_mortem_text.render(found, tuple(files)), make_console(file=out, width=width or columns()))
    return out.getvalue().rstrip()
