"""The scripts for a card: verdicts, calibration and ladders on made-up answers, and one row really run on the CPU."""

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bytescope.memory import cli
from bytescope.train.program.config_files import load
from bytescope.train.program.program import build

FOLDER = Path(__file__).parents[1] / "gpu"
GIB, MIB = 2**30, 2**20


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import accuracy
    import frontier
    import rows
    import tables

    return argparse.Namespace(accuracy=accuracy, frontier=frontier, rows=rows, tables=tables)


def answer(measured=10 * GIB, **fields):
    """A row as child.py answers it from a card, right to the byte."""
    return {
        "allocated": 10 * GIB - 3 * MIB,
        "predicted": 10 * GIB,
        "measured": measured,
        "source": "allocator",
        "before": GIB,
        "pool": 100 * GIB,
        "card": 100 * GIB + 512 * MIB,
        "device": "H200",
        "versions": {"jax": "1"},
        "runtime_overheads": [{"name": "batches waiting", "bytes": 3 * MIB, "where": "pool"}],
        "program": "step",
        **fields,
    }


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, "right"),
        ({"measured": int(10 * GIB / 1.0199)}, "right"),
        ({"measured": int(10 * GIB / 1.0201)}, "WRONG"),
        ({"measured": int(10 * GIB / 0.9801)}, "right"),
        ({"measured": int(10 * GIB / 0.9799)}, "WRONG"),
        ({"measured": 11 * GIB, "before": 11 * GIB}, "tuning"),
        ({"source": "host", "measured": GIB}, ""),
        ({"measured": None}, ""),
    ],
)
def test_a_row_is_right_within_two_per_cent(scripts, fields, verdict):
    assert scripts.rows.verdict(answer(**fields)) == verdict


def test_what_was_not_run_says_why(scripts):
    row = scripts.accuracy.row_of("tiny", "full", "bf16", "4:scan")
    assert row.keys["batch.accumulation"] == "4" and row.keys["batch.mode"] == "scan"
    for found, told in (
        ({"skipped": "does not fit: 3.00 GiB of 2.00"}, "does not fit: 3.00 GiB of 2.00"),
        ({"failed": "exit code 1: RESOURCE_EXHAUSTED"}, "FAILED: exit code 1: RESOURCE_EXHAUSTED"),
        ({"predicted": GIB}, "compiles"),
        ({"predicted": GIB, "fits": False}, "compiles, does not fit"),
        (answer(), "right"),
        (answer(source="host", card=None, pool=None), "not judged"),
    ):
        assert scripts.accuracy.cells(row, found)[-1] == told
    assert scripts.accuracy.cells(row, answer())[1:6] == ["9.997", "10.000", "10.000", "+0.00", "512"]
    with pytest.raises(ValueError, match="4:sca"):
        scripts.accuracy.row_of("tiny", "full", "bf16", "4:sca")


def test_calibration_finds_what_the_rows_were_made_with(scripts):
    """An item taken twice as large as predicted, 5 MiB that no item has, and 600 MiB outside the pool."""
    made = [
        answer(
            allocated=GIB,
            measured=GIB + 5 * MIB + 2 * waiting * MIB,
            predicted=GIB + waiting * MIB,
            card=100 * GIB + 600 * MIB,
            runtime_overheads=[{"name": "batches waiting", "bytes": waiting * MIB, "where": "pool"}],
        )
        for waiting in (1, 2, 4, 9)
    ]
    lines = scripts.accuracy.calibrate(made)
    assert "context: median 600.00 MiB, 600.00 to 600.00, 4 rows" in lines
    assert "pool, beside the prediction: median 8.00 MiB, 6.00 to 14.00, 4 rows" in lines
    assert "least squares: 5.00 MiB + batches waiting x 2.00" in lines
    assert lines[-1] == "for memory/devices/chips.py: CONTEXT_BYTES = 600 * MIB  # H200, jax 1, 4 rows"
    assert scripts.accuracy.calibrate([{"predicted": GIB}]) == ["nothing measured yet that calibrates anything"]
    assert scripts.accuracy.summary([*made, answer(measured=5 * GIB)])[0].startswith("5 rows measured: 4 within 2 %")


def test_every_row_of_the_grids_is_a_config_that_can_be_built(scripts):
    chosen = dict.fromkeys(scripts.accuracy.PARTS)
    counts = {grid: len(scripts.accuracy.rows_of(grid, chosen)) for grid in scripts.accuracy.GRIDS}
    assert counts == {"default": 42, "short": 8, "cpu": 8}
    asked = scripts.accuracy.rows_of("default", {**chosen, "configs": "tiny", "accumulations": "2"})
    assert [row.name for row in asked].count("tiny full bf16 x2") == 1
    for grid in scripts.accuracy.GRIDS:
        for row in scripts.accuracy.rows_of(grid, chosen):
            load(row.config, list(row.keys.items()))


def test_what_an_h100_measured_is_what_was_predicted(scripts):
    """The rows of tests/gpu/measured, and the figures that README.md states of them."""
    lines = scripts.tables.lines_of("h100")
    found = scripts.tables.summary(lines)
    assert {line.name for line in lines} <= {row.name for row in scripts.accuracy.POLICY_ROWS}
    assert (found["rows"], found["bytes within 1 %"], found["seconds within 10 %"]) == (38, 31, 34)
    assert found["bytes within 1 % without the formula for cuDNN's workspace"] == 27
    assert found["pairs of one config in the right order"] == "142 of 142"
    assert found["of these, pairs that differ only in the remat policy"] == "80 of 80"
    assert all(abs(line.compiled_error) < 0.01 for line in lines if line.measured > GIB)
    results = (FOLDER.parent / "bench/RESULTS.md").read_text()
    assert scripts.tables.markdown(lines) in results
    assert all(f"\n- {name}: {value}" in results for name, value in found.items())
    slow = [dataclasses.replace(line, predicted_seconds=1 / line.predicted_seconds) for line in lines]
    assert scripts.tables.ordered(slow)[0] < scripts.tables.ordered(lines)[0] / 10


def test_every_rung_can_be_built_tiny_with_its_levers(scripts):
    import jax

    for rung in (rung for ladder in scripts.frontier.LADDERS.values() for rung in ladder):
        row = scripts.frontier.row_of(rung, dry=True)
        program = build(load(row.config, list(row.keys.items())), jax.devices()[:1])
        assert sum(leaf.size for leaf in jax.tree.leaves(program.state.params)) < 2e5
        assert {
            key: row.keys[key] for key in rung.keys if key not in ("model.n_layers", "data.seq_len", "model.mlp_chunk")
        }.items() <= rung.keys.items()


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({}, False),
        ({"failed": "x"}, True),
        ({"cannot": "x"}, True),
        ({"fits": False}, True),
        ({"losses": [1.0, float("nan")]}, True),
        ({"skipped": "host memory: 300 GiB", "fits": True}, False),
    ],
)
def test_a_ladder_ends_at_the_first_rung_that_fails(scripts, fields, ends):
    assert scripts.frontier.last({"fits": True, "losses": [2.0, 1.0], **fields}) is ends


def test_rows_are_kept_as_they_come_and_not_run_twice(scripts, monkeypatch, tmp_path, capsys):
    rows, ran = scripts.rows, []

    def child(asked, timeout, gate):
        ran.append(asked["config"])
        if asked["config"] == "stop":
            raise KeyboardInterrupt
        return {"failed": "no"} if asked["config"] == "bad" else answer()

    monkeypatch.setattr(rows, "answer_of", child)
    options = argparse.Namespace(target="local", compile_only=False, timeout=1, jobs=1, keep=None, trace=None)
    todo = [rows.Row(name, name, {}) for name in ("a", "bad", "stop", "b")]
    for _ in range(2):
        found = rows.work(todo, options, rows.Store(tmp_path / "r.jsonl", {"jax": "1"}), lambda row, given: row.name)
        assert [row.name for row, _ in found] == ["a", "bad"]
    assert ran == ["a", "bad", "stop", "bad", "stop"]  # a failure is tried again, what is done is not
    assert not rows.Store(tmp_path / "r.jsonl", {"jax": "2"}).get(todo[0].asked("local", False))
    assert "stopped; the same command goes on after 2 rows" in capsys.readouterr().out
    (tmp_path / "r.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="give another --out"):
        rows.Store(tmp_path / "r.jsonl", {})


def test_rows_compile_together_and_a_failure_is_tried_alone(scripts, monkeypatch, tmp_path):
    rows, ran = scripts.rows, []

    def child(asked, timeout, gate, keep):
        ran.append((asked["config"], bool(gate), Path(keep).name))
        return {"failed": "no memory"} if asked["config"] == "b c" and gate else answer()

    monkeypatch.setattr(rows, "answer_of", child)
    options = argparse.Namespace(target="local", compile_only=False, timeout=1, jobs=2, keep=tmp_path / "k", trace=None)
    todo = [rows.Row(name, name, {}) for name in ("a", "b c", "d")]
    found = rows.work(todo, options, rows.Store(None, {}), lambda row, given: row.name)
    assert sorted(ran[:2]) == [("a", True, "a.json"), ("b c", True, "b_c.json")]
    assert ran[2:] == [("b c", False, "b_c.json"), ("d", False, "d.json")]
    assert [row.name for row, given in found if "failed" not in given] == ["a", "b c", "d"]


@pytest.mark.exhaustive
def test_a_row_really_runs_on_the_cpu(scripts, tmp_path, monkeypatch, capsys):
    """The command itself: one row of a grid, its answer on disk, nothing judged; a second time it is only read."""
    out = tmp_path / "a.jsonl"
    command = [
        str(FOLDER / "accuracy.py"),
        "--grid=cpu",
        "--policies=full",
        "--precisions=fp32",
        "--accumulations=2",
        f"--out={out}",
    ]
    env = scripts.rows.environment()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing may be run now
    assert scripts.accuracy.main() == 0
    for told in (done.stdout, capsys.readouterr().out):
        assert "tiny full fp32 x2" in told and "not judged" in told
    (line,) = out.read_text().splitlines()
    found = json.loads(line)["answer"]
    assert len(found["losses"]) == 2 and 5 < found["losses"][0] < 6.5
    assert {"name": "batches waiting", "bytes": 3 * 2 * 8 * 256 * 4, "where": "pool"} in found["runtime_overheads"]
    assert found["measured"] > 918_656 * 4 * 3  # parameters and moments, at the least


@pytest.mark.parametrize(
    ("script", "flags", "told"),
    [
        ("accuracy", ["--target=h200"], "--target=h200 is not here to run on: add --compile-only"),
        ("accuracy", ["--target=h2000", "--compile-only"], "unknown target 'h2000'"),
        ("frontier", ["--steps=0"], "--steps=0: give 1 or more"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(scripts, script, flags, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, *flags])
    with pytest.raises(SystemExit) as ended:
        sys.exit(vars(scripts)[script].main())
    assert ended.value.code == 2 and told in capsys.readouterr().err


@pytest.fixture
def everything(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import everything

    return everything


def test_rows_of_the_one_command_name_scripts_and_flags_that_are_there(everything):
    root = FOLDER.parents[1]
    shared = "".join((root / path).read_text() for path in ("tests/bench/interleave.py", "tests/gpu/rows.py"))
    for name, words in [*everything.ROWS.items(), *everything.REHEARSED.items()]:
        for script in [word for word in words if word.endswith(".py")]:
            text = (root / script).read_text() + shared
            flags = [word.split("=")[0] for word in words[words.index(script) + 1 :] if word.startswith("--")]
            assert all(f'"{flag}"' in text for flag in flags if not flag.startswith("--config.")), (name, flags)


def test_a_rehearsal_runs_the_script_of_each_row_with_small_sizes(everything, tmp_path, monkeypatch, capsys):
    for name, words in everything.REHEARSED.items():
        assert words[:2] == everything.ROWS[name][:2] and words != everything.ROWS[name]
    monkeypatch.setattr(sys, "argv", ["everything.py", f"--out={tmp_path}", "--rehearse", "--dry-run"])
    assert everything.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if "card.py" in line] and len(lines) == len(everything.ROWS) - 1
    assert any("loss.py --tokens=256" in line for line in lines)


def test_the_rates_of_the_card_are_measured_first_and_taken_by_what_predicts(everything, tmp_path):
    first, *later = everything.ROWS
    parsed = {
        name: cli.parse(words[words.index("bytescope.memory") + 1 :])
        for name, words in everything.ROWS.items()
        if "bytescope.memory" in words
    }
    assert parsed.pop(first).command == "calibrate" and set(parsed) == {"profile", "trace", "seconds"} <= set(later)
    assert {str(args.rates) for args in parsed.values()} == {"OUT/rates.json"}
    assert not [word for word in everything.command_of("trace", tmp_path, "") if word.startswith("--rates")]
    (tmp_path / "rates.json").touch()
    assert f"--rates={tmp_path}/rates.json" in everything.command_of("trace", tmp_path, "")


def test_the_one_command_resumes_and_tells_what_was_missed(everything, monkeypatch, tmp_path, capsys):
    checks = {
        "checks": [
            {"name": "time", "value": 1.3, "limit": 1.0},
            {"name": "bytes", "value": 1, "limit": 2},
            {"name": "seen", "value": 9, "limit": None},
        ]
    }
    write = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2]); print('ran'); sys.exit(1)"
    monkeypatch.setattr(
        everything,
        "ROWS",
        {
            "bars": (everything.PYTHON, "-c", write, "OUT/bars.json", json.dumps(checks)),
            "broken": (everything.PYTHON, "-c", "import sys; print('broke'); sys.exit(3)"),
        },
    )
    monkeypatch.setattr(sys, "argv", ["everything", f"--out={tmp_path}", "--only", "bars", "broken"])
    assert everything.main() == 1
    said = capsys.readouterr().out
    assert said.count("ran") == 1 and "time: 1.3, at most 1" in said and "bytes" not in said.split("exit")[1]
    assert (tmp_path / "bars.txt").read_text() == "ran\n"
    assert everything.main() == 1  # what failed is run again, what missed a bar is not
    said = capsys.readouterr().out
    assert "ran" not in said and "broke" in said and "time: 1.3" in said
