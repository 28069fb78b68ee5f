"""The axes: flags, keys, lines and commits. The programs of candidates are compiled in this process."""

import contextlib

import pytest

from bytescope.memory.bisect import change_axes
from bytescope.memory.bisect.bisection import run_bisection
from bytescope.memory.bisect.change_axes import Program
from bytescope.memory.bisect.measurements import Measurement, parse_bound
from bytescope.memory.compare.program_factory import load_factory
from bytescope.memory.devices import targets
from bytescope.memory.errors import ReportError
from bytescope.memory.records.report_record import ReportRecord
from bytescope.train import cli
from support.budget_project import git
from support.json_results import read_result

STEP = """
import jax, jax.numpy as jnp

def program(width=64, layers=4, rows=16):
    step = lambda weights, x: jnp.tanh(x @ weights.sum(0))
    return step, tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in [(layers, width, width), (rows, width)])

def scanned():
    body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    _, arguments = program(rows=1024)
    step = lambda weights, x: weights - jax.grad(lambda w: jax.lax.scan(body, x, w)[0].sum())(weights)
    return step, arguments, {"donate_argnums": 0}
"""


def measure(candidate):
    """Compiles a candidate in this process."""
    place = candidate.prepare()
    with contextlib.chdir(place.folder or "."):
        try:
            answer = load_factory(candidate.factory).report_json(candidate.overrides, targets.parse("cpu"))
        except ReportError as error:
            return Measurement(candidate.point, str(error))
    return Measurement(candidate.point, "ok", ReportRecord.from_json(answer["report"]))


def bisect(axis, bound):
    return run_bisection(axis, parse_bound("bytes", "allocated", bound), measure)


@pytest.fixture
def step(tmp_path, monkeypatch):
    (tmp_path / "bisected_step.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    return Program("bisected_step.py:program")


# ---- flags


def test_one_flag_of_a_file_is_found(step, tmp_path):
    """This flag removes a copy on CPUs; the other one changes no buffer."""
    flags = ["--xla_cpu_enable_fast_math=true", "xla_cpu_copy_insertion_use_region_analysis=true  # copies"]
    (tmp_path / "flags.txt").write_text("# flags to try\n" + "\n".join(flags))
    axis = change_axes.flags_axis(Program("bisected_step.py:scanned"), "flags.txt")
    outcome = bisect(axis, "-2%")
    assert outcome.change == ("xla_cpu_copy_insertion_use_region_analysis=true",)
    assert outcome.after.report.allocated_bytes < outcome.before.report.allocated_bytes


@pytest.mark.quick
def test_flags_of_a_list_go_to_the_program():
    program = Program("m:f", {"width": 8}, lambda overrides, flags: {**overrides, "flags": dict(flags)})
    axis = change_axes.flags_axis(program, "xla_a=1,xla_b=true")
    assert axis.candidate(frozenset([1])).overrides == {"width": 8, "flags": {"xla_b": True}}
    assert [axis.point(axis.good), axis.point(axis.bad)] == ["no change", "xla_a=1 + xla_b=true"]


# ---- keys


def test_one_parameter_of_a_function_is_found(step):
    axis = change_axes.keys_axis(step, change_axes.parse_keys(["rows=17,width=64", "layers=8"]))
    outcome = bisect(axis, "+50%")
    assert outcome.change == ("layers=8",) and outcome.before.point == "no change"


@pytest.mark.quick
def test_names_of_large_groups_are_short_and_different():
    axis = change_axes.keys_axis(Program("m:f"), {f"key{index}": index for index in range(9)})
    names = {axis.point(frozenset(range(9)) - {index}) for index in range(9)}
    assert len(names) == 9 and max(map(len, names)) < 20 and axis.point(axis.bad) == "all 9 changes"


# ---- lines


def test_one_line_of_a_diff_is_found(step, tmp_path):
    after = STEP.replace("layers=4", "layers=8").replace("tanh(x @ weights.", "tanh(2 * x @ weights.")
    (tmp_path / "after.py").write_text(after.replace("import jax,", "import math\nimport jax,"))
    paths = tmp_path / "bisected_step.py", tmp_path / "after.py"
    with change_axes.diff_axis(*paths, lambda path: Program(f"{path}:program")) as axis:
        assert len(axis.changes) == 3
        outcome = bisect(axis, "+50%")
    assert outcome.change == ("after.py:5: def program(width=64, layers=8, rows=16):",)


@pytest.mark.quick
def test_all_edits_make_the_second_file():
    before, after = ["a\n", "b\n", "c\n", "d\n"], ["a\n", "x\n", "y\n", "c\n", "e\n", "f"]
    edits = change_axes._split_edits(before, after)
    assert change_axes._apply_edits(before, edits) == after and change_axes._apply_edits(before, []) == before


@pytest.mark.quick
def test_names_with_dots_are_split_where_both_files_are(tmp_path, monkeypatch):
    (tmp_path / "a.py").touch()
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    assert change_axes.split_files("../a.py..../a.py") == ("../a.py", "../a.py")


# ---- commits


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Six commits of a step in src/. The fourth one adds layers; the fifth one cannot be imported."""
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    git(root, "init", "-q", "-b", "main")
    texts = [STEP, STEP + "\n", STEP + "\n\n", STEP.replace("layers=4", "layers=8"), "import (", ""]
    texts[5] = texts[3] + "\n"
    for index, text in enumerate(texts):
        (root / "src" / "bisected_commit.py").write_text(text)
        git(root, "add", ".")
        git(root, "commit", "-q", "-m", f"change {index}")
    git(root, "tag", "good", "HEAD~5")
    (root / "src" / "bisected_commit.py").write_text("a change that is not committed\n")
    monkeypatch.chdir(root)
    return root


def test_one_commit_of_six_is_found_and_the_repository_is_not_touched(repository):
    state = [git(repository, *words) for words in (["status", "--porcelain"], ["log", "--oneline"], ["branch"])]
    program = Program("src/bisected_commit.py:program")
    with change_axes.git_axis(program, "good..main", repository) as axis:
        assert len(axis.changes) == 6
        outcome = bisect(axis, "+50%")
        assert len(git(repository, "worktree", "list").splitlines()) == 2
    assert [name.split(" ", 1)[1] for name in outcome.change] == ["change 3"]
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert state == [git(repository, *words) for words in (["status", "--porcelain"], ["log", "--oneline"], ["branch"])]


@pytest.mark.quick
def test_the_newer_commit_first_is_an_error(repository):
    with (
        pytest.raises(ReportError, match="main is not an ancestor of good: give the older commit first"),
        change_axes.git_axis(Program("a.py:f"), "main..good", repository),
    ):
        pass


@pytest.mark.exhaustive
def test_a_commit_is_compiled_in_a_worker_process(repository, tmp_path, capsys, monkeypatch):
    """The module is found in the worktree, although sys.path has the user's folder."""
    monkeypatch.syspath_prepend(str(repository / "src"))
    words = ["--program=bisected_commit:program", "cpu", "--git=good..", "--bytes=+50%", "--all"]
    words += [f"--records={tmp_path / 'records.jsonl'}", f"--json={tmp_path / 'out.json'}"]
    assert cli.main(["bisect", *words]) == 0
    result = read_result(tmp_path / "out.json")
    assert [name.split(" ", 1)[1] for name in result["change"]] == ["change 3"]
    assert "SyntaxError" in result["measured"][4]["status"]
    assert result["difference"]["changes"][1]["growth"] > 0
    assert "change 3: " in capsys.readouterr().out


# ---- the command


def test_ctrl_c_keeps_measurements_and_says_how_to_continue(step, tmp_path, monkeypatch, capsys):
    """The measurements of the first run are not repeated by the second."""
    from bytescope.memory.bisect.measuring import Measuring

    asked, ask = [], Measuring._ask

    def answer(self, place, candidate):
        asked.append(candidate.point)
        if candidate.point == "layers=8" and not resumed:
            raise KeyboardInterrupt
        target = targets.parse("cpu")
        return {"status": "ok", **load_factory(candidate.factory).report_json(candidate.overrides, target)}

    monkeypatch.setattr(Measuring, "_ask", answer)
    resumed = False
    words = ["bisect", "--program=bisected_step.py:program", "cpu", "--keys=layers=8,rows=17", "--bytes=+50%"]
    words += ["--records=records.jsonl", "--json=out.json"]
    assert cli.main(words) == 130
    assert "interrupted: 2 finished measurements are in records.jsonl; run the same" in capsys.readouterr().err
    resumed = True
    assert cli.main(words) == 0
    assert asked == ["no change", "layers=8 + rows=17", "layers=8", "layers=8"]
    result = read_result("out.json")
    assert result["change"] == ["layers=8"] and [row["exceeds"] for row in result["measured"]] == [False, True, True]
    assert cli.main([*words, "--bytes=1GiB"]) == 1
    assert "no change found: the last candidate" in capsys.readouterr().out and len(asked) == 4
    assert ask is not answer
