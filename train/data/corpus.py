"""Finds the files of `data.source`: text, records or token shards.

`find` returns a `TextDocuments`, or the names of files of records (read by train/data/records.py) or of token shards
(read by train/data/shards.py).
"""

import glob
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from bytescope.train.data.documents import Document, TextDocuments, reading
from bytescope.train.data.records import (
    RecordFile,
    RecordFiles,
    find_saved,
    is_record_file,
    is_saved_dataset,
)
from bytescope.train.user_errors import UserError

INDEX = "index.json"
SHARD_SUFFIXES = (".bin", ".npy")

# Matches whole words in file names, so that `latest.bin` is not taken for a test set.
HELD_OUT_NAME = re.compile(r"(?<![a-z])(val|valid|validation|eval|evaluation|held_?out|test)(?![a-z])")
# Suffixes of files that are published next to records but contain no records.
BESIDE_RECORDS = (".md", ".json", ".lock", ".yaml")
# Bytes at the start of a file in which a zero byte marks it as binary, as in git and grep.
SNIFF_BYTES = 8192

# The default corpus leaves out tests, installed packages, and files that differ between machines.
STDLIB_SKIPPED_DIRS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip"}
STDLIB_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class ShardFiles:
    """The files of token shards.

    Attributes:
      title: name of the source, used in messages.
      folder: the folder with the index.json of the shards, or None if there is no index.
      files: paths of the shards, sorted by name.
    """

    title: str
    folder: Path | None
    files: tuple[Path, ...]


def find(source: str, key: str = "data.source") -> TextDocuments | RecordFiles | ShardFiles:
    """Finds the data that `source` names: "stdlib", a file, a folder or a glob. Nothing is tokenized yet.

    `key` is the config key of the source, used in error messages. Raises UserError if nothing is found, or if the
    source mixes text, records and shards.
    """
    if source == "stdlib":
        return _stdlib(key)
    path = Path(os.path.expanduser(source))
    if source and os.path.isdir(path):  # unlike Path.is_dir, os.path.isdir returns False for an invalid name
        shards = tuple(sorted(p for p in path.iterdir() if p.suffix in SHARD_SUFFIXES))
        has_index = (path / INDEX).is_file()
        if shards or has_index:
            return ShardFiles(source, path if has_index else None, shards)
        if is_saved_dataset(path):
            return find_saved(source, path)
        return _text(source, key, path, _visible_files(path))
    if os.path.isfile(path):
        if path.suffix in SHARD_SUFFIXES:
            return ShardFiles(source, None, (path,))
        if is_record_file(path):
            return RecordFiles(source, (RecordFile(path, path.name),))
        return _text(source, key, path.parent, [path], sniff=False)
    if not glob.has_magic(source):
        raise UserError(f"{key}={source!r} is not a file or folder: give one that exists, a glob, or 'stdlib'")
    files = sorted({Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name)})
    shards = tuple(p for p in files if p.suffix in SHARD_SUFFIXES)
    if not shards:
        return _text(source, key, _folder_before_wildcards(path), files)
    if len(shards) < len(files):
        other = next(p for p in files if p.suffix not in SHARD_SUFFIXES)
        raise UserError(
            f"{key}={source!r} matches token shards ({shards[0].name}) and other files "
            f"({other.name}): give a glob for one kind, such as '*{shards[0].suffix}'"
        )
    return ShardFiles(source, None, shards)


def _stdlib(key: str) -> TextDocuments | RecordFiles:
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in _visible_files(root, STDLIB_SKIPPED_DIRS)
        if path.suffix == ".py"
        and not path.name.startswith(STDLIB_SKIPPED_FILES)
        and not any(part.startswith("config-") for part in path.relative_to(root).parts[:-1])
    ]
    if not files:
        raise UserError(
            f"{key}='stdlib' cannot be used, since this Python has no source files of its standard library in {root}: "
            "give your own text"
        )
    version = platform.python_version()
    # errors="replace", since a distribution may have added files that are not UTF-8, and the default must not fail.
    return _text(
        f"standard library of Python {version}", key, root, files, sniff=False, errors="replace", version=version
    )


def _text(
    title: str,
    key: str,
    base: Path,
    files: Iterable[Path],
    *,
    sniff: bool = True,
    errors: str = "strict",
    version: str = "",
) -> TextDocuments | RecordFiles:
    documents, skipped, files = [], 0, list(files)
    if records := [path for path in files if sniff and is_record_file(path)]:
        return _records(title, key, base, records, [path for path in files if path not in set(records)])
    for path in files:
        size = path.stat().st_size
        if not size:  # an empty file would only add a second separator
            continue
        is_binary = False
        if sniff:
            with reading(path) as file:
                is_binary = b"\0" in file.read(SNIFF_BYTES)
        if is_binary:
            skipped += 1
        else:
            documents.append(Document(path, path.relative_to(base).as_posix(), 0, size, errors))
    if not documents:
        only = f", only {skipped:,} binary files" if skipped else ""
        raise UserError(f"{key}={title!r} has no text{only}: give UTF-8 text files, or .bin or .npy shards")
    return TextDocuments(title, tuple(sorted(documents, key=lambda d: d.name)), skipped, version)


def _records(title: str, key: str, base: Path, records: list[Path], others: list[Path]) -> RecordFiles:
    if others := [path for path in others if path.suffix.lower() not in BESIDE_RECORDS]:
        raise UserError(
            f"{key}={title!r} contains records ({min(records).name}) and other files ({min(others).name}): "
            "give a glob for one kind, such as 'folder/**/*.jsonl'"
        )
    names = {path: path.relative_to(base).as_posix() for path in records}
    return RecordFiles(
        title,
        tuple(
            RecordFile(path, name, HELD_OUT_NAME.search(name.lower()) is not None)
            for path, name in sorted(names.items(), key=lambda item: item[1])
        ),
    )


def _visible_files(root: Path, skipped: Iterable[str] = ()) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [n for n in folders if n not in skipped and n != "__pycache__" and not n.startswith(".")]
        for name in names:
            if not name.startswith(".") and Path(folder, name).is_file():
                yield Path(folder, name)


def _folder_before_wildcards(pattern: Path) -> Path:
    # Document names are relative to this folder.
    folders = pattern.parts[:-1]
    return Path(*takewhile(lambda part: not glob.has_magic(part), folders))
