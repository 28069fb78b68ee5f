"""Writes JAX's scope names into the files of a profiler's trace.

On CPUs and GPUs, an event has the name of XLA's instruction, not JAX's op_name. This module adds the op_name as the
stat `tf_op`, which traces of TPUs already have. In the *.xplane.pb it adds the stat to the metadata of CPU events
only, because for accelerators XProf and TensorBoard read the op_name from the HloProto. In Perfetto's JSON it adds
op_name, phase and component to each event. Times and all other fields stay the same.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

from bytescope.memory.errors import ReportError
from bytescope.memory.hlo import wire
from bytescope.memory.hlo.wire import Span, WireError, write_field
from bytescope.memory.profile.op_scopes import OpScope, OpScopes
from bytescope.memory.profile.xplane import CALLS, ProfilerTrace, is_host

PERFETTO = "perfetto_trace.json.gz"
_OP = "tf_op"
# Id of the stat's name. The profiler counts ids from 1, so no other stat has this id.
_STAT = 1 << 40


def name(path: Path, trace: ProfilerTrace) -> None:
    """Adds JAX's op_name (which contains the named scopes) to the events of a profiler trace, so that trace viewers
    show it. Rewrites the file *.xplane.pb at `path` and, if present, the Perfetto file in the same folder.

    `trace`: the content of the file, as `xplane.read` returns it. Raises ReportError if the files cannot be written.
    """
    op_scopes = OpScopes(trace)
    named: dict[str, tuple[str, OpScope]] = {}
    for operation in trace.operations:
        if operation.program[1] == op_scopes.main and operation.name and operation.name not in named:
            key = (operation.program, operation.name, operation.op_name)
            named[operation.name] = op_scopes.op_name(key), op_scopes.scope(key)
    try:
        path.write_bytes(with_names(path.read_bytes(), {op: text for op, (text, _) in named.items() if text}))
        perfetto = path.parent / PERFETTO
        if perfetto.is_file():
            _annotate_perfetto(perfetto, named, op_scopes.main)
    except (OSError, WireError, ValueError) as error:
        raise ReportError(
            f"cannot add scope names to the trace in {path.parent}: {error}; write the trace again"
        ) from error


def with_names(data: bytes, names: Mapping[str, str]) -> bytes:
    """Returns a serialized XSpace in which the host events listed in `names` have the stat `tf_op`, their op_name.

    `names`: name of an event -> op_name. Raises WireError if the bytes are not an XSpace.
    """
    out = []
    for field, value in wire.fields(data, (0, len(data))):
        if isinstance(value, int):  # all fields of an XSpace are messages and strings
            raise WireError("the file is not a profiler trace (an XSpace proto): give a *.xplane.pb file")
        body = data[value[0] : value[1]]
        out.append(write_field(field, _add_op_names(data, value, body, names) if field == 1 else body))
    return b"".join(out)


def _add_op_names(data: bytes, span: Span, body: bytes, names: Mapping[str, str]) -> bytes:
    """Returns the bytes of a plane (event table) of a profiler trace, with the stat `tf_op` added to the events in
    `names`: event name -> op_name. Planes of devices are returned unchanged.

    data, span: the serialized trace, and the (start, stop) offsets of the plane in it. body: the bytes of the plane.
    """
    title, added = "", []
    for field, value in wire.fields(data, span):
        if field == 2:
            title = wire.text(data, value)
        elif field == 4:
            entry = dict(wire.fields(data, wire.message(value)))
            kind = wire.message(entry.get(2, (0, 0)))
            called = next((wire.text(data, part) for at, part in wire.fields(data, kind) if at == 2), "")
            if called in names:
                stat = write_field(1, _STAT) + write_field(5, names[called].encode())
                more = data[kind[0] : kind[1]] + write_field(5, stat)
                added.append(write_field(4, write_field(1, wire.number(entry.get(1, 0))) + write_field(2, more)))
    # The new metadata of an event is appended under its old key: readers of protobufs use the last entry of a key.
    if not added or not is_host(title):
        return body
    stat_name = write_field(1, _STAT) + write_field(2, _OP.encode())
    return body + write_field(5, write_field(1, _STAT) + write_field(2, stat_name)) + b"".join(added)


def _annotate_perfetto(path: Path, named: Mapping[str, tuple[str, OpScope]], main: str) -> None:
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    for event in trace.get("traceEvents", ()):
        arguments = event.get("args", {})
        text, scope = named.get(str(arguments.get("hlo_op", "")).rsplit(CALLS, 1)[-1], ("", None))
        if scope and arguments.get("hlo_module", main) == main:
            arguments.update({_OP: text, "phase": scope.phase, "component": scope.component})
    with gzip.open(path, "wt", compresslevel=3) as file:
        file.write(json.dumps(trace, separators=(",", ":")))  # json.dump(trace, file) takes many times as long
