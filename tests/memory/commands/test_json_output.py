"""--json=-: the result is alone on standard output."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from bytescope.memory import ReportError
from bytescope.memory.__main__ import main
from bytescope.memory.commands.json_output import only_json, write_json

pytestmark = pytest.mark.quick


def test_other_output_is_discarded(capsys):
    args = argparse.Namespace(json=Path("-"))
    with only_json(args):
        print("a table")
        write_json(args, {"bytes": 3})
    print("afterwards")
    assert capsys.readouterr().out == '{\n "bytes": 3\n}\nafterwards\n'


def test_a_file_leaves_the_output_as_it_is(tmp_path, capsys):
    args = argparse.Namespace(json=tmp_path / "a.json")
    with only_json(args):
        print("a table")
        write_json(args, {"bytes": 3})
    assert capsys.readouterr().out == "a table\n" and json.loads(args.json.read_text()) == {"bytes": 3}
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
    assert json.loads(out)["recognized"] and "step 1" in err
