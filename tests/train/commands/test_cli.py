"""The one front: every command reachable, config and target by position, mistakes in a line, lists without jax."""

import argparse
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bytescope.memory import cli
from bytescope.memory.commands.moved import MOVED, moved_flags
from bytescope.memory.commands.registry import COMMANDS, GROUPS, TOOLS, make_parser
from support.command_line import called
from support.json_results import read_result, result_of

pytestmark = pytest.mark.quick

PARSERS = {name: make_parser(name) for name in COMMANDS}
# Abilities of report that a subject selects -> a subject.
SUBJECTS = {"saved": ["report.json"], "init-program": ["script.py"], "trace": ["card.xplane.pb"]}
# The commands that stay: flags that they have and keep, and flags that they get from other commands.
STAYING = {
    "report": (
        "--formulas --run --generate --dtype --weights --tensor --fsdp --sequences --length --kv --verbose --xla "
        "--allocators --try-remedies --github --rates --host-memory "
        "--processes-per-node --json --html --export",
        "--names --audit --strict --passes --trace --save-program --value --without --auto-axes --function --timeout",
    ),
    "explain": ("--json --html", ""),
    "diff": ("--fail-above --json --html --github", ""),
    "check": ("--pyproject --baseline --update-baseline --github --no-cache --jobs --json", ""),
    "estimate": ("--json --html", "--stages --micro-batches --schedule"),
    "compare": (
        "--remat --grid --measure --formulas --what-if --xla --no-cache --rates --jobs --json --html",
        "--levers --savings",
    ),
    "fit": (
        "--only-names --budget --max-compiles --max-seconds --measure --no-cache --rates --jobs --json --html",
        "--batch-tokens --lora --vary --budgets --from --to --cost --auto-offload",
    ),
    "train": (
        "--workdir --extend --fit --budget --lora --profile --rates --host-memory --show-data --verbose --coordinator "
        "--process --processes --timeout",
        "",
    ),
    "prepare": ("--source --out --tokenizer --special-tokens --field --skip-bad --shard-tokens", ""),
    "generate": (
        "--step --dtype --tensor --fsdp --sequences --length --kv --budget --prompt --prompts --out --chat "
        "--max-tokens --temperature --top-k --top-p --seed",
        "--score --json",
    ),
    "export": (
        "--step --dtype --merge --shard-size --force",
        "--awq --group --format --samples --length --budget --json",
    ),
    "list": ("--grep --json", ""),
    "calibrate": ("--out --json --seconds --host --rates", "--runs"),
    "mcp": ("--skill", ""),
}


def flags_of(name):
    """The flags of a command, as its parser knows them."""
    return [flag for flag in make_parser(name)._option_string_actions if flag not in ("-h", "--help")]


def test_every_command_is_in_the_overview_once(capsys):
    assert cli.main([]) == cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    names = [name for group in GROUPS.values() for name in group]
    assert sorted([*names, *TOOLS]) == sorted(name for name, row in COMMANDS.items() if not row.part_of)
    assert len(names) + len(TOOLS) <= 14
    assert all(f"\n  {name} " in text for name in (*names, *TOOLS)) and max(map(len, text.splitlines())) <= 80
    assert "\n  list         list configs, targets, keys and policies\n" in text
    assert cli.overview().count("\n") < 40
    assert all(f"  bytescope {name} " in text for name in ("report", "explain", "train"))
    assert all(row.flag in text for row in COMMANDS.values())


def test_one_sentence_says_what_it_is():
    root = Path(__file__).parents[3]
    sentence = " ".join(cli.SUMMARY.split())
    assert tomllib.loads((root / "pyproject.toml").read_text())["project"]["description"] == sentence
    assert " ".join((root / "README.md").read_text().split()).startswith(f"# bytescope {sentence} ")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(name, capsys, monkeypatch):
    """Within 80 columns, with two examples, and without lists of choices in braces."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as done:
        cli.main([*called(name, SUBJECTS.get(name, [])), "--help"])
    text = capsys.readouterr().out
    command = called(name, [])[0]
    assert done.value.code == 0 and text.startswith(f"usage: bytescope {command}")
    assert max(map(len, text.splitlines())) <= 80 and "{" not in text
    assert text.partition("examples:\n")[2].count(f"  bytescope {command}") >= 2


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.flag])
def test_the_help_of_an_ability_needs_no_value(name, capsys):
    """The help of a command names this spelling, such as report --trace --help."""
    command, flag = COMMANDS[name].part_of.split()
    with pytest.raises(SystemExit) as done:
        cli.main([command, flag, "--help"])
    assert done.value.code == 0 and capsys.readouterr().out.startswith(f"usage: bytescope {command}")


def test_examples_of_the_help_parse():
    for name, subcommand in COMMANDS.items():
        for example in subcommand.examples:
            if name not in SUBJECTS:  # a file or folder that is there selects these
                assert cli.parse(called(name, example.split())).command == name


@pytest.mark.parametrize(
    "words",
    [
        ["report", "llama_8b", "h100:8"],
        ["report", "llama_8b", "--json=x.json", "h100:8"],
        ["report", "--json=x.json", "llama_8b", "h100:8"],
    ],
)
def test_config_and_target_stand_anywhere_between_flags(words):
    args = cli.parse([*words, "--config.model.n_layers=2"])
    assert (args.subject.name, args.target) == ("llama_8b", "h100:8")
    assert args.subject.keys == (("model.n_layers", "2"),)


@pytest.mark.parametrize(
    ("line", "config", "target"),
    [
        ("train tiny batch.micro=4 train.steps=2", "tiny", None),
        ("train tiny --verbose batch.micro=4 --config.train.steps=2", "tiny", None),
        ("report tiny batch.micro=4 h100:8 train.steps=2", "tiny", "h100:8"),
        ("report tiny --names h100:8 batch.micro=4 train.steps=2", "tiny", "h100:8"),
        ("report tiny --audit batch.micro=4 train.steps=2", "tiny", "local"),
        ("report runs/lr=3e-4 batch.micro=4 train.steps=2", "runs/lr=3e-4", "local"),
        ("compare tiny --levers batch.micro=4 train.steps=2 cpu:2", "tiny", "cpu:2"),
        ("compare tiny batch.micro=4 cpu:2 train.steps=2 --grid=remat.policy=none,full", "tiny", "cpu:2"),
        ("fit tiny cpu:2 batch.micro=4 train.steps=2", "tiny", "cpu:2"),
        ("fit tiny cpu:2 --budgets=3 batch.micro=4 train.steps=2", "tiny", "cpu:2"),
        ("estimate tiny batch.micro=4 train.steps=2", "tiny", None),
        ("explain job.log tiny batch.micro=4 train.steps=2", "tiny", "local"),
    ],
)
def test_words_after_the_subject_set_keys(line, config, target):
    args = cli.parse(line.split())
    assert args.subject.name == config and getattr(args, "target", None) == target
    assert sorted(args.subject.keys) == [("batch.micro", "4"), ("train.steps", "2")]


def test_every_command_and_flag_stays_or_has_a_new_spelling():
    """At most 150 flags; the table of what is gone names none of them."""
    planned = {name: {*kept.split(), *new.split()} for name, (kept, new) in STAYING.items()}
    known = {}
    for name, row in COMMANDS.items():
        known.setdefault(row.part_of.partition(" ")[0] or name, set()).update(flags_of(name))
    assert known == planned and sum(map(len, planned.values())) <= 150
    for name in set(planned) & set(MOVED):
        assert "" not in MOVED[name] and not planned[name] & set(moved_flags(name)), name


@pytest.mark.parametrize("name", MOVED)
def test_what_is_gone_answers_with_its_new_spelling(name, capsys):
    """Each command and flag of the table: one line, exit code 2."""
    is_gone = name not in COMMANDS or bool(COMMANDS[name].part_of)
    needed = {"generate": ["run", "--prompt=x"], "export": ["run", "out"]}.get(name, [])
    lines = [[name, *needed, f"{flag}=x"] for flag in moved_flags(name)]
    for words in [*lines, *([[name]] if is_gone else [])]:
        assert cli.main(words) == 2
        err = capsys.readouterr().err
        now = MOVED[name][""] if is_gone else moved_flags(name)[words[-1].removesuffix("=x")]
        assert err.count("\n") == 1 and now.replace("{command}", name) in err, err


@pytest.mark.parametrize("name", MOVED)
def test_the_new_spelling_exists(name):
    """Each command and flag that the table says to write instead of what is gone is one that a parser knows."""
    known = {}  # command -> its flags and those of its parts
    for each, row in COMMANDS.items():
        known.setdefault(row.part_of.partition(" ")[0] or each, {"--print-completion", "--help"}).update(flags_of(each))
    everywhere = set().union(*known.values())
    for flags, now in MOVED[name].items():
        named = re.findall(r"bytescope ([a-z]+)\b", now)
        assert set(named) <= set(known), now
        there = set().union(*(known[command] for command in named)) if named else everywhere
        assert set(re.findall(r"(?<![\w-])--[a-z-]+", now.replace("{name}", "x"))) <= there, (flags, now)


def test_the_trainers_config_by_position():
    assert cli.parse(["train", "char", "--workdir=x"]).config == "char"
    assert cli.parse(["train"]).config == "tiny"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["list"], "policies  list every remat policy"),
        (["list", "configs"], "llama_8b"),
        (["list", "targets"], "h100"),
        (["list", "policies"], "selective"),
        (["list", "keys", "--grep=remat.budget"], "bytes"),
        (["list", "keys", "--grep=model.norm"], "rmsnorm"),
        (["--version"], "jax "),
    ],
)
def test_lists(words, expected, capsys):
    assert cli.main(words) == 0
    assert expected in capsys.readouterr().out


def test_every_command_with_figures_writes_json():
    without = {"train", "prepare", "generate", "export", "saved", "mcp"}
    with_json = {name for name in COMMANDS if "--json" in make_parser(name)._option_string_actions}
    assert with_json == set(COMMANDS) - without


@pytest.mark.parametrize(
    ("words", "key"),
    [("list keys --grep=remat.policy", "keys"), ("list policies", "policies"), ("list configs", "configs")],
)
def test_lists_as_json(words, key, tmp_path, capsys):
    assert cli.main([*words.split(), "--json=-"]) == cli.main([*words.split(), f"--json={tmp_path / 'a.json'}"]) == 0
    out, table = capsys.readouterr().out.split("\n}\n")
    rows = result_of(out + "}")[key]
    assert rows == read_result(tmp_path / "a.json")[key]
    assert all(next(iter(row.values())) in table for row in rows) and len(rows) > 0


def test_annotations_and_json_cannot_share_the_output(capsys):
    assert cli.main(["diff", "a.json", "b.json", "--github", "--json=-"]) == 2
    assert "give --json=FILE instead of --json=-" in capsys.readouterr().err


def test_every_key_has_a_meaning():
    from bytescope.train.program.config_files import describe_keys

    assert [key for key, _, meaning in describe_keys() if not meaning] == []


def test_from_any_folder_beside_files_of_ones_own(tmp_path):
    """A train.py and a memory.py of the user's own are not run in the place of ours."""
    for name in ("train", "memory", "configs", "model"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file')\n")
    script = Path(sys.executable).with_name("bytescope")
    python = {**os.environ, "JAX_PLATFORMS": "cpu"}
    for command in (
        [str(script), "list", "configs"],
        [sys.executable, "-m", "bytescope.memory", "list", "configs"],
    ):
        done = subprocess.run(command, cwd=tmp_path, env=python, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), command
        assert "the wrong file" not in done.stdout and "tiny" in done.stdout


def test_values_are_checked_without_a_device():
    """A search checks its configs before workers start; a client of its own would take an accelerator's memory."""
    code = (
        "from bytescope.train.plan.config_factory import check_config; check_config('tiny', ()); "
        "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_names_that_are_not_utf8_are_printed(tmp_path):
    (tmp_path / "text.txt").write_text("some text\n" * 50)
    script = Path(sys.executable).with_name("bytescope")
    done = subprocess.run(
        [str(script), "prepare", "--source=text.txt", b"--out=\xff"],
        cwd=tmp_path,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert (done.returncode, done.stderr) == (0, b"") and done.stdout.startswith(b"\\udcff: 2 shards")


# Flags whose help says more than one thing -> what each help has to say.
MEANINGS = {
    "--budget": "memory (budget )?per device",
    "--dtype": "float32, bfloat16 or float16",
    "--force": "replace OUT",
    "--formulas": "published formulas predict",
    "--function": "the function that (is|returns) the step",
    "--html": "page",
    "--json": "as JSON",
    "--length": "tokens (per|of a) (calibration )?sequence",
    "--lora": "LoRA adapters instead of the weights",
    "--measure": "on this machine",
    "--out": "write|new or empty",
    "--step": "the checkpoint of step N",
    "--timeout": "maximum seconds to wait for all to start|stop the script after",
    "--verbose": "the reason for each chosen setting",
    "--tensor": "number of tensor-parallel devices, which divide heads, MLP width and vocabulary",
}


def test_a_flag_means_the_same_in_every_command():
    flags, selecting = {}, {row.flag for row in COMMANDS.values()}
    for command, parser in PARSERS.items():
        for action in parser._actions:
            if action.help != argparse.SUPPRESS and not selecting & set(action.option_strings):
                for flag in action.option_strings:
                    flags.setdefault(flag, {})[command] = action
    for flag, by_command in flags.items():
        where = f"{flag} of {', '.join(by_command)}"
        assert len({(action.nargs, action.type) for action in by_command.values()}) == 1, where
        helps = {action.help for action in by_command.values()}
        if len(helps) > 1:
            assert all(re.search(MEANINGS.get(flag, "one help for all"), text) for text in helps), (where, helps)


def test_a_closed_pipe_ends_the_overview_without_a_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "bytescope.memory"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == ""
