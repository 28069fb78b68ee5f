"""Names that were probably meant, and errors that stay one line whatever is in them."""

import errno
import os
import re

import pytest

from bytescope import memory
from bytescope.memory.cli import main
from bytescope.memory.commands import arguments
from bytescope.memory.commands.arguments import write
from bytescope.memory.compare import row_cache
from bytescope.memory.errors import (
    MAX_SUGGESTIONS,
    ReportError,
    check_readable,
    did_you_mean,
    exit_code_of,
    in_one_line,
    nearest,
    one_line,
    remedy_for,
)
from bytescope.memory.seconds import rates

pytestmark = pytest.mark.quick

CONFIGS = ("char", "gpt2_small", "gpt2_medium", "llama_1b", "llama_405b", "llama_70b", "llama_8b", "tiny")


@pytest.mark.parametrize(
    ("word", "names", "found"),
    [
        ("llama8b", CONFIGS, ["llama_8b"]),
        ("LLAMA-8B", CONFIGS, ["llama_8b"]),
        ("lama_8b", CONFIGS, ["llama_8b"]),
        ("llama_9b", CONFIGS, ["llama_1b", "llama_8b", "llama_70b"]),
        ("tyni", CONFIGS, ["tiny"]),
        ("gpt2", CONFIGS, ["gpt2_small", "gpt2_medium"]),
        ("ful", ("none", "full", "full_sqrt"), ["full", "full_sqrt"]),
        ("adam", ("sgd", "adamw", "adamw_8bit", "adafactor"), ["adamw", "adamw_8bit"]),
        ("bf61", ("fp32", "bf16", "fp16"), ["bf16"]),
        ("xyzzy", CONFIGS, []),
        ("", CONFIGS, []),
        ("_-", CONFIGS, []),
        ("t", CONFIGS, []),
        ("x" * 10**6, CONFIGS, []),
    ],
)
def test_nearest_names(word, names, found):
    assert nearest(word, names) == found


def test_at_most_three_are_named():
    many = [f"llama_{size}b" for size in range(1, 9)]
    assert len(nearest("llama_9b", many)) == MAX_SUGGESTIONS == 3
    assert did_you_mean("llama_9b", many) == "did you mean llama_1b, llama_2b or llama_3b?"


def test_the_remedy_has_the_nearest_and_all():
    assert remedy_for("ful", ["none", "full"]) == "did you mean full? Else choose one of none, full"
    assert remedy_for("zzz", ["none", "full"]) == "choose one of none, full"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\r\nc", "a b c"),
        ("[/b] [red]x", "[/b] [red]x"),
        ("a\x1b[31mb\x00", "a\\x1b[31mb\\x00"),
        ("\udcff", "\\udcff"),
        ("\u202e", "\\u202e"),
        ("größe", "größe"),
        ("/" + "x" * 5000 + " is long", None),
    ],
)
def test_errors_are_one_line_as_they_are(text, shown):
    found = in_one_line(text)
    assert found == shown or (shown is None and len(found) < 200 and found.endswith("xx is long"))
    assert found.encode().decode() == found


def test_a_long_message_is_cut_behind_a_word():
    words = "the template refuses a conversation " * 9
    assert one_line(words[:118]) == words[:118].strip()
    cut = one_line(ValueError(words))
    assert len(cut) <= 120 and cut.endswith("...") and words.startswith(cut[:-3] + " ")
    assert one_line("x" * 200, 60) == "x" * 57 + "..."


class Unprintable(ReportError):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (Unprintable(), 2, "error: <exception str() failed>\n"),
        (ReportError("a\nb"), 2, "error: a b\n"),
        (OSError(36, "File name too long", "x"), 2, "error: x: File name too long\n"),
        (OSError(28, "No space left on device"), 2, "error: No space left on device\n"),
        (ValueError("ours"), None, ""),
        (OSError("of a library"), None, ""),
    ],
)
def test_what_users_can_mend_is_told(error, code, text, capsys):
    assert exit_code_of(error) == code
    assert capsys.readouterr() == ("", text)


def test_what_may_have_no_end_is_not_read(tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, kind in ((pipe, "pipe"), ("/dev/zero", "device")):
        with pytest.raises(ReportError, match=f"cannot read {path}: It is a {kind}, not a file; give a report"):
            memory.load(path)
        with pytest.raises(ReportError, match=f"{path}: It is a {kind}, not a file: give the file that"):
            rates.load(path)
    with pytest.raises(OSError, match="It is a pipe"):
        check_readable(pipe, pipes=True)  # nobody writes to it
    (tmp_path / "compare").mkdir()
    os.mkfifo(tmp_path / "compare" / "row.json")
    row_cache.write(tmp_path / "compare", "row", {"status": "ok"})
    assert row_cache.read(tmp_path / "compare", "row") is None
    for command in (["explain", str(pipe)], ["report", __file__, f"--save-program={pipe}"]):
        assert main(command) == 2
        assert re.search(f"error: .*{pipe}.*\n$", capsys.readouterr().err)
    reader, writer = os.pipe()
    check_readable(f"/dev/fd/{reader}", pipes=True)
    os.close(reader)
    os.close(writer)
    check_readable(tmp_path)
    check_readable(__file__)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room, or "),
        (errno.EDQUOT, "make room, or "),
        (errno.EROFS, "make that writable, or "),
        (errno.EACCES, "make that writable, or "),
        (errno.ENAMETOOLONG, ""),
    ],
)
def test_the_remedy_of_a_file_that_cannot_be_written(tmp_path, monkeypatch, number, remedy):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(arguments, "write_whole", refuse)
    with pytest.raises(ReportError) as caught:
        write(tmp_path / "x", "text")
    assert str(caught.value) == f"cannot write {tmp_path / 'x'}: {os.strerror(number)}; {remedy}give another file"
