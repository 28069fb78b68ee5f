"""compare MODULE:FUNCTION: any function from the values of a grid to a program."""

import re
import sys
from pathlib import Path

import pytest

from bytescope.memory import __main__ as command
from bytescope.memory.compare import compare_page, program_factory, row_cache, worker_pool
from bytescope.memory.compare.jobs import Jobs, with_cpu_devices
from bytescope.memory.compare.program_factory import FunctionFactory, load_factory
from bytescope.memory.devices import targets
from bytescope.memory.errors import ReportError
from bytescope.memory.program.user_program import load_function
from support.browser import Page
from support.cached_rows import keep_sources
from support.json_results import read_result
from support.same_process import SameProcess

EXAMPLE = Path(__file__).parents[2] / "support" / "grid_program.py"
PROGRAM = f"{EXAMPLE}:program"


def compare(*words):
    return command.main(["compare", PROGRAM, "cpu:1", *map(str, words)])


def test_rows_of_any_program_are_compiled_measured_cached_and_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_sources(monkeypatch)
    monkeypatch.setattr(worker_pool, "Worker", SameProcess)
    grid = ["--grid=remat=none,full", "--grid=width=32,64", "--grid=layers=3"]
    assert compare(*grid, "--measure", f"--json={tmp_path / 'a.json'}") == 0
    first = read_result(tmp_path / "a.json")
    rows = {(row["overrides"]["remat"], row["overrides"]["width"]): row for row in first["rows"]}
    assert list(rows) == [("none", 32), ("none", 64), ("full", 32), ("full", 64)], "values have the defaults' types"
    none, full = rows["none", 64], rows["full", 64]
    assert none["breakdown"]["params"] == full["breakdown"]["params"] > 0 == none["recompute_flops_fraction"]
    assert none["residual_bytes"] > full["residual_bytes"] and 0.3 < full["recompute_flops_fraction"] < 0.4
    assert none["fits"] is True and none["tokens_per_update"] == 64 and none["model_flops"] > 0
    assert none["measured"]["step_seconds"] > 0
    assert none["measured"]["tokens_per_s"] == pytest.approx(64 / none["measured"]["step_seconds"])
    # remat says how a step runs: its rows compete. Another width is another task.
    assert first["best"] is None and [one["task"] for one in first["best_of_each"]] == ["width=32", "width=64"]
    assert re.fullmatch(r"remat=\w+ width=32 layers=3", first["best_of_each"][0]["flags"])
    assert first["config"] == f"{EXAMPLE}:program" and first["target"]["name"] == "cpu:1"
    assert "best of each task" in capsys.readouterr().out

    monkeypatch.setattr(worker_pool, "Worker", None)  # nothing may be compiled now
    files = [f"--json={tmp_path / 'b.json'}", f"--html={tmp_path / 'b.html'}"]
    assert compare(*grid, "--measure", *files) == 0
    second = read_result(tmp_path / "b.json")
    for row in (*first["rows"], *second["rows"]):  # predicted by a CPU's rates, which are measured each time
        row |= dict.fromkeys(key for key in row if "predicted" in key or key in ("least_seconds", "pareto"))
    assert second["rows"] == first["rows"] and "4 from the cache" in capsys.readouterr().out
    page = Page((tmp_path / "b.html").read_text())
    assert len(page.data["rows"]) == 4 and page.data["keys"] == [["remat", "remat"], ["width", "width"]]
    assert all(
        row["command"].startswith(f"bytescope report {EXAMPLE}:program cpu:1 remat=") for row in page.data["rows"]
    )
    assert compare_page.render(second)  # without what the function says of its keys, too


def test_words_set_the_parameters_of_a_function(tmp_path, monkeypatch, capsys):
    """In every command that takes a function: report, report --names, compare and fit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(worker_pool, "Worker", SameProcess)
    out = tmp_path / "a.json"
    params = []
    for width in (32, 64):
        assert command.main(["report", PROGRAM, "cpu:1", f"width={width}", "layers=3", f"--json={out}"]) == 0
        params.append(read_result(out)["breakdown"]["params"])
    assert params[1] == 4 * params[0]
    assert compare("width=64", "layers=3", "--grid=remat=none,full", f"--json={out}") == 0
    assert {row["breakdown"]["params"] for row in read_result(out)["rows"]} == {params[1]}
    assert command.main(["fit", PROGRAM, "cpu:1", "width=64", "layers=3", f"--json={out}"]) == 0
    assert read_result(out)["best"]["breakdown"]["params"] == params[1]
    capsys.readouterr()
    assert command.main(["report", PROGRAM, "cpu:1", "widht=64"]) == 2
    assert "has no parameter widht: did you mean width?" in capsys.readouterr().err


def test_a_row_that_fails_is_one_line_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(worker_pool, "Worker", SameProcess)
    assert compare("--grid=remat=some,none", "--grid=width=32", f"--json={tmp_path / 'a.json'}") == 0
    failed, row = read_result(tmp_path / "a.json")["rows"]
    assert "ValueError: remat=some: give none or full (grid_program.py:" in failed["status"] and row["status"] == "ok"
    assert "best that fits" in capsys.readouterr().out


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--grid=widht=1,2"],
            "program has no parameter widht: did you mean width? it takes width, layers, remat, adam",
        ),
        (["--grid=width=wide"], "width=wide has the wrong type: give a whole number"),
        (["--grid=adam=maybe"], "adam=maybe has the wrong type: give true or false"),
        (["--remat=none,full"], "because it needs a config: write --grid"),
        (["--formulas"], "program, because it needs a config"),
        (["widht=3"], "has no parameter widht: did you mean width?"),
        (["--config=tiny"], "bytescope compare has no --config: give the config as the first word"),
        (["--grid=target=h300"], "h300"),
        (["--jobs=0"], "1 or more"),
    ],
)
def test_mistakes_are_one_line_before_anything_compiles(words, message, capsys, monkeypatch):
    monkeypatch.setattr(worker_pool, "Worker", None)
    assert compare(*words) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("error: ") and error.count("\n") == 1 and message in error


def factory_of(tmp_path, monkeypatch, text, name="own_program", function="program"):
    """The factory of a module that is written here, reloaded where it was imported before."""
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop(name, None)
    return FunctionFactory(load_function(f"{name}:{function}"))


@pytest.mark.quick
def test_values_have_the_types_of_the_defaults(tmp_path, monkeypatch):
    text = "def program(n=1, rate=0.5, on=True, name='a', shape=(1,), *, other=None, target=None): ...\n"
    factory = factory_of(tmp_path, monkeypatch, text)
    given = {"n": "1_000", "rate": "1e-3", "on": "False", "name": "1", "shape": "(2,3)", "other": "x"}
    wanted = {"n": 1000, "rate": 0.001, "on": False, "name": "1", "shape": (2, 3), "other": "x"}
    assert factory.resolve(given) == wanted, "a target is no key"
    assert factory.resolve({"other": "2"})["other"] == 2
    with pytest.raises(ReportError, match="has no parameter target"):
        factory.resolve({"target": "x"})


@pytest.mark.quick
def test_a_function_may_take_all_keys_in_one_dict_and_the_target(tmp_path, monkeypatch):
    text = "def program(overrides, target):\n    return abs, (overrides['n'] * [target.n_devices],)\n"
    factory = factory_of(tmp_path, monkeypatch, text)
    made = load_function("own_program:program").make({"n": 2}, targets.parse("h100:8"))
    assert made.args == ([8, 8],) and factory.resolve({"n": "2", "any": "b"}) == {"n": 2, "any": "b"}


@pytest.mark.quick
def test_a_change_in_the_functions_package_makes_its_rows_invalid(tmp_path, monkeypatch):
    """Of a module in a package every file of the package; without one the modules beside it that were imported."""
    (tmp_path / "src" / "pack" / "sub").mkdir(parents=True)
    (tmp_path / "alone").mkdir()
    empty = "src/pack/__init__.py", "src/pack/other.py", "src/pack/sub/__init__.py", "alone/beside.py", "alone/other.py"
    for name in empty:
        (tmp_path / name).write_text("")
    text = "import beside\ndef program(n=1): ...\n"
    (tmp_path / "src" / "pack" / "sub" / "steps.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    alone = factory_of(tmp_path / "alone", monkeypatch, text)
    inside = FunctionFactory(load_function("pack.sub.steps:program"))

    def names():
        return {one: Jobs(one).job({"n": "1"}, "h100").name for one in (alone, inside)}

    before = names()
    assert len(set(before.values())) == 2
    changed = {"alone/beside.py": {alone}, "alone/own_program.py": {alone}, "alone/other.py": set()}
    for name in ("src/pack/other.py", "src/pack/sub/steps.py", "src/pack/__init__.py"):
        changed[name] = {inside}
    for name, wanted in changed.items():
        kept = (tmp_path / name).read_text()
        (tmp_path / name).write_text(kept + "#")
        assert {one for one, found in names().items() if found != before[one]} == wanted, name
        (tmp_path / name).write_text(kept)
    assert names() == before


@pytest.mark.quick
def test_a_function_gets_as_many_cpu_devices_as_its_target_has():
    factory = load_factory(f"{EXAMPLE}:program")
    jobs = [with_cpu_devices(Jobs(factory).job({}, target)) for target in ("h100:2x8", "cpu:4", "local")]
    assert [job.cpu_devices for job in jobs] == [16, 0, 0]
    assert program_factory.__name__ in row_cache.MAKING_ROWS


@pytest.mark.quick
def test_how_has_to_name_keys(tmp_path, monkeypatch):
    with pytest.raises(ReportError, match=r"program.how='remat' is not a tuple of names: give a tuple"):
        factory_of(tmp_path, monkeypatch, "def program(remat=1): ...\nprogram.how = 'remat'\n")
