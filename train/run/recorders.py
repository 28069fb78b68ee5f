"""All recorders of a run as one: TensorBoard and wandb as the config asks, and the page of the run."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from bytescope.memory.records.report_record import ReportRecord
from bytescope.train.program.config_files import flatten
from bytescope.train.run.run_page import RunPage
from bytescope.train.run.tensorboard import Events, scalars
from bytescope.train.run.wandb_run import WandbRun


class Recorders:
    """The recorders of one start of a run; a context manager that closes them.

    Args:
      workdir: the run directory. step: the step at which this start begins.
      config: of the run, settled. report: of the compiled step.
      enabled: False for a process that is not the first: it records nothing.
      tell: says in a line what failed.
    """

    def __init__(
        self,
        workdir: Path,
        step: int,
        config: ConfigDict,
        report: ReportRecord,
        enabled: bool,
        tell: Callable[[str], None],
    ):
        self._recorders: list[Events | WandbRun | RunPage] = []
        if not enabled:
            return
        self._recorders.append(RunPage(workdir, tell))
        keys = flatten(config)
        if config.train.tensorboard:
            self._recorders.append(Events(workdir / "events", step, keys, report))
        if config.train.wandb:
            self._recorders.append(WandbRun(workdir, config.train.wandb, keys, report, tell))

    def __enter__(self) -> "Recorders":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        with contextlib.ExitStack() as stack:  # every one is closed, whatever happens to the others
            for recorder in self._recorders:
                stack.callback(recorder.close, failed=kind is not None)

    def write(self, row: Mapping[str, Any], loads: Mapping[int, Any] = {}) -> None:
        """Records a row of metrics or of an evaluation; `loads`: of experts by layer, which TensorBoard alone shows."""
        values = scalars(row)
        for recorder in self._recorders:
            recorder.write(row["step"], values)
            if isinstance(recorder, Events):
                recorder.write_loads(row["step"], loads)

    def finish(self, step: int, sample: str) -> None:
        """Records the sample of the finished run, "" for none."""
        for recorder in self._recorders:
            recorder.finish(step, sample)
