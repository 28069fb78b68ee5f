"""The files of `data.source`: text documents, their order, and which of them are held out.

`find` looks at the source and returns a `Text`, or the names of token shards (train/data/shards.py reads those).
Names decide what is held out, never chance, so it is the same in every run and on every machine.
"""

import codecs
import glob
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from bytescope.train.data.tokenizer import Tokenizer, tokenize
from bytescope.train.errors import UserError

INDEX = "index.json"
SHARD_SUFFIXES = (".bin", ".npy")

# One file in so many is held out, or of a single file its last part, one in so many.
HELD_OUT = 20
PIECE_BYTES = 1 << 20
# Enough to tell text from binary files, as git and grep do: by a zero byte near the start.
SNIFF_BYTES = 8192

# The default corpus leaves out tests, what was installed later, and what describes one machine.
STDLIB_SKIPPED_DIRS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip"}
STDLIB_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Document:
    """The bytes [start, stop) of a UTF-8 file; `name` is its path within the source, with forward slashes."""

    path: Path
    name: str
    start: int
    stop: int
    errors: str = "strict"

    def pieces(self) -> Iterator[str]:
        """Yields the text in pieces of about `PIECE_BYTES`, cut after line ends where there are any.

        Raises UserError if the file cannot be read or is not UTF-8.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(self.errors)
        position, undecoded, text = self.start, 0, ""
        try:
            with _reading(self.path) as file:
                file.seek(position)
                while position < self.stop:
                    chunk = file.read(min(PIECE_BYTES, self.stop - position))
                    if not chunk:
                        raise UserError(f"{self.path} ends at byte {position:,}, before {self.stop:,}: "
                                        "it changed while it was read; start again")
                    undecoded = len(decoder.getstate()[0])
                    text += decoder.decode(chunk, final=position + len(chunk) == self.stop)
                    position += len(chunk)
                    cut = text.rfind("\n") + 1 if position < self.stop else len(text)
                    # A very long line is cut anywhere.
                    cut = cut or (len(text) if len(text) >= PIECE_BYTES else 0)
                    if cut:
                        yield text[:cut]
                        text = text[cut:]
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.path} is not UTF-8 text (byte {position - undecoded + error.start:,}): convert it, "
                "or name the text files with a glob such as 'folder/**/*.txt'"
            ) from None


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): repair it or leave it out") from None


def texts(documents: Iterable[Document]) -> Iterator[str | None]:
    """Yields the pieces of every document in order, and None where a document ends."""
    for document in documents:
        yield from document.pieces()
        yield None


@dataclass(frozen=True)
class Text:
    """Text documents in the order in which they are read.

    title: the source in messages. skipped: number of binary files left out. version: of Python, for its standard
    library, else "".
    """

    title: str
    documents: tuple[Document, ...]
    skipped: int = 0
    version: str = ""

    recorded_tokenizer = None

    @property
    def paths(self) -> set[Path]:
        """The resolved paths of the files."""
        return {document.path.resolve() for document in self.documents}

    def split(self) -> tuple["Text", "Text"]:
        """Returns what trains and what is held out: by file, or the last part of a single file."""
        if len(self.documents) == 1:
            document = self.documents[0]
            cut = _cut(document)
            ends = replace(document, stop=cut), replace(document, start=cut)
            # A part without text must not count as a document: that would end with a separator.
            return tuple(replace(self, documents=(end,) if end.start < end.stop else ()) for end in ends)
        marks = {document.name: _mark(document.name) for document in self.documents}
        chosen = {name for name, mark in marks.items() if mark % HELD_OUT == 0}
        if not 0 < len(chosen) < len(marks):  # of few files the hash may choose none, or all
            chosen = {min(marks, key=marks.__getitem__)}
        return tuple(
            replace(self, documents=tuple(d for d in self.documents if (d.name in chosen) == held_out))
            for held_out in (False, True)
        )

    def training_part(self) -> "Text":
        """Returns what trains where the held-out data come from another source: everything."""
        return self

    held_out_part = training_part

    def arrays(self, tokenizer: Tokenizer) -> list[np.ndarray]:
        """Returns all tokens as one array of the smallest unsigned integer that holds them."""
        dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        return [np.concatenate([np.array([], dtype), *tokenize(texts(self.documents), tokenizer)])]

    def vocab_size(self, tokenizer: Tokenizer) -> int:
        """Returns the largest token id that can occur, plus 1."""
        return tokenizer.vocab_size

    def identity(self, arrays: list[np.ndarray]) -> bytes:
        """Returns a hash of names, sizes and contents; `arrays`: the tokens, as `arrays` has them."""
        digest = blake2b(repr([self.version, *((d.name, d.start, d.stop) for d in self.documents)]).encode())
        for array in arrays:
            digest.update(array)
        return digest.digest()

    def count(self) -> str:
        """Returns the number of documents in words, such as "2 documents"."""
        n = len(self.documents)
        return f"{n:,} document" if n == 1 else f"{n:,} documents"


@dataclass(frozen=True)
class ShardFiles:
    """Token shards by name; `folder` is where their index.json is, or None if they have none."""

    title: str
    folder: Path | None
    files: tuple[Path, ...]


def find(source: str, key: str = "data.source") -> Text | ShardFiles:
    """Returns the text or the shards of `source` ("stdlib", a file, a folder or a glob); nothing is tokenized yet.

    `key` names the setting in messages. Raises UserError if nothing is found, or both text and shards.
    """
    if source == "stdlib":
        return _stdlib(key)
    path = Path(os.path.expanduser(source))
    if source and os.path.isdir(path):  # unlike Path's own, these say no to a name that the system cannot have
        shards = tuple(sorted(p for p in path.iterdir() if p.suffix in SHARD_SUFFIXES))
        has_index = (path / INDEX).is_file()
        if shards or has_index:
            return ShardFiles(source, path if has_index else None, shards)
        return _text(source, key, path, _walk(path))
    if os.path.isfile(path):
        if path.suffix in SHARD_SUFFIXES:
            return ShardFiles(source, None, (path,))
        return _text(source, key, path.parent, [path], sniff=False)
    if not glob.has_magic(source):
        raise UserError(f"{key}={source!r} is not a file or folder: give one that exists, a glob, or 'stdlib'")
    files = sorted({Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name)})
    shards = tuple(p for p in files if p.suffix in SHARD_SUFFIXES)
    if not shards:
        return _text(source, key, _fixed_part(path), files)
    if len(shards) < len(files):
        other = next(p for p in files if p.suffix not in SHARD_SUFFIXES)
        raise UserError(f"{key}={source!r} matches token shards ({shards[0].name}) and other files "
                        f"({other.name}): name one kind, as in '*{shards[0].suffix}'")
    return ShardFiles(source, None, shards)


def _stdlib(key: str) -> Text:
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path for path in _walk(root, STDLIB_SKIPPED_DIRS)
        if path.suffix == ".py" and not path.name.startswith(STDLIB_SKIPPED_FILES)
        and not any(part.startswith("config-") for part in path.relative_to(root).parts[:-1])
    ]
    if not files:
        raise UserError(f"{key}='stdlib': this Python has no source files of its standard library in {root}: "
                        "give text of your own")
    version = platform.python_version()
    # A distribution may have put any file there, and the default must not fail.
    return _text(f"standard library of Python {version}", key, root, files,
                 sniff=False, errors="replace", version=version)


def _text(title: str, key: str, base: Path, files: Iterable[Path], *, sniff: bool = True,
          errors: str = "strict", version: str = "") -> Text:
    documents, skipped = [], 0
    for path in files:
        size = path.stat().st_size
        if sniff and size and _is_binary(path):
            skipped += 1
        elif size:  # an empty file would only add a second separator
            documents.append(Document(path, path.relative_to(base).as_posix(), 0, size, errors))
    if not documents:
        found = f"no text, only binary files ({skipped:,})" if skipped else "no text"
        raise UserError(f"{key}={title!r} holds {found}: give UTF-8 text files, or .bin or .npy shards")
    return Text(title, tuple(sorted(documents, key=lambda d: d.name)), skipped, version)


def _walk(root: Path, skipped: Iterable[str] = ()) -> Iterator[Path]:
    """Yields the files below `root`, without hidden ones and compiled Python."""
    for folder, folders, names in os.walk(root):
        folders[:] = [n for n in folders if n not in skipped and n != "__pycache__" and not n.startswith(".")]
        yield from (p for n in names if not n.startswith(".") and (p := Path(folder, n)).is_file())


def _fixed_part(pattern: Path) -> Path:
    """Returns the folder in front of the first wildcard: names are taken from there."""
    folders = pattern.parts[:-1]
    return Path(*takewhile(lambda part: not glob.has_magic(part), folders))


def _is_binary(path: Path) -> bool:
    with _reading(path) as file:
        return b"\0" in file.read(SNIFF_BYTES)


def _mark(name: str) -> int:
    """Returns a number that depends on the name alone, so that adding a file changes nothing for the others."""
    # Names need not be UTF-8.
    return int.from_bytes(blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest(), "big")


def _cut(document: Document) -> int:
    """Returns the byte at which the held-out end of a single file starts, after a line end if one is near."""
    nominal = document.stop - max((document.stop - document.start) // HELD_OUT, 1)
    before = min(nominal - document.start, 3)  # a character of UTF-8 has at most three more bytes
    with _reading(document.path) as file:
        file.seek(nominal - before)
        around = file.read(before + min(PIECE_BYTES, document.stop - nominal))
    line_end = around.find(b"\n", before) + 1 - before
    if 0 < line_end <= (len(around) - before) // 2:
        return nominal + line_end
    while before and around[before] & 0xC0 == 0x80:  # never inside a character: step back over 10xxxxxx
        nominal, before = nominal - 1, before - 1
    return nominal
