"""TensorBoard output: the rows of a run as scalars in named groups, its config as text and hparams, and its sample as
text.

Events are written directly, not by a library's thread. If the disk is full, the row that is written fails, instead of
the run waiting for a queue that is never emptied.
"""

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human
from bytescope.train.step.routing import ROUTING_METRICS

# Key of a row -> the tag of its curve. Viewers group tags by the part before the slash.
TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/learning_rate",
    "loss_scale": "train/loss_scale",
    "skipped_steps": "train/skipped_steps",
    "batch_tokens": "train/batch_tokens",
    "tokens_per_s": "speed/tokens_per_s",
    "step_time_s": "speed/step_time_s",
    "data_wait_s": "speed/data_wait_s",
    **{name: f"experts/{name}" for name in ROUTING_METRICS},
    "mfu": "speed/mfu",
    "hfu": "speed/hfu",
    "eval_loss": "held-out/loss",
    "eval_tokens": "held-out/tokens",
}
HELD_OUT = TAGS["eval_loss"]
# Charts with several curves: title -> tags, in TensorBoard's tab of custom scalars.
CHARTS = {
    "loss": [TAGS["loss"], HELD_OUT],
    "bytes, predicted and measured": [f"memory/{name}_bytes" for name in ("predicted", "in_use", "peak")],
}


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row of metrics.jsonl for TensorBoard, tag -> number. A tag has a group, such as
    "train/loss". Keys that have no tag in TAGS get the group "train"."""
    values: dict[str, Any] = {}
    for name, value in row.items():
        nested = value if isinstance(value, Mapping) else {}
        values |= {f"{name}/{inner}": number for inner, number in nested.items()}
        if not nested and name != "step":
            values[TAGS.get(name, f"train/{name}")] = value
    return {tag: float(number) for tag, number in values.items() if isinstance(number, int | float)}


def summary(report: ReportRecord) -> dict[str, str]:
    """Returns the predicted memory of the step on one device as text for TensorBoard: "peak", "allocated", "predicted"
    and "limit" -> bytes such as "12.30 GiB", and "verdict" -> "fits", "tight" or "exceeds"."""
    return {
        "peak": human(report.peak_bytes),
        "allocated": human(report.allocated_bytes),
        "predicted": human(report.predicted_bytes),
        "limit": human(report.limit_bytes),
        "verdict": report.verdict,
    }


class Events:
    """The TensorBoard event file of one start of a run.

    Args:
      directory: folder of the run's event files, created if it is missing.
      step: number of steps that were done before this start. Events of later steps, which an interrupted start wrote,
        are hidden.
      config: config of the run, by dotted key.
      report: the report of the compiled step.

    Raises:
      OSError: the file cannot be written.
    """

    def __init__(self, directory: Path, step: int, config: Mapping[str, Any], report: ReportRecord):
        with warnings.catch_warnings(), _block_imports("torch", "google.cloud.storage"):
            warnings.simplefilter("ignore")  # protobuf warns about its own generated code
            from tensorboardX import summary as protos
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._protos, self._event, self._step = protos, Event, step
        directory.mkdir(parents=True, exist_ok=True)
        # Numbered, so that two starts within a second have separate files, which are read in this order.
        number = len(list(directory.iterdir()))
        self._file = EventsWriter(str(directory / "events"), f".{number:04}")
        self._file.write_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))
        experiment, began, self._ended = protos.hparams(
            {key: _to_hparam(value) for key, value in config.items()}, {HELD_OUT: 0.0}
        )
        self._add(
            experiment,
            began,
            protos.custom_scalars({"run": {title: ["Multiline", tags] for title, tags in CHARTS.items()}}),
        )
        self._text("config", _code_block(f"{key} = {json.dumps(value)}" for key, value in config.items()), step)
        self._text("report", _code_block(f"{name}: {text}" for name, text in summary(report).items()), step)
        self._file.flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds scalars at a step. They are written to disk before the method returns."""
        self._add(*(self._protos.scalar(tag, value) for tag, value in values.items()), step=step)
        self._file.flush()

    def write_loads(self, step: int, loads: Mapping[int, Any]) -> None:
        """Adds a histogram for each layer with experts. Its bars are the experts, by index; a bar's height is the
        expert's load. `loads`: layer index -> number of tokens of each expert relative to the mean, [experts]."""
        for layer, load_E in loads.items():
            numbers = range(len(load_E))
            # The first bucket is empty. It marks where the bucket of the first expert begins.
            self._add(
                self._protos.histogram_raw(
                    f"experts/load_layer_{layer:03}",
                    -0.5,
                    len(load_E) - 0.5,
                    float(load_E.sum()),
                    float((load_E * numbers).sum()),
                    float((load_E * numbers * numbers).sum()),
                    [-0.5, *(number + 0.5 for number in numbers)],
                    [0.0, *map(float, load_E)],
                ),
                step=step,
            )
        self._file.flush()

    def finish(self, step: int, sample: str) -> None:
        """Adds the generated sample text of the finished run, and marks the run as finished."""
        if sample:
            self._text("sample", _code_block(sample.splitlines()), step)
        self._add(self._ended, step=step)
        self._file.flush()

    def close(self, failed: bool) -> None:
        """Closes the file. If the run has `failed`, an error while closing is ignored, so that the user sees the
        original error."""
        with contextlib.suppress(OSError) if failed else contextlib.nullcontext():
            self._file.close()

    def _add(self, *summaries: Any, step: int = 0) -> None:
        for value in summaries:
            self._file.write_event(self._event(wall_time=time.time(), step=step, summary=value))

    def _text(self, tag: str, text: str, step: int) -> None:
        self._add(self._protos.text(tag, text), step=step)


@contextlib.contextmanager
def _block_imports(*names: str) -> Iterator[None]:
    # tensorboardX would import torch, which takes two seconds at every start and is not needed.
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # None: an import of this name fails
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


def _to_hparam(value: Any) -> Any:
    # TensorBoard's hparams tab accepts only numbers, booleans and text.
    return value if isinstance(value, bool | int | float | str) else json.dumps(value)


def _code_block(lines: Any) -> str:
    return "\n".join(f"    {line}" for line in lines)
