"""Writes the messages of a watched step: predicted bytes, predicted against measured bytes, and the post-mortem.

In: reports, devices, errors. Out: lines for the loop's function `tell`, and the page and the JSON of a post-mortem. A
failure in this module never stops the loop: it is reported, and the error of the step is re-raised.
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
from bytescope.memory.hlo.jax_types import JaxDevice
from bytescope.memory.messages.post_mortem import HeldArrays, PostMortem
from bytescope.memory.report.report_object import Report
from bytescope.memory.units import human

# Maximum characters shown of an error message.
_MAX_ERROR = 200
# The status code of a failed allocation, in the text of XLA's exceptions.
EXHAUSTED = "RESOURCE_EXHAUSTED"
# The name, without suffix, of the two files of a post-mortem.
FILE_NAME = "memory-post-mortem"


class StepReporter:
    """Prints the messages about one watched step.

    Args:
        name: the step's name in messages.
        tell: function that prints a text.
        folder: the folder for post-mortem files.

    The attribute `post_mortem` is the explanation of the last call that ran out of memory, None if no call did.
    """

    def __init__(self, name: str, tell: Callable[[str], None], folder: Path) -> None:
        self.name, self._tell, self._folder = name, tell, folder
        self.post_mortem: PostMortem | None = None
        self._before: live.LiveMemory | None = None

    def report_unwatched(self, error: Exception) -> None:
        """Prints the reason why a step cannot be watched. The step is called as usual."""
        why = in_one_line(str(error))
        more = "..." if len(why) > _MAX_ERROR else ""
        self._print_once(f"{self.name} is called without a watch: {type(error).__name__}: {why[:_MAX_ERROR]}{more}")

    def begin(self, device: JaxDevice, report: Report) -> None:
        """Measures the memory in use on a device before the first call, so that later measurements can be compared with
        it. `report`: the report of the step, with the predicted bytes of its arguments.
        """
        if self._before is not None:
            return
        sample = live.sample(device)
        if sample is not None and sample.source == "host" and sample.in_use_bytes is not None:
            # On a CPU, the memory of the process already contains the step's arguments.
            arguments = (report.xla.argument_bytes or 0) * sample.sharing
            sample = dataclasses.replace(sample, in_use_bytes=max(sample.in_use_bytes - arguments, 0))
        self._before = sample

    def report_predicted(self, report: Report, kinds: int) -> None:
        """Prints the predicted bytes of a newly compiled step.

        kinds: how often the step was compiled so far, once for each combination of shapes and static arguments.
        """
        basis = limit_share(report.target, report.limit_bytes)
        limit = ""
        if report.limit_bytes:
            limit = f" of {human(report.limit_bytes)}{f' ({basis})' if basis else ''}: {report.verdict}"
        note = f"; compiled for {kinds} kinds of arguments so far" if kinds > 1 else ""
        self._print_once(f"{self.name}: predicted {human(report.predicted_bytes)} per device{limit}{note}")

    def report_measured(self, report: Report, device: JaxDevice | None, call: int) -> None:
        """Prints one line that compares predicted with measured bytes after a call.

        report: the report with the predicted bytes. device: the device that is measured. call: the number of the call.
        """
        before, sample = self._before, live.sample(device, host_limit=False)
        if before and sample and sample.source == "host" and sample.peak_bytes == before.peak_bytes:
            # On a CPU, this peak is older than the step, such as the peak of compiling.
            sample = dataclasses.replace(sample, peak_bytes=sample.in_use_bytes)
        comparison = live.predicted_against_measured(report, sample, before)
        self._print_once(f"{self.name}, call {call:,}: {comparison}")

    def report_exhausted(
        self, error: BaseException, call: int, device: JaxDevice | None, arguments: Iterable[Any], report: Report | None
    ) -> None:
        """Prints and writes the post-mortem of an out-of-memory error, and adds the names of the written files to the
        error's notes.

        Args:
            call: the number of the failed call.
            device: the device that ran out of memory; None means the first device of this process.
            arguments: the leaves of the call's arguments: arrays, or their shapes and dtypes.
            report: report of the executable that failed; None if the compiler failed.
        """
        import jax

        device = device or jax.local_devices()[0]
        vars(error)["_bytescope_reported"] = True
        try:
            self.post_mortem = post_mortem = PostMortem(
                step=self.name,
                call=call,
                error=memory_line(error),
                device=device.device_kind,
                held=held_arrays(device, list(arguments)),
                allocator=allocator_stats(device),
                report=report,
                text=error_text(error),
            )
            files = write_post_mortem(post_mortem, self._folder, jax.process_index())
            where = f"process {jax.process_index()}: " if jax.process_count() > 1 else ""
            unwritten = "" if files else f"\n\nnot written: {self._folder} is not writable; give watch(..., folder=DIR)"
            self._tell(where + printed_post_mortem(post_mortem, files) + unwritten)
            if files:
                error.add_note(f"bytescope: memory post-mortem: {', '.join(files)}")
        except Exception as own:  # the user must see the step's error, even if the post-mortem fails
            self._tell(f"no post-mortem of {self.name}: {type(own).__name__}: {in_one_line(str(own))}")

    def _print_once(self, line: str) -> None:
        # All processes of a run would print the same line.
        import jax

        if jax.process_index() == 0:
            self._tell(line)


# ---- post-mortems ---------------------------------------------------------------------------------------------


def is_exhausted(error: BaseException) -> bool:
    """Returns whether an error, or one of its causes, reports that a device or the compiler ran out of memory."""
    return any(EXHAUSTED in str(each) and not isinstance(each, OSError) for each in _with_causes(error))


def _with_causes(error: BaseException | None) -> list[BaseException]:
    errors: list[BaseException] = []
    while error is not None and error not in errors:
        errors.append(error)
        error = error.__cause__ or error.__context__
    return errors


def error_text(error: BaseException) -> str:
    """Returns the texts of an error and its causes, one below the other."""
    return "\n".join(str(each) for each in _with_causes(error))


def memory_line(error: BaseException) -> str:
    """Returns the line of an error's text that reports the failed allocation, beginning at the status code. If there
    is no such line, returns the whole text in one line."""
    text = error_text(error)
    line = next((line for line in text.splitlines() if EXHAUSTED in line), text)
    return in_one_line(line[max(line.find(EXHAUSTED), 0) :])


def held_arrays(device: JaxDevice, arguments: Sequence[Any]) -> tuple[HeldArrays, ...]:
    """Returns the live arrays on one device, grouped by shape and dtype, the group with the most bytes first. Each
    group also has the number and bytes of its arrays that are not arguments of the step.

    `arguments`: the leaves of the step's arguments. If only the shape and dtype of an argument are known, one live
    array of this shape and dtype counts as the argument.
    """
    import jax

    # A random key has its data in `_base_array`.
    own = {id(getattr(leaf, "_base_array", leaf)) for leaf in arguments if isinstance(leaf, jax.Array)}
    shapes = collections.Counter(
        _type(leaf) for leaf in arguments if not isinstance(leaf, jax.Array) and hasattr(leaf, "shape")
    )
    arrays: collections.Counter[tuple[tuple[int, ...], str]] = collections.Counter()
    sizes, others, other_sizes = arrays.copy(), arrays.copy(), arrays.copy()
    places: set[int] = set()
    # Shards of an array are live arrays too, in the same memory. Whole arrays are visited first, so only they count.
    for array in sorted(jax.live_arrays(), key=lambda array: (id(array) not in own, -len(array.sharding.device_set))):
        with contextlib.suppress(Exception):  # the array was deleted meanwhile, or its type has no bytes
            sharding, kind = array.sharding, _type(array)
            if device not in sharding.device_set or sharding.memory_kind == "pinned_host":
                continue
            size = math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
            if not _has_new_memory(array, device, places):
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


def _has_new_memory(array: Any, device: JaxDevice, places: set[int]) -> bool:
    # Shared buffers are counted once.
    try:
        addresses = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards if shard.device == device}
    except Exception:  # a runtime without addresses, or an array that was never computed
        return True
    new = addresses - places
    places |= addresses
    return bool(new)


def allocator_stats(device: JaxDevice) -> dict[str, int]:
    """Returns the statistics of a device's allocator, under the keys of jax's `memory_stats`. For a CPU, they are the
    bytes of the process."""
    try:
        stats = device.memory_stats()
    except Exception:  # each plugin raises its own error types
        stats = None
    if stats:
        return {str(name): int(value) for name, value in stats.items() if isinstance(value, int | float)}
    sample = live.sample(device)
    known = {"bytes_in_use": sample.in_use_bytes, "peak_bytes_in_use": sample.peak_bytes} if sample else {}
    return {name: value for name, value in known.items() if value is not None}


def write_post_mortem(post_mortem: PostMortem, folder: Path, number: int = 0) -> tuple[str, ...]:
    """Writes a post-mortem as an HTML page and as JSON. Returns the names of the files that could be written.

    number: the number of this process in a run of several processes. It is part of the file names unless it is 0.
    """
    from bytescope.memory.messages.explanation_document import document
    from bytescope.memory.report import report_page
    from bytescope.memory.view import draw_page

    stem = folder / (f"{FILE_NAME}-{number}" if number else FILE_NAME)
    report = post_mortem.report
    texts = {
        ".html": lambda: (
            report_page.render(report, post_mortem) if report else draw_page.draw(document(post_mortem.explanation))
        ),
        ".json": lambda: json.dumps(post_mortem.to_json(), indent=1) + "\n",
    }
    written = []
    for suffix, text in texts.items():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            stem.with_suffix(suffix).write_text(text())
            written.append(str(stem.with_suffix(suffix)))
    return tuple(written)


def printed_post_mortem(post_mortem: PostMortem, files: Iterable[str] = (), width: int | None = None) -> str:
    """Returns a post-mortem as text without colours, up to 45 lines long.

    files: names of the written files, which the text mentions. width: characters per line (default: the terminal's).
    """
    from bytescope.memory.messages.explanation_document import document
    from bytescope.memory.view import draw_terminal
    from bytescope.memory.view.console import columns, make_console, put

    out = io.StringIO()
    drawn = draw_terminal.draw(document(post_mortem.explanation, tuple(files)))
    put(drawn, make_console(file=out, width=width or columns()))
    return out.getvalue().rstrip()
