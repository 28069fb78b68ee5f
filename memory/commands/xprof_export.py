"""Exports reports for other viewers: XProf and TensorBoard (XLA's own proto), and pprof.

The pprof profile is encoded here, with the field numbers of github.com/google/pprof/proto/profile.proto. A few dozen
lines replace a dependency.
"""

import gzip
from collections.abc import Iterable
from pathlib import Path

from bytescope.memory.errors import ReportError
from bytescope.memory.hlo.wire import write_field, write_varint
from bytescope.memory.records.report_record import Buffer, ReportRecord

MODULE = "m"  # the name under which XProf lists the program


def export(directory: str | Path, report: ReportRecord | None = None, hlo_proto: bytes = b"") -> list[Path]:
    """Writes files for other viewers into `directory`, which is created if missing. Returns their paths.

    - If `hlo_proto` (a serialized HloProto) is given: `m.hlo_proto.pb` and an empty `h.xplane.pb`. The memory viewer
      of XProf and of TensorBoard's profile plugin opens this pair.
    - If a report is given: `memory.pprof.gz`, a pprof profile with one sample per buffer that is live at the peak.

    Raises ReportError if neither is given, or if the directory cannot be written.
    """
    files: dict[str, bytes] = {}
    if hlo_proto:
        files[f"{MODULE}.hlo_proto.pb"] = hlo_proto
        files["h.xplane.pb"] = b""  # only its presence matters: it makes the folder a profile
    if report is not None:
        # No time in the header: the same report gives the same bytes.
        files["memory.pprof.gz"] = gzip.compress(pprof(report), mtime=0)
    if not files:
        raise ReportError("there is nothing to export: pass a report or a serialized HloProto")
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise ReportError(f"cannot write to {folder}: {error.strerror or error}; give another folder") from error
    return [folder / name for name in files]


def pprof(report: ReportRecord) -> bytes:
    """Returns the buffers that are live at the peak of device memory as a pprof profile (uncompressed protobuf).

    Each sample is a buffer; its value is bytes on one device. Its stack is, from the root: category, the named scopes
    of the module path, operation, buffer with its source line. Its labels are phase, dtype, shape, checkpoint name and
    parameter. `go tool pprof -http=: memory.pprof.gz` draws the profile as a flame graph.
    """
    table = _Table()
    samples = []
    for buffer in sorted((b for b in report.buffers if b.at_peak and b.memory == "device"), key=lambda b: -b.bytes):
        locations = [table.location_id(*frame) for frame in reversed(_stack_frames(buffer))]
        labels = b"".join(
            write_field(3, write_field(1, table.string_index(key)) + write_field(2, table.string_index(value)))
            for key, value in _labels(buffer)
            if value
        )
        samples.append(write_field(2, _packed(1, locations) + _packed(2, [buffer.bytes]) + labels))
    value_type = write_field(1, table.string_index("space")) + write_field(2, table.string_index("bytes"))
    comments = b"".join(write_field(13, table.string_index(line)) for line in _comments(report))
    body = write_field(1, value_type) + b"".join(samples) + b"".join(table.locations) + b"".join(table.functions)
    tail = write_field(11, value_type) + write_field(12, 1) + comments + write_field(14, table.string_index("space"))
    strings = b"".join(write_field(6, text.encode()) for text in table.strings)
    return body + strings + tail


def _stack_frames(buffer: Buffer) -> list[tuple[str, str, int]]:
    file, _, line = buffer.source.rpartition(":")
    scopes = [scope for scope in buffer.module.split("/") if scope]
    names = [buffer.category, *scopes]
    if buffer.op_name and buffer.op_name != buffer.name:  # an argument's operation is its own path
        names.append(buffer.op_name.rsplit("/", 1)[-1])
    leaf = (buffer.name, file or buffer.source, int(line) if file and line.isdigit() else 0)
    # (name, file, line), from the root to the buffer
    return [(name, "", 0) for name in names] + [leaf]


def _labels(buffer: Buffer) -> Iterable[tuple[str, str]]:
    shape = "x".join(map(str, buffer.shape))
    return (
        ("phase", buffer.phase),
        ("dtype", buffer.dtype),
        ("shape", shape),
        ("checkpoint_name", buffer.checkpoint_name),
        ("parameter", buffer.parameter),
    )


def _comments(report: ReportRecord) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return [f"program {report.program}: {report.peak_bytes} bytes live at the peak on one device", versions]


class _Table:
    """Collects the strings, functions and stack frames of a pprof profile. Each is stored once, and samples refer to it
    by its index or id."""

    def __init__(self) -> None:
        self.strings: dict[str, int] = {"": 0}  # pprof requires the empty string first
        self.functions: list[bytes] = []
        self.locations: list[bytes] = []
        self._ids: dict[tuple[str, str, int], int] = {}

    def string_index(self, text: str) -> int:
        # Unpaired surrogates, which a damaged name may contain, cannot be encoded.
        return self.strings.setdefault(text.encode("utf-8", "replace").decode(), len(self.strings))

    def location_id(self, name: str, file: str, line: int) -> int:
        key = (name, file, line)
        if key not in self._ids:
            number = self._ids[key] = len(self._ids) + 1
            text = self.string_index(name)
            names = write_field(2, text) + write_field(3, text) + write_field(4, self.string_index(file))
            self.functions.append(write_field(5, write_field(1, number) + names))
            place = write_field(4, write_field(1, number) + write_field(2, line))
            self.locations.append(write_field(4, write_field(1, number) + place))
        return self._ids[key]


def _packed(field: int, values: list[int]) -> bytes:
    return write_field(field, b"".join(map(write_varint, values)))
