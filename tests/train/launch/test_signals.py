"""Signals and terminals that go away: a run saves, or ends at once; it never ends in a traceback."""

import contextlib
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bytescope.memory import cli
from bytescope.train.launch.signals import STOPPING, Stop, Surviving, leave_at_once

pytestmark = pytest.mark.quick


def fail():
    raise AssertionError("asked to end at once")


@pytest.mark.parametrize("number", STOPPING)
def test_the_first_signal_of_a_kind_asks_to_stop(number):
    before = [signal.getsignal(each) for each in STOPPING]
    with Stop(fail) as stop:
        assert [signal.getsignal(each) for each in STOPPING] == before  # nothing to save yet
        stop.watch()
        signal.raise_signal(number)
        assert stop.names == [signal.Signals(number).name]
    assert [signal.getsignal(each) for each in STOPPING] == before


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop(fail) as stop:
            stop.watch()
            signal.raise_signal(signal.SIGHUP)
            assert stop.names == [] and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


CHILD = """
import sys, time
from bytescope.train.launch.signals import Stop, leave_at_once, surviving_output
with surviving_output(), Stop(leave_at_once) as stop:
    stop.watch()
    print("ready", flush=True)
    try:
        for count in range(int(sys.argv[1])):
            for _ in range(6000):
                if len(stop.names) > count:
                    break
                time.sleep(0.01)
            print(stop.names[count:], flush=True)
    finally:
        print("words for nobody", flush=True)
        open(sys.argv[2], "w").write(" ".join(stop.names))
"""


@pytest.mark.parametrize("signals", [("SIGINT", "SIGINT"), ("SIGTERM", "SIGINT")])
def test_two_signals_are_one_line_and_130(signals, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, "9", str(tmp_path / "end")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.Signals[signals[0]])
        assert child.stdout.readline() == f"['{signals[0]}']\n"  # two that wait together are one
        child.send_signal(signal.Signals[signals[1]])
        assert child.stderr.read() == "interrupted\n"
    assert child.returncode == 130


def test_ending_at_once_erases_the_bar_of_a_terminal(monkeypatch):
    written, codes = [], []
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("os.write", lambda descriptor, text: written.append((descriptor, text)))
    monkeypatch.setattr("os._exit", codes.append)
    leave_at_once("saved: \udcff")
    assert written == [(1, b"\r\x1b[2K\x1b[?25h"), (2, b"saved: \\udcff\n")] and codes == [130]


def test_an_interrupt_before_the_first_update_promises_nothing(tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("bytescope.train.run.loop.run", interrupted)
    assert cli.main(["train", f"--workdir={tmp_path}", "--config.train.cache_dir=none"]) == 130
    assert capsys.readouterr().err == "interrupted before the first checkpoint: nothing is saved\n"


def test_a_closed_terminal_is_survived(tmp_path):
    """What is printed to it goes nowhere, and the run goes on to its save."""
    screen, end = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, "1", str(tmp_path / "end")], stdout=end, stderr=end, start_new_session=True
    ) as child:
        os.close(end)
        assert os.read(screen, 100).startswith(b"ready")
        os.close(screen)
        child.send_signal(signal.SIGHUP)
    assert child.returncode == 0 and (tmp_path / "end").read_text() == "SIGHUP"


def test_a_terminal_that_is_gone_without_a_signal_is_survived_too():
    screen, end = os.openpty()
    with os.fdopen(end, "w") as stream:
        stream.write("seen")
        stream.flush()
        os.close(screen)
        surviving = Surviving(stream)
        assert surviving.write("unseen" * 10_000) == 60_000
        surviving.flush()
        assert surviving.write("and more") == 8
        assert os.fstat(stream.fileno()).st_rdev == os.stat(os.devnull).st_rdev  # nothing tries the terminal again


def test_a_reader_who_has_seen_enough_stops_the_run():
    reader, end = os.pipe()
    os.close(reader)
    with os.fdopen(end, "w") as stream, Stop(fail) as stop:
        stop.watch()
        surviving = Surviving(stream)
        surviving.write("row")
        surviving.flush()
        surviving.write("row")
        surviving.flush()
        assert stop.names == ["SIGTERM"]


def test_a_log_on_a_full_disk_does_not_end_the_run():
    with contextlib.suppress(OSError), open("/dev/full", "w") as stream:
        with pytest.raises(OSError, match="No space left"):
            stream.write("row" * 10_000)
            stream.flush()
        surviving = Surviving(stream)
        try:
            assert surviving.write("row" * 10_000) == 30_000
            surviving.flush()
        except OSError:
            pytest.fail("it was not survived")


def test_an_interrupt_of_any_command_is_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("bytescope.train.commands.list_command.run", interrupted)
    monkeypatch.setattr("sys.argv", ["bytescope", "list", "configs"])
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        assert cli.main() == 130  # ignored is what the interpreter keeps while it ends
        assert {signal.getsignal(number) for number in STOPPING} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert capsys.readouterr().err == "interrupted\n"
