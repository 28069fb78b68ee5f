"""Errors that a user can fix, printed in one line as value, then remedy; and suggestions for misspelt names.

Every error about an unknown name (a config, a key, a policy, a target, a row of a table) ends with the text of
`remedy_for` or `did_you_mean`.
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

# Maximum number of names in a suggestion.
MAX_SUGGESTIONS = 3
# Minimum similarity of a suggested name (difflib's ratio, 0 to 1), and its maximum distance from the best similarity.
_MIN_RATIO, _MAX_DISTANCE = 0.6, 0.1
# A longer word is not compared, because it cannot be a misspelt name and difflib takes quadratic time.
_MAX_WORD = 80
# A word that may fill a screen, such as a long path or number: `in_one_line` leaves out its middle.
_LONG_WORD = re.compile(r"(\S{60})\S{240,}(\S{60})")
# Characters that end the line or move the cursor, and lone surrogates, which cannot be encoded.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class ReportError(ValueError):
    """Raised for a mistake that the user can fix, such as an invalid argument or a damaged file. The commands print
    its message without a traceback and exit with `exit_code`.
    """

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        # IPython shows this line instead of a traceback.
        return [f"{type(self).__name__}: {self}"]


class GuardError(ReportError, AssertionError):
    """Raised by `assert_fits` and other memory guards if a program needs more memory than is allowed. pytest shows it
    as a failed assertion.

    Attributes:
        report: the report of the program.
    """

    exit_code = 1
    report: Any = None


def nearest(word: str, names: Iterable[str]) -> list[str]:
    """Returns the valid `names` that are most similar to a misspelt `word`, the best first; at most three
    (`MAX_SUGGESTIONS`). Returns [] if no name is similar.

    Names with the same letters and digits as `word`, in any order, are the best suggestions: if there are any, only
    these are returned. Otherwise, names that begin with `word` come before names that are spelt similarly.
    """
    wanted, plain = _plain(word), {name: _plain(name) for name in names}
    if not wanted or len(wanted) > _MAX_WORD:
        return []
    same = [name for name, letters in plain.items() if letters == wanted]
    same = same or [name for name, letters in plain.items() if sorted(letters) == sorted(wanted)]
    begun = [name for name, letters in plain.items() if len(wanted) > 1 and letters.startswith(wanted)]
    if same or begun:
        return (same or begun)[:MAX_SUGGESTIONS]
    ratios = {name: difflib.SequenceMatcher(None, letters, wanted).ratio() for name, letters in plain.items()}
    min_ratio = max(_MIN_RATIO, max(ratios.values(), default=0.0) - _MAX_DISTANCE)
    near = [name for name, ratio in ratios.items() if ratio >= min_ratio]
    return sorted(near, key=lambda name: -ratios[name])[:MAX_SUGGESTIONS]


def _plain(name: str) -> str:
    return "".join(letter for letter in str(name).lower() if letter.isalnum())


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Returns a question such as "did you mean llama_1b or llama_8b?" for a misspelt `word`; "" if no name
    is similar.
    """
    return suggestion(nearest(word, names))


def suggestion(near: Sequence[str]) -> str:
    """Returns the question "did you mean a, b or c?" for a list of names; "" for an empty list."""
    if not near:
        return ""
    return f"did you mean {' or '.join(filter(None, (', '.join(near[:-1]), near[-1])))}?"


def remedy_for(word: str, names: Iterable[str]) -> str:
    """Returns the remedy for an unknown name: a question with the most similar names, then the list of all valid
    names.
    """
    names = list(names)
    near = did_you_mean(word, names)
    return f"{near} Else choose one of {', '.join(names)}" if near else f"choose one of {', '.join(names)}"


def install_remedy(extra: str) -> str:
    """Returns the remedy for a missing package of an extra of pyproject.toml, such as "cuda"."""
    # bytescope is not on PyPI, so pip needs the checkout.
    return f"run pip install -e '.[{extra}]' in the checkout of bytescope"


def type_phrase(value: Any) -> str:
    """Returns the type of a value with its article, for an error message: "an int", "a tuple". For None, returns
    "None".
    """
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def check_readable(path: str | os.PathLike[str], pipes: bool = False) -> None:
    """Raises OSError if the path is a device, a socket or a pipe. With `pipes`, a pipe that this process inherited is
    allowed, such as /dev/fd/63 of `<(command)` in a shell.

    Reading a device may never end, and opening a pipe in the file system without a writer blocks.
    """
    mode = os.stat(path).st_mode
    inherited = pipes and os.fspath(path).startswith(("/dev/fd/", "/proc/self/fd/"))
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (inherited and stat.S_ISFIFO(mode))):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise OSError(errno.EINVAL, f"It is {kind}, not a file", str(path))


def disk_remedy(error: OSError) -> str:
    """Returns the beginning of a remedy for a file that cannot be written, such as "make room, or " for a full disk.
    Returns "" if the user can only choose another path."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room, or "
    return "make that writable, or " if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else ""


def message_of(error: BaseException) -> str:
    """Returns str(error). If `__str__` raises an error itself, returns the placeholder that Python shows in
    tracebacks.
    """
    try:
        return str(error)
    except BaseException:  # a user's __str__ may raise anything
        return "<exception str() failed>"


def in_one_line(text: str) -> str:
    """Returns the text as one line that is safe to print on a terminal.

    Line ends become spaces, control characters become Python escapes, and a very long word is shortened in the middle.
    """
    text = _LONG_WORD.sub(lambda match: f"{match[1]}...{match[2]}", " ".join(text.splitlines()))
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


def one_line(error: BaseException | str, most: int = 120) -> str:
    """Returns an error's message as one line of at most `most` characters. A longer message is cut after a word and
    ends with "..."."""
    text = " ".join(str(error).split())
    if len(text) <= most:
        return text
    kept = text[: most - len("...")]
    words = kept.rpartition(" ")[0]
    return f"{words if len(words) > most // 2 else kept}..."  # inside a word only if the last word is very long


def exit_code_of(error: BaseException) -> int | None:
    """Prints `error: ...` to stderr if the error is one that a user can fix, and returns the exit code; otherwise
    prints nothing and returns None.

    A user can fix errors with an `exit_code`, and errors of the operating system about files.
    """
    if isinstance(error, OSError) and error.strerror:
        about = f"{error.filename}: " if error.filename is not None else ""
        code, text = ReportError.exit_code, f"{about}{error.strerror}"
    elif hasattr(error, "exit_code"):
        code, text = error.exit_code, message_of(error)
    else:
        return None
    print(f"error: {in_one_line(text)}", file=sys.stderr)
    return code
