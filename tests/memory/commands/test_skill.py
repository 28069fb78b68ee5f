"""The skill file for agents: its commands run as they stand on its own example, and do what the text says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bytescope.memory.cli import main
from bytescope.memory.commands import registry
from bytescope.memory.commands.mcp_command import skill_text
from support.json_results import read_result

# (language, text) of each fenced block, in the order of the file.
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", skill_text(), re.DOTALL | re.MULTILINE)
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
# The results that the text promises: part of a command -> part of what it prints.
PRINTED = {
    "explain job.log": "XLA could not allocate 2.50 GiB",
    "--json=before.json": "! layer keeps 2.25 GiB for the backward pass",
    "--json=after.json": "TIGHT",
    "diff before.json": "category residuals",
    "same_losses.py": "largest relative difference",
}


@pytest.mark.quick
def test_it_is_printed(capsys):
    assert main(["mcp", "--skill"]) == 0
    assert capsys.readouterr().out == skill_text()
    assert re.match(r"---\nname: out-of-memory\ndescription: .+\n---\n\n# ", skill_text())


@pytest.mark.quick
def test_commands_in_sentences_parse():
    prose = re.sub(r"^```.*?^```", "", skill_text(), flags=re.DOTALL | re.MULTILINE)
    commands = re.findall(r"`bytescope ([^`]+)`", " ".join(prose.split()))
    assert len(commands) > 3
    for command in commands:
        registry.parse(command.split())


@pytest.mark.oracle("cuda")
def test_the_commands_prove_the_fix(tmp_path):
    """Every command of the file, in its order: the example does not fit, is changed, fits, and has the same losses."""
    scripts = [text for language, text in BLOCKS if language == "python"]
    (tmp_path / "same_losses.py").write_text(scripts[0])
    (tmp_path / "step.py").write_text(scripts[1])
    (tmp_path / "job.log").write_text(next(text for language, text in BLOCKS if language == "text"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    printed = {}
    for command in COMMANDS:
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True)
        stated = re.search(r"# exit code (\d+)", command)
        assert done.returncode == (int(stated[1]) if stated else 0), f"{command}\n{done.stdout}{done.stderr}"
        printed[command] = done.stdout
    for part, words in PRINTED.items():
        assert [out for command, out in printed.items() if part in command and words in out], f"{part}: {printed}"
    before, after = (read_result(tmp_path / f"{name}.json") for name in ("before", "after"))
    assert before["verdict"] == "exceeds" and after["verdict"] == "tight"
    assert after["allocated_bytes"] < 0.4 * before["allocated_bytes"]
    losses = re.findall(r"\d\.\d+", printed[COMMANDS[-1]])
    assert len(set(losses)) > 4  # the losses change


@pytest.mark.oracle("cuda")
@pytest.mark.exhaustive
def test_a_wrong_change_is_found(tmp_path):
    """The script that compares the losses fails if the change alters the result."""
    script, example = (text for language, text in BLOCKS if language == "python")
    for name, text in (
        ("step_before", example),
        ("step", example.replace("0.1 *", "0.101 *")),
        ("same_losses", script),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "same_losses.py"],
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "largest relative difference" in done.stdout, done.stderr
