"""One answer to "is this a run, a folder of weights or a config?": every command recognizes each kind the same way."""

import ast
import json
from pathlib import Path

import pytest

from bytescope import train
from bytescope.memory import cli
from bytescope.memory.commands.registry import COMMANDS, make_parser
from bytescope.train.source import (
    ADAPTER_CONFIG,
    CHECKPOINTS,
    CONFIG,
    INDEX,
    METRICS,
    SINGLE,
    ConfigPath,
    RunPath,
    WeightsPath,
    find_source,
    holds_model,
    is_run,
)
from bytescope.train.user_errors import UserError
from support.command_line import called

pytestmark = pytest.mark.quick

# Command -> (kinds that it takes, its command line after the path). The commands whose first word names any subject are
# in tests/train/commands/test_subjects.py.
TAKES = {
    "generate": ((RunPath, WeightsPath), ["--prompt=x"]),
    "score": ((RunPath, WeightsPath), ["--score=text.txt"]),
    "quantize": ((WeightsPath,), ["out", "--awq=text.txt"]),
    "export": ((RunPath,), ["out"]),
}
# Kind -> (its path, how the reader of the kind refuses it).
GIVEN = {
    RunPath: ("run", "run has no checkpoint yet"),
    WeightsPath: ("weights", "model_type='dynamic' is not a supported family"),
    ConfigPath: ("config.py", "config.py has no get_config()"),
}
# Kinds that a command takes -> what it says of each other kind, and of a folder of other files.
REFUSED = {
    (RunPath,): {
        WeightsPath: "weights is not a run directory",
        ConfigPath: "config.py",
        None: "other is not a run directory",
    },
    (WeightsPath,): {
        RunPath: "run is a run: write its weights with bytescope export run FOLDER, and give FOLDER",
        ConfigPath: "config.py is neither a run nor a folder of weights: ",
        None: "other is neither a run nor a folder of weights: ",
    },
    (RunPath, WeightsPath): {
        ConfigPath: "config.py is neither a run nor a folder of weights: ",
        None: "other is neither a run nor a folder of weights: ",
    },
}


@pytest.fixture
def places(tmp_path, monkeypatch) -> Path:
    """A folder with one path of each kind, which its reader refuses at once, and a folder `other`."""
    monkeypatch.chdir(tmp_path)
    identity = {"config": {"train.steps": 1, "batch.accumulation": 1}, "global_rows": 1, "data": ""}
    for name in ("run", "weights", "other"):
        Path(name).mkdir()
    (Path("run") / CONFIG).write_text(json.dumps(identity))
    (Path("weights") / CONFIG).write_text(json.dumps({"model_type": "dynamic"}))
    Path("config.py").write_text("x = 1\n")
    Path("text.txt").write_text("text")
    Path("other/notes.md").touch()
    return tmp_path


def test_the_table_has_every_command_that_takes_one_of_the_three():
    found = set()
    for name in COMMANDS:
        for action in make_parser(name)._actions:
            if action.dest in ("word", "source", "run", "workdir") and not action.option_strings:
                found.add(name)
    of_any_subject = {"report", "audit", "names", "explain", "estimate", "compare", "levers", "front", "fit", "train"}
    of_any_subject |= {"saved", "trace"}
    assert found - of_any_subject == set(TAKES)


def refusal(words: list[str], capsys) -> tuple[int, str]:
    code = cli.main(words)
    return code, capsys.readouterr().err


@pytest.mark.parametrize("command", TAKES)
def test_each_kind_is_recognized_by_each_command(places, capsys, command):
    kinds, more = TAKES[command]
    for kind, (path, reading) in GIVEN.items():
        code, err = refusal(called(command, [path, *more]), capsys)
        if kind in kinds:
            assert code == 2 and reading in err, err
        else:
            assert code == 2 and REFUSED[kinds][kind] in err, err
        for prefix in {RunPath: ("run:",), WeightsPath: ("weights:", "hf:"), ConfigPath: ()}[kind]:
            assert refusal(called(command, [f"{prefix}{path}", *more]), capsys) == (code, err)
    code, err = refusal(called(command, ["other", *more]), capsys)
    assert code == 2 and REFUSED[kinds][None] in err, err


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({CONFIG: '{"config": {}, "global_rows": 8}'}, RunPath),
        ({CONFIG: "{", METRICS: ""}, RunPath),
        ({"memory.json": "{}"}, RunPath),
        ({f"{CHECKPOINTS}/2/state": "", CONFIG: "{}", SINGLE: ""}, RunPath),
        ({CONFIG: "{}"}, WeightsPath),
        ({CONFIG: "{"}, WeightsPath),
        ({CONFIG: "[]"}, WeightsPath),
        ({CONFIG: "{}", SINGLE: "", METRICS: ""}, WeightsPath),
        ({CONFIG: "{}", INDEX: "{}", "memory.json": ""}, WeightsPath),
        ({SINGLE: ""}, None),
        ({ADAPTER_CONFIG: "{}"}, None),
        ({}, None),
    ],
)
def test_a_folder_is_a_run_or_weights_by_its_files(tmp_path, files, kind):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert is_run(tmp_path) == (kind is RunPath)
    if kind is None:
        with pytest.raises(UserError, match="is neither a run nor a folder of weights"):
            find_source(tmp_path, RunPath, WeightsPath)
    else:
        assert find_source(tmp_path, RunPath, WeightsPath, ConfigPath) == kind(tmp_path)


def test_a_shipped_name_is_a_config_even_beside_a_folder_of_that_name(places):
    run = Path("run").rename("tiny")
    assert find_source("tiny", ConfigPath).path.name == "tiny.py"
    assert find_source("tiny", RunPath, WeightsPath, ConfigPath) == RunPath(run)


def test_a_home_directory_is_expanded_in_words_and_kept_in_paths(places, monkeypatch):
    monkeypatch.setenv("HOME", str(places))
    assert find_source("~/run", RunPath).path == places / "run"
    Path("run").rename("~")
    assert find_source(Path("~"), RunPath).path == Path("~")


def test_only_a_folder_with_a_model_may_be_replaced(tmp_path):
    for name in ("notes.md", CONFIG):
        (tmp_path / name).touch()
        assert not holds_model(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert holds_model(tmp_path)


# ---- nobody else asks ------------------------------------------------------------------------------------------------

NAMES = {"CONFIG", "CHECKPOINTS", "METRICS", "MEMORY", "INDEX", "SINGLE"}
TESTS = {"is_dir", "is_file", "exists", "lexists", "isdir", "isfile"}
# Modules that look for a file of a run or of weights although they know what the folder is.
READERS = {
    "commands/train_command.py": "continues the run whose directory it is given",
    "checkpoints/workdir.py": "claims a directory for a run by its config.json",
    "weights/folder.py": "says which file a folder of weights lacks",
}


def modules() -> dict[str, ast.Module]:
    root = Path(train.__file__).parent
    return {path.relative_to(root).as_posix(): ast.parse(path.read_text()) for path in root.rglob("*.py")}


def test_no_other_module_spells_the_file_names_that_decide():
    spelled = {CONFIG, CHECKPOINTS, METRICS, INDEX, SINGLE, ADAPTER_CONFIG, "hf:"}
    for name, tree in modules().items():
        found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)} & spelled
        assert not found or name == "source.py", f"{name} spells {found}: take them from train/source.py"


def test_no_other_module_asks_what_a_path_is():
    for name, tree in modules().items():
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imported = {each.name for node in imports if node.module == "bytescope.train.source" for each in node.names}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or name == "source.py":
                continue
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            inside = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
            if called in TESTS and inside & imported & NAMES:
                assert name in READERS, f"{name}:{node.lineno} asks: use train/source.py"
