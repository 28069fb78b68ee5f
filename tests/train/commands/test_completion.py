"""bytescope --print-completion: shells complete commands, configs, targets, flags and files with the printed script."""

import os
import pty
import subprocess

import pytest

from bytescope.memory import cli

pytestmark = pytest.mark.quick

# What is typed before TAB -> the word that TAB completes it to.
LINES = {
    "bytescope repo": "report",
    "bytescope report gpt2_s": "gpt2_small",
    "bytescope report notes": "notes.txt",
    "bytescope report tiny h100-p": "h100-pcie",
    "bytescope report tiny --verb": "--verbose",
    "bytescope report tiny --json not": "notes.txt",
    "bytescope list conf": "configs",
    "bytescope --print": "--print-completion",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "notes.txt").touch()
    return tmp_path


def test_bash(folder, capsys):
    assert cli.main(["--print-completion", "bash"]) == 0
    (folder / "script").write_text(capsys.readouterr().out)
    code = """source ./script
        while read -ra COMP_WORDS; do
            COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            _shtab_bytescope
            echo "${COMPREPLY[*]}"
        done"""
    typed = "".join(f"{line}\n" for line in LINES)
    done = subprocess.run(["bash", "-c", code], cwd=folder, input=typed, capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines(), done.stderr) == (list(LINES.values()), "")


@pytest.mark.oracle("zsh")
def test_zsh(folder, capsys):
    """The keys are typed into a terminal, and another key writes the line as TAB completed it to a file."""
    assert cli.main(["--print-completion=zsh"]) == 0
    (folder / "_bytescope").write_text(capsys.readouterr().out)
    (folder / ".zshrc").write_text("""
        PS1=READY fpath=($PWD $fpath)
        autoload -U compinit && compinit -u -D
        note() { print -r -- ${=BUFFER} >> lines }
        zle -N note && bindkey '^T' note
    """)
    terminal, inside = pty.openpty()
    env = {**os.environ, "ZDOTDIR": str(folder), "TERM": "dumb"}
    shell = subprocess.Popen(["zsh", "-d", "-i"], cwd=folder, env=env, stdin=inside, stdout=inside, stderr=inside)
    os.close(inside)
    printed = b""
    while b"READY" not in printed:
        printed += os.read(terminal, 4096)
    os.write(terminal, "".join(f"{line}\t\x14\x15" for line in LINES).encode() + b"exit\n")
    while True:
        try:
            os.read(terminal, 4096)
        except OSError:  # the shell has closed the terminal
            break
    shell.wait()
    assert [line.split()[-1] for line in (folder / "lines").read_text().splitlines()] == list(LINES.values())
