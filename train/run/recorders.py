"""Sends the rows of a run to Weights & Biases if `train.wandb` names a project, and writes the page of the run when a
start ends.

Failures of wandb never end a training. The id of the wandb run is stored in the run directory, so that a resumed run
continues in the same wandb run. Rows that wandb already has are not sent again. With WANDB_MODE=offline everything is
written below WORKDIR/wandb, and `wandb sync` sends it later.
"""

import importlib.util
import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.errors import ReportError, one_line
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human
from bytescope.train.checkpoints.workdir import write_atomically
from bytescope.train.step.routing import ROUTING_METRICS
from bytescope.train.user_errors import UserError

ID = "wandb.json"
# Maximum seconds that a start and an end wait for the network.
START_S, END_S = 20.0, 60.0
# Key of a row -> the name of its curve. wandb groups curves by the part before the slash.
CURVES = {
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


def check(project: str) -> None:
    """Checks that metrics can be sent to the wandb project. Does nothing if `project` is "".

    Raises:
      UserError: the package wandb is not installed, or the user is not logged in.
    """
    if not project:
        return
    if importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"train.wandb={project} cannot be used: the package wandb is not installed: run pip install wandb, or "
            "leave train.wandb empty"
        )
    import wandb

    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
        raise UserError(
            f"train.wandb={project} cannot be used: you are not logged in to wandb: run wandb login, or set "
            "WANDB_MODE=offline and send the metrics later with wandb sync"
        )


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row of metrics.jsonl for wandb: name of the curve, such as "train/loss" -> number. Keys
    that are not in CURVES get the group "train"."""
    values: dict[str, Any] = {}
    for name, value in row.items():
        nested = value if isinstance(value, Mapping) else {}
        values |= {f"{name}/{inner}": number for inner, number in nested.items()}
        if not nested and name != "step":
            values[CURVES.get(name, f"train/{name}")] = value
    return {name: float(number) for name, number in values.items() if isinstance(number, int | float)}


class Recorders:
    """Sends the rows of metrics to wandb. A context manager, which ends the wandb run and writes the run page on exit,
    also after an error.

    Args:
      workdir: the run directory.
      config: resolved config of the run, by dotted key.
      report: the report of the compiled step.
      enabled: False to record nothing. Only the first process records.
      tell: a function that prints a line about a failure.
    """

    def __init__(
        self,
        workdir: Path,
        config: Mapping[str, Any],
        report: ReportRecord,
        enabled: bool,
        tell: Callable[[str], None],
    ):
        self._workdir, self._enabled, self._tell = workdir, enabled, tell
        self._run: Any = None  # the run object of wandb
        if enabled and config["train.wandb"]:
            self._start_wandb(config, report)

    def __enter__(self) -> "Recorders":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._enabled:
            self._write_page()
        self._send(lambda run: run.finish(exit_code=int(kind is not None)))

    def write(self, row: Mapping[str, Any]) -> None:
        """Records a row of training metrics or of evaluation results."""
        self._send(lambda run: run.log(scalars(row), step=row["step"]))

    def finish(self, sample: str) -> None:
        """Records the generated sample text at the end of a finished run; "" if there is none."""
        self._send(lambda run: run.summary.update({"sample": sample}))

    def _start_wandb(self, config: Mapping[str, Any], report: ReportRecord) -> None:
        import wandb

        predicted = {
            "peak": human(report.peak_bytes),
            "allocated": human(report.allocated_bytes),
            "predicted": human(report.predicted_bytes),
            "limit": human(report.limit_bytes),
            "verdict": report.verdict,
        }
        path = self._workdir / ID
        try:
            if not path.exists():
                write_atomically(path, json.dumps({"id": secrets.token_hex(4)}) + "\n")
            self._run = wandb.init(
                project=config["train.wandb"],
                id=json.loads(path.read_text())["id"],
                resume="allow",
                name=self._workdir.name,
                dir=str(self._workdir),
                config={**config, "memory": predicted},
                settings=wandb.Settings(
                    console="off", silent=True, disable_git=True, init_timeout=START_S, finish_timeout=END_S
                ),
            )
        except Exception as error:  # wandb raises many kinds, and none of them may end a training
            self._tell(
                f"warning: wandb gets no rows of this start ({_line(error)}): they are in metrics.jsonl; with "
                "WANDB_MODE=offline wandb sync sends them later"
            )
            return
        self._tell(f"wandb: {self._run.url or f'recorded in {self._workdir}/wandb; wandb sync sends it later'}")

    def _send(self, action: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:  # wandb raises many kinds, and none of them may end a training
            self._run = None
            self._tell(f"warning: wandb failed and gets no more rows: {_line(error)}")

    def _write_page(self) -> None:
        """Writes index.html. If that fails, for example because the disk is full, prints a warning."""
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


def _line(error: Exception) -> str:
    return one_line(error, 160) or type(error).__name__
