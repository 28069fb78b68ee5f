"""The first word of a command names its subject."""

import json
from typing import ClassVar

import pytest

from bytescope import memory
from bytescope.memory import cli
from bytescope.memory.subjects.subject import Subject
from bytescope.train.commands import subjects
from bytescope.train.commands.subjects import SubjectKind, open_subject, recognize
from support.command_line import called

pytestmark = pytest.mark.quick

FILES = {
    "config.py": "def get_config(): ...",
    "imported.py": "from other import get_config",
    "script.py": "raise SystemExit('a file is not run to recognize it')",
    "broken.py": "def",
    "step.hlo.pb": "",
    "module.after_optimizations.hlo.pb.gz": "",
    "card.xplane.pb": "",
    "report.json": "{}",
    "run/metrics.jsonl": "",
    "run/profile/card.xplane.pb": "",
    "lr=3e-4/metrics.jsonl": "",
    "weights/config.json": "{}",
    "weights/model.safetensors": "",
    "profile/plugins/card.xplane.pb": "",
    "dump/module_0001.jit_step.gpu_after_optimizations.hlo.pb": "",
    "tiny/metrics.jsonl": "",
    "both/metrics.jsonl": "",
    "both/module_0001.jit_step.after_optimizations.txt": "",
    "empty/notes.md": "",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("tiny llama_8b config.py imported.py broken.py missing.py h100:8 hf:weights", "config"),
        ("maxtext:default", "trainer"),
        ("my_package.train:program script.py:program config.py:program ./script.py:program a:b.c", "function"),
        ("step.hlo.pb module.after_optimizations.hlo.pb.gz missing.hlo.pb dump", "dump"),
        ("script.py ./script.py", "script"),
        ("run run/ ./run lr=3e-4 ./tiny", "run"),
        ("report.json", "report"),
        ("card.xplane.pb profile missing.xplane.pb", "trace"),
    ],
)
def test_what_a_word_names(words, kind, folder):
    for word in words.split():
        assert recognize(word) == (kind, word)
        subject = open_subject(word)
        assert (subject.kind, subject.name) == (kind, word)


def test_a_prefix_names_the_kind(folder):
    for kind in ("config", "script", "dump", "run", "report", "trace"):
        assert recognize(f"{kind}:both") == (kind, "both")
    assert recognize("weights:both") == ("config", "hf:both") and recognize("weights") == ("config", "hf:weights")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "both"], "both contains a run and a dump: write run:both or dump:both"),
        (["report", "empty"], "empty is a folder without a run, weights, a saved report, a trace or an XLA dump"),
        (["report", "--verbose", "run"], "run is a run: write it as the first word, bytescope report run"),
        (["report", "run", "--names"], "run is a run: bytescope report --names takes a config or MODULE:FUNCTION"),
        (["compare", "dump", "h100"], "dump is an HLO dump, which is compiled already: bytescope compare takes"),
        (["compare", "script.py"], "--save-program=step.py, and give step.py:program"),
        (["compare", "a:f", "--levers"], "a:f is a function: bytescope compare --levers takes a config\n"),
        (["fit", "a:f", "--budgets=4"], "a:f is a function: bytescope fit --budgets takes a config\n"),
        (["report", "tinny", "--trace=profile"], "no config file 'tinny': did you mean tiny?"),
        (["report", "runs/gone", "--trace=profile"], "there is no file or folder runs/gone: give a path that exists"),
        (["report", "runs/gone", "h100"], "there is no file or folder runs/gone: give a path that exists"),
        (["report", "tiny.py", "--trace=profile"], "tiny.py is a config: bytescope report --trace takes a trace, or a"),
        (["fit", "report.json"], "report.json is a saved report: bytescope fit takes a config"),
    ],
)
def test_a_command_says_which_subjects_it_takes(words, message, folder, capsys):
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["report", "names", "audit", "compare", "fit"])
def test_a_function_and_a_dump_as_the_first_word(name, folder):
    args = cli.parse(called(name, ["script.py:program", "h100:8", "width=2"]))
    assert (args.subject.kind, args.subject.name, args.target) == ("function", "script.py:program", "h100:8")
    assert args.subject.keys == (("width", "2"),)
    if name in ("report", "audit"):
        args = cli.parse(called(name, ["dump", "h100:8"]))
        assert (args.subject.kind, args.subject.name, args.target) == ("dump", "dump", "h100:8")


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("tiny", "config"),
        ("config.py", "config"),
        ("script.py:program", "function"),
        ("dump", "dump"),
        ("run", "run"),
        ("report.json", "report"),
    ],
)
def test_explain_takes_the_subject_after_the_log(word, kind, folder):
    args = cli.parse(["explain", "job.log", word, "h100:8"])
    assert (args.subject.kind, args.subject.name, args.target) == (kind, word, "h100:8")


class Recipe(Subject):
    """A kind of subject that only this test has."""

    kind = "recipe"
    is_a = "a recipe"
    has = ("program",)
    lacks: ClassVar = {"--try-remedies": "which has no remedies: leave it out"}

    def program(self, target):
        raise SystemExit(f"the program of {self.name} for {target} with {dict(self.keys)}")


def test_a_new_kind_of_subject_is_a_class_and_a_row(folder, monkeypatch, capsys):
    row = SubjectKind(f"{__name__}.Recipe", is_word=lambda word: word.endswith(".cake"))
    monkeypatch.setitem(subjects.KINDS, "recipe", row)
    assert recognize("sweet.cake") == recognize("recipe:sweet.cake") == ("recipe", "sweet.cake")
    with pytest.raises(SystemExit, match=r"the program of sweet.cake for cpu:2 with \{'eggs': '3'\}"):
        cli.run(["report", "sweet.cake", "cpu:2", "eggs=3"])
    assert cli.run(["report", "sweet.cake", "--try-remedies"]) == 2
    assert "--try-remedies cannot be used with sweet.cake, which has no remedies" in capsys.readouterr().err
    assert cli.run(["compare", "sweet.cake"]) == 2
    assert "sweet.cake is a recipe: bytescope compare takes a config or MODULE:FUNCTION" in capsys.readouterr().err


def test_a_folder_with_one_saved_report(tmp_path, monkeypatch):
    monkeypatch.setattr("bytescope.memory.records.report_record.load", lambda file: json.loads(file.read_text()))
    (tmp_path / "a.json").write_text("{}")
    assert recognize(str(tmp_path)) == ("report", str(tmp_path / "a.json"))


def test_a_subject_in_python(folder):
    """The same names, keys and bytes as on the command line."""
    subject = memory.subject("tiny", **{"model.n_layers": 2, "data.seq_len": 64})
    assert subject.keys == (("model.n_layers", "2"), ("data.seq_len", "64"))
    report = subject.analyze("h100")
    assert cli.main(["report", "tiny", "h100", "model.n_layers=2", "data.seq_len=64", "--json=saved.json"]) == 0
    saved = memory.subject("saved.json").analyze()
    assert (saved.peak_bytes, saved.allocated_bytes) == (report.peak_bytes, report.allocated_bytes)
    with pytest.raises(memory.ReportError, match="saved.json is a saved report: it has no keys to vary; give a config"):
        memory.subject("saved.json").factory("h100")
    with pytest.raises(memory.ReportError, match="dump is a trace"):
        memory.subject("trace:dump").analyze("h100")
    assert memory.subject("step.py:program", width=2).keys == (("width", 2),)
