"""bytescope explain: exit codes, standard input and output, and the written files."""

import contextlib
import io
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from bytescope.memory.cli import main
from bytescope.memory.commands import recorded_job
from support import memory_messages as written
from support.json_results import read_result, result_of

pytestmark = pytest.mark.quick


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "job.log"
    path.write_text(written.training_log(written.gpu_buffers(random.Random(1)).text))
    return path


def test_a_log_is_explained(log, tmp_path, capsys):
    files = [tmp_path / "out.json", tmp_path / "out.html"]
    assert main(["explain", str(log), f"--json={files[0]}", f"--html={files[1]}"]) == 0
    printed = capsys.readouterr().out
    sample = written.gpu_buffers(random.Random(1))
    assert "out of memory, line 101 of the log" in printed and "what to do, the cheapest first" in printed
    found = read_result(files[0])
    assert found["requested_bytes"] == sample.requested and found["kind"] == "gpu_buffers"
    assert found["culprits"][0]["shape"] == sample.shape and found["remedies"][0]["words"]
    assert sample.shape in files[1].read_text()


def test_standard_input_and_output(log, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log.read_bytes())))
    assert main(["explain", "-", "--json=-"]) == 0
    assert result_of(capsys.readouterr().out)["recognized"] is True


def test_nothing_recognized_is_exit_code_1(tmp_path, capsys):
    (tmp_path / "log").write_text("step 1 loss 2.0\n")
    assert main(["explain", str(tmp_path / "log")]) == 1
    assert "No message about memory was recognized." in capsys.readouterr().out


@pytest.mark.parametrize("name", ["missing.log", "."])
def test_a_log_that_cannot_be_read(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["explain", name]) == 2
    error = capsys.readouterr().err
    assert f"cannot read {name}" in error and error.count("\n") == 1


# ---- a command after -- ---------------------------------------------------------------------------------------

FAILS = (
    "import sys; print('step 1'); print('RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5000000000 bytes.'"
    ", file=sys.stderr); sys.exit(7)"
)


def test_a_command_is_run_and_its_output_explained(capfd):
    assert main(["explain", "--", sys.executable, "-c", FAILS]) == 7
    out, err = capfd.readouterr()
    assert out == "step 1\n"
    assert err.startswith("RESOURCE_EXHAUSTED: ") and "could not allocate 4.66 GiB" in err


def test_a_command_without_failure(capfd):
    assert main(["explain", "--", sys.executable, "-c", "print(5)"]) == 0
    assert capfd.readouterr() == ("5\n", "")


def test_a_process_that_the_command_leaves_behind_is_not_waited_for(capfd):
    start = time.monotonic()
    assert main(["explain", "--", "sh", "-c", "sleep 20 & echo left"]) == 0
    assert time.monotonic() - start < 15 and capfd.readouterr().out == "left\n"


def test_commands_that_cannot_be_run(capsys):
    assert main(["explain", "--"]) == 2 and "no command is given after --" in capsys.readouterr().err
    assert main(["explain", "job.log", "--", "true"]) == 2 and "cannot be combined" in capsys.readouterr().err
    assert main(["explain", "--", "/no/such/file"]) == 2 and "cannot run /no/such/file" in capsys.readouterr().err


def test_signals_reach_the_command_and_its_end_by_a_signal_is_returned(capfd):
    sleeps = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    assert main(["explain", "--", sys.executable, "-c", sleeps]) == 128 + signal.SIGTERM
    handles = (
        "import os, signal, time; signal.signal(signal.SIGUSR1, lambda *_: os._exit(9)); "
        "os.kill(os.getppid(), signal.SIGUSR1); time.sleep(60)"
    )
    assert main(["explain", "--", sys.executable, "-c", handles]) == 9


def test_only_the_end_of_a_long_output_is_kept(monkeypatch):
    monkeypatch.setattr(recorded_job, "MAX_KEPT", 10)
    kept = recorded_job._Kept()
    for part in (b"abcdef", b"ghijkl", b"mnopqr"):
        kept.add(part)
    assert kept.all() == b"ghijklmnopqr"


def test_on_a_terminal_the_command_has_a_terminal_of_its_own():
    code = "import sys; print([sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty()]); print(input()); " + FAILS
    ours, theirs = os.openpty()
    words = [sys.executable, "-m", "bytescope.memory", "explain", "--", sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as job:
        os.close(theirs)
        os.write(ours, b"typed\n")
        shown = b""
        with contextlib.suppress(OSError):
            while select.select([ours], [], [], 60)[0] and (part := os.read(ours, 4096)):
                shown += part
    os.close(ours)
    text = shown.decode()
    assert job.returncode == 7, text
    assert "[True, True, True]" in text and text.count("typed") >= 2 and "could not allocate 4.66 GiB" in text


class Shell:
    """An interactive bash on a terminal of its own, with job control."""

    def __init__(self):
        self._ours, theirs = os.openpty()
        # The process takes the terminal itself: a function before exec would need os.fork, which jax's threads forbid.
        code = (
            "import fcntl, os, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
            "os.execvp('bash', ['bash', '--norc', '--noprofile', '-i'])"
        )
        self.job = subprocess.Popen(
            [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self.shown = ""

    def type(self, keys):
        os.write(self._ours, keys.encode())

    def wait(self, words):
        """Reads until the terminal shows the words, and forgets what it showed up to them."""
        end = time.monotonic() + 60
        while words not in self.shown:
            assert select.select([self._ours], [], [], max(end - time.monotonic(), 0))[0], self.shown
            self.shown += os.read(self._ours, 4096).decode()
        before, _, self.shown = self.shown.partition(words)
        return before

    def wait_for_raw_mode(self):
        """Waits until the command takes single keys. Before, a Ctrl-Z would go to the command instead of its job."""
        end = time.monotonic() + 60
        while termios.tcgetattr(self._ours)[3] & termios.ICANON:
            assert time.monotonic() < end, self.shown
            time.sleep(0.01)

    def close(self):
        self.job.kill()
        self.job.wait()
        os.close(self._ours)


@pytest.fixture
def shell():
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    shell = Shell()
    yield shell
    shell.close()


def test_ctrl_z_stops_the_command_and_gives_the_prompt_back(shell, tmp_path):
    (tmp_path / "job.py").write_text(
        "import sys, os\nprint('pid', os.getpid(), 'is')\nprint('got', input().upper())\n"
        "sys.exit('RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5000000000 bytes.')\n"
    )
    shell.type(f"{sys.executable} -m bytescope.memory explain -- {sys.executable} {tmp_path}/job.py\n")
    shell.wait("pid ")
    pid = int(shell.wait(" is"))
    for _ in range(2):
        shell.wait_for_raw_mode()
        shell.type("\x1a")
        shell.wait("Stopped")
        shell.type("echo mark$((40 + 2)); stty -a\n")
        shell.wait("mark42")
        assert " -icanon" not in shell.wait("noflsh"), "the terminal is as before the command"
        end = time.monotonic() + 60  # a busy machine may deliver the signal late
        while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
            assert time.monotonic() < end, "the command is stopped, too"
            time.sleep(0.05)
        shell.type("fg\n")
        shell.wait("explain -- ")
    shell.type("typed\n")
    shell.wait("got TYPED")
    shell.wait("could not allocate 4.66 GiB")
    shell.type("echo code$((0 + $?))\n")
    shell.wait("code1")
