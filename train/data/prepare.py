"""`bytescope prepare`: tokenizes text into the shards that train/data/shards.py reads."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bytescope.memory.commands.arguments import Parser, user_path
from bytescope.memory.errors import disk_remedy
from bytescope.memory.host.process_memory import host_phase
from bytescope.memory.records.host_record import HostTerm
from bytescope.memory.report.host_notice import expect_host, host_line, resident_term, warn_if_too_large
from bytescope.memory.units import plural
from bytescope.memory.view.progress_bar import progress
from bytescope.train.config_fields import FIELDS
from bytescope.train.data.corpus import INDEX, ShardFiles, find
from bytescope.train.data.documents import PIECE_BYTES, RecordTexts, TextDocuments
from bytescope.train.data.records import RecordFiles
from bytescope.train.data.shards import DTYPES, SPLITS
from bytescope.train.data.tokenizer import GROUP_CHARS, JsonTokenizer, Tokenizer, load_tokenizer, tokenize
from bytescope.train.user_errors import UserError

# Bytes that the tokenizers library takes for each byte of text: the text, its normalized copy, and the alignment of its
# bytes, a pair of 8-byte numbers, once for the text and once for its words (NormalizedString, PreTokenizedString).
TEXT_BYTES = 2 + 2 * 16
# For each token: id, type, word, offsets and masks take 40 bytes, its text a header of 24 and an allocation of 32.
ENCODING_BYTES = 40 + 24 + 32
SHARD_TOKENS = 100_000_000  # default tokens per shard
CHARACTERS_PER_TOKEN = 3  # a low number, since each token takes memory


def host_terms(tokenizer: Tokenizer) -> list[HostTerm]:
    """Returns the host memory of tokenizing text into shards. It does not depend on the size of the text."""
    # At the same time in memory: the bytes of a piece, its decoded text, the text joined with the rest of the previous
    # piece, and the text of the previous piece. A text has 4 bytes per character if one character, such as an emoji,
    # needs them. Few pieces have one, so the previous piece is counted with 2.
    terms = [
        resident_term("prepare"),
        HostTerm(
            "prepare", "text", (1 + 2 * 4 + 2) * PIECE_BYTES, "PIECE_BYTES of train/data/documents.py, four copies"
        ),
    ]
    tokens = PIECE_BYTES if tokenizer.cuts_anywhere else GROUP_CHARS // CHARACTERS_PER_TOKEN
    size = np.min_scalar_type(tokenizer.vocab_size - 1).itemsize
    # The encoded text, once to count its bytes, and the tokens in the dtype of the shards.
    terms.append(HostTerm("prepare", "tokens", tokens * (2 * size + max(size, 2)), "_write_split"))
    if not tokenizer.cuts_anywhere:
        held = GROUP_CHARS * TEXT_BYTES + tokens * ENCODING_BYTES
        terms.append(HostTerm("prepare", "encodings of the tokenizer", held, "GROUP_CHARS of train/data/tokenizer.py"))
    return terms


def write_shards(
    text: TextDocuments | RecordTexts,
    tokenizer: Tokenizer,
    out: Path,
    shard_tokens: int,
    advance: Callable[[int], None] = lambda size: None,
) -> dict[str, Any]:
    """Tokenizes `text` into shards of `shard_tokens` tokens in the folder `out`. Returns the content of index.json.

    Files are written into a folder beside `out`, which becomes `out` when all are complete. Partial output of an
    interrupted command is removed. `advance` is called with the number of bytes of text that were tokenized since its
    last call.

    Raises UserError if `out` already contains shards, or if the text is too short to hold out a part.
    """
    _refuse_used(out)
    out = out.resolve()
    partial = out.with_name(f".{out.name}.partial")
    parts: Sequence[TextDocuments | RecordTexts] = text.split()
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    dtype = next(name for name, kind in DTYPES.items() if tokenizer.vocab_size - 1 <= np.iinfo(kind).max)

    def counted(pieces: Iterable[str | None]) -> Iterator[str | None]:
        for piece in pieces:
            yield piece
            advance(len((piece or "").encode()))

    try:
        shards = []
        for split, part in zip(SPLITS, parts, strict=True):
            arrays = tokenize(counted(part.stream()), tokenizer)
            shards += _write_split(partial, split, DTYPES[dtype], arrays, shard_tokens)
        if {shard["split"] for shard in shards} != set(SPLITS):
            raise UserError(
                f"{text.title!r} has too little text to train on one part and hold out another: give more text"
            )
        index = {
            "dtype": dtype,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": tokenizer.name,
            "tokenizer_hash": tokenizer.identity,
            "separator": tokenizer.separator,
            "special_tokens": tokenizer.special_tokens,
            "shards": shards,
        }
        if isinstance(tokenizer, JsonTokenizer):  # a copy, so that the folder can move to another machine
            index["tokenizer"] = "tokenizer.json"
            shutil.copyfile(tokenizer.path, partial / "tokenizer.json")
        with _open_synced(partial / INDEX) as file:
            file.write(json.dumps(index, indent=1).encode() + b"\n")
        os.replace(partial, out)  # `out` is missing or an empty folder
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return index


def _write_split(
    folder: Path, split: str, dtype: np.dtype, arrays: Iterable[np.ndarray], shard_tokens: int
) -> list[dict[str, Any]]:
    """Writes the tokens of one split, "train" or "heldout", into shards of `shard_tokens` tokens. Returns the entries
    of the shards for index.json.

    `arrays`: the tokens of the split, as consecutive arrays.
    """
    shards: list[dict[str, Any]] = []
    left = (array for array in arrays if len(array))
    waiting = next(left, None)
    while waiting is not None:
        name, room = f"{split}_{len(shards):05d}.bin", shard_tokens
        with _open_synced(folder / name) as file:
            while waiting is not None and room:
                part, rest = waiting[:room], waiting[room:]
                file.write(part.astype(dtype).data)
                room -= len(part)
                waiting = rest if len(rest) else next(left, None)
        shards.append({"file": name, "tokens": shard_tokens - room, "split": split})
    return shards


@contextmanager
def _open_synced(path: Path) -> Iterator[BinaryIO]:
    # A file that is renamed later must be complete on the disk.
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _refuse_used(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"--out={out} is a file: give a folder")
    used = [path.name for path in out.glob("*")]
    if used:
        raise UserError(f"--out={out} already contains {min(used)}: give a new or empty folder")


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of `bytescope prepare`."""
    parser = Parser(
        prog="bytescope prepare",
        allow_abbrev=False,
        epilog="examples:\n  bytescope prepare --source=texts/ --out=shards/\n"
        "  bytescope prepare --source='a/*.txt' --tokenizer=tokenizer.json --out=b/\n\n"
        "exit codes: 0 done, 2 a mistake, 130 stopped by Ctrl-C",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Tokenize text into shards, which bytescope train maps into memory.",
    )
    parser.add_argument(
        "--source",
        required=True,
        metavar="PATH",
        help="text or records: a file, a folder, a glob, or stdlib (the source code of Python's standard library)",
    )
    parser.add_argument("--out", required=True, type=user_path, metavar="DIR", help="folder to write, new or empty")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="NAME",
        help="path of a tokenizer.json, or bytes (the default)",
    )
    parser.add_argument(
        "--special-tokens",
        choices=FIELDS["data.special_tokens"].choices,
        default="text",
        metavar="HOW",
        help="how to encode special tokens that occur in the text: text (default) encodes them as ordinary text, "
        "parse as special tokens",
    )
    parser.add_argument(
        "--field",
        default="text",
        metavar="NAME",
        help="name of the field of a record that holds the document (default %(default)s)",
    )
    parser.add_argument(
        "--skip-bad",
        type=int,
        default=0,
        metavar="N",
        help="maximum number of malformed records (default %(default)s)",
    )
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=SHARD_TOKENS,
        metavar="N",
        help="tokens per shard (default %(default)s)",
    )
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line of `bytescope prepare`.

    Raises:
      ValueError: the command line is not valid; the error has the exit code as `exit_code`.
    """
    args = make_parser().parse_args(argv)
    if args.shard_tokens < 1:
        raise UserError(f"--shard-tokens={args.shard_tokens} is too small: give 1 or more (default {SHARD_TOKENS})")
    if args.skip_bad < 0:
        raise UserError(f"--skip-bad={args.skip_bad} is negative: give 0 or more")
    return args


def _prepare(args: argparse.Namespace) -> None:
    source = find(args.source, "--source")
    if isinstance(source, ShardFiles):
        raise UserError(f"--source={args.source!r} contains token shards already: give text, or train on these shards")
    text = RecordTexts(source, args.field, args.skip_bad) if isinstance(source, RecordFiles) else source
    folder = Path(os.path.expanduser(args.source))
    if args.source != "stdlib" and folder.is_dir() and args.out.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"--out={args.out} is inside the source: give a folder outside {args.source}")
    tokenizer = load_tokenizer(args.tokenizer, "--tokenizer", args.special_tokens)
    host = expect_host(host_terms(tokenizer))
    warn_if_too_large(host, "end other programs")
    if sys.stderr.isatty():
        print(host_line(host), file=sys.stderr)
    with host_phase("prepare"), progress(text.text_bytes, "tokenizing", "bytes") as bar:
        index = write_shards(text, tokenizer, args.out, args.shard_tokens, bar.advance)
    tokens = {split: sum(s["tokens"] for s in index["shards"] if s["split"] == split) for split in SPLITS}
    print(
        f"{args.out}: {plural(len(index['shards']), 'shard')} of {index['dtype']}, {tokens['train']:,} tokens to "
        f"train on and {tokens['heldout']:,} held out; use with --config.data.source={args.out}"
    )


def run(args: argparse.Namespace) -> int:
    """Tokenizes the source into shards; returns the exit code.

    Raises UserError if an argument is wrong, or if the disk cannot be written.
    """
    try:
        _prepare(args)
    except OSError as error:  # a full disk, a folder without write permission
        place, remedy = error.filename or "--out", disk_remedy(error)
        raise UserError(f"{place} cannot be written ({error.strerror}): {remedy}choose another --out") from error
    return 0
