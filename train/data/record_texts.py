"""Documents that are fields of records, and which of them are held out: by content, so that copies stay together."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np

from bytescope.train.data.records import Malformed, RecordFiles, Skipped, choose_held_out, mark, read, text_of
from bytescope.train.data.tokenizer import Tokenizer, tokenize


@dataclass(frozen=True)
class Marks:
    """What one reading of all records has found. marks: uint64 [n], of their contents; named: bool [n], whether the
    name of the file says that the record is held out; malformed: records left out."""

    marks: np.ndarray
    named: np.ndarray
    malformed: int


@dataclass(frozen=True)
class RecordTexts:
    """The documents in `field` of records, read from their files each time. `chosen`: those of this part, bool [n] over
    the records that are not malformed; None for all."""

    files: RecordFiles
    field: str
    skip_bad: int
    chosen: np.ndarray | None = None
    found: Marks | None = None
    copies: int = 0  # of held-out documents, which this part leaves out

    recorded_tokenizer = None
    skipped = 0  # binary files
    text_bytes = None  # of text: not known before it is read

    @property
    def title(self) -> str:
        """The source in messages."""
        return self.files.title

    @property
    def paths(self) -> set[Path]:
        """The resolved paths of the files."""
        return self.files.paths

    @property
    def marks(self) -> np.ndarray:
        """Of the contents of this part's documents, uint64 [n]."""
        return self._scan.marks if self.chosen is None else self._scan.marks[self.chosen]

    @property
    def malformed(self) -> int:
        """Records left out as malformed."""
        return self._scan.malformed

    @cached_property
    def _scan(self) -> Marks:
        """One reading of all records."""
        if self.found is not None:
            return self.found
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
        return replace(self, chosen=chosen, found=self._scan)

    def split(self) -> tuple["RecordTexts", "RecordTexts"]:
        """Returns what trains and what is held out; a document that is held out trains nowhere."""
        chosen = choose_held_out(self._scan.marks, self._scan.named)
        held_out = self._part(chosen)
        return self._part(~chosen).without(held_out), held_out

    def training_part(self) -> "RecordTexts":
        """Returns what trains where the held-out data come from another source: all but what is named as held out."""
        named = self._scan.named
        return self._part(~named if not named.all() else np.ones_like(named))

    def held_out_part(self) -> "RecordTexts":
        """Returns the documents of the files whose names say that they are held out, or all if there are none."""
        named = self._scan.named
        return self._part(named if named.any() else ~named)

    def without(self, other: "RecordTexts") -> "RecordTexts":
        """Returns this part without copies of documents of the other."""
        chosen = np.ones_like(self._scan.named) if self.chosen is None else self.chosen
        kept = chosen & ~np.isin(self._scan.marks, other.marks)
        return replace(self, chosen=kept, copies=self.copies + int(chosen.sum() - kept.sum()))

    def stream(self) -> Iterator[str | None]:
        """Yields every document of this part, and None where one ends."""
        skipped = Skipped(self.skip_bad)
        for number, (text, _) in enumerate(self._documents(skipped)):
            if (self.chosen is None or self.chosen[number]) and text:
                yield text
                yield None

    def arrays(self, tokenizer: Tokenizer) -> list[np.ndarray]:
        """Returns all tokens as one array of the smallest unsigned integer that holds them."""
        dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        return [np.concatenate([np.array([], dtype), *tokenize(self.stream(), tokenizer)])]

    def vocab_size(self, tokenizer: Tokenizer) -> int:
        """Returns the largest token id that can occur, plus 1."""
        return tokenizer.vocab_size

    def identity(self, arrays: list[np.ndarray]) -> bytes:
        """Returns a hash of the contents; `arrays`: the tokens, as `arrays` has them."""
        digest = blake2b(b"records")
        for array in (self.marks, *arrays):
            digest.update(np.ascontiguousarray(array).data)
        return digest.digest()

    def count(self) -> str:
        """Returns the number of documents in words, such as "2 documents"."""
        n = len(self.marks)
        return f"{n:,} document" if n == 1 else f"{n:,} documents"
