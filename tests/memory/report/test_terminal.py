"""On a real terminal: the bar and the lines never share a line, and all of it stays within the width."""

import io
import os
import threading
import time

import pytest
from rich.progress import Progress

from bytescope.memory.devices.compiler_log import hold_back_log
from bytescope.memory.view import progress_bar
from bytescope.memory.view.console import make_console, put
from bytescope.memory.view.progress_bar import ProgressBar, ProgressLines, progress
from bytescope.memory.view.text_layout import Prose
from support.screen import seen, terminal

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("width", [60, 100])
def test_the_bar_never_shares_a_line_with_a_result(monkeypatch, width):
    lines = [f"result {number}: 3.50 GiB [/b] " + "x " * number for number in range(12)]
    with terminal(monkeypatch, width) as written, progress(len(lines)) as bar:
        for number, line in enumerate(lines):
            bar([f"program [red]{number}", "and another " * 9], number)
            time.sleep(0.01)
            with bar.aside():
                put(Prose(line))
    assert "compiling" in written[0] and "program [red]" in written[0], "there was a bar"
    file = io.StringIO()
    put(Prose("\n".join(lines)), make_console(file=file, width=width))
    assert [line for line in seen(written[0], width) if line] == file.getvalue().splitlines()


def test_without_a_terminal_there_is_no_bar(capsys):
    with progress(3) as bar:
        bar(["a"], 1)
        with bar.aside():
            put("b")
    assert capsys.readouterr() == ("b\n", "")


@pytest.mark.parametrize(
    ("figures", "done", "total", "amount"),
    [
        ("programs", 12, 130, "12 of 130 done"),
        ("programs", 12, None, "12 done"),
        ("bytes", 3 << 29, 4 << 30, "1.50 GiB of 4.00 GiB"),
        ("share", 1, 8, "12%"),
    ],
)
def test_without_a_terminal_there_is_a_line_every_30_seconds(figures, done, total, amount):
    now, file = 100.0, io.StringIO()
    with Progress(disable=True) as bar:
        shown = ProgressBar(bar, "compiling", None)
        lines = ProgressLines(bar.tasks[0], figures, make_console(file=file, width=40), lambda: now)
        shown.show(done, total)
        shown(["llama\x1b[2J [red] " + "x" * 50], done)
        for _ in range(95):  # a look every second
            now += 1.0
            lines.tick()
    times = ("0:00:30", "0:01:00", "0:01:30")
    tail = "elapsed: llama\ufffd[2J [red] " + "x" * 50
    assert file.getvalue().splitlines() == [f"compiling: {amount}, {time} {tail}" for time in times]


def test_the_lines_come_while_a_command_waits(capsys, monkeypatch):
    monkeypatch.setattr(progress_bar, "LINE_SECONDS", 0.02)
    monkeypatch.setattr(progress_bar, "_TICK_SECONDS", 0.01)
    with progress(7) as bar:
        bar(["a"], 3)
        time.sleep(0.3)
    printed = capsys.readouterr().err.splitlines()
    assert printed and set(printed) == {"compiling: 3 of 7 done, 0:00:00 elapsed: a"}
    assert "ProgressLines" not in {thread.name for thread in threading.enumerate()}


LOG = b"E1122 12:26:09.004250   31247 gpu_hlo_schedule.cc:968] The byte size of arguments exceeds the limit.\n  more\n"


def test_the_compilers_log_stays_back_unless_it_fails(capfd):
    with hold_back_log():
        os.write(2, b"someone else's line\n" + LOG)
    assert capfd.readouterr().err == "someone else's line\n"
    with pytest.raises(RuntimeError), hold_back_log():
        os.write(2, LOG + b"F1122 12:26:09.004250 1 x.cc:1] fatal\n")
        raise RuntimeError
    told = capfd.readouterr().err
    assert LOG.decode() in told and told.count("fatal") == 1
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_the_log_before_it_is_set_up(capfd):
    with hold_back_log():
        os.write(
            2,
            b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
            b"I0000 00:00:1763814369.004250   31247 tpu_client.cc:9] started\n",
        )
        os.write(2, b"F0000 00:00:1763814369.004250   31247 x.cc:1] fatal\n")
    assert capfd.readouterr().err == "F0000 00:00:1763814369.004250   31247 x.cc:1] fatal\n"


def test_a_progress_bar_moves_on_while_the_log_stays_back(capfd):
    with hold_back_log():
        os.write(2, b"\r 1 of 3")
        seen, until = "", time.monotonic() + 5
        while not seen and time.monotonic() < until:
            time.sleep(0.005)
            seen = capfd.readouterr().err
        assert seen == "\r 1 of 3", "held until its line ends"
        os.write(2, b" compiled\n" + LOG)
    assert capfd.readouterr().err == " compiled\n"


def test_a_second_thread_s_lines_are_left_alone(capfd):
    with hold_back_log(), hold_back_log():
        os.write(2, LOG)
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"
