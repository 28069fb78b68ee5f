"""Token shards: memory-mapped files of token ids, with or without the index that train/data/prepare.py writes.

A prepared folder has the files `train_00000.bin` ... and `heldout_00000.bin` ... (little-endian unsigned integers, no
header), the tokenizer.json if one was used, and `index.json`, which names them. Without an index, .bin and .npy files
are read as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from bytescope.memory.errors import one_line
from bytescope.memory.records.result import parse
from bytescope.memory.units import plural
from bytescope.train.data.corpus import HELD_OUT_NAME, INDEX, ShardFiles
from bytescope.train.data.records import HELD_OUT
from bytescope.train.data.tokenizer import ByteTokenizer, Tokenizer
from bytescope.train.user_errors import UserError

DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
NPY_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
SPLITS = ("train", "heldout")
INDEX_KEYS = {"dtype": str, "vocab_size": int, "tokenizer": str, "tokenizer_hash": str, "shards": list}
SHARD_KEYS = {"file": str, "tokens": int, "split": str}
SCAN_TOKENS = 1 << 24


@dataclass(frozen=True)
class Shard:
    """A memory-mapped file of token ids.

    Attributes:
      path: path of the file.
      tokens: the token ids, integers [n].
      split: "train" or "heldout", from the index or the file's name.
    """

    path: Path
    tokens: np.ndarray
    split: str


@dataclass(frozen=True)
class Shards:
    """The token shards of a data source.

    Attributes:
      source: the files of the shards.
      shards: the shards, in the order in which they are read.
      index: the content of index.json, or {} if there is none.
    """

    source: ShardFiles
    shards: tuple[Shard, ...]
    index: dict[str, Any]
    skipped = malformed = copies = 0

    @property
    def title(self) -> str:
        """Name of the data source that the shards are from, used in messages."""
        return self.source.title

    @property
    def paths(self) -> set[Path]:
        """Absolute paths, without symbolic links, of the shard files."""
        return {shard.path.resolve() for shard in self.shards}

    @property
    def recorded_tokenizer(self) -> tuple[str, str] | None:
        """Name or path, and hash, of the tokenizer that the shards were prepared with; None if there is no index."""
        if not self.index:
            return None
        name = self.index["tokenizer"]
        path = name if name == ByteTokenizer.name else str(self.source.folder / name)
        return path, self.index["tokenizer_hash"]

    def split(self) -> tuple["Shards", "Shards"]:
        """Returns (training part, held-out part).

        The held-out part has the shards whose split is "heldout". If there are no such shards, the last shard is held
        out. If there is only one shard, its end is held out.
        """
        if any(shard.split == "heldout" for shard in self.shards):
            return self.training_part(), self.held_out_part()
        *first, last = self.shards
        if first:
            return replace(self, shards=tuple(first)), replace(self, shards=(last,))
        cut = len(last.tokens) - len(last.tokens) // HELD_OUT
        train, held_out = replace(last, tokens=last.tokens[:cut]), replace(last, tokens=last.tokens[cut:])
        return replace(self, shards=(train,)), replace(self, shards=(held_out,))

    def training_part(self) -> "Shards":
        """Returns the shards whose split is not "heldout"."""
        return replace(self, shards=tuple(shard for shard in self.shards if shard.split != "heldout"))

    def held_out_part(self) -> "Shards":
        """Returns the shards whose split is "heldout". If there are none, returns all shards."""
        marked = tuple(shard for shard in self.shards if shard.split == "heldout")
        return replace(self, shards=marked or self.shards)

    def arrays(self, tokenizer: Tokenizer) -> list[np.ndarray]:
        """Returns the tokens of each shard. `tokenizer` is not used, since shards contain tokens already."""
        return [shard.tokens for shard in self.shards]

    def vocab_size(self, tokenizer: Tokenizer) -> int:
        """Returns 1 plus the largest token id. It is in the index; without an index, all shards are read once.

        Raises UserError for a negative token.
        """
        if self.index:
            return self.index["vocab_size"]
        return 1 + max((_largest(shard) for shard in self.shards), default=-1)

    def identity(self, arrays: list[np.ndarray]) -> bytes:
        """Returns a hash of the name, the size, and the first and last bytes of each shard. Reading all tokens would
        take too long.

        `arrays`: the tokens of each shard, as the method `arrays` returns them.
        """
        digest = blake2b()
        for shard, array in zip(self.shards, arrays, strict=True):
            digest.update(repr((shard.path.name, array.dtype.str, len(array))).encode())
            digest.update(array[:2048].tobytes() + array[-2048:].tobytes())
        return digest.digest()

    def count(self) -> str:
        """Returns the number of shards as text, such as "2 shards"."""
        return plural(len(self.shards), "shard")


def open_shards(source: ShardFiles, dtype: str) -> Shards:
    """Maps token shards into memory.

    `dtype` is the dtype of .bin files without an index.json, "uint16" or "uint32". Raises UserError if the index or a
    shard is damaged, truncated or empty, or has a dtype that is not allowed for token ids.
    """
    if source.folder is None:
        shards = []
        for path in source.files:
            split = "heldout" if HELD_OUT_NAME.search(path.stem.lower()) else "train"
            shards.append(Shard(path, READERS[path.suffix](path, dtype), split))
        return Shards(source, tuple(shards), {})
    index = _read_index(source.folder / INDEX)
    shards = []
    for entry in index["shards"]:
        path = source.folder / entry["file"]
        tokens = READERS[path.suffix](path, index["dtype"])
        if len(tokens) != entry["tokens"]:
            raise UserError(
                f"{path} has {len(tokens):,} tokens, but {INDEX} lists {entry['tokens']:,}: "
                "the file is damaged; copy it again, or prepare the folder again"
            )
        shards.append(Shard(path, tokens, entry["split"]))
    return Shards(source, tuple(shards), index)


def _open_bin(path: Path, dtype: str) -> np.ndarray:
    itemsize = DTYPES[dtype].itemsize
    size = _size(path)
    if size % itemsize:
        raise UserError(
            f"{path} is truncated: its {size:,} bytes are not a whole number of {dtype} tokens; "
            "copy it again, or set data.dtype to its dtype"
        )
    return np.memmap(path, DTYPES[dtype], mode="r")


def _open_npy(path: Path, dtype: str) -> np.ndarray:
    size = _size(path)
    try:
        with open(path, "rb") as file:  # np.load would also read other formats, and leave a damaged file open
            np.lib.format.read_magic(file)
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy evaluates the header as Python: TokenError, SyntaxError, OverflowError, ...
        reason = one_line(error) or type(error).__name__
        raise UserError(f"{path} of {size:,} bytes is truncated or not a .npy file ({reason}): save it again") from None
    if tokens.ndim != 1 or tokens.dtype.name not in NPY_DTYPES:
        raise UserError(
            f"{path} contains an array of {tokens.dtype.name} {list(tokens.shape)}, which is not supported for tokens: "
            f"save a one-dimensional array as one of {', '.join(NPY_DTYPES)}"
        )
    if not len(tokens):
        raise UserError(f"{path} is empty: leave it out, or save it again")
    return tokens


READERS: dict[str, Callable[[Path, str], np.ndarray]] = {".bin": _open_bin, ".npy": _open_npy}


def _size(path: Path) -> int:
    try:
        size = path.stat().st_size
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({reason}): prepare the folder again") from None
    if not size:
        raise UserError(f"{path} is empty: leave it out, or prepare it again")
    return size


def _largest(shard: Shard) -> int:
    largest = 0
    for start in range(0, len(shard.tokens), SCAN_TOKENS):
        part = shard.tokens[start : start + SCAN_TOKENS]
        if part.min() < 0:
            raise UserError(f"{shard.path} has the token {part.min()}: token ids start at 0; save the file again")
        largest = max(largest, int(part.max()))
    return largest


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = parse(path.read_bytes())
        entries = [(index, INDEX_KEYS), *((shard, SHARD_KEYS) for shard in index["shards"])]
        wrong = [key for entry, keys in entries for key, kind in keys.items() if type(entry[key]) is not kind]
        wrong += [s["file"] for s in index["shards"] if Path(s["file"]).suffix not in READERS]
        wrong += [s["split"] for s in index["shards"] if s["split"] not in SPLITS]
        if wrong or not index["shards"] or index["dtype"] not in DTYPES:
            raise ValueError(
                f"{wrong[0]!r} has a wrong type or value" if wrong else "it has no shards, or an unknown dtype"
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"it has no key {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path} cannot be used ({reason}): prepare the folder again") from None
    return index
