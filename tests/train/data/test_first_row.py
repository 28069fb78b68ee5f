"""`bytescope train --show-data`: what a run would read, before it does."""

import json

import pytest

from support.command_line import train as main
from support.text_data import write

pytestmark = pytest.mark.quick


def shown(capsys, *flags):
    assert main(["tiny", "--show-data", *(f"--config.{flag}" for flag in flags)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_examples_of_a_row_with_what_is_learned(tmp_path, capsys):
    pairs = [{"prompt": f"{i}: say\x1b[31m [/b]", "completion": " yes\n"} for i in range(30)]
    write(tmp_path, {"a.jsonl": "".join(json.dumps(pair) + "\n" for pair in pairs)})
    source = f"data.source={tmp_path / 'a.jsonl'}"
    out = shown(capsys, source, "data.format=pairs", "data.seq_len=64")
    assert "packed into" in out and out.count("--- example") == 2
    assert out.count(": say\ufffd[31m [/b][ yes\n\ufffd]") == 2 and "\x1b" not in out
    out = shown(capsys, source, "data.format=pairs", "data.seq_len=64", "data.packing=False", "data.loss_on=all")
    assert out.count("--- example") == 1 and "[: say" not in out and "[31m [/b] yes\n\ufffd]" in out


def test_a_window_of_text_is_learned_but_for_its_first_token(tmp_path, capsys):
    write(tmp_path, {"a.txt": "word " * 500})
    out = shown(capsys, f"data.source={tmp_path / 'a.txt'}", "data.seq_len=9")
    last = out.splitlines()[-1]
    assert last[1] == "[" and last.endswith("]") and last.replace("[", "").rstrip("]") in "word " * 5
