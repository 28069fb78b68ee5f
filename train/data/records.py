"""Records: the rows of .jsonl, .jsonl.gz and .parquet files, and of folders that the library `datasets` saved.

`RecordFiles` names the files; `read` yields their records one after the other, as dictionaries with their place.
`chat_of` and `pair_of` return the content of a record in the formats "chat" and "pairs".
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from bytescope.memory.errors import install_remedy, one_line
from bytescope.memory.units import plural
from bytescope.train.user_errors import UserError

# Files that `datasets.save_to_disk` writes: for a single data set, and for a dictionary of splits.
STATE, SPLITS = "state.json", "dataset_dict.json"
HELD_OUT_SPLITS = ("validation", "test")  # the first split that exists is held out
LONGEST_LINE = 1 << 26  # maximum bytes of a record
ROWS = 256  # number of table rows that are converted to records at a time
# One of this many records is held out.
HELD_OUT = 20


@dataclass(frozen=True)
class RecordFile:
    """A file of records.

    Attributes:
      path: path of the file.
      name: path of the file within the source.
      held_out: True if the file's name marks its records as held out.
    """

    path: Path
    name: str
    held_out: bool = False


@dataclass(frozen=True)
class RecordFiles:
    """The record files of a data source.

    Attributes:
      title: name of the source, used in messages.
      files: the files, in the order in which they are read.
    """

    title: str
    files: tuple[RecordFile, ...]

    @property
    def paths(self) -> set[Path]:
        """Absolute paths, without symbolic links, of the record files."""
        return {file.path.resolve() for file in self.files}


@dataclass(frozen=True)
class Record:
    """A record, such as a line of a .jsonl file or a row of a table.

    Attributes:
      place: its file and line or row, for messages.
      values: name of a field -> its value.
      held_out: True if the record's file is marked as held out.
    """

    place: str
    values: dict[str, Any]
    held_out: bool


class Malformed(ValueError):
    """Raised for a record that cannot be used. The message is the reason."""


@dataclass
class Skipped:
    """Counts the malformed records that were left out.

    Attributes:
      allowed: maximum number of malformed records.
      count: number of malformed records so far.
      first: place and error of the first malformed record.
    """

    allowed: int
    count: int = 0
    first: str = ""

    def add(self, place: str, why: str | Malformed) -> None:
        """Counts a malformed record. Raises UserError if more records are malformed than allowed."""
        self.count += 1
        self.first = self.first or f"{place}: {why}"
        if self.count > self.allowed:
            already = f" ({self.count - 1:,} before it were left out)" if self.allowed else ""
            raise UserError(
                f"cannot use the record in {place}: {why}{already}; fix the record, set data.format and data.field to "
                "match the records, or allow N malformed records with data.skip_bad=N"
            )

    def refuse_nothing_left(self, title: str, left: int) -> None:
        """Raises UserError if no record of the source `title` remains because all were malformed. `left` is the number
        of remaining records.
        """
        if self.count and not left:
            raise UserError(
                f"{title}: all {self.count:,} records are malformed, the first in {self.first}; fix them, "
                "or set data.format and data.field to match the records"
            )


def is_record_file(path: Path) -> bool:
    """Returns True if the file's suffix is one of a record file, such as .jsonl or .parquet."""
    return path.name.lower().endswith(tuple(READERS))


def is_saved_dataset(folder: Path) -> bool:
    """Returns True if the folder was written by `save_to_disk` of the datasets package."""
    return (folder / SPLITS).is_file() or ((folder / STATE).is_file() and (folder / "dataset_info.json").is_file())


def find_saved(title: str, folder: Path) -> RecordFiles:
    """Returns the files of a folder that the datasets package saved.

    If the folder has several splits, "train" is trained on, and the first split of HELD_OUT_SPLITS is held out. Raises
    UserError if the folder is damaged, or has no split to train on.
    """
    if not (folder / SPLITS).is_file():
        return RecordFiles(title, _saved_files(folder, ""))
    splits = _listed(folder / SPLITS, lambda content: [str(name) for name in content["splits"]])
    if "train" not in splits:
        raise UserError(
            f"{folder} has the splits {', '.join(splits)}, but no split named train: give the folder of one split"
        )
    held_out = next((name for name in HELD_OUT_SPLITS if name in splits), None)
    files = _saved_files(folder / "train", "train/")
    if held_out:
        files += tuple(replace(f, held_out=True) for f in _saved_files(folder / held_out, f"{held_out}/"))
    return RecordFiles(title, files)


def _saved_files(folder: Path, prefix: str) -> tuple[RecordFile, ...]:
    def names_in(content: Any) -> list[str]:
        return [str(file["filename"]) for file in content["_data_files"]]

    names = _listed(folder / STATE, names_in, ".arrow")
    return tuple(RecordFile(folder / name, prefix + name) for name in names)


def _listed(path: Path, names_in: Callable[[Any], list[str]], suffix: str = "") -> list[str]:
    try:
        names = names_in(json.loads(path.read_bytes()))
        # Files must be inside the folder.
        if wrong := [name for name in names if Path(name).name != name or not name.endswith(suffix)]:
            raise ValueError(f"the file lists {wrong[0]!r}, which is not a valid file name")
        if not names:
            raise ValueError("the file lists no data files")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} cannot be used ({one_line(error)}): save the data set again") from None
    return names


def read(files: RecordFiles, fields: Sequence[str], skipped: Skipped) -> Iterator[Record]:
    """Yields the records of all files in order. If a file is a table, only the columns in `fields` are read.

    `skipped` counts the malformed records, which are left out.

    Raises UserError, which names the file and line, if a file cannot be read or if more records are malformed than
    allowed.
    """
    for file in files.files:
        suffix = next(suffix for suffix in READERS if file.path.name.lower().endswith(suffix))
        for place, values in READERS[suffix](file.path, fields, skipped):
            yield Record(place, values, file.held_out)


def _lines(path: Path, fields: Sequence[str], skipped: Skipped) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.name.lower().endswith(".gz") else open(path, "rb") as file:
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                place = f"{path} line {number:,}"
                if len(line) > LONGEST_LINE:
                    raise UserError(f"{place} is longer than {LONGEST_LINE >> 20} MiB: write one record per line")
                if not (line := line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip():
                    continue
                try:
                    values = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
                    if not isinstance(values, dict):
                        raise Malformed('the line is not a JSON object such as {"text": ...}')
                except (ValueError, RecursionError) as error:
                    why = error if isinstance(error, Malformed) else f"not a line of JSON ({one_line(error)})"
                    skipped.add(place, why)
                    continue
                yield place, values
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"{path} cannot be read after line {number:,} ({reason}): copy it again") from None


def _parquet(path: Path, fields: Sequence[str], skipped: Skipped) -> Iterator[tuple[str, dict[str, Any]]]:
    with _importing_pyarrow(path) as arrow, arrow.parquet.ParquetFile(path) as file:
        columns = _columns(path, file.schema_arrow.names, fields)
        yield from _rows(path, file.iter_batches(batch_size=ROWS, columns=columns))


def _arrow(path: Path, fields: Sequence[str], skipped: Skipped) -> Iterator[tuple[str, dict[str, Any]]]:
    with _importing_pyarrow(path) as arrow, arrow.memory_map(str(path)) as file:
        reader = arrow.ipc.open_stream(file)
        columns = _columns(path, reader.schema.names, fields)
        yield from _rows(path, _batches_of_columns(reader, columns))


def _batches_of_columns(reader: Any, columns: Sequence[str]) -> Iterator[Any]:
    for whole in reader:
        batch = whole.select(columns)
        for start in range(0, batch.num_rows, ROWS):
            yield batch.slice(start, ROWS)


def _columns(path: Path, names: Sequence[str], fields: Sequence[str]) -> list[str]:
    columns = [name for name in names if name in fields]
    if not columns:
        raise UserError(
            f"{path} has the columns {', '.join(names[:20])}, but none named {' or '.join(fields)}: set data.format "
            "and data.field to match the file"
        )
    return columns


def _rows(path: Path, batches: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    for batch in batches:
        for values in batch.to_pylist():
            number += 1
            yield f"{path} row {number:,}", {name: value for name, value in values.items() if value is not None}


@contextmanager
def _importing_pyarrow(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path} needs pyarrow, which is not installed: {install_remedy('data')}") from None
    try:
        yield pyarrow
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}): copy it again") from None


# Suffix of a file -> its reader.
READERS = {".jsonl": _lines, ".jsonl.gz": _lines, ".parquet": _parquet, ".arrow": _arrow}


def text_of(value: Any, what: str) -> str:
    """Returns `value` if it is a string that can be encoded as UTF-8. Otherwise raises Malformed; `what` names the
    value in the message.
    """
    if not isinstance(value, str):
        raise Malformed(
            f"{what} is {'missing' if value is None else f'{type(value).__name__}, not text'}: give a string"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Malformed(f"{what} has half of a surrogate pair, which is not valid UTF-8: remove it") from None
    return value


def mark(content: str) -> int:
    """Returns a 64-bit hash of the content. Copies have the same hash, so that all of them are held out or none."""
    return int.from_bytes(blake2b(content.encode(), digest_size=8).digest(), "big")


def choose_held_out(marks: np.ndarray, named: np.ndarray) -> np.ndarray:
    """Returns True for each record that is held out, bool [n].

    If the names of some files mark them as held out, the records of these files are held out. Otherwise about one of
    every `HELD_OUT` records is held out; the hash of a record decides.

    Args:
      marks: hash of each record's content, uint64 [n].
      named: True for records in files whose name marks them as held out, bool [n].
    """
    if named.any() and not named.all():
        return named
    chosen = marks % HELD_OUT == 0
    if len(marks) and (chosen.all() or not chosen.any()):  # with few records, the hash may choose none or all
        chosen = marks == marks.min()
    return chosen


def left_out(malformed: int, copies: int) -> list[str]:
    """Returns notes for the user about the number of malformed records and of copies that were left out."""
    notes = []
    if malformed:
        notes.append(f"{plural(malformed, 'malformed record')} left out (data.skip_bad)")
    if copies:
        notes.append(f"{plural(copies, 'copy', 'copies')} of held-out content left out")
    return notes


# ---- examples in records ---------------------------------------------------------------------------------------------

# Role in ShareGPT records ("conversations" with "from" and "value") -> role in messages.
ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant", "model": "assistant"}
# The prompts of Stanford Alpaca (Taori et al. 2023, github.com/tatsu-lab/stanford_alpaca), with an input and without.
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Chat:
    """A conversation.

    Attributes:
      messages: the messages, each a dict with role, content and any other keys that the message has in the record.
      tools: descriptions of tools for the chat template, or None.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None

    def key(self) -> str:
        """Returns the content as text. Two conversations have the same text if and only if they are copies."""
        return json.dumps([self.messages, self.tools], sort_keys=True)


@dataclass(frozen=True)
class Pair:
    """A training example of two texts: a prompt, and the completion that the model learns to answer with."""

    prompt: str
    completion: str

    def key(self) -> str:
        """Returns the content as text. Two pairs have the same text if and only if they are copies."""
        return json.dumps([self.prompt, self.completion])


def chat_of(values: dict[str, Any]) -> Chat:
    """Returns the conversation in a record with "messages" (role, content) or "conversations" (from, value).

    Raises Malformed if the record has no conversation.
    """
    messages = values.get("messages", values.get("conversations"))
    if not isinstance(messages, list) or not messages:
        raise Malformed('the record has no list of "messages" or "conversations": give one of them')
    tools = values.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise Malformed(f'"tools" of the record is {type(tools).__name__}, but must be a list')
    return Chat([_message(message, number) for number, message in enumerate(messages, 1)], tools or None)


def _message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Malformed(
            f"message {number} is {type(message).__name__}, but must be a JSON object with a role and a content"
        )
    fields = {key: value for key, value in message.items() if value is not None}  # tables have nulls in unused columns
    if "from" in fields and "role" not in fields:
        fields["role"], fields["content"] = fields.pop("from"), fields.pop("value", None)
        fields["role"] = (
            ROLES.get(fields["role"], fields["role"]) if isinstance(fields["role"], str) else fields["role"]
        )
    text_of(fields.get("role"), f"the role of message {number}")
    if "tool_calls" in fields and fields.get("content") is None:  # an answer that only calls tools
        return {**fields, "content": ""}
    text_of(fields.get("content"), f"the content of message {number}")
    return fields


def pair_of(values: dict[str, Any]) -> Pair:
    """Returns the prompt and completion in a record with "prompt" and "completion", or in Alpaca's format with
    "instruction", "input" and "output".

    Raises Malformed if the record has neither.
    """
    if "instruction" in values and "prompt" not in values:
        instruction = text_of(values["instruction"], '"instruction"')
        given = text_of(values.get("input", ""), '"input"')
        prompt = (ALPACA_INPUT if given else ALPACA).format(instruction=instruction, input=given)
        return Pair(prompt, text_of(values.get("output"), '"output"'))
    return Pair(text_of(values.get("prompt"), '"prompt"'), text_of(values.get("completion"), '"completion"'))


# data.format -> (fields of a record that are read, function from a record to its content).
CONTENTS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], Chat | Pair]]] = {
    "chat": (("messages", "conversations", "tools"), chat_of),
    "pairs": (("prompt", "completion", "instruction", "input", "output"), pair_of),
}
