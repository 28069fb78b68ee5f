"""Seconds of one training step on a CPU by kind of instruction, from a trace by jax's profiler."""

import collections
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

# Kind -> names of XLA's instructions on a CPU. YNNPACK's fusions (ynn_fusion) are products and reductions.
KINDS = {
    "products, reductions": re.compile(r"ynn_fusion|dot|convolution|reduce"),
    "copies, transposes": re.compile(r"(wrapped_)?(copy|transpose)"),
    "slices of stacks": re.compile(r".*dynamic[-_](update[-_])?slice"),
}
_CONTAINERS = re.compile(r"while|call|conditional")  # their time is that of the instructions inside


def seconds_by_kind(update: Callable[[], Any]) -> dict[str, float]:
    """Runs one step and returns kind of instruction -> seconds, summed over all threads.

    update: dispatches one optimizer update and returns its loss.
    Raises RuntimeError if the trace contains no instruction of a compiled program.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(update())
        trace = ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
        seconds: collections.Counter[str] = collections.Counter()
        for plane in trace.planes:
            for line in plane.lines:
                for event in line.events:
                    if any(key == "hlo_op" for key, _ in event.stats) and not _CONTAINERS.match(event.name):
                        seconds[kind_of(event.name)] += event.duration_ns / 1e9
    if not seconds:
        raise RuntimeError("the trace contains no instruction of a compiled program")
    return dict(seconds)


def kind_of(instruction: str) -> str:
    """Returns the kind of an instruction: a key of KINDS, or "elementwise, other"."""
    return next((kind for kind, names in KINDS.items() if names.match(instruction)), "elementwise, other")
