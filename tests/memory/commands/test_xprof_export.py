"""Exports: what pprof and XProf open."""

import gzip

import pytest

from bytescope.memory.commands import xprof_export as xprof_export_command
from bytescope.memory.errors import ReportError
from bytescope.memory.records.report_record import Buffer, ReportRecord

BUFFERS = (
    Buffer(
        "fusion.1",
        300,
        (3, 25),
        "f32",
        "workspace",
        "backward",
        "mlp",
        "blocks/mlp",
        "jit(step)/transpose(jvp(blocks))/dot_general",
        "model/mlp.py:42",
        at_peak=True,
    ),
    Buffer("params['w']", 2**40, (2**19, 2**20), "bf16", "params", "argument", source="nowhere", at_peak=True),
    Buffer("named", 7, category="residuals", checkpoint_name="qkv é \ud800", at_peak=True),
    Buffer("dead", 5, at_peak=False),
    Buffer("host", 9, at_peak=True, memory="host"),
)
REPORT = ReportRecord(2**40 + 307, 2**40 + 307, {}, buffers=BUFFERS, program="jit_step", versions={"jax": "1"})


def fields(message):
    """(field number, value) of a protobuf message: ints for varints, bytes for the rest."""
    at, out = 0, []

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            out.append((key >> 3, varint()))
        else:
            assert key & 7 == 2
            size = varint()
            out.append((key >> 3, message[at : at + size]))
            at += size
    assert at == len(message)
    return out


def many(message, number):
    return [value for field, value in fields(message) if field == number]


def unpack(packed):
    return [value for _, value in fields(b"".join(b"\x08" + group for group in _groups(packed)))]


def _groups(packed):
    group = b""
    for byte in packed:
        group += bytes([byte])
        if byte < 0x80:
            yield group
            group = b""


def decode(profile):
    """Samples of a pprof profile as (bytes, names from the root, leaf's (file, line), labels)."""
    strings = [text.decode() for text in many(profile, 6)]
    assert strings[0] == ""
    functions = {dict(fields(f))[1]: dict(fields(f)) for f in many(profile, 5)}
    locations = {dict(fields(loc))[1]: dict(fields(dict(fields(loc))[4])) for loc in many(profile, 4)}
    out = []
    for sample in many(profile, 2):
        frames = [locations[number] for number in unpack(many(sample, 1)[0])]
        names = [strings[functions[frame[1]][2]] for frame in frames]
        leaf = (strings[functions[frames[0][1]][4]], frames[0][2])
        pairs = [dict(fields(label)) for label in many(sample, 3)]
        labels = {strings[pair[1]]: strings[pair[2]] for pair in pairs}
        out.append((unpack(many(sample, 2)[0])[0], names[::-1], leaf, labels))
    unit = dict(fields(many(profile, 1)[0]))
    assert (strings[unit[1]], strings[unit[2]]) == ("space", "bytes")
    return out


def test_one_sample_per_buffer_at_the_peak_with_its_stack():
    samples = decode(xprof_export_command.pprof(REPORT))
    assert [size for size, *_ in samples] == [2**40, 300, 7]
    assert sum(size for size, *_ in samples) == REPORT.peak_bytes
    _, names, leaf, labels = samples[1]
    assert names == ["workspace", "blocks", "mlp", "dot_general", "fusion.1"]
    assert leaf == ("model/mlp.py", 42)
    assert labels == {"phase": "backward", "dtype": "f32", "shape": "3x25"}
    assert samples[0][2] == ("nowhere", 0)
    assert samples[2][3]["checkpoint_name"] == "qkv é ?"


def test_an_independent_decoder_agrees():
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2", reason="protobuf is not installed")
    from google.protobuf import descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="p.proto", package="p", syntax="proto3")
    sample = file.message_type.add(name="Sample")
    profile = file.message_type.add(name="Profile")
    kind = descriptor_pb2.FieldDescriptorProto
    sample.field.add(name="location_id", number=1, type=kind.TYPE_UINT64, label=kind.LABEL_REPEATED)
    sample.field.add(name="value", number=2, type=kind.TYPE_INT64, label=kind.LABEL_REPEATED)
    profile.field.add(name="sample", number=2, type=kind.TYPE_MESSAGE, label=kind.LABEL_REPEATED, type_name=".p.Sample")
    profile.field.add(name="strings", number=6, type=kind.TYPE_STRING, label=kind.LABEL_REPEATED)
    profile.field.add(name="period", number=12, type=kind.TYPE_INT64, label=kind.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("p.Profile"))
    read = message.FromString(xprof_export_command.pprof(REPORT))
    assert [list(s.value) for s in read.sample] == [[2**40], [300], [7]]
    assert read.strings[0] == "" and "dot_general" in read.strings and read.period == 1


def test_files_for_each_viewer(tmp_path):
    written = xprof_export_command.export(tmp_path / "new", REPORT, hlo_proto=b"\x0a\x00")
    assert [path.name for path in written] == ["m.hlo_proto.pb", "h.xplane.pb", "memory.pprof.gz"]
    assert [path.stat().st_size for path in written[:2]] == [2, 0]
    assert decode(gzip.decompress(written[2].read_bytes()))
    assert xprof_export_command.export(tmp_path, REPORT)[0].read_bytes() == written[2].read_bytes()  # reproducible
    assert len(xprof_export_command.export(tmp_path, hlo_proto=b"x")) == 2


def test_nothing_to_write_and_nowhere_to_write_it(tmp_path):
    with pytest.raises(ReportError, match="nothing to export"):
        xprof_export_command.export(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="cannot write"):
        xprof_export_command.export(tmp_path / "file", REPORT)


def test_an_empty_report_is_a_valid_profile():
    assert decode(xprof_export_command.pprof(ReportRecord(0, 0, {}))) == []
