"""bytescope check: budgets of pyproject.toml, verdicts, exit codes, baselines, the cache and the pre-commit hook."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bytescope.memory import cli
from bytescope.memory.adapters.trainers import find_adapter
from bytescope.memory.commands import budgets, check_command, github, trainer_packages
from bytescope.memory.commands.budgets import Budget, BudgetResult
from bytescope.memory.compare import worker_pool
from bytescope.memory.errors import ReportError
from bytescope.memory.records.report_record import ROWS, Buffer, ReportRecord
from bytescope.memory.units import GIB, MIB
from support.budget_project import PYPROJECT, STEP, commit, git, make_project
from support.cached_rows import keep_sources
from support.json_results import read_result

ROOT = Path(__file__).parents[3]


def report_of(size, **fields):
    """A report of `size` bytes, of which all but 1 MiB are residuals."""
    buffers = (Buffer("fusion.1", size, (size // 4,), "float32", "residuals", "backward", source="/srv/mlp.py:4"),)
    rows = {**dict.fromkeys(ROWS, 0), "residuals": size - MIB, "params": MIB}
    fields = {"target": {"name": "h100:8", "platform": "cuda"}, "limit_bytes": GIB, "fits": True, **fields}
    fields["verdict"] = "fits" if fields["fits"] else "exceeds"
    return ReportRecord(size, size, rows, buffers=buffers, program="jit_step", **fields)


def budget_of(**fields):
    return Budget("mlp", "step.py:program", "", "h100:8", **fields)


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = make_project(tmp_path)
    monkeypatch.chdir(folder)
    return folder


def check(capsys, *words):
    """(exit code, standard output, standard error) of bytescope check."""
    code = cli.main(["check", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ---- the file and the verdicts, without compiling --------------------------------------------------------------------


@pytest.mark.quick
def test_a_budget_has_every_key_and_paths_beside_the_file(tmp_path):
    file = tmp_path / "pyproject.toml"
    file.write_text(
        '[tool.bytescope.budgets]\nsmall = { program = "a:b", target = "H100:8 " }\n[tool.bytescope.budgets."b c"]\n'
        'config = "tiny"\ntarget = "cpu"\nbudget = 2097152\nkeys = { "batch.micro" = 4 }\n'
        'baseline = "x/b.json"\nfail_above = 2\n'
    )
    small, other = budgets.read_budgets(file)
    assert small == Budget("small", "a:b", "", "h100:8")
    assert other == Budget(
        "b c", "", "tiny", "cpu", "2097152", {"batch.micro": 4}, tmp_path / "x" / "b.json", fail_above=2
    )
    (tmp_path / "src").mkdir()
    assert budgets.find_pyproject(tmp_path / "src") == file


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.bytescope]\n", "has no budgets: add [tool.bytescope.budgets.NAME]"),
        ("[tool", "is not TOML"),
        ('[tool.bytescope.budgets]\na = "b"\n', "tool.bytescope.budgets.a is not a table"),
        ('[tool.bytescope.budgets]\na = { target = "cpu" }\n', "a needs either a program or a config"),
        ('[tool.bytescope.budgets]\na = { program = "a:b", config = "tiny", target = "cpu" }\n', "either a program or"),
        ('[tool.bytescope.budgets]\na = { program = "a:b" }\n', "a has no target"),
        ('[tool.bytescope.budgets]\na = { program = "a:b", target = "h9" }\n', "a: unknown target 'h9'"),
        ('[tool.bytescope.budgets]\na = { program = "a:b", target = "cpu", buget = "1GiB" }\n', "did you mean budget"),
        (
            '[tool.bytescope.budgets]\na = { program = 3, target = "cpu" }\n',
            "program = 3 has the wrong type: give text",
        ),
        ('[tool.bytescope.budgets]\na = { program = "a:b", target = "cpu", budget = "60" }\n', "write 60GiB"),
        (
            '[tool.bytescope.budgets]\na = { program = "a:b", target = "cpu", limit = "60GiB" }\n',
            "a: the key limit is now called budget: write budget = '60GiB'",
        ),
        ('[tool.bytescope.budgets]\na = { program = "a:b", target = "cpu", fail_above = -1 }\n', "not a percentage"),
        ('[tool.bytescope.budgets]\na = { program = "a:b", target = "cpu", baseline = "b" }\n', "--update-baseline"),
        ('[tool.bytescope.budgets]\na = { program = "a:b", target = "cpu", size = 1 }\n', "key size: choose one of"),
        ('[tool.bytescope.budgets]\na = { program = "a:b", target = "cpu", budget = 1.5 }\n', "give a size such as"),
        ('[tool.bytescope.budgets]\na = { program = "a:b", target = "cpu", budget = 0 }\n', "budget = 0 must be more"),
        ('[tool.bytescope.budgets]\na = { program = "a:b", target = "cpu", budget = "0 %" }\n', "give more than 0%"),
        ('[tool.bytescope.budgets]\na = { program = "a:b", target = 2024-01-01 }\n', "target = 2024-01-01 has"),
        (
            '[tool.bytescope.budgets]\na = { program = "a:b", target = "cpu", keys.x = [{ day = 2024-01-01 }] }\n',
            "a: day = 2024-01-01 is a date or a time: write it as text",
        ),
        ('[tool.bytescope.budgets]\na = { program = "a:b", target = "cpu", keys.x = nan }\n', "x = nan is not finite"),
        (f"a = {'[' * 9999}", "is nested too deeply"),
        (f"[tool.bytescope.budgets.a.keys{'.b' * 9999}]\n", "is nested too deeply"),
    ],
    ids=lambda value: ascii(value)[-40:],
)
def test_a_mistake_is_one_line_and_2(text, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(worker_pool, "run", None)  # nothing is compiled
    (tmp_path / "pyproject.toml").write_text(text)
    code, out, err = check(capsys, f"--pyproject={tmp_path / 'pyproject.toml'}")
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err, err


@pytest.mark.quick
def test_the_limit_is_a_size_a_percentage_or_the_memory_of_the_target():
    report = report_of(100 * MIB)
    for limit, limit_bytes, verdict in (
        ("", GIB, "fits"),
        ("10%", GIB // 10, "tight"),
        ("9 %", GIB * 9 // 100, "exceeds"),
        ("99MiB", 99 * MIB, "exceeds"),
        ("1GiB", GIB, "fits"),
    ):
        judged = budgets.judged(budget_of(limit=limit), report)
        assert (judged.limit_bytes, judged.verdict, judged.title) == (limit_bytes, verdict, "mlp"), limit
    with pytest.raises(ReportError, match=r"mlp: budget=2GiB is out of range: a device has 1.00 GiB"):
        budgets.judged(budget_of(limit="2GiB"), report)
    with pytest.raises(ReportError, match="0% is not a percentage"):
        budgets.judged(budget_of(limit="0%"), report)
    full = dataclasses.replace(report, fits=False, verdict="exceeds")  # no memory is left outside of the pool
    assert budgets.judged(budget_of(limit="900MiB"), full).fits is False
    free = dataclasses.replace(report, target={"platform": "cpu"}, limit_bytes=10 * MIB, fits=False, verdict="exceeds")
    assert budgets.judged(budget_of(limit="1GiB"), free).fits, "the free memory of this machine is no limit"


@pytest.mark.quick
def test_growth_fails_above_its_percentage_only():
    before, after = report_of(100 * MIB), report_of(103 * MIB)
    for fail_above, verdict in ((None, "fits"), (3, "fits"), (2.9, "grew")):
        result = BudgetResult(budget_of(fail_above=fail_above), after, before=before, accepted=before)
        assert (result.verdict, result.change_text) == (verdict, "+3.0")
    assert result.problems[0] == "peak_bytes grew from 100.00 MiB to 103.00 MiB (+3.0 %), above 2.9 %"
    assert not BudgetResult(budget_of(fail_above=0), before, before=after, accepted=after).problems


@pytest.mark.quick
def test_growth_that_a_baseline_accepts_does_not_fail_a_pull_request():
    base, after = {"mlp": report_of(100 * MIB)}, report_of(200 * MIB)
    own = budget_of(fail_above=2, baseline=Path("memory.json"))
    for budget, accepted, verdict in (
        (own, {"mlp": after}, "fits"),  # the pull request updated its baseline
        (own, base, "grew"),
        (own, {}, "fits"),  # a new budget
        (budget_of(fail_above=2), {}, "grew"),  # without a baseline, the base of the pull request counts
    ):
        result = check_command._compared(BudgetResult(budget, after), base, accepted)
        assert (result.verdict, result.change_text) == (verdict, "+100.0")


@pytest.mark.quick
def test_a_baseline_is_small_and_keeps_the_entries_of_other_budgets(tmp_path):
    file, names = tmp_path / "b.json", ("mlp", "other")
    other = dataclasses.replace(budget_of(), name="other")
    file.write_text(budgets.baseline_text(file, [BudgetResult(other, report_of(50 * MIB))], names))
    failed = BudgetResult(dataclasses.replace(other, name="third"), error="ValueError")
    file.write_text(budgets.baseline_text(file, [BudgetResult(budget_of(), report_of(100 * MIB)), failed], names))
    before = budgets.read_reports(file)
    assert list(before) == ["other", "mlp"] and before["other"].peak_bytes == 50 * MIB
    changes = BudgetResult(budget_of(), report_of(103 * MIB), before=before["mlp"]).changes
    assert [(change.kind, change.name, change.growth) for change in changes if change.growth] == [
        ("total", "peak_bytes", 3 * MIB),
        ("total", "allocated_bytes", 3 * MIB),
        ("category", "residuals", 3 * MIB),
    ], "buffers are not in a baseline, so they are not new either"
    assert list(json.loads(budgets.baseline_text(file, [], ["mlp"]))["budgets"]) == ["mlp"], "removed budgets go"
    report = json.dumps({"schema": 2, "command": "report", "result": {}})
    for text, message in (
        ("{", "is not JSON"),
        ("{}", "another layout"),
        ("[]", "another layout"),
        (report, r"b.json: the JSON is the result of bytescope report: give a file that bytescope check"),
    ):
        file.write_text(text)
        with pytest.raises(ReportError, match=message):
            budgets.read_reports(file)


@pytest.mark.quick
def test_the_summary_of_a_hostile_name_keeps_its_table():
    results = [
        BudgetResult(dataclasses.replace(budget_of(), name="a|<b>"), report_of(9 * MIB, fits=False), before=None),
        BudgetResult(budget_of(), error="ValueError: a|<script>\n::error::"),
    ]
    text = github.summary_of_budgets(results)
    assert "<b>" not in text and "<script" not in text and "\n::error" not in text
    assert text.startswith("### Device memory: 0 of 2 budgets kept")
    assert "<details open><summary>a\\|&lt;b> on h100:8</summary>" in text and "before" not in text
    lines = github.budget_annotations(results)
    assert len(lines) == 2 and all(re.fullmatch(r"::error [^\n]*", line) for line in lines), lines


@pytest.mark.quick
def test_a_name_is_no_command_in_the_log_of_github(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(worker_pool, "run", lambda jobs, **options: ({}, False))  # nothing is compiled
    text = '[tool.bytescope.budgets."::error::a ##[error]b"]\nprogram = "no_such_module:program"\ntarget = "cpu"\n'
    (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    code, out, err = check(capsys, "--github")
    lines = out.splitlines()
    annotations = [line for line in lines if re.match(r"\s*::", line)]
    assert code == 2 and len(annotations) == 1 and annotations[0].startswith("::error title=memory budget %3A%3Aerror")
    rest = [line for line in lines if line not in annotations]
    assert any(": :error::a ## [error]b" in line for line in rest) and "##[" not in "".join(rest) + err


@pytest.mark.quick
def test_a_config_without_the_trainer_names_the_extra(monkeypatch):
    monkeypatch.setattr(trainer_packages, "PACKAGES", ("bytescope_no_such_module",))
    with pytest.raises(ReportError, match=r"pip install -e '\.\[train\]'"):
        check_command._subject(Budget("a", "", "tiny", "cpu"))


@pytest.mark.quick
def test_a_program_of_another_trainer_is_made_by_its_adapter():
    budget = Budget("a", "maxtext:llama2-7b", "", "h100:8", keys={"scan_layers": True, "steps": 3})
    subject = check_command._subject(budget)
    assert subject.factory("h100:8") is find_adapter("maxtext:llama2-7b")
    assert subject.fixed() == {
        "config": "maxtext:llama2-7b",
        "scan_layers": "true",
        "steps": "3",
    }


@pytest.mark.quick
def test_the_digest_of_a_project_follows_what_decides_a_program(project, tmp_path):
    def digest(written=()):
        return check_command._digest_project(written)

    first = digest()
    (project / "README.md").write_text("words")
    (project / "pyproject.toml").write_text("")
    (project / "b.json").write_text("{}")
    assert digest() == first, "an untracked JSON file is a report"
    git(project, "add", "b.json")
    assert digest([project / "b.json"]) == first != digest()
    for name in ("model.yaml", "nested.py"):  # untracked too
        before = digest()
        (project / name).write_text("a")
        assert digest() != before
    (project / ".gitignore").write_text("*.yaml")
    before = digest()
    (project / "model.yaml").write_text("b")
    assert digest() == before, "ignored"
    shutil.rmtree(project / ".git")
    assert check_command._digest_project(()) is None


# ---- compiled --------------------------------------------------------------------------------------------------------

CONFIG = """
[tool.bytescope.budgets.tiny]
config = "tiny"
target = "cpu:2"
budget = "1MiB"
[tool.bytescope.budgets.tiny.keys]
model.n_layers = 1
model.tie_embeddings = true
mesh.data = 2
remat.policy = "custom"
remat.save = ["v", "up"]
"""
BROKEN = PYPROJECT.replace("mlp", "broken").replace('budget = "64MiB"', "keys = { width = -1 }")


def test_programs_and_configs_are_checked_and_cached(project, capsys, monkeypatch, tmp_path):
    keep_sources(monkeypatch)
    baseline = '\nbaseline = "memory.json"\nfail_above = 2\n'
    (project / "pyproject.toml").write_text(PYPROJECT + baseline + CONFIG + BROKEN)
    (project / "src").mkdir()
    monkeypatch.chdir(project / "src")
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))

    code, out, err = check(capsys, "--update-baseline", "--github", "--json=out.json")
    assert code == 2, out + err
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith(("mlp ", "tiny ", "broken "))}
    assert "fits" in rows["mlp"] and "exceeds" in rows["tiny"] and "failed" in rows["broken"]
    assert re.search(r"^tiny: exceeds 1.00 MiB: \S+ MiB too much", out, re.M)
    assert "::error title=memory budget broken::" in out and "1 of 3 budgets kept" in summary.read_text()
    written = read_result(project / "src" / "out.json")["budgets"]
    assert {name: entry["verdict"] for name, entry in written.items()} == {
        "mlp": "fits",
        "tiny": "exceeds",
        "broken": "failed",
    }
    report = ReportRecord.from_json(written["tiny"]["report"])
    assert report.limit_bytes == MIB and report.target["n_devices"] == 2 and report.buffers
    assert list(json.loads((project / "memory.json").read_text())["budgets"]) == ["mlp"]

    monkeypatch.setattr(worker_pool, "Worker", None)  # every answer comes from the cache
    code, out, _ = check(capsys, "mlp")
    assert code == 0 and re.search(r"^mlp .* fits .* \+0\.0$", out, re.M), out
    code, out, _ = check(capsys, "tiny", "mlp")
    assert code == 1 and out.index("tiny ") < out.index("mlp "), out
    code, _, err = check(capsys, "mpl")
    assert code == 2 and "there is no budget mpl: did you mean mlp" in err
    (project / "step.py").write_text(STEP + "# changed\n")
    code, out, _ = check(capsys, "mlp")
    assert code == 2 and "no worker" in out, "a changed source is compiled again"


@pytest.mark.oracle("precommit")
def test_the_hook_of_pre_commit_runs_the_check(project, tmp_path):
    bin_folder = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "PRE_COMMIT_HOME": str(tmp_path / "pre-commit"),
    }
    hooks = tmp_path / "hooks"  # the manifest alone, as pre-commit clones a repository of hooks
    hooks.mkdir()
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", hooks)
    git(hooks, "init", "--quiet")
    git(hooks, "add", "--all")
    git(hooks, "commit", "--quiet", "--message=Hooks")

    def try_repo():
        command = [sys.executable, "-m", "pre_commit", "try-repo", str(hooks), "bytescope-check", "--all-files", "-v"]
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    code, out = try_repo()
    assert code == 0 and re.search(r"^mlp +cpu .* fits$", out, re.M), out
    (project / "pyproject.toml").write_text(PYPROJECT.replace("64MiB", "1KiB"))
    git(project, "add", "--all")
    code, out = try_repo()
    assert code == 1 and "mlp: exceeds 1.00 KiB" in out, out


# ---- the guide to what added memory ----------------------------------------------------------------------------------

# Stands for uv, which installs packages: runs the command after its options in the environment of the tests.
UV = """#!/bin/sh
[ "$1" = run ] || exit 9
shift
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""


@pytest.mark.exhaustive
def test_the_guide_finds_what_added_memory(tmp_path):
    """Runs each block of memory/guides/what_changed.md in a repository whose third commit adds memory, on cpu."""
    guide = (ROOT / "memory" / "guides" / "what_changed.md").read_text(encoding="utf-8").replace("h100", "cpu")
    assert len(guide.split()) <= 500
    found = re.findall(r"^```(\w+)\n(.*?)^```", guide, flags=re.M | re.S)
    (budget,) = (text for language, text in found if language == "toml")
    commits, versions, dump, grid, option = (text for language, text in found if language == "bash")
    project = make_project(tmp_path, "")
    for message, width in (("second", 64), ("third", 1024), ("fourth", 1024)):
        (project / "step.py").write_text(STEP.replace("width=64", f"width={width}") + f"# {message}\n")
        commit(project, message)
    (project / "memory.toml").write_text(budget.replace("8MiB", "4MiB"))
    (project / "train.py").write_text("import jax\nprint(jax.jit(lambda x: (x @ x).sum())(jax.numpy.ones((64, 64))))\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").write_text(UV)
    (tmp_path / "bin" / "uv").chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}

    def run(text):
        done = subprocess.run(["bash", "-ec", text], cwd=project, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    printed = run(commits)
    assert f"{git(project, 'rev-parse', 'HEAD~1')} is the first bad commit" in printed and "third" in printed
    assert "unchanged" in run(versions) and (project / "jax-0.11.2.json").is_file()
    run(dump)
    assert "jit__lambda" in run("bytescope report old cpu")
    assert "64" in run(grid) and "full" in run(grid)
    # An option that XLA knows for a CPU too.
    run(option.replace("xla_gpu_enable_latency_hiding_scheduler=false", "xla_cpu_enable_fast_math=true"))
    assert {"with.json", "without.json"} <= set(os.listdir(project))
