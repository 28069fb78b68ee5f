"""Binary formats by hand: protobuf fields, TensorBoard's event files as its reader shows them, wandb's records."""

import struct
import warnings
from pathlib import Path

START = 1  # SessionLog.START: what an earlier start wrote at this step and later is hidden


def _records(path: Path):
    """The records of a TFRecord file, up to one that a kill has cut short."""
    data, at = path.read_bytes(), 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        if at + 16 + size > len(data):
            return
        yield data[at + 12:at + 12 + size]
        at += 16 + size


def shown(folder: Path) -> dict[str, list]:
    """Tag -> (step, value) of every summary that a viewer shows; the value of a scalar is its number, that of a text
    its bytes, that of another plugin's the plugin's content."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of protobuf's, about its own generated code
        from tensorboardX.proto.event_pb2 import Event
    found: dict[str, list] = {}
    for path in sorted(folder.iterdir()):
        for record in _records(path):
            event = Event.FromString(record)
            if event.session_log.status == START:
                found = {tag: [pair for pair in pairs if pair[0] < event.step] for tag, pairs in found.items()}
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, _value(value)))
    return {tag: pairs for tag, pairs in found.items() if pairs}


def _value(value):
    if value.HasField("simple_value"):
        return value.simple_value
    return value.tensor.string_val[0] if value.tensor.string_val else value.metadata.plugin_data.content


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
        parts += data[at + 7:at + 7 + size]
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
