"""What goes wrong for a user: one line with the value, then the remedy; and the names that were probably meant.

Every unknown name, of a config, a key, a policy, a target or a row of any table, is answered by
`remedy_for` or `did_you_mean`, so all say it alike.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import stat
import sys
from collections.abc import Iterable, Sequence
from typing import Any

# So many near names are shown at most.
MOST_NEAR = 3
# How alike two names have to be (difflib's ratio), and how much less than the nearest another may be.
_ALIKE, _AS_NEAR = 0.6, 0.1
# A longer word is no misspelt name; comparing it would take quadratic time.
_LONGEST_WORD = 80
# A path or a number may be longer than a screen: of such a word the middle is left out.
_LONG_WORD = re.compile(r"(\S{60})\S{240,}(\S{60})")
# What would end the line or move the cursor, and what has no encoding.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class ReportError(ValueError):
    """A mistake the user can mend; the command prints it without a traceback and exits with `exit_code`."""

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """What IPython shows of it in the place of a traceback: the message, and the line of the user's that led to it.

        A mistake that the user can mend is not mended inside this package.
        """
        return [f"{type(self).__name__}: {self}", *_called_from(self)]


class GuardError(ReportError, AssertionError):
    """A program needs more memory than its guard allows: pytest shows it as a failed assertion. `report`: of it."""

    exit_code = 1
    report: Any = None


def _called_from(error: BaseException) -> list[str]:
    """The last line of code before this package was called, where the traceback knows one."""
    import traceback

    own = os.path.dirname(os.path.abspath(__file__)) + os.sep
    frames = traceback.extract_tb(error.__traceback__)
    first = next((at for at, frame in enumerate(frames) if os.path.abspath(frame.filename).startswith(own)), 0)
    if not first or not frames[first - 1].line:
        return []
    caller = frames[first - 1]
    where = f"{os.path.basename(caller.filename)}:{caller.lineno}"
    # A cell of a notebook is no file; the last line that was run is seen right above.
    return [f"  {where if os.path.isfile(caller.filename) else f'line {caller.lineno}'}: {caller.line}"]


def nearest(word: str, names: Iterable[str]) -> list[str]:
    """The names that a misspelt `word` may stand for, the nearest first, at most `MOST_NEAR`; [] where none is near.

    The same letters and digits, in any order, come before names that begin so, and those before names spelt alike.
    """
    wanted, plain = _plain(word), {name: _plain(name) for name in names}
    if not wanted or len(wanted) > _LONGEST_WORD:
        return []
    same = [name for name, letters in plain.items() if letters == wanted]
    same = same or [name for name, letters in plain.items() if sorted(letters) == sorted(wanted)]
    begun = [name for name, letters in plain.items() if len(wanted) > 1 and letters.startswith(wanted)]
    if same or begun:
        return (same or begun)[:MOST_NEAR]
    ratios = {name: difflib.SequenceMatcher(None, letters, wanted).ratio() for name, letters in plain.items()}
    least = max(_ALIKE, max(ratios.values(), default=0.0) - _AS_NEAR)
    near = [name for name, ratio in ratios.items() if ratio >= least]
    return sorted(near, key=lambda name: -ratios[name])[:MOST_NEAR]


def _plain(name: str) -> str:
    """The letters and digits of a name."""
    return "".join(letter for letter in str(name).lower() if letter.isalnum())


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """`did you mean llama_1b or llama_8b?` for a misspelt `word`; "" where no name is near."""
    return one_of(nearest(word, names))


def one_of(near: Sequence[str]) -> str:
    """`did you mean a, b or c?`; "" for no name."""
    if not near:
        return ""
    return f"did you mean {' or '.join(filter(None, (', '.join(near[:-1]), near[-1])))}?"


def remedy_for(word: str, names: Iterable[str]) -> str:
    """The remedy for an unknown name: the names that were probably meant, and all that there are."""
    names = list(names)
    near = did_you_mean(word, names)
    return f"{near} Else choose one of {', '.join(names)}" if near else f"choose one of {', '.join(names)}"


def a_kind(value: Any) -> str:
    """What a value is that is not what was wanted: `an int`, `a tuple`, `None`."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def check_readable(path: str | os.PathLike[str], pipes: bool = False) -> None:
    """Raises OSError if the path is a device or a socket, or a pipe unless `pipes`. Reading a device may never end;
    reading a pipe without a writer blocks."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (pipes and stat.S_ISFIFO(mode))):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise OSError(errno.EINVAL, f"It is {kind}, not a file", str(path))


def disk_remedy(error: OSError) -> str:
    """Returns the beginning of the remedy if a file cannot be written, such as "make room, or "; "" if only another
    file helps."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room, or "
    return "make that writable, or " if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else ""


def message_of(error: BaseException) -> str:
    """Returns str(error); if that raises, the placeholder that a traceback shows."""
    try:
        return str(error)
    except BaseException:  # a user's __str__ may raise anything
        return "<exception str() failed>"


def in_one_line(text: str) -> str:
    """The text as one line that a terminal shows as it is: control characters as Python writes them, ends of lines as
    spaces, and of a word without end its first and last letters."""
    text = _LONG_WORD.sub(lambda found: f"{found[1]}...{found[2]}", " ".join(text.splitlines()))
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(error: BaseException | str, most: int = 120) -> str:
    """Returns an error's message as one line of at most `most` characters; a longer one is cut after a word, and ends
    with "..."."""
    text = " ".join(str(error).split())
    if len(text) <= most:
        return text
    kept = text[: most - len("...")]
    words = kept.rpartition(" ")[0]
    return f"{words if len(words) > most // 2 else kept}..."  # cuts inside a word only if it is that long


def exit_code_of(error: BaseException) -> int | None:
    """Prints `error: ...` to stderr and returns the exit code, for what a user can mend: errors with an `exit_code`,
    and files that the system refuses. None, and nothing printed, for any other error."""
    if isinstance(error, OSError) and error.strerror:
        about = f"{error.filename}: " if error.filename is not None else ""
        code, text = ReportError.exit_code, f"{about}{error.strerror}"
    elif hasattr(error, "exit_code"):
        code, text = error.exit_code, message_of(error)
    else:
        return None
    print(f"error: {in_one_line(text)}", file=sys.stderr)
    return code
