"""Rows of prompts in, rows of answers out: files of JSON lines, to which each answer is added as it is finished."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from bytescope.memory.errors import check_readable, disk_remedy
from bytescope.train.generate.request import Request, Running
from bytescope.train.user_errors import UserError


@dataclasses.dataclass(frozen=True)
class PromptRow:
    """One row of a file of prompts.

    number: counted from 0. prompt: the text, messages or ids as the file has them. stops: strings that end the answer.
    """

    number: int
    prompt: Any
    request: Request
    stops: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Identifies the request by its prompt, sampling and stops."""
        values = dataclasses.asdict(self.request) | {"stops": sorted(self.request.stops), "texts": self.stops}
        return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


def read_rows(path: Path, flag: str = "--prompts") -> list[dict[str, Any]]:
    """Returns the objects of a file of JSON lines. flag: names the file in messages.

    Raises:
      UserError: a line is none; there is no line; the file cannot be read.
    """
    found = []
    try:
        check_readable(path, pipes=True)
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                if not isinstance(row, dict):
                    raise UserError(f'{path} line {number} is no JSON object: write rows such as {{"text": "Once"}}')
                found.append(row)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"{flag}={path} cannot be read ({reason}): give a file of JSON lines") from None
    if not found:
        raise UserError(f'{flag}={path} has no line: give rows such as {{"text": "Once"}}')
    return found


class Answers:
    """The file of answers, as a context. Answers of an earlier, interrupted run are kept and not generated again.

    Raises:
      UserError: the file answers other requests, or cannot be written.
    """

    def __init__(self, path: Path, rows: Sequence[PromptRow]):
        self.path, self.done = path, set[int]()
        wanted = {row.number: row.digest for row in rows}
        try:
            kept = self._read(wanted)
            self._file: IO[bytes] = path.open("r+b" if path.exists() else "w+b")
            self._file.truncate(kept)  # without the line that was being written
            self._file.seek(kept)
        except OSError as error:
            raise UserError(f"--out={path} cannot be written ({error.strerror}): give another file") from None

    def _read(self, wanted: dict[int, str]) -> int:
        """Finds what is answered; the bytes of whole lines."""
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
                raise UserError(f"{where} is no answer of generate: give another file") from None
            if wanted.get(place) != digest:
                raise UserError(
                    f"{where} answers another request (another prompt, sampling or stop): give another "
                    "file, or the flags that it was written with"
                )
            self.done.add(place)
        return kept

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, row: PromptRow, answer: Running, text: str | None) -> None:
        """Appends one answer and flushes it to the operating system.

        Raises:
          UserError: the answer cannot be written.
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
                f"--out={self.path} cannot be written ({error.strerror}): {disk_remedy(error)}copy it to "
                "another place; the same command answers the rest"
            ) from None
