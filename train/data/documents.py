"""Text documents from files (`TextDocuments`) or from a field of records (`RecordTexts`), and which of them are held
out.

File names or record contents decide what is held out, never chance, so it is the same in every run and on every
machine. Copies of held-out documents are not trained on.
"""

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np

from bytescope.memory.units import plural
from bytescope.train.data.records import (
    HELD_OUT,
    Malformed,
    RecordFiles,
    Skipped,
    choose_held_out,
    mark,
    read,
    text_of,
)
from bytescope.train.data.tokenizer import Tokenizer, tokenize
from bytescope.train.user_errors import UserError

PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """A document: a byte range of a UTF-8 file.

    Attributes:
      path: path of the file.
      name: path of the file within the source, with forward slashes.
      start: index in the file of the document's first byte.
      stop: index in the file of the byte after the document.
      errors: how to handle bytes that are not UTF-8, as in `bytes.decode`.
    """

    path: Path
    name: str
    start: int
    stop: int
    errors: str = "strict"

    def pieces(self) -> Iterator[str]:
        """Yields the text in pieces of about `PIECE_BYTES` bytes, which end at line ends if possible.

        Raises UserError if the file cannot be read or is not UTF-8.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(self.errors)
        position, undecoded, text = self.start, 0, ""
        try:
            with reading(self.path) as file:
                file.seek(position)
                while position < self.stop:
                    chunk = file.read(min(PIECE_BYTES, self.stop - position))
                    if not chunk:
                        raise UserError(
                            f"{self.path} ends at byte {position:,} instead of {self.stop:,}: "
                            "it changed while it was read; run the command again"
                        )
                    undecoded = len(decoder.getstate()[0])
                    text += decoder.decode(chunk, final=position + len(chunk) == self.stop)
                    position += len(chunk)
                    cut = text.rfind("\n") + 1 if position < self.stop else len(text)
                    # A very long line is divided anywhere.
                    cut = cut or (len(text) if len(text) >= PIECE_BYTES else 0)
                    if cut:
                        yield text[:cut]
                        text = text[cut:]
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.path} is not UTF-8 text (byte {position - undecoded + error.start:,}): convert it, "
                "or give a glob for the text files, such as 'folder/**/*.txt'"
            ) from None


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading in binary mode. Raises UserError if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): repair it or leave it out") from None


class TextSource:
    """The documents of a data source. The subclass says where they are stored."""

    def stream(self) -> Iterator[str | None]:
        """Yields the text of every document in pieces, in order, and None at the end of each document."""
        raise NotImplementedError

    def arrays(self, tokenizer: Tokenizer) -> list[np.ndarray]:
        """Returns a list of one array with all tokens, in the smallest unsigned integer dtype that can hold the token
        ids.
        """
        dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        return [np.concatenate([np.array([], dtype), *tokenize(self.stream(), tokenizer)])]

    def vocab_size(self, tokenizer: Tokenizer) -> int:
        """Returns 1 plus the largest token id that can occur."""
        return tokenizer.vocab_size


@dataclass(frozen=True)
class TextDocuments(TextSource):
    """Text documents of a data source.

    Attributes:
      title: name of the source, used in messages.
      documents: the documents, in the order in which they are read.
      skipped: number of binary files that were left out.
      version: Python version if the source is Python's standard library, else "".
      copies: number of documents that were left out because they are copies of held-out documents.
    """

    title: str
    documents: tuple[Document, ...]
    skipped: int = 0
    version: str = ""
    copies: int = 0

    recorded_tokenizer = None
    malformed = 0

    @property
    def paths(self) -> set[Path]:
        """Absolute paths, without symbolic links, of the files that contain the documents."""
        return {document.path.resolve() for document in self.documents}

    @property
    def text_bytes(self) -> int:
        """Bytes of text of all documents, as they are stored in their files."""
        return sum(document.stop - document.start for document in self.documents)

    def stream(self) -> Iterator[str | None]:
        """Yields the text of every document in pieces, in order, and None at the end of each document."""
        for document in self.documents:
            yield from document.pieces()
            yield None

    def split(self) -> tuple["TextDocuments", "TextDocuments"]:
        """Returns (training part, held-out part). Of several files, whole files are held out, chosen by a hash of their
        names, and copies of held-out documents are removed from the training part. Of one file, the end is held out.

        Raises UserError if a file cannot be read.
        """
        if len(self.documents) == 1:
            document = self.documents[0]
            cut = _held_out_start(document)
            # A part without text must not count as a document, which would add a separator.
            first = (replace(document, stop=cut),) if document.start < cut else ()
            rest = (replace(document, start=cut),) if cut < document.stop else ()
            return replace(self, documents=first), replace(self, documents=rest)
        marks = {}
        for document in self.documents:  # by name only, so that adding a file does not change the other files
            name = document.name.encode(errors="surrogateescape")  # names need not be UTF-8
            marks[document.name] = int.from_bytes(blake2b(name, digest_size=8).digest(), "big")
        chosen = {name for name, mark in marks.items() if mark % HELD_OUT == 0}
        if not 0 < len(chosen) < len(marks):  # with few files, the hash may choose none or all
            chosen = {min(marks, key=marks.__getitem__)}
        held_out = replace(self, documents=tuple(d for d in self.documents if d.name in chosen))
        train = replace(self, documents=tuple(d for d in self.documents if d.name not in chosen))
        return train.without(held_out), held_out

    def without(self, other: "TextDocuments") -> "TextDocuments":
        """Returns these documents except copies of documents of `other`."""
        sizes = {d.stop - d.start for d in self.documents} & {d.stop - d.start for d in other.documents}
        contents = {_content(d) for d in other.documents if d.stop - d.start in sizes}
        kept = tuple(d for d in self.documents if d.stop - d.start not in sizes or _content(d) not in contents)
        return replace(self, documents=kept, copies=len(self.documents) - len(kept))

    def training_part(self) -> "TextDocuments":
        """Returns the documents to train on when the held-out data come from another source: all documents."""
        return self

    held_out_part = training_part

    def identity(self, arrays: list[np.ndarray]) -> bytes:
        """Returns a hash of the file names, sizes and contents. `arrays`: all tokens of the documents, as the method
        `arrays` returns them.
        """
        digest = blake2b(repr([self.version, *((d.name, d.start, d.stop) for d in self.documents)]).encode())
        for array in arrays:
            digest.update(np.ascontiguousarray(array).data)
        return digest.digest()

    def count(self) -> str:
        """Returns the number of documents as text, such as "2 documents"."""
        return plural(len(self.documents), "document")


def _content(document: Document) -> bytes:
    digest = blake2b(digest_size=16)
    with reading(document.path) as file:
        while chunk := file.read(PIECE_BYTES):
            digest.update(chunk)
    return digest.digest()


def _held_out_start(document: Document) -> int:
    """Returns the byte offset at which the held-out end of a single file starts. If a line ends nearby, the offset is
    after the line end.
    """
    nominal = document.stop - max((document.stop - document.start) // HELD_OUT, 1)
    before = min(nominal - document.start, 3)  # a UTF-8 character has at most four bytes
    with reading(document.path) as file:
        file.seek(nominal - before)
        around = file.read(before + min(PIECE_BYTES, document.stop - nominal))
    line_end = around.find(b"\n", before) + 1 - before
    if 0 < line_end <= (len(around) - before) // 2:
        return nominal + line_end
    while before and around[before] & 0xC0 == 0x80:  # never inside a character: go back over the bytes 10xxxxxx
        nominal, before = nominal - 1, before - 1
    return nominal


# ---- documents in records ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Marks:
    """The result of reading all records once.

    Attributes:
      marks: hash of each record's content, uint64 [n].
      named: True for records in files whose name marks them as held out, bool [n].
      malformed: number of malformed records, which are left out.
    """

    marks: np.ndarray
    named: np.ndarray
    malformed: int


@dataclass(frozen=True)
class RecordTexts(TextSource):
    """The documents in one field of records. Each reading opens the files again.

    Attributes:
      files: the record files of the source.
      field: the field of a record that contains the document, such as "text".
      skip_bad: maximum number of malformed records to leave out.
      chosen: True for each well-formed record that belongs to this part of the data, bool [n]. It is None if all
        records belong to this part.
      scanned: the result of an earlier reading of all records, to avoid reading them again.
      copies: number of documents that were left out because they are copies of held-out documents.
    """

    files: RecordFiles
    field: str
    skip_bad: int
    chosen: np.ndarray | None = None
    scanned: Marks | None = None
    copies: int = 0

    recorded_tokenizer = None
    skipped = 0  # number of binary files
    text_bytes = None  # not known before the records are read

    @property
    def title(self) -> str:
        """Name of the data source that the records are from, used in messages."""
        return self.files.title

    @property
    def paths(self) -> set[Path]:
        """Absolute paths, without symbolic links, of the record files."""
        return self.files.paths

    @property
    def marks(self) -> np.ndarray:
        """Hash of the content of each document in this part, uint64 [n]."""
        return self._scan.marks if self.chosen is None else self._scan.marks[self.chosen]

    @property
    def malformed(self) -> int:
        """Number of records of the source that are left out because they are malformed."""
        return self._scan.malformed

    @cached_property
    def _scan(self) -> Marks:
        if self.scanned is not None:
            return self.scanned
        skipped = Skipped(self.skip_bad)
        rows = [(mark(text), held_out) for text, held_out in self._documents(skipped)]
        skipped.refuse_nothing_left(self.files.title, len(rows))
        return Marks(
            np.array([row[0] for row in rows], np.uint64), np.array([row[1] for row in rows], bool), skipped.count
        )

    def _documents(self, skipped: Skipped) -> Iterator[tuple[str, bool]]:
        for record in read(self.files, (self.field,), skipped):
            try:
                yield text_of(record.values.get(self.field), f"the field {self.field!r} (data.field)"), record.held_out
            except Malformed as error:
                skipped.add(record.place, error)

    def _part(self, chosen: np.ndarray) -> "RecordTexts":
        return replace(self, chosen=chosen, scanned=self._scan)

    def split(self) -> tuple["RecordTexts", "RecordTexts"]:
        """Returns (training part, held-out part). Copies of held-out documents are left out of the training part."""
        chosen = choose_held_out(self._scan.marks, self._scan.named)
        held_out = self._part(chosen)
        return self._part(~chosen).without(held_out), held_out

    def training_part(self) -> "RecordTexts":
        """Returns the documents to train on when the held-out data come from another source. These are the records in
        files whose name does not mark them as held out.
        """
        named = self._scan.named
        return self._part(~named if not named.all() else np.ones_like(named))

    def held_out_part(self) -> "RecordTexts":
        """Returns the records in files whose name marks them as held out. If there are no such files, returns all
        records.
        """
        named = self._scan.named
        return self._part(named if named.any() else ~named)

    def without(self, other: "RecordTexts") -> "RecordTexts":
        """Returns this part except copies of documents of `other`."""
        chosen = np.ones_like(self._scan.named) if self.chosen is None else self.chosen
        kept = chosen & ~np.isin(self._scan.marks, other.marks)
        return replace(self, chosen=kept, copies=self.copies + int(chosen.sum() - kept.sum()))

    def stream(self) -> Iterator[str | None]:
        """Yields every document of this part, and None at the end of each."""
        skipped = Skipped(self.skip_bad)
        for number, (text, _) in enumerate(self._documents(skipped)):
            if (self.chosen is None or self.chosen[number]) and text:
                yield text
                yield None

    def identity(self, arrays: list[np.ndarray]) -> bytes:
        """Returns a hash of the contents. `arrays`: all tokens of the documents, the result of the method `arrays`."""
        digest = blake2b(b"records")
        for array in (self.marks, *arrays):
            digest.update(np.ascontiguousarray(array).data)
        return digest.digest()

    def count(self) -> str:
        """Returns the number of documents as text, such as "2 documents"."""
        return plural(len(self.marks), "document")
