"""Shell completion: the printed scripts in real shells, and every word of them one that the commands take."""

import argparse
import re
import subprocess

import pytest

from bytescope.train import cli
from bytescope.train.commands.completion_command import SHELLS
from bytescope.train.commands.completion_words import gather, parsers
from bytescope.train.commands.registry import COMMANDS

pytestmark = pytest.mark.quick

# What is typed before TAB -> what has to be offered, and what must not be. bash offers what follows the last = or :.
LINES = [
    ("bytescope ", "train report completion --version", "tiny"),
    ("bytescope repo", "report", "train"),
    ("bytescope report lla", "llama_8b llama_70b", "tiny h100"),
    ("bytescope report m", "mine.py", "notes.txt"),
    ("bytescope report llama_8b h", "h100 h200", "llama_8b cpu"),
    ("bytescope report tiny h100:2", "2 2x8", "4 h100"),
    ("bytescope report tiny --config.mod", "--config.model.", "--config.mesh."),
    ("bytescope report tiny --config.model.n_l", "--config.model.n_layers=", "--config.model.norm="),
    ("bytescope train --config.se", "--config.seed=", "--config.train."),
    ("bytescope report tiny --config.remat.policy=s", "selective sqrt", "none"),
    ("bytescope report tiny --config.model.scan=", "true false", ""),
    ("bytescope report --config=ti", "tiny", "char"),
    ("bytescope report --target=h100:2", "2 2x8", "h100"),
    ("bytescope report tiny --js", "--json=", "--html="),
    ("bytescope compare tiny --remat=none,f", "none,full", "none full"),
    ("bytescope compare tiny --grid=remat.p", "remat.policy=", "remat.save="),
    ("bytescope compare tiny --grid=remat.policy=none,f", "none,full", "full"),
    ("bytescope compare --grid=config=tiny,ch", "tiny,char", "char"),
    ("bytescope fit tiny --levers=remat,mi", "remat,micro", "micro"),
    ("bytescope fit tiny --jobs 3 rtx4", "rtx4090", ""),
    ("bytescope fit tiny --config.train.steps 5 h2", "h200", "tiny"),
    ("bytescope fit tiny --jobs=", "", "tiny h100"),
    ("bytescope levers tiny --savings=bf16,fused", "bf16,fused_backward", ""),
    ("bytescope estimate --offload=", "optimizer both", "remat"),
    ("bytescope front tiny --auto", "--auto-offload", "--offload"),
    ("bytescope diff no", "notes.txt", "mine.py"),
    ("bytescope report tiny --json=no", "notes.txt", "mine.py"),
    ("bytescope calibrate --o", "--out=", "--seconds="),
    ("bytescope calibrate --from-runs=no", "notes.txt", "mine.py"),
    ("bytescope validate --runs=ru", "runs", "mine.py"),
    ("bytescope train --rates=no", "notes.txt", "mine.py"),
    ("bytescope trace ", "runs", "notes.txt tiny"),
    ("bytescope export ", "runs", "notes.txt tiny"),
    ("bytescope generate runs --kv=", "int8", "runs"),
    ("bytescope score ", "runs", "notes.txt tiny"),
    ("bytescope export runs new --dtype=b", "bfloat16", "float16"),
    ("bytescope completion ", "bash zsh fish", "tiny"),
    ("bytescope list ", "configs targets keys policies", "tiny"),
    ("bytescope list keys --", "--grep= --json=", "--html="),
    ("bytescope ke", "keys", "train"),
    ("bytescope keys --", "--grep= --json=", "--html="),
    ("bytescope nothing ", "", "tiny"),
    ("bytescope train h", "hf:", "tiny runs"),
    ("bytescope train hf:r", "runs", "notes.txt tiny hf:"),
    ("bytescope report hf:", "runs", "tiny mine.py"),
    ("bytescope fit --config=hf:r", "runs", "tiny"),
    ("bytescope train tiny --config.init.folder=r", "runs", "notes.txt"),
    ("bytescope export hf:r", "", "runs"),
    ("bytescope compare --remat=$(touch${IFS}pwned),f", "$(touch${IFS}pwned),full", ""),
]


# Flags whose help says more than one thing -> what each help has to say.
MEANINGS = {
    "--budget": "memory (budget )?per device",
    "--config": "the training step of a config|the same as the argument CONFIG",
    "--config.KEY": "(set a|override a) (config )?key",
    "--dtype": "float32, bfloat16 or float16",
    "--force": "replace OUT",
    "--formulas": "published formulas predict",
    "--function": "the function that (is|returns) the step",
    "--hlo": "compare the failure with an XLA dump|report on an XLA dump",
    "--html": "page",
    "--json": "as JSON",
    "--layers": "layers of the model",
    "--length": "tokens per (calibration )?sequence",
    "--lora": "LoRA adapters instead of the weights",
    "--measure": "on this machine",
    "--out": "write|append|new or empty",
    "--program": "your own (step|programs|model) instead of a config|compare the failure with your step",
    "--target": "the same as the argument TARGET|devices of the failed job",
    "--report": "memory report",
    "--step": "the checkpoint of step N",
    "--timeout": "maximum seconds to wait for all processes|stop the script after",
    "--verbose": "the reason for each chosen setting",
    "--tensor": "number of tensor-parallel devices, which divide heads, MLP width and vocabulary",
}


def test_a_flag_means_the_same_in_every_command():
    flags = {}
    for command, parser in parsers().items():
        for action in parser._actions:
            if action.help != argparse.SUPPRESS:
                for flag in action.option_strings:
                    flags.setdefault(flag, {})[command] = action
    for flag, by_command in flags.items():
        where = f"{flag} of {', '.join(by_command)}"
        assert len({(action.nargs, action.type) for action in by_command.values()}) == 1, where
        helps = {action.help for action in by_command.values()}
        if len(helps) > 1:
            assert all(re.search(MEANINGS.get(flag, "one help for all"), text) for text in helps), (where, helps)


@pytest.mark.parametrize(
    ("command", "old", "now"),
    [
        (["fit", "tiny"], "--timeout=7", "--max-seconds=7"),
        (["front", "tiny"], "--offload", "--auto-offload"),
        (["levers", "tiny"], "--stages=bf16", "--savings=bf16"),
        (["quantize", "wide"], "--plan=cpu:1", "--target=cpu:1"),
        (["quantize", "wide", "cpu:1"], "--limit=1GiB", "--budget=1GiB"),
        (["estimate", "--params=7b"], "--width=64", "--d-model=64"),
        (["estimate", "--params=7b"], "--head-width=8", "--d-head=8"),
        (["estimate", "--params=7b"], "--mlp-width=96", "--d-ff=96"),
        (["estimate", "--params=7b"], "--sequence=32", "--length=32"),
    ],
)
def test_an_old_name_of_a_flag_is_taken_with_a_note(command, old, now, words, capsys):
    assert vars(cli.parse([*command, old])) == vars(cli.parse([*command, now]))
    name, other = old.partition("=")[0], now.partition("=")[0]
    assert capsys.readouterr().err == f"note: {name} is now {other}; the next version no longer has the old name\n"
    assert other in words.flags[command[0]] and name not in words.flags[command[0]]
    assert f" {name} " not in parsers()[command[0]].format_help()


@pytest.fixture(scope="module")
def words():
    return gather()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, words):
    """A folder with the script of each shell, and files to complete."""
    found = tmp_path_factory.mktemp("completion")
    for shell, script in SHELLS.items():
        (found / f".script.{shell}").write_text(script(words))
    for name in ("mine.py", "notes.txt"):
        (found / name).touch()
    (found / "runs").mkdir()
    return found


def offered(folder, *command, text=""):
    done = subprocess.run(command, cwd=folder, input=text, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def in_bash(folder):
    """What bash offers for each of LINES, in one process."""
    asked = "".join(f"{line}\n" for line, _, _ in LINES)
    script = """source .script.bash
        while IFS= read -r COMP_LINE; do
            COMP_POINT=${#COMP_LINE} COMPREPLY=()
            _bytescope
            echo "${COMPREPLY[*]}"
        done"""
    return dict(zip((line for line, _, _ in LINES), offered(folder, "bash", "-c", script, text=asked).splitlines()))


@pytest.mark.parametrize(("line", "has", "lacks"), LINES, ids=[line[10:] for line, _, _ in LINES])
def test_bash(line, has, lacks, in_bash, folder):
    found = in_bash[line].split()
    assert set(has.split()) <= set(found) and not set(lacks.split()) & set(found)
    assert has or not found
    assert not (folder / "pwned").exists(), "what is typed was run"


def test_bash_in_the_middle_of_a_line(folder):
    script = """source .script.bash
        COMP_LINE='bytescope report ch h100' COMP_POINT=19; _bytescope; echo "${COMPREPLY[*]}"
        COMP_WORDBREAKS=' '; COMP_LINE='bytescope report --config=ch' COMP_POINT=28; _bytescope; echo "${COMPREPLY[*]}"
        """
    assert offered(folder, "bash", "-c", script).splitlines() == ["char", "--config=char"]


@pytest.mark.parametrize("shell", [pytest.param(shell, marks=pytest.mark.oracle(shell)) for shell in SHELLS])
def test_the_syntax(shell, folder):
    assert offered(folder, shell, "-n", f".script.{shell}") == ""
    (folder / f".broken.{shell}").write_text((folder / f".script.{shell}").read_text() + "\nif (\n")
    with pytest.raises(subprocess.CalledProcessError):
        offered(folder, shell, "-n", f".broken.{shell}")


@pytest.mark.oracle("fish")
def test_fish(folder):
    lines = (
        "bytescope report lla",
        "bytescope compare tiny --remat=none,f",
        "bytescope report tiny --config.model.n_l",
        "bytescope report tiny h100:2",
        "bytescope report m",
        "bytescope train hf",
        "bytescope train hf:r",
        "bytescope report --config=hf:r",
    )
    script = "source .script.fish; while read -l line; complete -C $line; echo end; end"
    found = offered(folder, "fish", "-c", script, text="".join(f"{line}\n" for line in lines)).split("end\n")
    assert [set(part.split()) for part in found[:-1]] == [
        {"llama_1b", "llama_8b", "llama_8b_qlora", "llama_70b", "llama_70b_qlora", "llama_405b"},
        {"--remat=none,full"},
        {"--config.model.n_layers="},
        {"h100:2", "h100:2x8"},
        {"mine.py", "mixtral_8x7b"},
        {"hf:"},
        {"hf:runs/"},
        {"--config=hf:runs/"},
    ]


def test_every_word_is_one_that_is_taken(words):
    """A flag, key, target or name that has gone, or a value of another table, would fail here."""
    from bytescope.memory.devices import targets
    from bytescope.train.program.config_files import describe_keys
    from bytescope.train.source import WEIGHTS, ConfigPath, find_source

    assert set(words.commands) == set(COMMANDS) == set(words.flags)
    assert set(words.keys) == {key for key, _, _ in describe_keys()}
    assert all(find_source(name, ConfigPath) for name in words.configs)
    assert all(f"{WEIGHTS}*" in script(words) for script in SHELLS.values())
    for name, counted in words.targets.items():
        if name not in ("local", "cpu"):  # those ask jax
            assert all(targets.parse(each).is_described for each in (name, *counted))
    for key in ("optimizer.name", "remat.policy", "model.attention", "xla.gemm", "precision.preset", "data.dtype"):
        assert words.keys[key].startswith("@one ") and len(words.keys[key].split()) > 2
    for command, row in words.flags.items():
        assert row.keys() >= {"--help"}, command


def test_the_command(capsys):
    assert cli.main(["completion", "bash"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# bash completion") and out.endswith("complete -F _bytescope bytescope\n")
