"""--json of all commands: one envelope with a JSON Schema; with --json=- alone on standard output."""

import argparse
import json
import sys
from pathlib import Path

import jsonschema
import pytest

from bytescope import memory
from bytescope.memory import ReportError
from bytescope.memory.__main__ import main
from bytescope.memory.commands.json_output import make_envelope, only_json, write_json
from bytescope.memory.commands.registry import COMMANDS, make_parser
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.records.result import plain
from bytescope.memory.records.result_envelope import MemoryLimit, unwrap
from bytescope.train.commands.list_command import LISTS
from support.json_results import SCHEMAS, read_result, result_of, validator

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[3]
REPORT = ReportRecord(1, 1, {"params": 1})


def test_other_output_is_discarded(capsys):
    args = argparse.Namespace(command="names", json=Path("-"))
    with only_json(args):
        print("a table")
        write_json(args, {"values": []})
    print("afterwards")
    out, _, after = capsys.readouterr().out.rpartition("}\n")
    assert result_of(out + "}") == {"values": []} and after == "afterwards\n"


def test_a_file_leaves_the_output_as_it_is(tmp_path, capsys):
    args = argparse.Namespace(command="names", json=tmp_path / "a.json")
    with only_json(args):
        print("a table")
        write_json(args, {"values": []})
    assert capsys.readouterr().out == "a table\n" and read_result(args.json) == {"values": []}
    with only_json(argparse.Namespace()):  # a command without the flag
        print("a table")
    assert capsys.readouterr().out == "a table\n"


def test_an_error_restores_the_output(capsys):
    args = argparse.Namespace(json=Path("-"))
    with pytest.raises(ReportError), only_json(args):
        raise ReportError("wrong")
    print("afterwards")
    assert capsys.readouterr().out == "afterwards\n"


def test_the_output_of_an_explained_job_is_on_standard_error(capfd):
    job = (
        "print('step 1'); raise SystemExit('RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5000000 bytes.')"
    )
    assert main(["explain", "--json=-", "--", sys.executable, "-c", job]) == 1
    out, err = capfd.readouterr()
    assert result_of(out)["recognized"] and "step 1" in err


def test_the_envelope_has_the_limit_and_its_source():
    target = memory.target("h100@0.9").to_json()
    found = make_envelope("report", {"target": target, "limit_bytes": target["limit_bytes"]}, caveats=("first",))
    assert found.target is target and found.limit.bytes == target["limit_bytes"]
    assert found.limit.source.startswith("90 % of the GPU's memory")
    assert found.caveats == ("first", f"The limit of 71.20 GiB is {found.limit.source}.")
    assert found.versions["bytescope"] and found.versions["jax"]
    chosen = make_envelope("fit", {"target": target}, limit=MemoryLimit(5, "the budget"))
    assert chosen.limit.bytes == 5 and chosen.caveats == ("The limit of 5 B is the budget.",)
    assert plain(make_envelope("diff", {"changes": []}))["limit"] is None


def test_reports_of_both_schemas_are_read(tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    REPORT.save(old)
    new.write_text(json.dumps(plain(make_envelope("report", REPORT.to_json()))))
    assert result_of(new.read_text()) == json.loads(old.read_text())
    assert memory.load(new).to_json() == memory.load(old).to_json() == REPORT.to_json()
    assert main(["diff", str(old), str(new), "--fail-above=0", "--json=-"]) == 0
    assert {change["growth"] for change in result_of(capsys.readouterr().out)["changes"]} == {0}


def test_the_result_of_another_command_is_refused(tmp_path, capsys):
    other, later = tmp_path / "other.json", tmp_path / "later.json"
    other.write_text(json.dumps(plain(make_envelope("compare", {}))))
    later.write_text(json.dumps(plain(make_envelope("report", REPORT.to_json())) | {"schema": 3}))
    assert main(["diff", str(other), str(other)]) == main(["diff", str(later), str(later)]) == 2
    err = capsys.readouterr().err
    assert "the JSON is the result of bytescope compare: give a file that bytescope report --json=FILE wrote" in err
    assert "the JSON has schema 3, but this version reads schemas 1 and 2" in err
    assert unwrap([], "report") == [] and unwrap({"command": "x"}, "report") == {"command": "x"}


def test_every_command_with_the_flag_has_a_schema():
    with_json = {name for name in COMMANDS if "--json" in make_parser(name)._option_string_actions}
    assert {path.stem for path in SCHEMAS.glob("*.json")} == (with_json | set(LISTS)) - {"list", "init-program"}


@pytest.mark.parametrize("command", sorted(path.stem for path in SCHEMAS.glob("*.json")))
def test_a_schema_refuses_other_keys(command):
    jsonschema.Draft202012Validator.check_schema(validator(command).schema)
    for wrong in ({"no_such_key": 1}, {}, []):
        envelope = {**plain(make_envelope(command, {})), "result": wrong}
        assert not validator(command).is_valid(envelope)


def test_no_command_writes_json_in_another_way():
    for path in (*ROOT.glob("memory/commands/*.py"), *ROOT.glob("train/commands/*.py")):
        text = path.read_text()
        assert path.name in ("arguments.py", "json_output.py") or ("write(args.json" not in text), path
        assert path.name in ("arguments.py", "moved.py") or '"--json"' not in text, path
