"""The rows of a run: what wandb gets, whatever is missing, and its row of host memory."""

import importlib.machinery
import importlib.util
import json
import sys
import time
import types

import pytest

from bytescope.memory.records.report_record import ReportRecord
from bytescope.train.program.config_files import flatten
from bytescope.train.run import loop, recorders
from bytescope.train.run.recorders import Recorders, scalars
from bytescope.train.source import METRICS
from bytescope.train.user_errors import UserError
from support.formats import wandb_records
from support.toy import small_config

pytestmark = pytest.mark.quick

GIB = 2**30
REPORT = ReportRecord(peak_bytes=3 * GIB, allocated_bytes=4 * GIB, breakdown={}, limit_bytes=8 * GIB, verdict="fits")


def row(step, **more):
    return {
        "step": step,
        "loss": 8.0 / step,
        "grad_norm": None,
        "lr": 0.25,
        "batch_tokens": 64,
        "tokens_per_s": 2.0,
        "step_time_s": 32.0,
        "data_wait_s": 0.0,
        "mfu": None,
        "hfu": None,
        "memory": {"in_use_bytes": 5.0 * GIB, "peak_bytes": 6.0 * GIB, "predicted_bytes": 8 * GIB},
        **more,
    }


def start(folder, step=0, upto=4, *, enabled=True, finish="", told=None, **keys):
    """One start of a run from `step` that writes rows and evaluations as the loop does."""
    config = flatten(small_config({f"train.{key}": value for key, value in keys.items()}))
    with Recorders(folder, config, REPORT, enabled, (told if told is not None else []).append) as sinks:
        for at in range(step + 1, upto + 1):
            sinks.write(row(at))
            if at % 2 == 0:
                sinks.write({"step": at, "eval_loss": 4.0 / at, "eval_tokens": 100})
        if finish:
            sinks.finish(finish)


def test_train_held_out_memory_and_speed_are_groups():
    found = scalars(row(2, loss_scale=4.0, skipped_steps=1, novel=7))
    assert found == {
        "train/loss": 4.0,
        "train/learning_rate": 0.25,
        "train/batch_tokens": 64,
        "train/loss_scale": 4.0,
        "train/skipped_steps": 1,
        "train/novel": 7,
        "speed/tokens_per_s": 2.0,
        "speed/step_time_s": 32.0,
        "speed/data_wait_s": 0.0,
        "memory/in_use_bytes": 5.0 * GIB,
        "memory/peak_bytes": 6.0 * GIB,
        "memory/predicted_bytes": 8 * GIB,
    }
    assert scalars({"step": 2, "eval_loss": 2.0, "eval_tokens": 100}) == {"held-out/loss": 2.0, "held-out/tokens": 100}


def test_other_processes_and_a_run_without_wandb_write_nothing(tmp_path):
    start(tmp_path, enabled=False, wandb="p")
    start(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- wandb --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "project", "said"),
    [
        (True, "p", "the package wandb is not installed: run pip install wandb"),
        (False, "p", "not logged in to wandb: run wandb login, or set WANDB_MODE=off"),
    ],
)
def test_what_wandb_lacks_is_told_before_anything_is_compiled(tmp_path, monkeypatch, missing, project, said):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(loop, "settled_program", lambda *_, **__: pytest.fail("compiles"))
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    if missing:
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    else:
        monkeypatch.setitem(sys.modules, "wandb", Fake())
    with pytest.raises(UserError) as caught:
        loop.run(small_config({"train.wandb": project}), workdir=tmp_path / "run", extend=False, console=None)
    assert said in str(caught.value) and str(caught.value).startswith(f"train.wandb={project} ")
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value) and not (tmp_path / "run").exists()


class Fake(types.ModuleType):
    """A wandb whose network is down: `init` fails for one project, and `log` after the first row."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.rows = []
        self.run = types.SimpleNamespace(url=None, log=self._log, summary={}, finish=lambda exit_code: None)

    def setup(self):
        return types.SimpleNamespace(settings=types.SimpleNamespace(mode="online"))

    def login(self, **_):
        return False

    def Settings(self, **settings):
        return settings

    def init(self, project, **settings):
        if project == "unreachable":
            raise TimeoutError("no\nnetwork")
        return self.run

    def _log(self, values, step):
        if self.rows:
            raise BrokenPipeError("gone")
        self.rows.append((step, values))


@pytest.mark.parametrize(
    ("project", "rows", "warning"), [("p", 1, "gets no more rows: gone"), ("unreachable", 0, "(no network)")]
)
def test_no_failure_of_wandb_ends_a_training(tmp_path, monkeypatch, project, rows, warning):
    fake, told = Fake(), []
    monkeypatch.setitem(sys.modules, "wandb", fake)
    start(tmp_path, wandb=project, finish="text", told=told)
    assert len(fake.rows) == rows and warning in told[-1] and "wandb sync" in told[0]
    assert not rows or (fake.rows[0][0] == 1 and fake.rows[0][1]["train/loss"] == 8.0)


def test_an_offline_run_goes_on_as_the_same(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    told = []
    (tmp_path / "run").mkdir()
    start(tmp_path / "run", upto=2, wandb="p", told=told)
    time.sleep(1)  # wandb names the folder of an offline run by the second
    start(tmp_path / "run", step=2, wandb="p", finish="a sample", told=told)
    assert len(told) == 2 and all("wandb sync" in line for line in told)
    ids, losses, sample = set(), {}, ""
    for path in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")):
        for record in wandb_records(path):
            ids |= {record.run.run_id} - {""}
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if name in ("train/loss", "held-out/loss", "memory/predicted_bytes"):
                    losses.setdefault(name, []).append(json.loads(item.value_json))
            for item in record.summary.update:
                sample = item.value_json if (item.key or item.nested_key[0]) == "sample" else sample
    assert len(ids) == 1 and ids == {json.loads((tmp_path / "run" / recorders.ID).read_text())["id"]}
    assert losses == {
        "train/loss": [8.0, 4.0, 8 / 3, 2.0],
        "held-out/loss": [2.0, 1.0],
        "memory/predicted_bytes": [8 * GIB] * 4,
    }
    assert sample == '"a sample"' and not (tmp_path / "run" / METRICS).exists()


def test_the_row_of_host_memory_has_the_highest_process_of_each_phase():
    """Two processes, of which each needs more in another phase."""
    rows = []
    processes = types.SimpleNamespace(
        gather=lambda own: [[{"train": 7}, {"train": 5, "save": 9}], [{"train": 3, "save": 4}, {"train": 8, "save": 2}]]
    )
    run = types.SimpleNamespace(processes=processes, log=types.SimpleNamespace(write=rows.append))
    loop.record_host_memory(run, 30)
    expected = {"processes": 2, "predicted": {"train": 7, "save": 4}, "measured": {"train": 8, "save": 9}}
    assert rows == [{"step": 30, "host_memory": expected}]
