"""bytescope fit: mistakes before anything compiles, a real program end to end, the cache, Ctrl-C."""

import json
import os
import re
import signal
import threading

import pytest

from bytescope.memory import __main__ as command
from bytescope.memory.compare import worker_pool
from bytescope.memory.cost import roofline
from bytescope.memory.devices import targets
from bytescope.memory.records import schedule_records
from bytescope.memory.records.schedule_records import ScheduledKernel
from bytescope.train.plan.fit import fit_walk as walks
from support.cached_rows import keep_sources
from support.described import LAYERS, WIDE_GPU
from support.fit_trials import GIB
from support.json_results import read_result
from support.same_process import SameProcess
from support.screen import seen, terminal

SMALL = [
    "tiny",
    "--config.model.n_layers=2",
    "--config.model.d_model=32",
    "--config.model.d_ff=64",
    "--config.data.seq_len=16",
    "--config.batch.micro=8",
]


def test_the_command(tmp_path, monkeypatch, capsys):
    """A budget that nothing helps; one that takes some recomputation; the same again out of the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_sources(monkeypatch)
    # What a CPU can do is measured in every process: here it is one that recomputes dearly, in every run.
    monkeypatch.setattr(roofline, "machine_rates", lambda: (1e9, 1e12))
    monkeypatch.setattr(walks, "MAX_NEIGHBOURS", 1)
    monkeypatch.setattr(worker_pool, "Worker", SameProcess)

    def fit(budget, code):
        files = [f"--json={tmp_path / 'f.json'}", f"--html={tmp_path / 'f.html'}"]
        assert command.main(["fit", *SMALL, "cpu:1", "--jobs=1", "--vary=remat", f"--budget={budget}", *files]) == code
        assert "<html" in (tmp_path / "f.html").read_text()
        return read_result(tmp_path / "f.json"), capsys.readouterr().out

    nothing, told = fit("100KiB", 3)
    none, full = [step["allocated_bytes"] for step in nothing["walk"]]
    assert nothing["best"] is None and nothing["programs"] == 2 and none > full
    assert nothing["certificate"]["missing_bytes"] == full - 100 * 2**10
    assert re.search(r"does not fit: [\d.]+ [KM]iB on the device missing", told)

    budget = none - 1
    first, told = fit(budget, 0)
    best = first["best"]
    assert full <= best["allocated_bytes"] <= budget and best["tokens_per_update"] == first["batch_tokens"] == 128
    assert sum(best["breakdown"].values()) == best["allocated_bytes"]
    assert first["programs"] == len(first["walk"]) - 2 > 0, "two are in the cache"
    assert best["recompute_flops_fraction"] < nothing["walk"][1]["recompute_flops_fraction"]
    whole = " ".join(told.replace("\\\n", " ").split())  # a long command goes on in the next line, as shells read it
    assert f"run it with: bytescope train tiny {best['flags']}" in whole
    assert "--config.model.d_ff=64" in best["flags"] and "--config.remat." in best["flags"]

    monkeypatch.setattr(worker_pool, "Worker", None)  # nothing may be compiled now
    again, _ = fit(budget, 0)
    assert again["walk"] == first["walk"] and again["best"] == best and again["programs"] == 0


class Worker:
    """Answers in the place of a process. Asked what auto has to know, it sends this process SIGINT, and is silent."""

    cpu_devices = 0

    def __init__(self, env, cpu_devices):
        self._killed = threading.Event()

    def ask(self, message):
        job = json.loads(message)
        if job["method"]:
            os.kill(os.getpid(), signal.SIGINT)
            self._killed.wait(60)
            return {"status": "the worker died", "dead": True}
        size = {"none": 3, "full": 1}[dict(job["overrides"])["remat.policy"]] * GIB
        return {
            "status": "ok",
            "allocated_bytes": size,
            "host_bytes": 0,
            "breakdown": {"params": size},
            "recompute_flops_fraction": 0.25,
            "calls_per_update": 1,
            "target": targets.parse("h100").to_json(),
            "schedule": schedule_records.to_json(
                tuple(
                    ScheduledKernel("product", phase, 0, 10**12, "bfloat16")
                    for phase in ("forward", "recompute", "backward")
                )
            ),
        }

    def kill(self):
        self._killed.set()

    close = kill


class Refusing(Worker):
    """As Worker, but what auto has to know is not told."""

    def ask(self, message):
        return {"status": "not [/b] today"} if json.loads(message)["method"] else super().ask(message)


def test_on_a_terminal_the_bar_and_the_walk_never_share_a_line(monkeypatch):
    monkeypatch.setattr(worker_pool, "Worker", Refusing)
    with terminal(monkeypatch, 80) as written:
        code = command.main(["fit", *SMALL, "h100", "--budget=2GiB", "--vary=remat", "--no-cache"])
    lines = seen(written[0], 80)
    assert code == 0 and "compiling" in written[0] and not any("compiling" in line for line in lines)
    assert [line[0] for line in lines if line.startswith(("baseline", "mesh"))] == ["b", "m"]
    assert sum(re.match(r" *[\d.]+ s  \S.*(GiB|none|full)", line) is not None for line in lines) >= 2
    assert any("not [/b] today" in line for line in lines) and "fits: " in "\n".join(lines)


def test_ctrl_c_leaves_the_best_so_far(tmp_path, monkeypatch, capsys, request):
    # A shell starts what runs in the background with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    monkeypatch.setattr(worker_pool, "Worker", Worker)
    words = [
        "fit",
        *SMALL,
        "h100",
        "--budget=2GiB",
        "--vary=remat",
        "--no-cache",
        f"--json={tmp_path / 'f.json'}",
        f"--html={tmp_path / 'f.html'}",
    ]
    assert command.main(words) == 130
    out = read_result(tmp_path / "f.json")
    assert out["stopped"] == "Ctrl-C" and out["best"]["allocated_bytes"] == GIB
    assert [step["fits"] for step in out["walk"]] == [False, True] and "<html" in (tmp_path / "f.html").read_text()
    told = capsys.readouterr().out
    assert "stopped early: Ctrl-C" in told and "--config.remat.policy=full" in told


@pytest.mark.exhaustive
@pytest.mark.oracle("cuda")
def test_an_option_of_xla_is_found_where_little_memory_is_missing(tmp_path, monkeypatch, capsys):
    """Full recomputation lacks 1.5 % of the budget; the step without XLA's latency-hiding scheduler fits."""
    monkeypatch.setattr(worker_pool, "Worker", SameProcess)
    unrolled = {**WIDE_GPU, "model.unroll": LAYERS}
    words = ["tiny", "h100:2", *(f"--config.{key}={value}" for key, value in unrolled.items())]
    assert command.main(["compare", *words, "--remat=full", f"--json={tmp_path / 'c.json'}"]) == 0
    row = read_result(tmp_path / "c.json")["rows"][0]
    budget = int(row["allocated_bytes"] / 1.015)
    asked = [f"--budget={budget}B", "--vary=remat,xla", f"--json={tmp_path / 'f.json'}"]
    assert command.main(["fit", *words, *asked]) == 0
    out = read_result(tmp_path / "f.json")
    tried = [step for step in out["walk"] if step["stage"] == "compiler"]
    assert 0 < len(tried) <= 4 and any(step["fits"] for step in tried)
    assert not any(step["fits"] for step in out["walk"] if step["stage"] != "compiler")
    assert "xla.latency_hiding=off" in capsys.readouterr().out
