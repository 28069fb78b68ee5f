"""Binary formats by hand: protobuf fields, a profiler's trace, wandb's records."""

import struct
from pathlib import Path


def wandb_records(path: Path) -> list:
    """The records of a file *.wandb: LevelDB's log format after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # the end of a block holds no record
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


def varint(value):
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def field(number, value):
    """One protobuf field: an int as varint, bytes or str with their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def entry(number, key, *body):
    """An entry of one of a plane's maps."""
    return field(number, field(1, key) + field(2, b"".join(body)))


class Plane:
    """A plane of an XSpace under construction."""

    def __init__(self, name):
        self.name, self.kinds, self.stats, self.lines = name, {}, {}, []

    def stat(self, name, value):
        """A XStat: a number, a string, bytes, or "&text": a reference to a name."""
        kind = self.stats.setdefault(name, len(self.stats) + 1)
        if isinstance(value, str) and value.startswith("&"):
            return field(1, kind) + field(7, self.stats.setdefault(value[1:], len(self.stats) + 1))
        return field(1, kind) + field(6 if isinstance(value, bytes) else 5 if isinstance(value, str) else 4, value)

    def line(self, name, at_ns, *events):
        """Events: (name, offset, duration in ps, {stat: value})."""
        made = []
        for called, offset, length, stats in events:
            kind = self.kinds.setdefault(called, (len(self.kinds) + 1, b""))[0]
            made.append(
                field(
                    4,
                    field(1, kind)
                    + field(2, offset)
                    + field(3, length)
                    + b"".join(field(4, self.stat(*item)) for item in stats.items()),
                )
            )
        self.lines.append(field(3, field(2, name) + field(3, at_ns) + b"".join(made)))

    def bytes(self):
        kinds = [entry(4, key, field(1, key), field(2, name), more) for name, (key, more) in self.kinds.items()]
        stats = [entry(5, key, field(1, key), field(2, name)) for name, key in self.stats.items()]
        return field(1, b"".join([field(2, self.name), *self.lines, *kinds, *stats]))


def gpu_space(proto, named):
    """What a trace of one GPU holds; `named`: instruction names by what they are.

    Stats as XLA's device tracer writes them: references, scopes of calls joined by "::", kernels of a CUDA graph
    and copies without any.
    """
    module = {"hlo_module": "&jit_step", "program_id": 7, "correlation_id": 1}
    gpu = Plane("/device:GPU:0")
    gpu.line(
        "Stream #14(Compute)",
        1,
        ("gemm_kernel", 0, 300, {"hlo_op": f"&{named['dot']}", **module}),
        ("gemm_kernel", 400, 300, {"hlo_op": f"&while.1::{named['dot']}", **module}),
        (named["fusion"].replace(".", "_").replace("-", "_"), 700, 100, {"cuda_graph_id": 3}),
    )
    gpu.line("Stream #20(MemcpyH2D)", 1, ("MemcpyH2D", 600, 400, {"memcpy_details": "kind_src:pageable"}))
    gpu.line("Stream #21(Compute)", 1, ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 200, 200, {}))
    gpu.line("XLA Modules", 1, ("jit_step(7)", 0, 1000, {"hlo_op": "&jit_step", **module}))
    host = Plane("/host:CPU")
    host.line("python", 0, ("update", 500, 1500, {"step_num": 4, "_r": 1}), ("host/wait_for_data", 600, 400, {}))
    host.line("launcher", 0, ("cuLaunchKernel", 0, 900, {"hlo_op": f"&{named['dot']}", **module}))
    metadata = Plane("/host:metadata")
    metadata.kinds["jit_step(7)"] = (
        7,
        field(5, metadata.stat("Hlo Proto", proto)) + field(5, metadata.stat("program_id", 7)),
    )
    return b"".join(plane.bytes() for plane in (metadata, gpu, host))
