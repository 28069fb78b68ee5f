"""The messages of a watched step: predicted bytes, predicted against measured, and the post-mortem.

In: reports, devices, errors. Out: lines for the loop's own `tell`, and the page and the JSON of a post-mortem. Nothing
here stops a loop: a failure is reported, and the error of the step is re-raised.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bytescope.memory.devices import live
from bytescope.memory.devices.limits import limit_share
from bytescope.memory.errors import in_one_line
from bytescope.memory.findings.post_mortem import HeldArrays, PostMortem
from bytescope.memory.hlo.jax_types import JaxDevice
from bytescope.memory.report.report_object import Report
from bytescope.memory.units import human

# Characters of an error message that are shown.
_MAX_ERROR = 200
# The status code of a failed allocation, in the text of XLA's exceptions.
EXHAUSTED = "RESOURCE_EXHAUSTED"
# The name of the two files of a post-mortem.
FILE_NAME = "memory-post-mortem"


class StepReporter:
    """Reports on one watched step.

    Attributes: `name` of the step; `post_mortem` of the last call that ran out of memory, None if none did.
    """

    def __init__(self, name: str, tell: Callable[[str], None], folder: Path) -> None:
        self.name, self._tell, self._folder = name, tell, folder
        self.post_mortem: PostMortem | None = None
        self._before: live.LiveMemory | None = None

    def unwatched(self, error: Exception) -> None:
        """Reports why a step is called without a watch."""
        why = in_one_line(str(error))
        more = "..." if len(why) > _MAX_ERROR else ""
        self._say(f"{self.name} is called without a watch: {type(error).__name__}: {why[:_MAX_ERROR]}{more}")

    def begin(self, device: JaxDevice, report: Report) -> None:
        """Samples a device at the first call: later samples are compared with this one."""
        if self._before is None:
            self._before = before_arguments(device, report)

    def predicted(self, report: Report, kinds: int) -> None:
        """Reports the predicted bytes of an executable; `kinds`: number of executables compiled so far."""
        basis = limit_share(report.target, report.limit_bytes)
        limit = ""
        if report.limit_bytes:
            limit = f" of {human(report.limit_bytes)}{f' ({basis})' if basis else ''}: {report.verdict}"
        again = f"; compiled for arguments of {kinds} kinds by now" if kinds > 1 else ""
        self._say(f"{self.name}: predicted {human(report.predicted_bytes)} per device{limit}{again}")

    def compared(self, report: Report, device: JaxDevice | None, call: int) -> None:
        """Reports predicted against measured bytes after a call, in one line."""
        seen = without_older_peak(self._before, live.sample(device, host_limit=False))
        self._say(f"{self.name}, call {call:,}: {live.predicted_against_measured(report, seen, self._before)}")

    def exhausted(
        self, error: BaseException, call: int, device: JaxDevice | None, arguments: Iterable[Any], report: Report | None
    ) -> None:
        """Prints and writes the post-mortem of an out-of-memory error, and notes the files on the error.

        Args:
            device: None for the first device of this process. arguments: the leaves of the call's arguments, as
                `held_arrays` takes them. report: of the executable that failed; None if the compiler failed.
        """
        import jax

        device = device or jax.local_devices()[0]
        vars(error)["_bytescope_told"] = True
        try:
            self.post_mortem = found = PostMortem(
                step=self.name,
                call=call,
                error=memory_line(error),
                device=device.device_kind,
                held=held_arrays(device, list(arguments)),
                allocator=allocator_of(device),
                report=report,
            )
            files = write_post_mortem(found, self._folder, jax.process_index())
            where = f"process {jax.process_index()}: " if jax.process_count() > 1 else ""
            unwritten = "" if files else f"\n\nnot written: {self._folder} takes no files; give watch(..., folder=DIR)"
            self._tell(where + printed_post_mortem(found, files) + unwritten)
            if files:
                error.add_note(f"bytescope: what held the memory: {', '.join(files)}")
        except Exception as own:  # the step's error is what the user has to see, whatever fails here
            self._tell(f"no post-mortem of {self.name}: {type(own).__name__}: {in_one_line(str(own))}")

    def _say(self, line: str) -> None:
        """Prints a line in process 0 only: it is the same in every process of a run."""
        import jax

        if jax.process_index() == 0:
            self._tell(line)


def before_arguments(device: JaxDevice, report: Report) -> live.LiveMemory | None:
    """Returns what a device held before the arguments of a step were on it, as far as a sample taken later can tell.

    On the CPU the sample is of the process, with the arguments: their predicted bytes are subtracted.
    """
    sample = live.sample(device)
    if sample is None or sample.source != "host" or sample.in_use_bytes is None:
        return sample
    arguments = (report.xla.argument_bytes or 0) * sample.sharing
    return dataclasses.replace(sample, in_use_bytes=max(sample.in_use_bytes - arguments, 0))


def without_older_peak(before: live.LiveMemory | None, sample: live.LiveMemory | None) -> live.LiveMemory | None:
    """Returns a sample; if its peak is older than the loop, its bytes in use replace the peak, because compiling takes
    more memory than most steps."""
    if before is None or sample is None or sample.source != "host" or sample.peak_bytes != before.peak_bytes:
        return sample
    return dataclasses.replace(sample, peak_bytes=sample.in_use_bytes)


# ---- post-mortems ---------------------------------------------------------------------------------------------


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


def memory_line(error: BaseException) -> str:
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
    arrays: collections.Counter[tuple[tuple[int, ...], str]] = collections.Counter()
    sizes, others, other_sizes = arrays.copy(), arrays.copy(), arrays.copy()
    places: set[int] = set()
    # A part of an array is an array too, in the same memory: the whole ones count.
    for array in sorted(jax.live_arrays(), key=lambda array: (id(array) not in own, -len(array.sharding.device_set))):
        with contextlib.suppress(Exception):  # deleted since, or of a kind that has no bytes
            sharding, kind = array.sharding, _type(array)
            if device not in sharding.device_set or sharding.memory_kind == "pinned_host":
                continue
            size = math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
            if not _is_new(array, device, places):
                continue
            arrays[kind] += 1
            sizes[kind] += size
            if id(array) in own:
                continue
            if shapes[kind] > 0:
                shapes[kind] -= 1
            else:
                others[kind] += 1
                other_sizes[kind] += size
    held = [
        HeldArrays(*kind, arrays=count, bytes=sizes[kind], others=others[kind], other_bytes=other_sizes[kind])
        for kind, count in arrays.items()
    ]
    return tuple(sorted(held, key=lambda group: (-group.bytes, group.name)))


def _type(leaf: Any) -> tuple[tuple[int, ...], str]:
    return tuple(leaf.shape), str(leaf.dtype)


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
    seen = live.sample(device)
    known = {"bytes_in_use": seen.in_use_bytes, "peak_bytes_in_use": seen.peak_bytes} if seen else {}
    return {name: value for name, value in known.items() if value is not None}


def write_post_mortem(found: PostMortem, folder: Path, number: int = 0) -> tuple[str, ...]:
    """Writes the page and the JSON. Returns the names of the files that could be written.

    Args:
        number: of the process; the names of the files contain it unless it is 0.
    """
    from bytescope.memory.report import report_page

    stem = folder / (f"{FILE_NAME}-{number}" if number else FILE_NAME)
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


def printed_post_mortem(found: PostMortem, files: Iterable[str] = (), width: int | None = None) -> str:
    """Returns the post-mortem as printed text, at most 40 lines, without colours."""
    from bytescope.memory.report import post_mortem_text
    from bytescope.memory.view.console import columns, make_console, put

    out = io.StringIO()
    put(post_mortem_text.render(found, tuple(files)), make_console(file=out, width=width or columns()))
    return out.getvalue().rstrip()
