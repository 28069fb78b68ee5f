"""Running a comparison: the cache, jobs, worker processes that die or are stopped, and the command end to end."""

import argparse
import ast
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bytescope.memory import __main__ as command
from bytescope.memory.commands import compare_command
from bytescope.memory.compare import compare_page, compare_text, comparison, row_cache, worker, worker_pool
from bytescope.memory.compare import compare_rows as plan_rows
from bytescope.memory.compare.comparison import Compared
from bytescope.memory.compare.jobs import Jobs
from bytescope.memory.devices import platform, targets
from bytescope.memory.errors import ReportError
from bytescope.memory.seconds import rates
from bytescope.memory.view import elements
from bytescope.train.commands.config_arguments import split_overrides
from bytescope.train.plan import config_factory, config_subject, levers_view
from bytescope.train.plan.config_factory import FACTORY
from bytescope.train.plan.config_grid import ConfigRow
from bytescope.train.plan.config_subject import ConfigSubject
from bytescope.train.plan.fit import fit_walk
from bytescope.train.plan.trials import Trials
from bytescope.train.program.config_files import load_flat
from bytescope.train.run import loop
from bytescope.train.user_errors import UserError
from support.cached_rows import keep_sources
from support.json_results import read_result
from support.same_process import SameProcess

ROOT = Path(row_cache.__file__).parents[2]
SMALL = [
    "--config.model.n_layers=2",
    "--config.model.d_model=32",
    "--config.model.d_ff=64",
    "--config.data.seq_len=16",
    "--config.batch.micro=2",
]


# ---- the cache --------------------------------------------------------------------------------------


def test_the_cache_key_holds_what_decides():
    base = {
        "config": {"a": 1},
        "target": "h200:8",
        "versions": {"jax": "1"},
        "sources": "s",
        "measure": False,
        "env": {},
    }
    changes = [
        {"config": {"a": 2}},
        {"target": "h200:4"},
        {"versions": {"jax": "2"}},
        {"sources": "t"},
        {"measure": True},
        {"env": {"XLA_FLAGS": "--x"}},
    ]
    keys = [row_cache.key(**(base | change)) for change in [{}, *changes]]
    assert len(set(keys)) == len(keys) and row_cache.key(**base) == keys[0]
    for without_effect in ("HOME", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        assert row_cache.key(**(base | {"env": {without_effect: "1"}})) == keys[0]


def test_a_cache_that_is_damaged_or_cannot_be_written_is_none(tmp_path):
    place = tmp_path / "compare"
    row_cache.write(place, "k", {"status": "ok", "peak_bytes": 1})
    assert row_cache.read(place, "k") == {"status": "ok", "peak_bytes": 1}
    assert [file.name for file in place.iterdir()] == ["k.json"]
    (place / "k.json").write_text('{"status": "ok", "pea')
    assert row_cache.read(place, "k") is None and row_cache.read(place, "other") is None
    (tmp_path / "file").write_text("")
    row_cache.write(tmp_path / "file" / "below", "k", {})
    assert row_cache.folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "bytescope" / "compare"


def listed_modules():
    """Every list of modules of whose files a row's name is a digest, by what they do."""
    return {
        "row": row_cache.MAKING_ROWS,
        "program": config_factory.PROGRAM_MODULES,
        "plan": config_factory.PLAN_MODULES,
    }


@pytest.fixture
def changed(monkeypatch):
    """Changes one byte of a file, as far as the digest sees it; "" for none."""
    real, wanted = Path.read_bytes, []
    monkeypatch.setattr(Path, "read_bytes", lambda path: real(path) + (b"#" if path in wanted else b""))

    def change(file):
        wanted[:] = [Path(file)] if file else []

    return change


def named(policy):
    return Jobs(FACTORY).job({"config": "tiny", "remat.policy": policy}, "h200:8").name


def test_a_change_in_each_listed_module_changes_the_name_of_a_row(changed):
    before = {policy: named(policy) for policy in ("full", "auto")}
    listed = listed_modules()
    decide = {file for what in ("row", "program") for file in row_cache.source_files(listed[what])}
    for module in {module for modules in listed.values() for module in modules}:
        file = row_cache.source_files([module])[-1]  # of a package any of its files
        changed(file)
        assert named("auto") != before["auto"], file
        assert (named("full") != before["full"]) == (file in decide), file
    changed("")
    assert named("full") == before["full"]


def test_a_change_in_a_view_or_a_search_leaves_rows_valid(changed):
    before = {policy: named(policy) for policy in ("full", "auto")}
    for module in (compare_text, compare_page, compare_command, elements, config_subject, fit_walk, levers_view, loop):
        changed(module.__file__)
        assert {policy: named(policy) for policy in before} == before, module.__name__


def test_every_module_that_a_row_is_made_by_is_listed_or_known_to_show():
    """A worker and the trainer's factory import these modules, themselves or through others; a new one is listed, or
    named here because no row depends on it."""
    no_part = (
        "configs",  # a row's name has every value
        "memory.compare.compare_rows",  # keys and rows of the parent process
        "memory.compare.grids",
        "memory.compare.jobs",
        "memory.compare.what_if",
        "memory.audit",  # what a report says of a row's program, as findings do
        "memory.findings",
        "memory.host",  # this computer's memory
        "memory.files",
        "memory.processes",
        "memory.remat",  # chooses, or describes a block
        "memory.allocators",  # replay what was read
        "memory.report",
        "memory.seconds",  # predicts from a row
        "memory.view",
        "train.user_errors",
        "train.data",
        "train.checkpoints",  # the host memory of a run
        "train.weights",  # what a run begins with
        "train.plan",
        "train.generate.training_sample",  # another program of a run
        "train.run",
        "train.source",  # finds a config; a row's name has every value of it
        "train.launch",
    )
    listed = {file for name in ("row", "program") for file in row_cache.source_files(listed_modules()[name])}
    left, seen = ["memory.compare.worker", "train.plan.config_factory", "train.program.program"], set()
    while left:
        if (name := left.pop()) in seen:
            continue
        seen.add(name)
        file = ROOT / (name.replace(".", "/") + ".py")
        file = file if file.exists() else file.with_suffix("") / "__init__.py"
        if name.startswith(no_part) and file not in listed:
            continue
        assert file in listed or file.name == "__init__.py", name
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bytescope."):
                module = node.module.removeprefix("bytescope.")
                inner = [f"{module}.{alias.name}" for alias in node.names]
                places = [ROOT / one.replace(".", "/") for one in inner]
                left += [
                    one if place.is_dir() or place.with_suffix(".py").exists() else module
                    for one, place in zip(inner, places, strict=True)
                ]
    assert len(seen) > 60


# ---- jobs and workers -------------------------------------------------------------------------------


def options(config="tiny", overrides=(), **more):
    given = {"target": "cpu:1", "remat": None, "grid": [], "measure": False}
    return argparse.Namespace(**(given | more), subject=ConfigSubject(config, overrides))


def make_jobs(args):
    what = Compared(FACTORY, args.subject.fixed(), args.target, "tiny")
    return comparison.make_jobs(what, Jobs(FACTORY), compare_command.asked_grids(args))


def test_jobs_are_typed_by_the_trainer_and_duplicates_dropped():
    args = options(
        remat="none,full", grid=["data.seq_len=32,0032,64", "target=h200:8,H200:8"], overrides=[("model.n_layers", "2")]
    )
    jobs = make_jobs(args)
    assert [tuple(job.chosen.values()) for job in jobs] == [
        (n, "h200:8", policy) for n in (32, 64) for policy in ("none", "full")
    ], "policies last: rivals side by side"
    assert [job.label for job in jobs][:2] == ["seq_len=32, h200:8, none", "seq_len=32, h200:8, full"]
    assert jobs[0].overrides["model.n_layers"] == "2" and jobs[0].overrides["config"] == "tiny"
    for key in ("data.seq_lne", "data.seq_len=x"):
        with pytest.raises(UserError, match="seq_l"):
            make_jobs(options(grid=[f"{key}=1" if "=" not in key else key]))
    with pytest.raises(ReportError, match="no config"):
        make_jobs(options(config=""))


def test_policies_with_names_of_their_own():
    """The names are keys of the row; those that the config gives its own custom policy stay with that alone."""
    own = [("remat.policy", "custom"), ("remat.save", "context")]
    args = options(remat="none,custom,custom(v,up)+offload(block_in),custom( v )", overrides=own)
    jobs = make_jobs(args)
    names = [{key: value for key, value in job.chosen.items() if key != "remat.policy"} for job in jobs]
    assert list(zip([job.label for job in jobs], names)) == [
        ("none", {"remat.save": []}),
        ("custom", {}),
        ("custom(v,up)+offload(block_in)", {"remat.save": ["v", "up"], "remat.offload": ["block_in"]}),
        ("custom(v)", {"remat.save": ["v"], "remat.offload": []}),
    ]
    assert [job.resolved["remat.save"] for job in jobs] == [(), ("context",), ("v", "up"), ("v",)]
    # Where a range of layers is custom, its names are for it.
    ranges = [*own, ("remat.layers", "0-2:custom")]
    assert make_jobs(options(remat="none", overrides=ranges))[0].resolved["remat.save"] == ("context",)


def test_the_flags_of_a_policy_run_it():
    """What compare prints goes through a shell into the same config."""
    (job,) = make_jobs(options(remat="custom(v,up)+offload(block_in)"))
    _, pairs = split_overrides(shlex.split(plan_rows.flags(ConfigRow(job.chosen))))
    assert load_flat("tiny", pairs) == job.resolved


def test_searches_share_rows():
    """One program has one name in the cache, whichever command asks for it; what describes its blocks has another."""
    (row,) = make_jobs(options(target="h100", remat="full", overrides=[("model.n_layers", "2")]))
    trials = Trials("tiny", targets.parse("h100"), [("model.n_layers", "2")], None, None)
    assert trials.job({"remat.policy": "full"}).name == row.name
    others = [
        trials.job({"remat.policy": "full"}, **more).name
        for more in ({"describe": True}, {"measure": True}, {"target": "h200"})
    ]
    assert len({row.name, *others}) == 4


@pytest.fixture
def file_of_rates(tmp_path):
    """What `bytescope calibrate` writes on an H200; undone at the end, where a test chose it."""
    (file := tmp_path / "rates.json").write_text(json.dumps(rates.select(targets.parse("h200")).to_json()))
    yield file
    rates.use(None)


def test_a_policy_that_a_search_settles_is_another_row_at_other_rates(file_of_rates, tmp_path):
    """The others stay valid: they are predicted again. Workers get the file."""

    def named(policy):
        return Jobs(FACTORY).job({"config": "tiny", "remat.policy": policy}, "h200:8")

    before = {policy: named(policy).name for policy in ("auto", "full")}
    assert named("auto").name == before["auto"] and json.loads(named("auto").message(False))["rates"] is None
    rates.use(file_of_rates)
    job = named("auto")
    assert job.name != before["auto"] and named("full").name == before["full"]
    assert json.loads(job.message(False))["rates"] == str(file_of_rates)
    (tmp_path / "same.json").write_text(json.dumps(json.loads(file_of_rates.read_text()), indent=2))
    rates.use(tmp_path / "same.json")
    assert named("auto").name == job.name
    slower = dataclasses.replace(rates.load(file_of_rates), floor_seconds=1.0)
    (tmp_path / "same.json").write_text(json.dumps(slower.to_json()))
    rates.use(tmp_path / "same.json")
    assert named("auto").name not in (job.name, before["auto"])


def test_a_worker_takes_the_rates_of_its_job(file_of_rates):
    class Chooser:
        memory_fraction = platform.JAX_FRACTION

        def describe(self, overrides, target):
            return {"source": rates.select(target).source}

    job = {"overrides": {"config": "tiny"}, "target": "h200", "method": "describe"}
    listed = worker.answer_to(job, Chooser())["source"]
    slower = json.loads(file_of_rates.read_text()) | {"source": "measured here"}
    file_of_rates.write_text(json.dumps(slower))
    assert worker.answer_to({**job, "rates": str(file_of_rates)}, Chooser())["source"] == "measured here" != listed
    assert worker.answer_to({**job, "rates": None}, Chooser())["source"] == listed


def test_the_workers_environment():
    assert worker_pool.environment(["cpu:4", "cpu:2"], {})["JAX_NUM_CPU_DEVICES"] == "4"
    assert worker_pool.environment(["h200:8"], {})["JAX_PLATFORMS"] == "cpu"
    assert "JAX_PLATFORMS" not in worker_pool.environment(["local", "h200:8"], {})
    assert worker_pool.environment(["cpu:4"], {"JAX_NUM_CPU_DEVICES": "8"})["JAX_NUM_CPU_DEVICES"] == "8"
    assert worker_pool.worker_count(100, 3) == 3 and worker_pool.worker_count(1, 3) == 1


FAKE = """
import json, os, sys, time
for line in sys.stdin:
    job = json.loads(line)
    if job["overrides"]["config"] == "die":
        print("the last words", file=sys.stderr, flush=True)
        os._exit(7)
    if job["overrides"]["config"] == "leave":  # a child that holds the pipe to the pool
        if not os.fork():
            time.sleep(600)
        print(f"end {os.getpid()}", file=sys.stderr, flush=True)
        os._exit(5)
    if job["overrides"]["config"] == "end":
        os._exit(0)
    if job["overrides"]["config"] == "hang":
        time.sleep(600)
    print(json.dumps({"status": "ok", "pid": os.getpid(), "config": job["overrides"]["config"]}), flush=True)
"""


@pytest.fixture
def fake(monkeypatch):
    """Workers that speak the protocol and compile nothing."""
    real = subprocess.Popen
    monkeypatch.setattr(
        worker_pool.subprocess, "Popen", lambda command, **more: real([sys.executable, "-c", FAKE], **more)
    )


def jobs_of(*configs):
    return [
        worker_pool.Job("a:factory", {"config": config}, "cpu:1", f"{config}-{i}", config)
        for i, config in enumerate(configs)
    ]


def test_a_worker_that_dies_costs_one_row_and_is_replaced(fake, tmp_path):
    jobs = jobs_of("a", "die", "b", "c")
    answers, interrupted = worker_pool.run(jobs, workers=1, env=os.environ, cache=tmp_path)
    assert not interrupted and [answers[job.name]["status"] == "ok" for job in jobs] == [True, False, True, True]
    assert answers["die-1"]["status"] == "the worker died (exit code 7): the last words"
    ended, _ = worker_pool.run(jobs_of("end"), workers=1, env=os.environ)
    assert "(exit code 0): the program ended the process; remove its call of os._exit" in ended["end-0"]["status"]
    assert answers["b-2"]["pid"] == answers["c-3"]["pid"] != answers["a-0"]["pid"]
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["a-0", "b-2", "c-3"]


def test_a_worker_that_dies_and_leaves_a_child_ends_with_the_child(fake):
    answers, _ = worker_pool.run(jobs_of("leave", "a"), workers=1, env=os.environ)
    how, _, group = answers["leave-0"]["status"].rpartition(" end ")
    assert how == "the worker died (exit code 5):" and answers["a-1"]["status"] == "ok"
    until = time.monotonic() + 30
    while re.search(rf"^ *{group} +[^Z]", subprocess.check_output(["ps", "-eo", "pgid,stat"], text=True), re.M):
        assert time.monotonic() < until, "the child still runs"


def test_a_row_whose_worker_died_fails_the_command(monkeypatch, capsys):
    class Dying(SameProcess):
        def ask(self, message):
            dies = '"width": "64"' in message
            return {"status": "the worker died", "dead": True} if dies else super().ask(message)

    monkeypatch.setattr(worker_pool, "Worker", Dying)
    program = f"{ROOT / 'tests/support/grid_program.py'}:program"
    words = ["compare", program, "cpu:1", "--grid=layers=1", "--no-cache"]
    assert command.main([*words, "--grid=width=32,64"]) == 1
    assert "width=64: the worker died" in capsys.readouterr().out
    assert command.main([*words, "--grid=width=32"]) == 0


def test_workers_that_cannot_start_fail_every_row(monkeypatch):
    def refuse(env, cpu_devices):
        raise OSError("no more processes")

    monkeypatch.setattr(worker_pool, "Worker", refuse)
    answers, _ = worker_pool.run(jobs_of("a", "b", "c"), workers=2, env=os.environ)
    assert {answer["status"] for answer in answers.values()} == {"no worker: no more processes"} and len(answers) == 3


def test_measuring_takes_a_fresh_worker_each_time(fake):
    answers, _ = worker_pool.run(jobs_of("a", "b"), workers=1, env=os.environ, measure=True)
    assert answers["a-0"]["pid"] != answers["b-1"]["pid"]


def test_what_is_cached_starts_no_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "Worker", None)
    jobs = jobs_of("a", "b")
    for job in jobs:
        row_cache.write(tmp_path, job.name, {"status": "ok", "config": job.overrides["config"]})
    answers, _ = worker_pool.run(jobs, workers=2, env=os.environ, cache=tmp_path)
    assert [answers[job.name]["config"] for job in jobs] == ["a", "b"]


def test_ctrl_c_keeps_what_is_finished(fake, tmp_path, request):
    def stop(labels, done):
        if done == 2 and "hang" in labels:
            signal.raise_signal(signal.SIGINT)

    # A shell starts what runs in the background with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    began = time.monotonic()
    answers, interrupted = worker_pool.run(
        jobs_of("a", "b", "hang", "c"), workers=1, env=os.environ, cache=tmp_path, progress=stop
    )
    assert interrupted and list(answers) == ["a-0", "b-1"] and time.monotonic() - began < 30
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["a-0", "b-1"]


# ---- end to end -------------------------------------------------------------------------------------


def test_the_command(tmp_path, monkeypatch, capsys):
    """Two policies, measured; then the same out of the cache, with a page; then a policy that does not exist."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_sources(monkeypatch)
    words = [
        "compare",
        "tiny",
        *SMALL,
        "cpu:1",
        "--remat=none,full",
        "--measure",
        f"--json={tmp_path / 'c.json'}",
    ]
    assert command.main(words) == 0
    first = read_result(tmp_path / "c.json")
    none, full = first["rows"]
    assert [r["overrides"]["remat.policy"] for r in first["rows"]] == ["none", "full"]
    assert none["temp_bytes"] > full["temp_bytes"] > 0 and none["residual_bytes"] > full["residual_bytes"]
    assert none["breakdown"]["residuals"] == none["residual_bytes"] and none["fits"] is True
    assert none["measured"]["step_seconds"] > 0 and none["measured"]["peak_bytes"] is None
    assert first["target"]["name"] == "cpu:1" and "jax" in first["versions"]
    assert first["best"]["flags"].startswith("--config.remat.policy=")

    monkeypatch.setattr(worker_pool, "Worker", None)  # nothing may be compiled now
    assert (
        command.main(
            [
                *words[:-3],
                "--remat=full,none",
                "--measure",
                f"--json={tmp_path / 'd.json'}",
                f"--html={tmp_path / 'd.html'}",
            ]
        )
        == 0
    )
    again = read_result(tmp_path / "d.json")
    strip = [{**r, "pareto": None} for r in again["rows"]]
    assert strip == [{**full, "pareto": None}, {**none, "pareto": None}]
    assert "2 from the cache" in capsys.readouterr().out and "<html" in (tmp_path / "d.html").read_text()

    monkeypatch.setattr(worker_pool, "Worker", SameProcess)  # a real one would import jax for the third time
    assert command.main([*words[:-3], "--remat=none,custom(act_fp8)", f"--json={tmp_path / 'w.json'}"]) == 0
    none, wrong = read_result(tmp_path / "w.json")["rows"]
    assert none["status"] == "ok" and "does not occur in this program" in wrong["status"]
    assert wrong["peak_bytes"] is None and wrong["measured"] is None
