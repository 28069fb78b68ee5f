"""Reads XLA's dumps (a proto, gzipped or not, or the largest proto of a folder), and detects the platform of a
proto."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path
from typing import NamedTuple

from bytescope.memory.errors import ReportError
from bytescope.memory.hlo import wire
from bytescope.memory.hlo.kernels import PLATFORM_TARGETS
from bytescope.memory.units import human, list_names

# Maximum size of a protobuf message in bytes.
_MAX_PROTO = 2**31
_GZIP = b"\x1f\x8b"
_REMEDY = "XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_proto' writes the proto, *after_optimizations.hlo.pb"
_ENDS = ("hlo.pb", "hlo.pb.gz")
# Matches the first line of HLO or StableHLO text, after comments.
_TEXT = re.compile(rb"\s*(//[^\n]*\n\s*)*(HloModule\s|module\b[^\n]*\{|module @|#\w+ = )")
_LISTED = 6
# Texts by which a module shows the platform of its compiler, besides the targets of custom calls: keys of backend
# configs, attributes.
_MARKS = (
    ("gpu", ('"operation_queue_id":', "fingerprint_before_lhs")),
    ("tpu", ('"flag_configs":', '"scoped_memory_configs":')),
    ("cpu", ('"outer_dimension_partitions":',)),
)


class Dump(NamedTuple):
    """A serialized HloProto, and notes to print about the file or folder from which it was read."""

    proto: bytes
    notes: tuple[str, ...] = ()


def read(path: Path) -> Dump:
    """Returns the HloProto of a file. For a folder, returns the HloProto whose buffers take the most bytes, with a
    note about the other protos.

    Raises ReportError if the path does not exist, cannot be read, or contains HLO as text.
    """
    # The caller may pass the text of `Compiled.as_text` instead of a path.
    if _TEXT.match(str(path)[:4096].encode(errors="replace")):
        raise ReportError(
            "the program is given as HLO text, which does not contain buffers: give the Compiled or Lowered object, "
            f"or the path of a proto; {_REMEDY}"
        )
    return _read_largest_dump(path) if path.is_dir() else Dump(_read_file(path))


def unpacked(data: bytes, name: str = "the program") -> bytes:
    """Returns the bytes of a proto, decompressed if they are in gzip format. name: the file's name for messages. Raises
    ReportError if the gzip data is damaged, or if the bytes are HLO as text."""
    if data[:2] == _GZIP:
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ReportError(
                f"{name} is damaged and cannot be decompressed ({error}): dump it again; {_REMEDY}"
            ) from error
    if len(data) >= _MAX_PROTO:
        raise ReportError(f"{name} has 2 GiB or more, so it is not a proto: give a *after_optimizations.hlo.pb file")
    if _TEXT.match(data[:4096]):
        raise ReportError(f"{name} is HLO as text, which does not contain buffers: {_REMEDY}")
    return data


def platform_of(proto: bytes) -> str:
    """Returns the platform whose compiler wrote a proto: "gpu", "tpu" or "cpu"; "" if unknown."""
    for platform, marks in _MARKS:
        if any(mark.encode() in proto for mark in (*marks, *PLATFORM_TARGETS[platform])):
            return platform
    return ""


def buffer_bytes(proto: bytes) -> int:
    """Returns the bytes of all allocations of an HloProto; 0 if it has no buffer assignment.

    Raises WireError if the bytes are not an HloProto.
    """
    total = 0
    for field, assignment in wire.fields(proto, (0, len(proto))):
        if field == 3:
            for kind, allocation in wire.fields(proto, wire.message(assignment)):
                total += wire.plain(proto, wire.message(allocation)).get(2, 0) if kind == 3 else 0
    return total


def _read_file(path: Path) -> bytes:
    if not path.is_file():
        raise ReportError(
            f"there is no file {path}: give the *after_optimizations.hlo.pb of an XLA dump, or its folder"
        )
    try:
        if path.stat().st_size >= _MAX_PROTO:
            raise ReportError(
                f"{path} has 2 GiB or more, so it is not a proto: give a *after_optimizations.hlo.pb file"
            )
        return unpacked(path.read_bytes(), str(path))
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}; give another file of the XLA dump") from error


def _read_largest_dump(folder: Path) -> Dump:
    try:
        paths = [path for path in sorted(folder.glob("*after_optimizations*")) if path.name.endswith(_ENDS)]
    except OSError as error:
        raise ReportError(f"cannot read {folder}: {error.strerror}; give another folder of XLA dumps") from error
    programs: list[tuple[int, Path]] = []
    damaged: dict[str, str] = {}
    for path in paths:
        try:
            programs.append((buffer_bytes(_read_file(path)), path))
        except ReportError as error:
            damaged[path.name] = str(error) if str(path) in str(error) else f"{path} is damaged: {error}"
    if damaged and not programs:
        others = f"; damaged too: {list_names([*damaged][1:], _LISTED)}" if len(damaged) > 1 else ""
        raise ReportError(f"{next(iter(damaged.values()))}{others}")
    if not programs:
        raise ReportError(f"there is no *after_optimizations.hlo.pb in {folder}: {_REMEDY}")
    programs.sort(key=lambda program: (-program[0], program[1].name))
    (size, path), *smaller = programs
    notes = (f"damaged and left out: {list_names([*damaged], _LISTED)}",) if damaged else ()
    if not smaller:
        return Dump(_read_file(path), notes)
    listed = list_names([f"{each.name} {human(count)}" for count, each in smaller], _LISTED)
    note = (
        f"the largest of {len(programs)} programs in {folder}: {path.name}, {human(size)} of "
        f"buffers; the others: {listed}"
    )
    return Dump(_read_file(path), (note, *notes))
