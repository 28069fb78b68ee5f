"""The rows of a run: what TensorBoard and wandb get, whatever was killed or is missing, and its row of host memory."""

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from bytescope.memory.records.report_record import ReportRecord
from bytescope.train.program.config_files import flatten
from bytescope.train.run import loop, wandb_run
from bytescope.train.run.recorders import Recorders
from bytescope.train.run.tensorboard import scalars
from bytescope.train.source import METRICS
from bytescope.train.user_errors import UserError
from support.formats import shown, wandb_records
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
    with Recorders(folder, step, config, REPORT, enabled, (told if told is not None else []).append) as recorders:
        for at in range(step + 1, upto + 1):
            recorders.write(row(at))
            if at % 2 == 0:
                recorders.write({"step": at, "eval_loss": 4.0 / at, "eval_tokens": 100})
        if finish:
            recorders.finish(upto, finish)


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


def test_predicted_memory_config_and_sample_stand_beside_the_curves(tmp_path):
    start(tmp_path, finish="def f():\n    <b>return</b>")
    found = shown(tmp_path / "events")
    assert found["memory/predicted_bytes"] == [(step, 8.0 * GIB) for step in (1, 2, 3, 4)]
    assert found["held-out/loss"] == [(2, 2.0), (4, 1.0)]
    assert b"    model.d_model = 32\n" in found["config/text_summary"][0][1]
    assert b"predicted: 4.00 GiB" in found["report/text_summary"][0][1]
    assert found["sample/text_summary"] == [(4, b"    def f():\n        <b>return</b>")]
    assert b"optimizer.learning_rate" in found["_hparams_/session_start_info"][0][1]
    assert b"held-out/loss" in found["_hparams_/experiment"][0][1] and "_hparams_/session_end_info" in found
    assert b"train/loss" in found["custom_scalars__config__"][0][1]


def test_what_experts_took_is_a_histogram_for_each_layer(tmp_path):
    with Recorders(tmp_path, 0, flatten(small_config()), REPORT, True, print) as recorders:
        recorders.write(row(1), {2: np.float32([0.5, 1.5]), 11: np.float32([2.0, 0.0])})
    found = shown(tmp_path / "events")
    assert found["experts/load_layer_002"] == [(1, [0.0, 0.5, 1.5])]
    assert found["experts/load_layer_011"] == [(1, [0.0, 2.0, 0.0])]


@pytest.mark.parametrize("resumed", [0, 2])
def test_a_killed_start_leaves_no_second_point(tmp_path, resumed):
    """From a checkpoint, and from the beginning where there was none yet; in the same second, too."""
    start(tmp_path / "whole")
    start(tmp_path / "killed", upto=3)
    last = max((tmp_path / "killed" / "events").iterdir())
    last.write_bytes(last.read_bytes()[:-5])  # in the middle of a record
    start(tmp_path / "killed", step=resumed)
    curves = [
        {
            tag: points
            for tag, points in shown(tmp_path / name / "events").items()
            if tag.startswith(("train/", "held-out/", "memory/", "speed/"))
        }
        for name in ("whole", "killed")
    ]
    assert curves[0] == curves[1] and len(curves[0]["train/loss"]) == 4


def test_events_are_on_the_disk_at_once_and_a_full_disk_is_an_error(tmp_path):
    config = flatten(small_config())
    recorders = Recorders(tmp_path, 0, config, REPORT, True, print)
    recorders.write(row(1))
    assert shown(tmp_path / "events")["train/loss"] == [(1, 8.0)]
    events = recorders._recorders[-1]
    events._file._py_recordio_writer._writer.close()
    with open("/dev/full", "wb") as full:
        events._file._py_recordio_writer._writer = full
        with pytest.raises(OSError, match="No space"):
            recorders.write(row(2))
        recorders.__exit__(OSError, None, None)  # what failed first is to be seen
        with contextlib.suppress(OSError):
            full.close()


def test_other_processes_and_a_switched_off_tensorboard_write_nothing(tmp_path):
    start(tmp_path, enabled=False, wandb="p")
    start(tmp_path, tensorboard=False)
    assert list(tmp_path.iterdir()) == []


# ---- wandb --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "project", "said"),
    [
        (True, "p", "the package wandb is not installed: run pip install wandb"),
        (False, "a/b", "train.wandb=a/b is not a valid project name (Invalid project name)"),
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
    """A wandb whose network is down: `init` fails online, and `log` after the first row."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.calls, self.rows = [], []
        self.errors = types.SimpleNamespace(UsageError=ConnectionError)
        self.run = types.SimpleNamespace(url=None, log=self._log, summary={}, finish=lambda exit_code: None)

    def setup(self):
        return types.SimpleNamespace(settings=types.SimpleNamespace(mode="online"))

    def login(self, **_):
        return False

    def Settings(self, **settings):
        if "/" in settings.get("project", ""):
            raise ConnectionError("Invalid project name")
        return settings

    def init(self, **settings):
        self.calls.append(settings.get("mode", "online"))
        if self.calls[-1] == "online":
            raise TimeoutError("no\nnetwork")
        return self.run

    def _log(self, values, step):
        if self.rows:
            raise BrokenPipeError("gone")
        self.rows.append((step, values))

    def teardown(self):
        self.calls.append("teardown")


def test_no_failure_of_wandb_ends_a_training(tmp_path, monkeypatch):
    fake, told = Fake(), []
    monkeypatch.setitem(sys.modules, "wandb", fake)
    start(tmp_path, wandb="p", finish="text", told=told)
    assert fake.calls == ["online", "teardown", "offline", "teardown"]
    assert len(fake.rows) == 1 and fake.rows[0][0] == 1 and fake.rows[0][1]["train/loss"] == 8.0
    assert len(told) == 2 and "no network" in told[0] and "wandb sync" in told[0]
    assert "gets no more rows: gone" in told[1]
    assert len(shown(tmp_path / "events")["train/loss"]) == 4  # TensorBoard goes on


def test_an_id_is_kept_for_its_project(tmp_path):
    path = tmp_path / wandb_run.ID
    first = wandb_run._read_or_create_id(path, "p")
    assert wandb_run._read_or_create_id(path, "p") == first != wandb_run._read_or_create_id(path, "q")
    path.write_text("{")
    assert len(wandb_run._read_or_create_id(path, "p")) == 8 and json.loads(path.read_text())["project"] == "p"


def test_an_offline_run_goes_on_as_the_same_and_leaves_no_process(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    told = []
    (tmp_path / "run").mkdir()
    start(tmp_path / "run", upto=2, wandb="p", tensorboard=False, told=told)
    start(tmp_path / "run", step=2, wandb="p", tensorboard=False, finish="a sample", told=told)
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
    assert len(ids) == 1 and ids == {json.loads((tmp_path / "run" / wandb_run.ID).read_text())["id"]}
    assert losses == {
        "train/loss": [8.0, 4.0, 8 / 3, 2.0],
        "held-out/loss": [2.0, 1.0],
        "memory/predicted_bytes": [8 * GIB] * 4,
    }
    assert sample == '"a sample"' and not (tmp_path / "run" / METRICS).exists()
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if children.exists():
        names = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children.read_text().split()]
        assert not any("wandb" in name for name in names)


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
