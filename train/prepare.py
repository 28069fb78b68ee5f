"""Token shards: `python -m train.prepare` writes them from text, and `open_shards` reads any.

A prepared folder holds `train_00000.bin` ... and `heldout_00000.bin` ... (little-endian unsigned integers, no
header), the tokenizer.json if one was used, and `index.json`, which names them and is written last. Without
an index, .bin and .npy files are taken as they are.
"""

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from train.corpus import HELD_OUT, INDEX, ShardFiles, Text, find, texts
from train.errors import UserError
from train.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer, tokenize

DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
NPY_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
SPLITS = ("train", "heldout")
# A word of its own: `latest.bin` is no test set.
HELD_OUT_NAME = re.compile(r"(?<![a-z])(val|valid|validation|eval|evaluation|held_?out|test)(?![a-z])")
INDEX_KEYS = {"dtype": str, "vocab_size": int, "tokenizer": str, "tokenizer_hash": str, "shards": list}
SHARD_KEYS = {"file": str, "tokens": int, "split": str}
SCAN_TOKENS = 1 << 24


@dataclass(frozen=True)
class Shard:
    """A memory-mapped file of tokens, integers [n]; `split` is "train", "heldout" or "" where unmarked."""

    path: Path
    tokens: np.ndarray
    split: str


@dataclass(frozen=True)
class Shards:
    """Token shards in the order in which they are read; `index` is the content of index.json, or empty."""

    found: ShardFiles
    shards: tuple[Shard, ...]
    index: dict[str, Any]
    skipped = 0

    @property
    def title(self) -> str:
        return self.found.title

    @property
    def paths(self) -> set[Path]:
        return {shard.path.resolve() for shard in self.shards}

    @property
    def recorded_tokenizer(self) -> tuple[str, str] | None:
        """Name or path of the tokenizer that made the shards, and its hash; None if they do not say."""
        if not self.index:
            return None
        name = self.index["tokenizer"]
        path = name if name == ByteTokenizer.name else str(self.found.folder / name)
        return path, self.index["tokenizer_hash"]

    def split(self) -> tuple["Shards", "Shards"]:
        """Returns what trains and what is held out: the marked shards, else the last one, else its end."""
        if any(shard.split == "heldout" for shard in self.shards):
            return self.training_part(), self.held_out_part()
        *first, last = self.shards
        if first:
            return replace(self, shards=tuple(first)), replace(self, shards=(last,))
        cut = len(last.tokens) - len(last.tokens) // HELD_OUT
        ends = last.tokens[:cut], last.tokens[cut:]
        return tuple(replace(self, shards=(replace(last, tokens=tokens),)) for tokens in ends)

    def training_part(self) -> "Shards":
        """Returns the shards that are not marked as held out."""
        return replace(self, shards=tuple(shard for shard in self.shards if shard.split != "heldout"))

    def held_out_part(self) -> "Shards":
        """Returns the shards marked as held out, or all if none is."""
        marked = tuple(shard for shard in self.shards if shard.split == "heldout")
        return replace(self, shards=marked or self.shards)

    def arrays(self, tokenizer: Tokenizer) -> list[np.ndarray]:
        """Returns the tokens of each shard; they were made earlier, so `tokenizer` has no part in it."""
        return [shard.tokens for shard in self.shards]

    def vocab_size(self, tokenizer: Tokenizer) -> int:
        """Returns the largest token + 1: as the index says, else by reading all shards once."""
        if self.index:
            return self.index["vocab_size"]
        return 1 + max((_largest(shard) for shard in self.shards), default=-1)

    def identity(self, arrays: list[np.ndarray]) -> bytes:
        """Returns a hash of names, sizes and the ends of each shard: reading all would take too long."""
        digest = blake2b()
        for shard, array in zip(self.shards, arrays, strict=True):
            digest.update(repr((shard.path.name, array.dtype.str, len(array))).encode())
            digest.update(array[:2048].tobytes() + array[-2048:].tobytes())
        return digest.digest()

    def count(self) -> str:
        n = len(self.shards)
        return f"{n:,} shard{'s' * (n != 1)}"


def open_shards(found: ShardFiles, dtype: str) -> Shards:
    """Maps shards into memory; `dtype` ("uint16" or "uint32") is that of .bin files without an index.json.

    Raises UserError if the index or a shard is damaged, truncated, empty, or of a type that holds no tokens.
    """
    if found.folder is None:
        shards = [Shard(path, READERS[path.suffix](path, dtype), _split_of(path)) for path in found.files]
        return Shards(found, tuple(shards), {})
    index = _read_index(found.folder / INDEX)
    shards = []
    for entry in index["shards"]:
        path = found.folder / entry["file"]
        tokens = READERS[path.suffix](path, index["dtype"])
        if len(tokens) != entry["tokens"]:
            raise UserError(f"{path} holds {len(tokens):,} tokens, {INDEX} says {entry['tokens']:,}: "
                            "copy it again, or prepare the folder again")
        shards.append(Shard(path, tokens, entry["split"]))
    return Shards(found, tuple(shards), index)


def _split_of(path: Path) -> str:
    return "heldout" if HELD_OUT_NAME.search(path.stem.lower()) else "train"


def _open_bin(path: Path, dtype: str) -> np.ndarray:
    itemsize = DTYPES[dtype].itemsize
    size = _size(path)
    if size % itemsize:
        raise UserError(f"{path} is truncated: {size:,} bytes are no whole number of {dtype} tokens; "
                        "copy it again, or set data.dtype to what it holds")
    return np.memmap(path, DTYPES[dtype], mode="r")


def _open_npy(path: Path, dtype: str) -> np.ndarray:
    size = _size(path)
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} of {size:,} bytes is truncated or no .npy file ({reason}): "
                        "save it again") from None
    if tokens.ndim != 1 or tokens.dtype.name not in NPY_DTYPES:
        raise UserError(f"{path} holds {tokens.dtype.name} {list(tokens.shape)}: "
                        f"save one axis of tokens as one of {', '.join(NPY_DTYPES)}")
    if not len(tokens):
        raise UserError(f"{path} is empty: leave it out, or save it again")
    return tokens


READERS: dict[str, Callable[[Path, str], np.ndarray]] = {".bin": _open_bin, ".npy": _open_npy}


def _size(path: Path) -> int:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): prepare the folder again") from None
    if not size:
        raise UserError(f"{path} is empty: leave it out, or prepare it again")
    return size


def _largest(shard: Shard) -> int:
    largest = 0
    for start in range(0, len(shard.tokens), SCAN_TOKENS):
        part = shard.tokens[start:start + SCAN_TOKENS]
        if part.min() < 0:
            raise UserError(f"{shard.path} holds the token {part.min()}: token ids start at 0; save it again")
        largest = max(largest, int(part.max()))
    return largest


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        entries = [(index, INDEX_KEYS), *((shard, SHARD_KEYS) for shard in index["shards"])]
        wrong = [key for entry, keys in entries for key, kind in keys.items() if type(entry[key]) is not kind]
        wrong += [s["file"] for s in index["shards"] if Path(s["file"]).suffix not in READERS]
        wrong += [s["split"] for s in index["shards"] if s["split"] not in SPLITS]
        if wrong or not index["shards"] or index["dtype"] not in DTYPES:
            raise ValueError(f"wrong {wrong[0]!r}" if wrong else "no shards, or a dtype that is not known")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"no key {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path} cannot be used ({reason}): prepare the folder again") from None
    return index


def write_shards(text: Text, tokenizer: Tokenizer, out: Path, shard_tokens: int,
                 advance: Callable[[int], None] = lambda size: None) -> dict[str, Any]:
    """Tokenises `text` into `out`, a part at a time, and returns the content of index.json.

    `advance` is told the bytes of text done. Everything is written into a folder of its own within `out` and
    moved when complete. Raises UserError if `out` already holds shards or the text is too little to part.
    """
    _refuse_used(out)
    partial = out / ".prepare"
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir(parents=True)
    dtype = next(name for name, kind in DTYPES.items() if tokenizer.vocab_size - 1 <= np.iinfo(kind).max)

    def told(pieces: Iterable[str | None]) -> Iterator[str | None]:
        for piece in pieces:
            yield piece
            advance(len((piece or "").encode()))

    try:
        shards = []
        for split, part in zip(SPLITS, text.split(), strict=True):
            arrays = tokenize(told(texts(part.documents)), tokenizer)
            shards += _write_split(partial, split, DTYPES[dtype], arrays, shard_tokens)
        if {shard["split"] for shard in shards} != set(SPLITS):
            raise UserError(f"{text.title!r} holds too little text to train on and to hold out: give more")
        index = {"dtype": dtype, "vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.name,
                 "tokenizer_hash": tokenizer.identity, "separator": tokenizer.separator, "shards": shards}
        names = [shard["file"] for shard in shards]
        if isinstance(tokenizer, JsonTokenizer):  # a copy, so that the folder can move to another machine
            index["tokenizer"] = "tokenizer.json"
            shutil.copyfile(tokenizer.path, partial / "tokenizer.json")
            names.append("tokenizer.json")
        with _synced(partial / INDEX) as file:
            file.write(json.dumps(index, indent=1).encode() + b"\n")
        for name in [*names, INDEX]:  # the index last: a folder that has one is whole
            os.replace(partial / name, out / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return index


def _write_split(folder: Path, split: str, dtype: np.dtype, arrays: Iterable[np.ndarray],
                 shard_tokens: int) -> list[dict[str, Any]]:
    """Writes `arrays` into shards of `shard_tokens` and returns their entries of index.json."""
    shards: list[dict[str, Any]] = []
    left = (array for array in arrays if len(array))
    waiting = next(left, None)
    while waiting is not None:
        name, room = f"{split}_{len(shards):05d}.bin", shard_tokens
        with _synced(folder / name) as file:
            while waiting is not None and room:
                part, rest = waiting[:room], waiting[room:]
                file.write(part.astype(dtype).tobytes())
                room -= len(part)
                waiting = rest if len(rest) else next(left, None)
        shards.append({"file": name, "tokens": shard_tokens - room, "split": split})
    return shards


@contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    """Opens a file whose content is on the disk once it is closed: no name may come before its content."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _refuse_used(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"--out={out} is a file: give a folder")
    used = [path.name for path in out.glob("*") if path.name == INDEX or path.suffix in READERS]
    if used:
        raise UserError(f"--out={out} already holds {min(used)}: give an empty folder, or clear this one")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message} (see --help)")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="python -m train.prepare", allow_abbrev=False,
                     description="Turn text into token shards that python -m train maps into memory.")
    parser.add_argument("--source", required=True, help="stdlib, or a text file, folder or glob")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--tokenizer", default="bytes", help="bytes (default), or a tokenizer.json")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N",
                        help="tokens of one shard (default 100000000)")
    args = parser.parse_args(argv)
    if args.shard_tokens < 1:
        raise UserError(f"--shard-tokens={args.shard_tokens} is not positive: leave it out for 100000000")
    return args


def _prepare(args: argparse.Namespace) -> None:
    text = find(args.source, "--source")
    if isinstance(text, ShardFiles):
        raise UserError(f"--source={args.source!r} holds token shards: give text, or train on it as it is")
    source = Path(args.source).expanduser()
    if args.source != "stdlib" and source.is_dir() and args.out.resolve().is_relative_to(source.resolve()):
        raise UserError(f"--out={args.out} lies within the source: give a folder outside of {args.source}")
    tokenizer = load_tokenizer(args.tokenizer, "--tokenizer")
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("tokenising", total=sum(d.stop - d.start for d in text.documents))
        index = write_shards(text, tokenizer, args.out, args.shard_tokens,
                             lambda size: progress.advance(task, size))
    tokens = {split: sum(s["tokens"] for s in index["shards"] if s["split"] == split) for split in SPLITS}
    print(f"{args.out}: {len(index['shards'])} shards of {index['dtype']}, {tokens['train']:,} tokens to "
          f"train on and {tokens['heldout']:,} held out; use with --config.data.source={args.out}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's) and returns the exit code, 0 or 2."""
    try:
        _prepare(_arguments(argv))
    except UserError as error:
        print(f"train.prepare: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a full disk, a folder that may not be written
        print(f"train.prepare: {error.filename or '--out'} cannot be written ({error.strerror}): "
              "make room, or choose another --out", file=sys.stderr)
        return UserError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
