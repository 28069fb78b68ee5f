"""Reads prompts from files of JSON lines, and appends each finished answer to a file of JSON lines."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from bytescope.memory.errors import check_readable, disk_remedy
from bytescope.train.generate.request import Request, Running
from bytescope.train.user_errors import UserError


@dataclasses.dataclass(frozen=True)
class PromptRow:
    """A row of a file of prompts.

    Attributes:
      number: index of the row, from 0.
      prompt: the text, messages or token ids, as in the file.
      request: token ids of the prompt and sampling settings.
      stops: strings that end the answer.
    """

    number: int
    prompt: Any
    request: Request
    stops: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Hash of the prompt, the sampling settings and the stop strings. It is stored with the answer, so that an
        answer to another request is noticed.
        """
        values = dataclasses.asdict(self.request) | {"stops": sorted(self.request.stops), "texts": self.stops}
        values["min_p"] = 0.0  # a setting that requests once had: answers of that time are still recognized
        return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def readable(path: Path, flag: str, expected: str) -> Iterator[None]:
    """A context manager for reading a text file. If the file cannot be read, it raises a UserError that names the
    command-line flag `flag` and the kind of file that is `expected`."""
    try:
        check_readable(path, pipes=True)
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"{flag}={path} cannot be read ({reason}): give {expected}") from None


def read_rows(path: Path, flag: str = "--prompts") -> list[dict[str, Any]]:
    """Returns the objects in a file of JSON lines. Error messages name the command-line flag `flag`.

    Raises:
      UserError: the file is empty, it cannot be read, or a line is not a JSON object.
    """
    rows = []
    with readable(path, flag, "a file of JSON lines"), path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise UserError(f'{path} line {number} is not a JSON object: write rows such as {{"text": "Once"}}')
            rows.append(row)
    if not rows:
        raise UserError(f'{flag}={path} is empty: give rows such as {{"text": "Once"}}')
    return rows


class Answers:
    """The file that answers are appended to, a context manager. Answers that an earlier, interrupted command wrote are
    kept.

    Args:
      path: path of the file.
      rows: all prompts, including those answered earlier.

    Attributes:
      done: indices of the prompts that were answered earlier.

    Raises:
      UserError: the file contains answers to other requests, or cannot be written.
    """

    def __init__(self, path: Path, rows: Sequence[PromptRow]):
        self.path, self.done = path, set[int]()
        wanted = {row.number: row.digest for row in rows}
        try:
            kept = self._read_earlier_answers(wanted)
            self._file: IO[bytes] = path.open("r+b" if path.exists() else "w+b")
            self._file.truncate(kept)  # drops a partial last line
            self._file.seek(kept)
        except OSError as error:
            raise UserError(f"--out={path} cannot be written ({error.strerror}): give another file") from None

    def _read_earlier_answers(self, wanted: dict[int, str]) -> int:
        """Reads the answers that an earlier, interrupted command wrote to the file, and records the indices of their
        prompts in `done`. Returns the size in bytes of the complete lines.

        `wanted`: index of each prompt -> hash of its request.
        """
        if not os.path.lexists(self.path):
            return 0
        check_readable(self.path)
        content = self.path.read_bytes()
        kept = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:kept].splitlines(), 1):
            where = f"--out={self.path} line {number}"
            try:
                row = json.loads(line)
                place, digest = row["row"], row["request"]
            except (ValueError, TypeError, KeyError, RecursionError):
                raise UserError(f"{where} is not an answer of bytescope generate: give another file") from None
            if wanted.get(place) != digest:
                raise UserError(
                    f"--out={self.path} line {number} is the answer to another prompt, or was generated with another "
                    "sampling setting or stop string: write the answers to another file, or use the prompts and flags "
                    "of the command that wrote this file"
                )
            self.done.add(place)
        return kept

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, row: PromptRow, answer: Running, text: str | None) -> None:
        """Appends an answer to the file and flushes it to the operating system.

        Args:
          row: the prompt.
          answer: the finished request, which has the token ids of the answer.
          text: text of the answer; None if there is no tokenizer.

        Raises:
          UserError: the file cannot be written.
        """
        line = {
            "row": row.number,
            "prompt": row.prompt,
            "tokens": list(answer.answer),
            "text": text,
            "ended": answer.ended,
            "request": row.digest,
        }
        try:
            self._file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # buffered bytes cannot be written either
                self._file.close()
            raise UserError(
                f"--out={self.path} cannot be written ({error.strerror}): {disk_remedy(error)}copy the file to "
                "another disk, and run the same command with it to answer the rest"
            ) from None
