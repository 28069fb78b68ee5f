"""Weights & Biases output: sends the rows of a run to the project `train.wandb`. Its failures never end a training.

The id of its run is stored in the run directory, so that a resumed run continues in the same wandb run. Rows that
wandb already has are not sent again. Without a network, or with WANDB_MODE=offline, everything is written below
WORKDIR/wandb, and `wandb sync` sends it later.
"""

import importlib.util
import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.errors import one_line
from bytescope.memory.records.report_record import ReportRecord
from bytescope.train.checkpoints.workdir import write_atomically
from bytescope.train.run.tensorboard import summary
from bytescope.train.user_errors import UserError

ID = "wandb.json"
# Maximum seconds that a start and an end wait for the network.
START_S, END_S = 20.0, 60.0


def check(project: str) -> None:
    """Checks that metrics can be sent to the wandb project. Does nothing if `project` is "".

    Raises:
      UserError: the package wandb is not installed, the project name is invalid, or the user is not logged in.
    """
    if not project:
        return
    if importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"train.wandb={project} cannot be used: the package wandb is not installed: run pip install wandb, or "
            "leave train.wandb empty"
        )
    import wandb

    try:
        wandb.Settings(project=project)
    except wandb.errors.UsageError as error:
        raise UserError(
            f"train.wandb={project} is not a valid project name ({_line(error)}): give the name of a wandb project"
        ) from error
    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
        raise UserError(
            f"train.wandb={project} cannot be used: you are not logged in to wandb: run wandb login, or set "
            "WANDB_MODE=offline and send the metrics later with wandb sync"
        )


class WandbRun:
    """Records metrics to wandb. It has the methods of the other recorders: write, finish and close. Each start of a run
    continues the same wandb run.

    Args:
      workdir: the run directory.
      project: name of the wandb project.
      config: config of the run, by dotted key.
      report: the report of the compiled step.
      tell: a function that prints a line about a failure.
    """

    def __init__(
        self, workdir: Path, project: str, config: Mapping[str, Any], report: ReportRecord, tell: Callable[[str], None]
    ):
        self._workdir, self._tell = workdir, tell
        self._run: Any = None  # the run object of wandb
        settings = {
            "project": project,
            "id": _read_or_create_id(workdir / ID, project),
            "name": workdir.name,
            "dir": str(workdir),
            "config": {**config, "memory": summary(report)},
        }
        failure = self._start(settings)
        run: Any = self._run
        if failure is None:
            tell(f"wandb: {run.url or f'recorded in {workdir}/wandb; wandb sync sends it later'}")
            return
        tell(
            f"warning: wandb does not answer ({failure}): this start is recorded in {workdir / 'wandb'}; "
            "wandb sync sends it later"
        )
        if failure := self._start({**settings, "mode": "offline"}):
            tell(f"warning: nothing is sent to wandb: {failure}")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Sends the metrics of one step, name -> value, to wandb."""
        self._call_safely(lambda: self._run.log(dict(values), step=step))

    def finish(self, step: int, sample: str) -> None:
        """Adds the generated sample text of the finished run to the wandb summary."""
        del step
        self._call_safely(lambda: self._run.summary.update({"sample": sample}))

    def close(self, failed: bool) -> None:
        """Ends the wandb run, and the process that sends its rows. Waits for the network for at most a minute."""
        self._call_safely(lambda: self._run.finish(exit_code=int(failed)))
        self._run = None
        _teardown()

    def _start(self, settings: Mapping[str, Any]) -> str | None:
        import wandb

        try:
            self._run = wandb.init(
                resume="allow",
                **settings,
                settings=wandb.Settings(
                    console="off", silent=True, disable_git=True, init_timeout=START_S, finish_timeout=END_S
                ),
            )
        except Exception as error:  # wandb raises many kinds, and none of them may end a training
            _teardown()
            return _line(error)
        return None

    def _call_safely(self, action: Callable[[], None]) -> None:
        if self._run is None:
            return
        try:
            action()
        except Exception as error:  # wandb raises many kinds, and none of them may end a training
            self._run = None
            self._tell(f"warning: wandb failed and gets no more rows: {_line(error)}")


def _read_or_create_id(path: Path, project: str) -> str:
    try:
        kept = json.loads(path.read_text())
        if kept["project"] == project and isinstance(kept["id"], str):
            return kept["id"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # the first start, or a damaged file
    new_id = secrets.token_hex(4)
    write_atomically(path, json.dumps({"project": project, "id": new_id}) + "\n")
    return new_id


def _teardown() -> None:
    import wandb

    try:
        wandb.teardown()
    except Exception:  # the process ends with this one anyway
        return


def _line(error: Exception) -> str:
    return one_line(error, 160) or type(error).__name__
