"""Several processes on one machine: they load weights and train as one, end as one, and go on from where they were."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from bytescope.memory.devices.platform import THREADS_VARIABLE
from bytescope.train.checkpoints.workdir import Identity, claim, claim_together
from bytescope.train.generate.training_sample import read_part
from bytescope.train.launch.processes import Address, Processes, add_flags, find
from bytescope.train.user_errors import UserError
from support.exhaustive import exhaustive
from support.models import weights
from support.ports import free_port

CONFIG = """
from bytescope.configs import tiny
def get_config():
    config = tiny.get_config()
    config.model.update(d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, d_head=16, d_ff=64, max_seq_len=32)
    config.init.folder = {folder!r}
    config.data.update(source={source!r}, seq_len=32)
    config.batch.update(micro=8, accumulation=1)
    config.mesh.strategy = "ddp"
    config.train.update(steps=12, log_every=1, eval_every=6, eval_sequences=12, checkpoint_every=2, sample_tokens=4)
    return config
"""
# The model of CONFIG: with ddp each process reads all of it, with zero3 the half that its device holds.
LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "vocab_size": 256,
}
VALUES = ("step", "loss", "grad_norm", "lr", "eval_loss", "eval_tokens")
FOUR = ("--config.batch.micro=4",)  # four devices, the same global batch
LONG = 240  # seconds; for machines with more to do
# What all processes are started with; how many threads XLA has is their own choice.
ALIKE = {key: value for key, value in os.environ.items() if key != THREADS_VARIABLE}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a config, weights to begin from and a text to train on."""
    folder = tmp_path_factory.mktemp("distributed")
    words = random.Random(3).choices(("to", "be", "or", "not", "that", "is", "the", "question"), k=40_000)
    (folder / "text").mkdir()
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text(" ".join(words[number::40]))
    model = weights.llama(folder / "weights", shards=3, **LLAMA)
    (folder / "small.py").write_text(CONFIG.format(source=str(folder / "text"), folder=str(model)))
    return folder


def by_flags(port, index, count):
    return [f"--coordinator=127.0.0.1:{port}", f"--process={index}", f"--processes={count}"], {}


def by_slurm(port, index, count):
    """What `srun` leaves; jax makes the port out of the number of the job."""
    return [], {
        "SLURM_JOB_ID": str(port - 61440 + 4096 * 7),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
        "SLURM_STEP_NUM_NODES": "1",
    }


class Started:
    """The processes of one start."""

    def __init__(self, place, workdir, count, *flags, devices=1, told=by_flags, own=None, indices=None):
        port = free_port() if told is by_flags else free_port(61440, 65535)
        self.logs, self.processes = [], []
        for index in range(count) if indices is None else indices:
            where, environment = told(port, index, count) if count > 1 else ([], {})
            self.logs.append(place / f"{workdir.name}-{time.monotonic_ns()}-{index}.txt")
            command = [
                sys.executable,
                "-m",
                "bytescope.memory",
                "train",
                str(place / "small.py"),
                f"--workdir={workdir}",
                *flags,
                *where,
                *(own or {}).get(index, ()),
            ]
            with open(self.logs[-1], "w") as log:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**ALIKE, "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONUNBUFFERED": "1", **environment},
                    )
                )

    def codes(self, seconds=LONG):
        """Exit codes, once all have ended by themselves."""
        deadline = time.monotonic() + seconds
        try:
            return [process.wait(max(deadline - time.monotonic(), 0.1)) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()

    def texts(self):
        """What each said, without the greeting of the CPU's collectives."""
        return [
            "\n".join(line for line in log.read_text().splitlines() if not line.startswith("[Gloo]"))
            for log in self.logs
        ]

    def strike(self, index, number, workdir, rows_seen):
        """A signal to one of them when the run has written some rows."""
        deadline = time.monotonic() + LONG
        path = workdir / "metrics.jsonl"
        while not (path.exists() and path.read_bytes().count(b"\n") >= rows_seen):
            assert all(process.poll() is None for process in self.processes), self.texts()
            assert time.monotonic() < deadline, self.texts()
            time.sleep(0.005)
        assert self.processes[index].poll() is None
        self.processes[index].send_signal(number)


def finish(*args, **kwargs):
    started = Started(*args, **kwargs)
    assert set(started.codes()) == {0}, started.texts()
    return started.texts()


def rows(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in VALUES if key in row} for row in lines]


def assert_close(some, others):
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key] == pytest.approx(other[key], rel=1e-5), one


@pytest.fixture(scope="module")
def alone(place):
    """The rows of one process with two devices."""
    finish(place, place / "alone", 1, devices=2)
    assert json.loads((place / "alone" / "config.json").read_text())["weights"]
    found = rows(place / "alone")
    assert [row["step"] for row in found if "loss" in row] == list(range(1, 13))
    return found


@pytest.mark.exhaustive
def test_two_processes_killed_told_to_stop_and_damaged(place, alone):
    """One run directory. Launched by SLURM, one of two processes is killed; its rows until then are bit for bit what
    one process with the two devices computes. The run goes on as two processes of two devices each, of which one is
    told to stop, and from a checkpoint that lacks the shards of that one as two of one device each."""
    workdir = place / "two"
    killed = Started(place, workdir, 2, told=by_slurm)
    killed.strike(1, signal.SIGKILL, workdir, rows_seen=5)
    began = time.monotonic()
    assert killed.codes() == [5, -signal.SIGKILL], killed.texts()
    assert time.monotonic() - began < 30
    first = killed.texts()[0]
    assert "error: process 1 died: start all processes again" in first and "Traceback" not in first
    assert "2 x cpu in 2 processes" in first
    before = rows(workdir)
    assert before == alone[: len(before)]
    zero3 = "--config.mesh.strategy=zero3"  # each has a half of every array
    stopped = Started(place, workdir, 2, zero3, *FOUR, devices=2)
    stopped.strike(1, signal.SIGTERM, workdir, rows_seen=len(before) + 1)
    assert stopped.codes() == [0, 0], stopped.texts()
    first, second = stopped.texts()
    saved = int(first.split("SIGTERM: saved step ")[1].split(";")[0])
    assert (
        "4 x cpu in 2 processes" in first
        and "resumed at step" in first
        and second == ""
        and 5 <= saved < 12
        and rows(workdir)[-1]["step"] == saved
    )
    lost = list((workdir / "checkpoints" / str(saved)).rglob("ocdbt.process_1/d/*"))
    assert lost  # process 1 wrote its own shards, and will be the only one to miss them
    for path in lost:
        path.unlink()
    # The keys of an earlier command line stay: with half the devices a micro-batch has twice the sequences again.
    first, second = finish(place, workdir, 2, zero3, "--config.batch.micro=8", told=by_slurm)
    assert f"checkpoint {saved} is damaged" in first and "resumed at step" in first and second == ""
    assert "sample:" in first and (workdir / "damaged" / f"{saved}.1").is_dir()
    assert_close(rows(workdir), alone)


@pytest.mark.exhaustive
def test_the_error_of_one_ends_all_with_its_code(place, alone):
    """Only process 0 looks at the run directory, only process 1 has the other config."""
    del alone
    started = Started(place, place / "alone", 2, "--config.optimizer.weight_decay=0.2")
    assert started.codes() == [2, 2]
    for text, label in zip(started.texts(), ("error: ", "[process 1] error: ")):
        assert text.startswith(label) and "contains another run: optimizer.weight_decay 0.1 -> 0.2" in text
        assert text.count("\n") == 0
    other = weights.llama(place / "other", seed=1, **LLAMA)  # of the same shapes
    started = Started(
        place, place / "differs", 2, own={1: ["--config.train.log_every=2", f"--config.init.folder={other}"]}
    )
    assert started.codes() == [2, 2]
    for text in started.texts():
        assert "differs from process 0: train.log_every 1 -> 2; init.folder '" in text
        assert text.count("\n") == 0


@pytest.mark.parametrize(
    ("index", "message"),
    [(0, "process 1 of 2 did not connect within 3 s"), *exhaustive((1, "process 0 did not answer at 127.0.0.1:"))],
)
def test_a_process_that_never_comes_is_a_clear_time_out(place, index, message):
    began = time.monotonic()
    started = Started(place, place / "never", 2, "--timeout=3", indices=[index])
    assert started.codes() == [5]
    [text] = started.texts()
    assert text.startswith("error: ") and message in text and text.count("\n") == 0
    assert time.monotonic() - began >= 3 and not (place / "never").exists()


# Joins the processes as a run does, with jax's own heartbeat at 3 seconds instead of 100 unless the run sets it.
STOPPED = """
import argparse, sys, time, jax
from bytescope.train.launch import liveness, processes
initialize = jax.distributed.initialize
jax.distributed.initialize = lambda *args, **kwargs: initialize(*args, **{"heartbeat_timeout_seconds": 3, **kwargs})
liveness.SILENT_S = 2.0
parser = argparse.ArgumentParser()
processes.add_flags(parser)
args = parser.parse_args(sys.argv[2:])
args.workdir = None
joined = processes.start(processes.find(args), args, 8.0)
step, stop = 0, False
while not stop:
    step += 1
    joined.at(f"in step {step}")
    stop = any(joined.gather(sys.argv[1] == "0" and not sys.stdin.readline()))
    print("step", flush=True)
joined.close()
"""


def joined(folder):
    """Two processes that run STOPPED and have made a step together."""
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", STOPPED, str(index), *by_flags(port, index, 2)[0]],
            cwd=folder,
            env={**ALIKE, "BYTESCOPE_TOKEN": "x"},
            stdin=subprocess.PIPE,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]
    started[0].stdin.write("\n")
    started[0].stdin.flush()
    assert [process.stdout.readline() for process in started] == ["step\n"] * 2
    return started


@pytest.mark.exhaustive
def test_the_first_process_killed_ends_the_other(tmp_path):
    """With it the service that jax's processes meet at is gone."""
    first, second = joined(tmp_path)
    first.kill()
    try:
        error = second.communicate(timeout=30)[1]
    finally:
        second.kill()
        first.communicate()
    # jax aborts it if the line does not end it first
    assert second.returncode == -signal.SIGABRT or (second.returncode == 5 and "process 0 died" in error), error


@pytest.mark.exhaustive
def test_a_stopped_process_is_named_and_nothing_is_ended(tmp_path):
    """Each in turn stands still for longer than jax's heartbeat allows, while the other waits for it."""
    started = joined(tmp_path)
    try:
        for process in started:
            process.send_signal(signal.SIGSTOP)
            started[0].stdin.write("\n")
            started[0].stdin.flush()
            time.sleep(7)
            process.send_signal(signal.SIGCONT)
            assert [process.stdout.readline() for process in started] == ["step\n"] * 2
        outputs = [process.communicate(timeout=LONG)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    assert "process 1 has been silent for" in outputs[0] and "process 0 has been silent for" in outputs[1]


def arguments(*flags):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(flags)


@pytest.fixture
def no_launcher(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_"))]:
        monkeypatch.delenv(name)


def test_the_place_of_a_process(no_launcher, monkeypatch):
    assert find(arguments()) is None and find(arguments("--processes=1")) is None
    flags = ["--process=1", "--processes=2"]
    assert find(arguments("--coordinator=node1:4567", *flags)) == Address("node1", 4567, 1, 2, False)
    assert str(find(arguments("--coordinator=[::1]:4567", *flags))) == "[::1]:4567"
    for name, value in by_slurm(61441, 3, 4)[1].items():
        monkeypatch.setenv(name, value)
    assert find(arguments()) == Address("localhost", 61441, 3, 4, True)
    assert find(arguments("--coordinator=node1:4567", *flags)) == Address("node1", 4567, 1, 2, False)
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert find(arguments()) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--processes=2"], "--coordinator and --process are missing"),
        (["--coordinator=a:1", "--process=0"], "--processes are missing"),
        (["--coordinator=a", "--process=0", "--processes=2"], "give HOST:PORT"),
        (["--coordinator=a:99999", "--process=0", "--processes=2"], "give HOST:PORT"),
        (["--coordinator=a:1", "--process=2", "--processes=2"], "give process numbers from 0"),
        (["--coordinator=a:1", "--process=-1", "--processes=2"], "give process numbers from 0"),
        (["--timeout=0"], "--timeout=0 is out of range: give a positive number"),
    ],
)
def test_flags_that_make_no_sense_are_one_line(no_launcher, flags, message):
    with pytest.raises(UserError, match=message) as caught:
        find(arguments(*flags))
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_the_accumulation_for_other_devices_is_named(tmp_path):
    """Four devices of micro-batch 4 x accumulation 2 are two of accumulation 4."""
    claim(tmp_path, Identity({"train.steps": 1, "batch.accumulation": 2}, 32, "abc"), extend=False)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="--config.batch.accumulation=4 makes the global batch 32 again"):
        claim(tmp_path, Identity({"train.steps": 1, "batch.accumulation": 2}, 16, "abc"), extend=False)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("tokens", "count", "kept"),
    [
        (0, 4, []),
        (3, 9, [0, 1, 2]),
        (7, 4, list(range(7))),  # room for one token at least: the whole prompt
        (20, 2, list(range(14, 20))),
        (20, 100, list(range(16, 20))),
        (20, 0, list(range(13, 20))),
    ],
)
def test_of_a_prompt_longer_than_the_window_its_end_is_read(tokens, count, kept):
    assert read_part(list(range(tokens)), count, 8) == kept


def test_a_directory_that_is_not_shared_is_told(tmp_path, monkeypatch):
    class Second:
        first, count = False, 2

        def from_first(self, value):
            return answers.pop(0)

    identity = Identity({"train.steps": 1, "data.source": "here"}, 8, "abc")
    monkeypatch.setattr("bytescope.train.checkpoints.workdir.SHARED_S", 0.2)
    answers = [{"config": {"train.steps": 1, "data.source": "there"}, "global_rows": 8, "data": "abc"}, []]
    with pytest.raises(UserError, match="give a --workdir on a file system"):
        claim_together(tmp_path, identity, extend=False, processes=Second())


@pytest.mark.quick
def test_processes_of_one_node_have_the_same_host_name_and_start_of_the_system(monkeypatch):
    class Others:
        def gather(self, value):
            return [["another", value[1]], value, [value[0], "before a restart"], value]

    assert Processes().on_this_node() == 1
    assert Processes(1, 4, Others()).on_this_node() == 2
