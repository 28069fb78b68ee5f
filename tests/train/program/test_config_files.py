"""Configs: every shipped file builds; overrides are typed; mistakes name the nearest valid choice."""

import jax
import pytest
from ml_collections import ConfigDict

from bytescope.configs import base
from bytescope.train.commands.config_arguments import split_overrides
from bytescope.train.program.config_files import flatten, load, override
from bytescope.train.program.program import build
from bytescope.train.source import SHIPPED
from bytescope.train.user_errors import UserError

pytestmark = pytest.mark.quick

NAMES = sorted(path.stem for path in SHIPPED.glob("*.py") if path.stem not in ("__init__", "base"))

# The start of a config of one's own.
FROM_BASE = "from bytescope.configs import base\ndef get_config():\n    c = base.get_config()\n"


def test_the_promised_configs_are_shipped():
    assert {
        "tiny",
        "char",
        "gpt2_small",
        "gpt2_xl",
        "llama_1b",
        "llama_8b",
        "llama_70b",
        "llama_405b",
        "gpt3_175b",
        "deepseek_v3",
    } <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_config_describes_a_program(name):
    config = load(name)
    config.mesh.update(data=1, fsdp=-1, expert=1)  # some name more devices than there are here
    program = build(config, jax.devices()[:1])
    assert program.batch.tokens == program.batch.global_rows * program.config.data.seq_len
    assert set(flatten(program.config)) == set(flatten(base.get_config()))


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.steps", "7", 7),
        ("optimizer.learning_rate", "1", 1.0),
        ("optimizer.learning_rate", "3e-4", 3e-4),
        ("model.scan", "false", False),
        ("model.scan", "1", True),
        ("data.source", "a,b", "a,b"),
        ("model.rope_scaling", "8,1.0,4.0,8192", (8, 1.0, 4.0, 8192)),
        ("model.rope_scaling", "()", ()),
        ("mesh.fsdp", "-1", -1),
    ],
)
def test_overrides_take_the_type_of_the_key(key, text, value):
    config = load("tiny")
    override(config, key, text)
    found = flatten(config)[key]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("train.step", "7", "did you mean train.steps"),
        ("model.dmodel", "7", "did you mean model.d_model"),
        ("learning_rate", "1", "did you mean optimizer.learning_rate"),
        ("train", "7", "train is a group"),
        ("train.steps", "many", "give a value of type int, such as"),
        ("train.steps", "1.5", "give a value of type int"),
        ("model.scan", "maybe", "give a value of type bool"),
        ("optimizer.b1", "x", "give a value of type float"),
        ("zzz", "1", "unknown key"),
    ],
)
def test_a_wrong_override_is_one_line_with_the_remedy(key, text, message):
    with pytest.raises(UserError, match=message) as caught:
        override(load("tiny"), key, text)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_overrides_are_taken_out_of_the_command_line():
    rest, overrides = split_overrides(["--workdir=x", "--config.a.b=1", "--config.c", "2", "--config=tiny"])
    assert rest == ["--workdir=x", "--config=tiny"] and overrides == [("a.b", "1"), ("c", "2")]
    with pytest.raises(UserError, match="has no value"):
        split_overrides(["--config.a"])


def test_files_are_found_by_path_and_by_name(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(FROM_BASE + "    c.train.steps = 5\n    return c\n")
    assert load(str(mine)).train.steps == 5
    assert load("char") == load("configs/char.py")
    with pytest.raises(UserError, match="did you mean llama_8b"):
        load("lama_8b")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "has no get_config.*bytescope report "),
        ("get_config = 3", "has no get_config"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import sys; sys.exit(7)", "SystemExit: 7"),
        ("def get_config(size): return size", "TypeError"),
        ("def get_config(): return get_config()", "RecursionError"),
        ("def get_config(:", "SyntaxError"),
        (
            "class Own(BaseException):\n    def __str__(self): raise self\nraise Own",
            "Own: <exception str.. failed>: fix",
        ),
        ("def get_config():\n    return {}", "not an ml_collections"),
        (FROM_BASE + "    c.train.stepz = 1\n    return c", "did you mean train.steps"),
        ("from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict()", "is missing"),
        (
            "from ml_collections import ConfigDict\n"
            + FROM_BASE
            + "    c.train = ConfigDict(c.train.to_dict() | {'steps': 'x'})\n    return c",
            "give a value of type int",
        ),
    ],
)
def test_a_broken_config_file_is_one_line(tmp_path, source, message):
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(UserError, match=message):
        load(str(path))


def test_flatten_keeps_every_leaf():
    assert flatten(ConfigDict({"a": {"b": 1, "c": ()}, "d": "x"})) == {"a.b": 1, "a.c": (), "d": "x"}
