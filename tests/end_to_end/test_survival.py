"""The run as a user starts it: killed, stopped, resumed, refused; nothing is lost and every error is a line."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import pytest

from bytescope.memory.records.report_record import ReportRecord
from bytescope.train.checkpoints.checkpoint import Checkpoints
from bytescope.train.launch.failures import explain, too_big
from bytescope.train.user_errors import DoesNotFit, UserError

CONFIG = """
from bytescope.configs import tiny
def get_config():
    config = tiny.get_config()
    config.model.update(d_model=64, n_layers=2, n_heads=2, n_kv_heads=1, d_head=32, d_ff=128, max_seq_len=64)
    config.data.seq_len = 64
    config.batch.update(micro=16, accumulation=2)
    config.train.update(steps=30, log_every=1, eval_every=10, eval_sequences=20, checkpoint_every=5, sample_tokens=0)
    return config
"""
TIMED = ("tokens_per_s", "step_time_s", "data_wait_s", "mfu", "hfu", "memory")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the config, and a cache that all starts share."""
    folder = tmp_path_factory.mktemp("survival")
    (folder / "small.py").write_text(CONFIG)
    return folder


def command(place, *flags):
    overrides = [str(place / "small.py"), f"--config.train.cache_dir={place / 'cache'}"]
    return [sys.executable, "-m", "bytescope.memory", "train", *overrides, *flags]


def environment():
    # One device, as a user has it; nothing of the test's own settings but the speed of compiling.
    keep = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    return {**keep, "PYTHONUNBUFFERED": "1"}


def run(place, *flags, cwd=None):
    return subprocess.run(
        command(place, *flags),
        capture_output=True,
        text=True,
        env=environment(),
        cwd=cwd,
        timeout=300,
        check=False,
    )


def start(place, *flags):
    """A run that goes on beside the test, its output line by line."""
    return subprocess.Popen(command(place, *flags), env=environment(), stdout=subprocess.PIPE, text=True)


def terminate_at(process, landmark):
    """SIGTERM once a line starts with `landmark`; what the run said after that. It must end with 0."""
    for line in process.stdout:
        if line.startswith(landmark):
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    process.communicate()
    assert process.returncode == 0
    return rest


def rows(workdir):
    """Metrics without what a clock says."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in (*TIMED, "host_memory")} for line in lines
    ]


def last_checksums(workdir):
    folder = max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    return next(
        json.loads(path.read_text())["checksums"]
        for path in folder.rglob("*")
        if path.name == "metadata" and "meta" in path.parts
    )


@pytest.fixture(scope="module")
def uninterrupted(place):
    done = run(place, f"--workdir={place / 'whole'}")
    assert done.returncode == 0, done.stderr
    return done, place / "whole"


def test_the_user_sees_everything_in_order(uninterrupted):
    done, workdir = uninterrupted
    landmarks = [
        "model ",
        " parameters",
        "batch ",
        "16 micro-batch x 2 accumulation x 1 data-parallel",
        "devices ",
        "program ",
        "attention",
        "memory ",
        " GiB (",
        "report ",
        "memory.html",
        "step      1/30  loss",
        "held-out loss",
        "done ",
        "held-out loss",
        "updates 1 to 30 of 30",
        "memory ",
        "predicted",
        "of XLA's buffers on 1 CPU device, ",
        "of arrays measured",
        "checkpoint ",
        "checkpoints/30",
        "for more steps",
        "--config.train.steps=60",
        "--extend",
        "bytescope generate ",
        "bytescope export ",
        "bytescope report ",
    ]
    place = 0
    for landmark in landmarks:
        place = done.stdout.find(landmark, place)
        assert place >= 0, landmark
    assert len(done.stdout.split("step      1/30")[0].splitlines()) <= 12  # the whole report is for --verbose
    lines = [
        line for line in done.stdout.splitlines() if not line.startswith("  bytescope ")
    ]  # commands are not wrapped
    assert max(map(len, lines)) <= 120
    assert "Traceback" not in done.stderr and "cuPTI" not in done.stderr
    found = {path.name for path in workdir.iterdir()}
    assert {"config.json", "metrics.jsonl", "memory.json", "memory.html", "checkpoints"} <= found


def test_metrics_rows_have_the_promised_keys(uninterrupted):
    lines = [json.loads(line) for line in (uninterrupted[1] / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in lines if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 31))
    assert all(set(row) == {"step", "loss", "grad_norm", "lr", "batch_tokens", *TIMED} for row in steps)
    assert [row["step"] for row in lines if "eval_loss" in row] == [10, 20, 30]
    assert steps[-1]["loss"] < steps[0]["loss"]
    report = ReportRecord.from_json(json.loads((uninterrupted[1] / "memory.json").read_text()))
    assert sum(report.breakdown.values()) == report.allocated_bytes and report.breakdown["accumulator"] > 0


def test_the_last_row_has_the_host_memory_of_each_phase(uninterrupted):
    last = json.loads((uninterrupted[1] / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 30 and last["host_memory"]["processes"] == 1
    predicted, measured = last["host_memory"]["predicted"], last["host_memory"]["measured"]
    for phase in ("initialize", "train", "evaluate"):
        assert measured[phase] == pytest.approx(predicted[phase], rel=0.2), phase
    page = (uninterrupted[1] / "index.html").read_text()
    assert all(f">{phase}<" in page for phase in ("initialize", "train", "evaluate"))


def test_device_bytes_of_cpus_are_measured_apart_from_the_process(uninterrupted):
    """Arrays alone: the temporaries of this model are smaller than what the growth of the process resolves."""
    lines = [json.loads(line) for line in (uninterrupted[1] / "metrics.jsonl").read_text().splitlines()]
    rows = [row["memory"] for row in lines if "loss" in row]
    report = ReportRecord.from_json(json.loads((uninterrupted[1] / "memory.json").read_text()))
    # While a checkpoint is written, its copies are arrays too.
    assert min(row["in_use_bytes"] for row in rows) == pytest.approx(report.xla.argument_bytes, rel=0.05)
    assert not any("peak_bytes" in row for row in rows)
    said = " ".join(uninterrupted[0].stdout.split())
    assert "of arrays measured; the temporaries are too small to be measured: below 32.00 MiB" in said


@pytest.mark.exhaustive
def test_killed_and_told_to_stop_the_curve_is_bit_identical(place, uninterrupted):
    """Killed in a step; told to stop in a step; told in the last evaluation, which does not wait for its end: the next
    start makes the row."""
    workdir = place / "interrupted"
    process = subprocess.Popen(
        command(place, f"--workdir={workdir}"), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        path = workdir / "metrics.jsonl"
        if path.exists() and path.read_bytes().count(b"\n") >= 9:
            process.kill()
            break
        time.sleep(0.002)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run was over before it could be killed"
    rest = terminate_at(start(place, f"--workdir={workdir}"), "step     13/30")
    assert "SIGTERM: saved step" in rest
    saved = int(rest.split("saved step ")[1].split(";")[0])
    assert 13 <= saved < 30 and rows(workdir)[-1]["step"] == saved  # not at a cadence, and its row is there
    terminate_at(start(place, f"--workdir={workdir}"), "step     29/30")
    assert rows(workdir)[-1]["step"] >= 29
    done = run(place, f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr
    assert "resumed at step" in done.stdout
    assert rows(workdir) == rows(uninterrupted[1])
    assert last_checksums(workdir) == last_checksums(uninterrupted[1])


def test_a_finished_run_says_so(place, uninterrupted):
    before = rows(uninterrupted[1])
    done = run(place, f"--workdir={uninterrupted[1]}")
    assert done.returncode == 0 and "is finished: step 30 of 30" in done.stdout
    assert rows(uninterrupted[1]) == before


@pytest.mark.exhaustive
def test_a_resumed_run_may_change_its_layout(place, uninterrupted):
    """Micro-batch x accumulation, remat and kernels are free: the loss goes on as it would have."""
    changed = place / "layout-changed"
    shutil.copytree(uninterrupted[1], changed)
    for step in (25, 30):
        shutil.rmtree(changed / "checkpoints" / str(step))
    done = run(
        place,
        f"--workdir={changed}",
        "--config.batch.micro=8",
        "--config.batch.accumulation=4",
        "--config.batch.mode=scan",
        "--config.remat.policy=full",
        "--config.model.attention=chunked",
    )
    assert done.returncode == 0 and "changed since the last start: batch.micro 16 -> 8" in done.stdout, done.stderr
    assert "resumed at step 20" in done.stdout and not (changed / "damaged").exists()
    for one, other in zip(rows(changed), rows(uninterrupted[1]), strict=True):
        for key in one:
            assert one[key] == pytest.approx(other[key], rel=1e-4), one["step"]


# Mistakes that end with exit code 2 are tried in tests/train/program/test_mistakes.py; the refusal with exit code 3 is
# quoted in train/README.md, and tests/end_to_end/test_quoted_output.py runs it.


def test_help_is_short_and_names_the_exit_codes(place):
    done = run(place, "--help")
    assert done.returncode == 0 and len(done.stdout.splitlines()) <= 30 and "exit codes" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 110


@pytest.mark.exhaustive
def test_loss_that_is_not_finite_leaves_the_last_good_checkpoint(place):
    workdir = place / "diverged"
    flags = (
        f"--workdir={workdir}",
        "--config.train.checkpoint_every=1",
        "--config.train.eval_every=0",
        "--config.optimizer.learning_rate=1e18",
        "--config.optimizer.clip_norm=0.0",
        "--config.optimizer.warmup_steps=0",
    )
    done = run(place, *flags)
    assert done.returncode == 4 and "last good checkpoint is step" in done.stderr, done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr and done.stderr.count("\n") == 1
    good = int(done.stderr.split("checkpoint is step ")[1].split()[0])
    assert Checkpoints(workdir, 3).steps()[-1] == good
    assert rows(workdir)[-1]["step"] == good  # the row of the bad step is not written


def test_out_of_memory_and_a_full_disk_are_explained():
    report = ReportRecord(peak_bytes=2**30, allocated_bytes=2**30, breakdown={}, limit_bytes=2**31)
    told = explain(
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate"),
        report,
        jax.devices()[0],
        lambda: ["left to try"],
    )
    assert isinstance(told, DoesNotFit) and told.exit_code == 3 and told.advice[-1] == "left to try"
    assert "out of memory in the step, on cpu" in told.advice and "where the bytes are" in "\n".join(told.advice)
    assert "predicted 1.00 GiB" in str(told) and "limit 2.00 GiB" in str(told)
    full = explain(OSError(errno.ENOSPC, "No space left on device"), report, jax.devices()[0])
    assert type(full) is UserError and "No space left on device. Make room" in str(full)
    assert explain(ValueError("a bug"), report, jax.devices()[0]) is None
    assert "1.00 GiB too much" in too_big(dataclasses.replace(report, allocated_bytes=3 * 2**30))
