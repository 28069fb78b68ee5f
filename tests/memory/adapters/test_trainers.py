"""Programs of other trainers on the command line: which words belong to them, and what is refused in one line."""

import pytest

from bytescope.memory.adapters import maxtext
from bytescope.memory.adapters.trainers import find_adapter, is_adapted, overrides_of
from bytescope.memory.cli import main
from bytescope.memory.commands import registry
from bytescope.memory.errors import ReportError
from bytescope.memory.subjects.trainer_subject import TrainerSubject

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", ["maxtext:llama2-7b", "maxtext:"])
def test_a_prefix_selects_the_adapter(name):
    assert is_adapted(name)
    assert find_adapter(name) is maxtext.FACTORY


@pytest.mark.parametrize("name", ["maxtext", "llama_8b", "other:llama2-7b", None])
def test_other_names_are_no_programs_of_a_trainer(name):
    assert not is_adapted(name)


@pytest.mark.parametrize("words", ["h100:8 a=1 b=2", "h100:8 a=1 --verbose b=2", "--verbose h100:8 a=1 b=2"])
def test_words_after_the_target_are_keys_of_the_trainer(words):
    args = registry.parse(["report", "maxtext:llama2-7b", *words.split()])
    assert args.subject == TrainerSubject("maxtext:llama2-7b", (("a", "1"), ("b", "2"))) and args.target == "h100:8"


def test_words_before_the_target_are_keys_too():
    args = registry.parse(["report", "maxtext:llama2-7b", "a=1", "h100:8", "b=2,3"])
    assert (args.target, args.subject.keys) == ("h100:8", (("a", "1"), ("b", "2,3")))


def test_without_a_target_the_words_follow_the_program():
    args = registry.parse(["compare", "maxtext:my.yml", "a=1", "--grid=b=1,2"])
    assert (args.subject.name, args.target, args.subject.keys) == ("maxtext:my.yml", "local", (("a", "1"),))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("report tiny h100:8 a=b", "a is an unknown key"),
        ("compare tiny cpu a=b", "a is an unknown key"),
        ("compare tiny h100:8 a=b,c", "write --grid=a=b,c to compare them, or --config.a=b,c"),
        ("report tiny h100:8 a=b,c", "a is an unknown key"),
        ("report f.py:p h100:8 a=b", "the file f.py does not exist"),
        ("report dump:f.pb h100:8 a=b", "a=b cannot be used with f.pb"),
        ("fit f.py:p h100:8 a=b", "the file f.py does not exist"),
        ("report maxtext:llama2-7b h100:8 word", "unrecognized arguments: word"),
        ("report maxtext:llama2-7b h100:8 --formulas", "--formulas cannot be used with maxtext:llama2-7b"),
        ("compare maxtext:llama2-7b h100:8 --measure", "--measure cannot be used with maxtext:llama2-7b"),
        ("compare maxtext:llama2-7b h100:8 a=1 --levers", "maxtext:llama2-7b"),
    ],
)
def test_words_are_refused_in_one_line(command, said, capsys):
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_keys_and_values():
    assert overrides_of("maxtext:x", ["a=1", "b=c=d"]) == {"config": "maxtext:x", "a": "1", "b": "c=d"}
    with pytest.raises(ReportError, match="a is given twice, as 1 and as 2"):
        overrides_of("maxtext:x", ["a=1", "a=2"])
    with pytest.raises(ReportError, match="write KEY=VALUE"):
        overrides_of("maxtext:x", ["a.b=1"])


def test_all_policies_or_some():
    program = TrainerSubject("maxtext:x")
    assert program.policies("all") == [("remat_policy", list(maxtext.POLICIES))]
    assert program.policies("full,minimal") == [("remat_policy", ["full", "minimal"])]
    with pytest.raises(ReportError, match="empty policy"):
        program.policies("full,")


def test_a_row_has_the_command_of_its_report():
    row = maxtext.MaxTextRow({"remat_policy": "full", "xla_gpu_autotune_level": 0})
    command = row.command("maxtext:llama2-7b", "h100:8", "scan_layers=true")
    assert command == (
        "bytescope report maxtext:llama2-7b h100:8 scan_layers=true remat_policy=full --xla=xla_gpu_autotune_level=0"
    )


@pytest.mark.parametrize(
    ("target", "slices"), [("h100:8", 1), ("h100:8x8", 8), ("h100", 1), ("gb200:4x4", 1), ("v5e:4x4", 1)]
)
def test_a_host_of_gpus_is_a_slice_of_maxtext(target, slices):
    from bytescope.memory.devices import targets

    assert maxtext._slices(targets.parse(target)) == slices


def test_a_config_file_is_read_with_its_bases(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yml").write_text("base_config: 'other.yml'  # beside it\nsteps: 3\n")
    (tmp_path / "other.yml").write_text("base_config: base.yml\n")
    assert [path.name for path in maxtext._config_files("mine.yml")] == ["mine.yml", "other.yml"]
    monkeypatch.setenv("M_STEPS", "4")
    resolved = maxtext.FACTORY.resolve({"config": "maxtext:mine.yml"})
    assert resolved["M_STEPS"] == "4" and "steps: 3" in resolved["mine.yml"]


def test_without_maxtext_the_message_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(maxtext.importlib.util, "find_spec", lambda name: None)
    assert main(["report", "maxtext:llama2-7b", "h100:8"]) == 2
    error = capsys.readouterr().err
    assert "MaxText is not installed: pip install" in error and error.count("\n") == 1
