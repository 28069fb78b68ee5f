"""Cuts a profiler trace of a GPU to a fixture of the tests.

    python tests/bench/cut_trace.py FOLDER --program=jit_step --out=tests/memory/profile/traces/NAME.xplane.pb.gz
    python tests/bench/cut_trace.py FOLDER --report=REPORT.json --out=tests/memory/profile/traces/NAME.report.json

The first command keeps the kernels and copies of the devices with the stats that name their instruction, and the
compiled module of one program without its source locations. The second command keeps the parts of a report that a
prediction of seconds needs.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

from bytescope.memory.hlo import wire
from bytescope.memory.hlo.wire import Span, write_field
from bytescope.memory.profile import xplane

_STATS = ("hlo_op", "hlo_module", "program_id")
_REPORT = ("schema", "program", "peak_bytes", "allocated_bytes", "breakdown", "target", "subject", "work", "schedule")
# Field numbers in hlo.proto: of the stack frames of a module, of its computations and their instructions, and of the
# metadata of an instruction, of which only the op_name is kept.
_STACK_FRAMES, _COMPUTATIONS, _INSTRUCTIONS, _METADATA, _OP_NAME = 17, 3, 2, 7, 2


def main() -> None:
    """Writes the cut trace, or with --report the cut report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="a file *.xplane.pb, or a folder that contains one")
    parser.add_argument("--program", default="jit_step", help="name of the module to keep (default jit_step)")
    parser.add_argument("--report", type=Path, help="cut this report instead of the trace")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    if args.report:
        report = json.loads(args.report.read_text())
        args.out.write_text(json.dumps({name: report[name] for name in _REPORT if name in report}) + "\n")
        return
    data = xplane.find(args.trace).read_bytes()
    planes = [wire.message(value) for field, value in wire.fields(data, (0, len(data))) if field == 1]
    cut = b"".join(
        write_field(1, plane) for plane in (_cut_plane(data, span, args.program) for span in planes) if plane
    )
    args.out.write_bytes(gzip.compress(cut, 9, mtime=0))


def _cut_plane(data: bytes, span: Span, program: str) -> bytes:
    name = next(wire.text(data, value) for field, value in wire.fields(data, span) if field == 2)
    if name.startswith("/device:GPU"):
        return _cut_device(data, span)
    return _cut_metadata(data, span, program) if name == "/host:metadata" else b""


def _cut_device(data: bytes, span: Span) -> bytes:
    names: dict[int, str] = {}  # id of a stat -> its name, which is also the value of a stat that refers to it
    for field, value in wire.fields(data, span):
        if field == 5:
            entry = dict(wire.fields(data, wire.message(value)))
            inner = dict(wire.fields(data, wire.message(entry[2])))
            names[wire.number(entry[1])] = wire.text(data, inner[2]) if 2 in inner else ""
    kinds: set[int] = set()
    used: set[int] = set()
    lines = []
    for field, value in wire.fields(data, span):
        if field != 3:
            continue
        line = b""
        for part, item in wire.fields(data, wire.message(value)):
            if part in (1, 3):
                line += write_field(part, wire.number(item))
            elif part == 2:
                line += write_field(2, wire.text(data, item).encode())
            elif part == 4:
                event = b""
                for number, content in wire.fields(data, wire.message(item)):
                    if number == 4:
                        stat = dict(wire.fields(data, wire.message(content)))
                        if names.get(wire.number(stat[1])) in _STATS:
                            used.add(wire.number(stat[1]))
                            used.add(wire.number(stat.get(7, stat[1])))
                            event += write_field(4, _bytes(data, wire.message(content)))
                    elif number in (1, 2, 3):
                        event += write_field(number, wire.number(content))
                        if number == 1:
                            kinds.add(wire.number(content))
                line += write_field(4, event)
        lines.append(write_field(3, line))
    out = []
    for field, value in wire.fields(data, span):
        if field == 2:
            out.append(write_field(2, wire.text(data, value).encode()))
        elif field in (4, 5):
            entry = dict(wire.fields(data, wire.message(value)))
            if wire.number(entry[1]) in (kinds if field == 4 else used):
                inner = dict(wire.fields(data, wire.message(entry[2])))
                text = wire.text(data, inner[2]) if 2 in inner else ""
                kept = write_field(1, wire.number(entry[1])) + write_field(2, text.encode())
                out.append(write_field(field, write_field(1, wire.number(entry[1])) + write_field(2, kept)))
    return b"".join((*out, *lines))


def _cut_metadata(data: bytes, span: Span, program: str) -> bytes:
    out = []
    for field, value in wire.fields(data, span):
        if field == 4:
            entry = dict(wire.fields(data, wire.message(value)))
            kind = b""
            for part, item in wire.fields(data, wire.message(entry[2])):
                if part == 5:
                    stat = dict(wire.fields(data, wire.message(item)))
                    if 6 in stat:
                        proto = _cut_proto(data, wire.message(stat[6]))
                        kind += write_field(5, write_field(1, wire.number(stat[1])) + write_field(6, proto))
                        continue
                kind += write_field(part, _bytes(data, item) if isinstance(item, tuple) else wire.number(item))
            name = dict(wire.fields(data, wire.message(entry[2])))[2]
            if wire.text(data, name).startswith(f"{program}("):
                out.append(write_field(4, write_field(1, wire.number(entry[1])) + write_field(2, kind)))
        elif field in (2, 5):
            out.append(write_field(field, _bytes(data, wire.message(value))))
    return b"".join(out)


def _cut_proto(data: bytes, span: Span) -> bytes:
    """Returns an HloProto with its module and buffers, without source locations."""

    def metadata(place: Span) -> bytes:
        found = dict(wire.fields(data, place))
        return write_field(_OP_NAME, wire.text(data, found[_OP_NAME]).encode()) if _OP_NAME in found else b""

    def instruction(place: Span) -> bytes:
        return _rewrite(data, place, {_METADATA: metadata})

    def computation(place: Span) -> bytes:
        return _rewrite(data, place, {_INSTRUCTIONS: instruction})

    def module(place: Span) -> bytes:
        return _rewrite(data, place, {_COMPUTATIONS: computation, _STACK_FRAMES: lambda _: b""})

    return _rewrite(data, span, {1: module})


def _rewrite(data: bytes, span: Span, changes: dict) -> bytes:
    out = []
    for field, value in wire.fields(data, span):
        if field in changes:
            out.append(write_field(field, changes[field](wire.message(value))))
        else:
            out.append(write_field(field, _bytes(data, value) if isinstance(value, tuple) else wire.number(value)))
    return b"".join(out)


def _bytes(data: bytes, span: Span) -> bytes:
    return data[span[0] : span[1]]


if __name__ == "__main__":
    main()
