"""A terminal that a test looks at: a pseudo-terminal, and what a person would see on it in the end."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading

# What rich writes to move about: the cursor up, a line erased, a column, colours and the cursor hidden or shown.
_MOVE = re.compile(r"\x1b\[(?:(\d*)A|(2)K|([\d;]*)m|\?25[lh])|\r|\n|[^\x1b\r\n]+")


def seen(written, width):
    """The lines that a terminal of `width` columns shows after `written`, without blanks at their ends."""
    lines, row, column = [""], 0, 0
    for found in _MOVE.finditer(written):
        text = found[0]
        if text == "\r":
            column = 0
        elif text == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif text.endswith("A"):
            row = max(row - int(found[1] or 1), 0)
        elif text.endswith("K"):
            lines[row] = ""
        elif not text.startswith("\x1b"):
            assert column + len(text) <= width, f"a line of {column + len(text)} columns: {text}"
            lines[row] = lines[row].ljust(column)[:column] + text + lines[row][column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in lines]


@contextlib.contextmanager
def terminal(monkeypatch, width):
    """stdout and stderr are one terminal of `width` columns inside; gives a list that holds what was written in the
    end, one text."""
    monkeypatch.setenv("TERM", "xterm")
    for name in ("COLUMNS", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor=1: os.terminal_size((width, 50)))
    pieces, out = [], []

    def read():
        with contextlib.suppress(OSError):  # the other end is closed
            while piece := os.read(master, 2**16):
                pieces.append(piece)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with open(os.dup(slave), "w", encoding="utf-8") as stdout, open(os.dup(slave), "w", encoding="utf-8") as stderr:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", stderr)
        os.close(slave)
        yield out
        stdout.flush()
        stderr.flush()
    monkeypatch.undo()
    reader.join(10)
    os.close(master)
    out.append(b"".join(pieces).decode())
