"""Steps of other people's repositories by the name of a function: what it may return, and mistakes in one line."""

import sys

import pytest

from bytescope.memory.errors import ReportError
from bytescope.memory.program import user_program

pytestmark = pytest.mark.quick

TRAIN = """
def step(state, batch):
    return state, batch

class Traced:
    jaxpr = in_tree = None
    def lower(self): ...

class Config(dict):
    def __init__(self, inner=None):
        self.program = inner

class Space:
    @staticmethod
    def make(): return step, (1, 2)

STAGE = Traced()
def program(): return step, (1, 2)
def listed(): return [step, [1]]
def none_given(): return step, ()
def optioned(): return step, (1,), {"donate_argnums": 0, "kwargs": {"causal": True}, "target": "h100:8"}
def traced(): return Traced()
def config(): return Config(program)
def nested(): return {"program": program}
def defaulted(width=8, *rest, **more): return step, (width,)

def stepped(): return step
def nothing(): pass
def number(): return 3
def flat(): return step, 1, 2
def no_step(): return 3, (1,)
def too_many(): return step, (1,), {}, 4
def odd_options(): return step, (1,), [3]
def misspelt(): return step, (1,), {"donate_argnum": 0}
def unknown(): return step, (1,), {3: 0}
def odd_kwargs(): return step, (1,), {"kwargs": 3}
def raises(): return [][3]
def exits(): raise SystemExit(4)
def arguments():
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    return step, (parser.parse_args().width,)
class Own(BaseException): pass
class Interrupt(KeyboardInterrupt): pass
class Unprintable(Exception):
    def __str__(self): raise SystemExit(5)
class Odd:
    def __getattr__(self, name): raise Own(name)
def own(): raise Own("gone")
def interrupt(): raise Interrupt
def unprintable(): raise Unprintable
def odd(): return Odd()
def says_two_lines(): raise ValueError("one\\ntwo")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with somebody's modules, which is where the command runs; nothing of it stays imported."""
    files = {
        "their_train.py": TRAIN,
        "their_syntax.py": "def f(:\n",
        "their_imports.py": "import no_such_wandb\n",
        "their_own.py": "class Own(BaseException): pass\nraise Own\n",
        "their_exit.py": "import sys\nsys.exit(3)\n",
        "their_empty.py": "",
        "their_package/__init__.py": "",
        "their_package/inner/__init__.py": "",
        "only/their_alone.py": TRAIN,
        "their_package/inner/make.py": "from ..other import step\ndef program(): return step, (1,)\n",
        "their_package/other.py": "def step(x): return x\n",
        "only/json.py": TRAIN,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("their_", "bytescope_program_")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("their_train:program", (1, 2)),
        ("their_train.py:program", (1, 2)),
        ("./their_train.py:program", (1, 2)),
        ("their_train:listed", (1,)),
        ("their_train:none_given", ()),
        ("their_train:config", (1, 2)),
        ("their_train:nested", (1, 2)),
        ("their_train:arguments", (8,)),
        ("their_train:defaulted", (8,)),
        ("their_train:Space.make", (1, 2)),
        ("their_package.inner.make:program", (1,)),
        ("their_package/inner/make.py:program", (1,)),
        ("only/their_alone.py:program", (1, 2)),
        ("only/json.py:program", (1, 2)),
    ],
)
def test_a_step_with_its_arguments(folder, name, args, monkeypatch):
    monkeypatch.setattr(sys, "argv", given := ["bytescope", "report", name])
    found = user_program.load_function(name).make()
    assert found.program.__name__ == "step" and found.args == args and found.options == {}
    assert sys.argv is given


def test_options_and_stages(folder):
    found = user_program.load_function("their_train:optioned").make()
    assert found.options == {"donate_argnums": 0, "kwargs": {"causal": True}, "target": "h100:8"}
    for name in ("traced", "STAGE"):
        found = user_program.load_function(f"their_train:{name}").make()
        assert type(found.program).__name__ == "Traced" and not found.args
    assert sys.modules["json"].__file__ != str(folder / "only" / "json.py"), "the real one stays"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("their_train", "write module:function"),
        (":program", "does not name a function"),
        ("their_train:", "does not name a function"),
        ("their_train:a b", "does not name a function"),
        ("their train:program", "neither a module nor a file"),
        ("quite_other:program", "no module quite_other"),
        ("their_trian.py:program", "did you mean their_train.py?"),
        ("no/such.py:program", "the file no/such.py does not exist"),
        ("their_train:progam", "their_train has no progam: did you mean program?"),
        ("their_empty:program", "it has no function"),
        ("their_train:zzz", "it has step, Traced, Config, Space, program"),
        ("their_train:Space.mak", "did you mean make?"),
        ("their_syntax:f", "SyntaxError: invalid syntax (their_syntax.py, line 1)"),
        ("their_imports:f", "No module named 'no_such_wandb' (their_imports.py:1): install no_such_wandb"),
        ("their_exit.py:f", "SystemExit: 3 (their_exit.py:2)"),
        ("their_train:stepped", "returns the step without its arguments"),
        ("their_train:nothing", "returns None, which is not a program: return"),
        ("their_train:number", "returns int, which is not a program: return (step"),
        ("their_train:flat", "(step, int, int), which is not a program: return (step, arguments)"),
        ("their_train:no_step", "(int, tuple), which is not a program: return"),
        ("their_train:too_many", "(step, tuple, dict, int), which is not a program: return"),
        ("their_train:odd_options", "(step, tuple, list), which is not a program: return"),
        ("their_train:misspelt", "did you mean donate_argnums? Keyword arguments"),
        ("their_train:unknown", "the unknown option 3: remove it."),
        ("their_train:odd_kwargs", "'kwargs' as int"),
        ("their_train:raises", "their_train:raises() fails: IndexError: list index out of range (their_train.py:"),
        ("their_train:exits", "SystemExit: 4"),
        ("their_train:own", "their_train:own() fails: Own: gone (their_train.py:"),
        ("their_train:interrupt", "their_train:interrupt() fails: Interrupt (their_train.py:"),
        (
            "their_train:unprintable",
            "their_train:unprintable() fails: Unprintable: <exception str() failed> (their_train",
        ),
        ("their_train:odd", "their_train:odd: Own: "),
        ("their_own.py:f", "their_own.py cannot be imported: Own (their_own"),
        ("their_own:f", "their_own cannot be imported: Own (their_own.py:2)"),
        ("their_train:says_two_lines", "ValueError: one (their_train.py"),
    ],
)
def test_mistakes_are_one_line(folder, name, words):
    with pytest.raises(ReportError) as caught:
        user_program.load_function(name).make()
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_ctrl_c_is_no_mistake(folder):
    (folder / "their_wait.py").write_text("def program(): raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        user_program.load_function("their_wait:program").make()
