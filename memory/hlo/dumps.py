"""XLA's dumps on disk: one proto, packed or not, or a folder of them; and what a proto says of who compiled it."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from pathlib import Path
from typing import NamedTuple

from bytescope.memory.errors import ReportError
from bytescope.memory.hlo import wire
from bytescope.memory.units import human

# Larger messages are no protobufs.
_MAX_PROTO = 2**31
_PIECE = 2**20  # bytes out of gzip at a time: asked for more, Python's reader allocates all of them beforehand
_GZIP = b"\x1f\x8b"
_REMEDY = "XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_proto' dumps the protos, *after_optimizations.hlo.pb"
_ENDS = ("hlo.pb", "hlo.pb.gz")
# How HLO and StableHLO begin as text, after comments.
_TEXT = re.compile(rb"\s*(//[^\n]*\n\s*)*(HloModule\s|module\b[^\n]*\{|module @|#\w+ = )")
_LISTED = 6
# What only one platform's compiler writes into a module: keys of its backend configs, attributes, targets of calls.
_MARKS = (
    ("gpu", (b'"operation_queue_id":', b"fingerprint_before_lhs", b"__cublas$", b"__cudnn$")),
    ("tpu", (b'"flag_configs":', b'"scoped_memory_configs":', b"tpu_custom_call")),
    ("cpu", (b'"outer_dimension_partitions":', b"__ynn_fusion", b"__onednn$")),
)


class Dump(NamedTuple):
    """A serialized HloProto, and what to say of the file that it came from."""

    proto: bytes
    notes: tuple[str, ...] = ()


def read(path: Path) -> Dump:
    """The proto of a file, or the one with most bytes in its buffers of a folder; a note lists the others.

    Raises ReportError for what is not there, cannot be read, or is HLO as text.
    """
    if _TEXT.match(str(path)[:4096].encode(errors="replace")):  # as `Compiled.as_text` has it, in the place of a path
        raise ReportError(f"the text of a program has no buffers: give the Compiled or Lowered itself; {_REMEDY}")
    return _of_folder(path) if path.is_dir() else Dump(_of_file(path))


def unpacked(data: bytes, name: str = "the program") -> bytes:
    """A proto's bytes as they are, or out of gzip. Raises ReportError for damaged gzip, and for HLO as text."""
    if data[:2] == _GZIP:
        try:
            with gzip.open(io.BytesIO(data)) as packed:
                content = bytearray()
                while len(content) < _MAX_PROTO and (piece := packed.read(_PIECE)):
                    content += piece
                data = bytes(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ReportError(f"{name} is damaged ({error}): dump it again; {_REMEDY}") from error
    if len(data) >= _MAX_PROTO:
        raise ReportError(f"{name} is larger than a proto can be: give a *after_optimizations.hlo.pb")
    if _TEXT.match(data[:4096]):
        raise ReportError(f"{name} is HLO as text, which has no buffers: {_REMEDY}")
    return data


def platform_of(proto: bytes) -> str:
    """The platform whose compiler wrote a proto: "gpu", "tpu" or "cpu"; "" where nothing tells."""
    return next((platform for platform, marks in _MARKS if any(mark in proto for mark in marks)), "")


def buffer_bytes(proto: bytes) -> int:
    """Bytes of all allocations of an HloProto; 0 for one without a buffer assignment.

    Raises WireError where the bytes are no HloProto.
    """
    total = 0
    for field, assignment in wire.fields(proto, (0, len(proto))):
        if field == 3:
            for kind, allocation in wire.fields(proto, wire.message(assignment)):
                total += wire.plain(proto, wire.message(allocation)).get(2, 0) if kind == 3 else 0
    return total


def _of_file(path: Path) -> bytes:
    if not path.is_file():
        raise ReportError(f"no file {path}: give the *after_optimizations.hlo.pb of an XLA dump, or its folder")
    try:
        if path.stat().st_size >= _MAX_PROTO:
            raise ReportError(f"{path} is larger than a proto can be: give a *after_optimizations.hlo.pb")
        return unpacked(path.read_bytes(), str(path))
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from error


def _of_folder(folder: Path) -> Dump:
    """The largest program of a dump's folder."""
    try:
        paths = sorted(path for end in _ENDS for path in folder.glob(f"*after_optimizations*{end}"))
    except OSError as error:
        raise ReportError(f"cannot read {folder}: {error.strerror}") from error
    found, refused = [], None
    for path in paths:
        try:
            found.append((buffer_bytes(_of_file(path)), path))
        except ReportError as error:
            refused = error
    if not found:
        raise refused or ReportError(f"no *after_optimizations.hlo.pb in {folder}: {_REMEDY}")
    found.sort(key=lambda each: (-each[0], each[1].name))
    (size, path), *others = found
    if not others:
        return Dump(_of_file(path))
    listed = ", ".join(f"{each.name} {human(count)}" for count, each in others[:_LISTED])
    more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
    return Dump(
        _of_file(path),
        (
            f"the largest of {len(found)} programs in {folder}: {path.name}, {human(size)} of "
            f"buffers; the others: {listed}{more}",
        ),
    )
