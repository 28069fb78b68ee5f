"""Combines the recorders of a run: TensorBoard and wandb if the config asks for them, and the page of the run."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.errors import ReportError
from bytescope.memory.records.report_record import ReportRecord
from bytescope.train.run.tensorboard import Events, scalars
from bytescope.train.run.wandb_run import WandbRun


class Recorders:
    """Sends the rows of metrics to the run page, TensorBoard and wandb. A context manager, which closes these
    recorders.

    Args:
      workdir: the run directory.
      step: number of steps that were done before this start of the run.
      config: resolved config of the run, by dotted key.
      report: the report of the compiled step.
      enabled: False to record nothing. Only the first process records.
      tell: a function that prints a line about a failure.
    """

    def __init__(
        self,
        workdir: Path,
        step: int,
        config: Mapping[str, Any],
        report: ReportRecord,
        enabled: bool,
        tell: Callable[[str], None],
    ):
        self._recorders: list[Events | WandbRun | RunPage] = []
        if not enabled:
            return
        self._recorders.append(RunPage(workdir, tell))
        if config["train.tensorboard"]:
            self._recorders.append(Events(workdir / "events", step, config, report))
        if config["train.wandb"]:
            self._recorders.append(WandbRun(workdir, config["train.wandb"], config, report, tell))

    def __enter__(self) -> "Recorders":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        with contextlib.ExitStack() as stack:  # every recorder is closed, even if another one fails
            for recorder in self._recorders:
                stack.callback(recorder.close, failed=kind is not None)

    def write(self, row: Mapping[str, Any], loads: Mapping[int, Any] = {}) -> None:
        """Records a row of training metrics or of evaluation results. `loads`: layer index -> number of tokens of each
        expert relative to the mean [experts], which only TensorBoard records."""
        values = scalars(row)
        for recorder in self._recorders:
            recorder.write(row["step"], values)
            if isinstance(recorder, Events):
                recorder.write_loads(row["step"], loads)

    def finish(self, step: int, sample: str) -> None:
        """Records the generated sample text at the end of a finished run; "" if there is none."""
        for recorder in self._recorders:
            recorder.finish(step, sample)


class RunPage:
    """Writes index.html of a run directory when a start of the run ends, also after an error.

    It has the methods of the other recorders (write, finish, close), but only `close` does something: it reads the rows
    from metrics.jsonl.

    Args:
      workdir: the run directory.
      tell: a function that prints a line about a failure.
    """

    def __init__(self, workdir: Path, tell: Callable[[str], None]):
        self._workdir, self._tell = workdir, tell

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Does nothing, because writing the page after each row would take too long."""

    def finish(self, step: int, sample: str) -> None:
        """Does nothing, because `close` writes the page."""

    def close(self, failed: bool) -> None:
        """Writes the page. If that fails, for example because the disk is full, prints a warning instead of raising an
        error."""
        del failed  # the curves of a failed run are useful too
        from bytescope.train.run import run_directory_page

        try:
            run_directory_page.write(self._workdir)
        except OSError as error:
            self._tell(
                f"warning: no {run_directory_page.PAGE}: {error.strerror}; "
                f"bytescope report {self._workdir} --html=FILE writes it later"
            )
        except ReportError:  # the directory has no files of a run yet
            return
