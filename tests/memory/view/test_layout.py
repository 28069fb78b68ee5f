"""The console and the layout of every view: widths, figures that stay whole, names that cannot move the cursor."""

import io
import os
import pty
import shlex
import subprocess
import sys

import pytest
from rich.text import Text

from bytescope.memory.view import console as consoles
from bytescope.memory.view.console import make_console, put, safe, shorten
from bytescope.memory.view.figures import shares
from bytescope.memory.view.text_layout import CopyCommand, Items, Prose, SideBySide, blocks, wrap_command
from bytescope.memory.view.text_table import FigureTable, figure, label, value, words

pytestmark = pytest.mark.quick

HOSTILE = ("[/b]", "[red]", "[link=x]", "a\x1b[2Jb", "tab\tand\nline", "lone \ud800", ":smile:", "\u202eright to left")


def printed(renderable, width):
    """The lines that a view prints at a width."""
    file = io.StringIO()
    put(renderable, make_console(file=file, width=width))
    return file.getvalue().splitlines()


def traffic():
    """A table that is too wide for 80 columns, with every kind of column."""
    table = FigureTable(
        label("communication"),
        label("over"),
        figure("times"),
        figure("payload"),
        figure("sent"),
        figure("formula"),
        words("of"),
    )
    table.add("all-gather", "data x fsdp 8", "1,230", "12.34 GiB", "1023.25 MiB", "7.00 GiB", "a layer's parameters")
    table.add("reduce-scatter of a long name", "data x fsdp x tensor 64", "9", "0.50 GiB", "3 B", "", "gradients " * 9)
    return table


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 200])
def test_a_table_keeps_every_figure_whole(width):
    lines = printed(traffic(), width)
    for cell in ("1,230", "12.34 GiB", "1023.25 MiB", "7.00 GiB", "0.50 GiB", "3 B"):
        assert sum(cell in line for line in lines) == 1
    assert max(map(len, lines)) <= max(width, 13 + 2 + 11)  # a title, a gap and the longest figure
    assert " ".join(" ".join(lines).split()).count("gradients") == 9


def test_columns_that_continue_below_repeat_all_keys_of_a_row():
    table = FigureTable(value("seq_len"), value("policy"), figure("allocated"), figure("predicted"))
    table.add("128", "none", "12.34 GiB", "0.123 to 0.456")
    table.add("128", "full", "10.34 GiB", "0.234 to 0.567")
    assert [line.split() for line in printed(table, 34)][-3:] == [
        ["seq_len", "policy", "predicted"],
        ["128", "none", "0.123", "to", "0.456"],
        ["128", "full", "0.234", "to", "0.567"],
    ]


@pytest.mark.parametrize("width", [60, 80])
def test_a_source_place_is_never_broken(width):
    table = FigureTable(label("held"), figure("bytes"), words("where"), words("until"))
    table.add("input_multiply_reduce_fusion", "1.00 MiB", "attention_kernels_of_gpus.py:1234", "the gradient of a")
    lines = printed(table, width)
    assert any("attention_kernels_of_gpus.py:1234" in line for line in lines) and max(map(len, lines)) <= width


@pytest.mark.parametrize("sizes", [[1, 1, 1], [58.6, 36.05, 5.35], [999, 1], [5], [0, 0], [1, 1e-9], range(1, 40)])
def test_shares_add_up_to_100(sizes):
    found = shares(sizes)
    assert round(sum(found), 6) == (100 if sum(sizes) else 0)
    assert all(abs(share - 100 * size / max(sum(sizes), 1e-9)) < 0.1 for share, size in zip(found, sizes))


def test_labels_are_shortened_in_their_middle_before_anything_else():
    assert [shorten("transformer/blocks/mlp", width) for width in (30, 12, 1)] == [
        "transformer/blocks/mlp",
        "transf…s/mlp",
        "…",
    ]
    table = FigureTable(label("module"), figure("bytes"))
    table.add("transformer/blocks/attention", "12.34 GiB")
    assert printed(table, 25) == ["module              bytes", "transfo…ention  12.34 GiB"]
    assert "…" not in printed(table, 60)[1]
    assert shorten("日本語の名前です", 9) == "日本…です"


def test_a_value_wraps_and_is_never_cut():
    table = FigureTable(value("policy"), figure("peak"))
    table.add("custom(block_in,q,k,v,attn_out)+offload(up)", "1.00")
    assert "".join(line.split("  ")[0] for line in printed(table, 30)[1:]) == (
        "custom(block_in,q,k,v,attn_out)+offload(up)"
    )


def test_a_number_stays_with_its_unit():
    text = "bytes per parameter " + "total 16.00 B of 72.78 GiB at 3.5 TFLOP and 7 % " * 5
    for width in range(20, 90):
        for line in printed(Prose(text), width):
            assert not line[-1].isdigit(), line
    for line in printed(Items([f"{name} {name}.00 B" for name in range(40)], title="ledger"), 33):
        assert line.endswith("B") and len(line) <= 33


def test_one_blank_line_between_blocks_and_none_for_what_is_missing():
    parts = blocks(Text("a"), None, Text(), "", Prose("b"), SideBySide(None, Text("c")))
    assert printed(parts, 80) == ["a", "", "b", "", "c"]


def test_two_columns_from_100():
    pair = SideBySide(Text("left 1\nleft 2"), Text("right"))
    assert printed(pair, 99) == ["left 1", "left 2", "", "right"]
    assert printed(pair, 100) == ["left 1   right", "left 2"]


def by_a_shell(command):
    """The arguments that a shell reads in a command."""
    found = subprocess.run(["sh", "-c", f"set -- {command}\nprintf '%s\\0' \"$@\""], capture_output=True, check=True)
    return found.stdout.decode().split("\0")[:-1]


def test_a_broken_command_is_the_same_command_to_a_shell():
    names = "0-1:custom(a b),2-3:full"
    line = shlex.join(
        [
            "bytescope",
            "train",
            "llama_8b",
            f"--config.remat.layers={names}",
            "--config.data.seq_len=64",
            "--workdir=it's here",
        ]
    )
    for width in (62, 80, 100):
        lines = wrap_command(line, width, 2)
        assert len(lines) >= 2 and max(map(len, lines)) <= width
        assert by_a_shell("\n".join(lines)) == shlex.split(line)
        assert printed(CopyCommand(line), width) == lines
    assert wrap_command("short one", 80, 2) == ["  short one"]
    assert wrap_command("it's no command", 80) == ["it's no command"]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_printed_and_not_obeyed(name):
    table = FigureTable(label(name), value(name), words(name), figure(name))
    table.add(name, name, name, name)
    lines = "\n".join(printed(blocks(Prose(name), Items([name], title=name), table, Text(name), name), 200))
    assert not set(lines) & set("\x1b\x07\u202e\ud800")
    if safe(name) == name:
        assert lines.count(name) == 13


def test_the_width_is_the_terminals_and_columns_rules_elsewhere(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    assert make_console(file=io.StringIO()).width == 70
    for odd in ("", "0", "wide", "-3", "٣"):
        monkeypatch.setenv("COLUMNS", odd)
        assert make_console(file=io.StringIO()).width == 100
    monkeypatch.delenv("COLUMNS")
    assert make_console(file=io.StringIO()).width == consoles.DEFAULT_WIDTH == 100


def test_a_terminal_is_asked_anew(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    width = 90
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor=1: os.terminal_size((width, 24)))
    with os.fdopen(slave, "w") as stream:
        console = make_console(file=stream)
        assert console.is_terminal and console.width == 90
        width = 120
        assert console.width == 120
    os.close(master)


def test_no_color_prints_no_colour(monkeypatch):
    def sgr(name):
        file = io.StringIO()
        put(Text("red", style="bold red"), make_console(file=file, force_terminal=True, color_system="truecolor"))
        return file.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "31" in sgr("red")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31" not in sgr("red")


def test_a_reader_that_has_left_ends_nothing():
    """As `| head` does: what comes after the text, such as a file, is still written."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        console = make_console(file=stream)
        for _ in range(3):
            put(Text("3.50 GiB " * 99), console)
        assert console.quiet


def test_a_character_that_stdout_cannot_encode_becomes_a_question_mark(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    consoles.settle_stdout()
    print("█ \ud800")
    put(Text("█ 3.50 GiB"))
    sys.stdout.flush()
    assert raw.getvalue() == b"? ?\n? 3.50 GiB\n"
