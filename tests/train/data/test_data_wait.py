"""A source that is too slow: the time that devices wait for it is told, and readers that run ahead hide it."""

import contextlib
import io
import json
import threading
import time
from pathlib import Path

import jax
import pytest
from rich.console import Console

from bytescope.train.data.batches import TokenSource
from bytescope.train.program.config_files import load
from bytescope.train.run import loop
from bytescope.train.run.display import MIN_NOTED_WAIT
from bytescope.train.run.step_timer import Clock

STEPS, ROWS, DELAY = 12, 8, 0.02  # seconds of one window
BASE = {
    "model.d_model": 32,
    "model.n_layers": 2,
    "model.n_heads": 2,
    "model.n_kv_heads": 2,
    "model.d_head": 16,
    "model.d_ff": 64,
    "data.seq_len": 32,
    "data.source": str(Path(loop.__file__).parent),
    "batch.micro": ROWS,
    "mesh.fsdp": 1,
    "train.steps": STEPS,
    "train.log_every": 4,
    "train.eval_every": 0,
    "train.eval_sequences": 4,
    "train.checkpoint_every": 0,
    "train.sample_tokens": 0,
    "train.cache_dir": "none",
}


def train(folder, **keys):
    """(mean share of the steps' time that was waiting, mean seconds of it, what was said) of a run on one device."""
    config = load("tiny", [(key, str(value)) for key, value in {**BASE, "mesh.data": -1, **keys}.items()])
    console = Console(record=True, width=100, file=io.StringIO())
    loop.run(config, workdir=folder, extend=False, console=console)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    assert all(0 <= row["data_wait_s"] <= row["step_time_s"] for row in rows)
    waited, seconds = (sum(row[key] for row in rows) for key in ("data_wait_s", "step_time_s"))
    return waited / seconds, waited / len(rows), console.export_text()


@pytest.fixture
def one_device(monkeypatch):
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *args: first)


@pytest.mark.exhaustive
def test_waiting_for_a_slow_source_is_told_and_readers_ahead_hide_it(tmp_path, monkeypatch, one_device):
    share, _, said = train(tmp_path / "quick")
    assert share < 0.3 and ("raise data.workers" in said) == (share >= MIN_NOTED_WAIT)
    read = TokenSource.__getitem__

    def slow(self, i):
        time.sleep(DELAY)
        return read(self, i)

    monkeypatch.setattr(TokenSource, "__getitem__", slow)
    share, seconds, said = train(tmp_path / "alone", **{"data.workers": 0, "data.prefetch": 0})
    # A step of this model is far shorter than its eight windows take.
    assert seconds > 0.5 * ROWS * DELAY and share > 0.5
    assert "raise data.workers" in said
    _, ahead, _ = train(tmp_path / "ahead", **{"data.workers": 8, "data.prefetch": 16})
    assert ahead < 0.5 * seconds


def test_tokens_per_second_of_all_laps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    with contextlib.closing(Clock()) as clock:
        assert clock.tokens_per_s() == 0.0
        for seconds in (2.0, 6.0):
            for _ in range(4):
                clock.tick(100)
            now[0] += seconds
            clock.lap()
            now[0] += 100.0  # an evaluation
            clock.skip()
        assert clock.tokens_per_s() == 800 / 8


class Running:
    """A step's result, ready when it is told to be."""

    def __init__(self):
        self._done = threading.Event()

    def block_until_ready(self):
        self._done.wait()

    def finish(self, clock):
        self._done.set()
        while clock._watch.idle_since() is None:
            time.sleep(0.001)


def test_reading_beside_a_step_is_hidden_and_after_it_is_not():
    with contextlib.closing(Clock()) as clock:
        first, second = Running(), Running()
        clock.dispatched(first)
        with clock.reading():  # the step runs on
            time.sleep(0.05)
        clock.dispatched(second)
        first._done.set()
        second.finish(clock)
        clock.tick(10)
        lap = clock.lap()
        assert lap.data_wait == 0 and lap.seconds >= 0.05 and lap.tokens == 10
        began = time.perf_counter()
        with clock.reading():  # nothing runs
            time.sleep(0.05)
        third = Running()
        clock.dispatched(third)
        with clock.reading():  # the step ends on the way: only what follows counts
            time.sleep(0.05)
            third.finish(clock)
            time.sleep(0.05)
        taken = time.perf_counter() - began
        clock.tick(10)
        clock.tick(10)
        assert 0.1 <= 2 * clock.lap().data_wait <= taken - 0.05
        assert clock.waited() > 0.3
        clock.skip()
        assert clock.lap().data_wait == 0
