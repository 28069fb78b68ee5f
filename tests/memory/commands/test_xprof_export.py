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


# The part of pprof's profile.proto that is written: message -> (field, number, type); names in the plural are repeated.
MESSAGES = {
    "ValueType": (("type", 1, "int64"), ("unit", 2, "int64")),
    "Label": (("key", 1, "int64"), ("str", 2, "int64")),
    "Sample": (("location_ids", 1, "uint64"), ("values", 2, "int64"), ("labels", 3, "Label")),
    "Line": (("function_id", 1, "uint64"), ("line", 2, "int64")),
    "Location": (("id", 1, "uint64"), ("lines", 4, "Line")),
    "Function": (("id", 1, "uint64"), ("name", 2, "int64"), ("filename", 4, "int64")),
    "Profile": (
        ("types", 1, "ValueType"),
        ("samples", 2, "Sample"),
        ("locations", 4, "Location"),
        ("functions", 5, "Function"),
        ("strings", 6, "string"),
        ("period", 12, "int64"),
    ),
}


@pytest.fixture(scope="module")
def profile_class():
    """The message class of a profile, made by protobuf's own runtime."""
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2", reason="protobuf is not installed")
    from google.protobuf import descriptor_pool, message_factory

    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="p.proto", package="p", syntax="proto3")
    for message, rows in MESSAGES.items():
        declared = file.message_type.add(name=message)
        for name, number, type_name in rows:
            label = kind.LABEL_REPEATED if name.endswith("s") else kind.LABEL_OPTIONAL
            field = declared.field.add(name=name, number=number, label=label)
            if type_name in MESSAGES:
                field.type, field.type_name = kind.TYPE_MESSAGE, f".p.{type_name}"
            else:
                field.type = getattr(kind, f"TYPE_{type_name.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("p.Profile"))


@pytest.fixture
def decode(profile_class):
    """Returns a function that reads a profile: (bytes, names from the root, leaf's (file, line), labels) per sample."""

    def read(data):
        profile = profile_class.FromString(data)
        strings = list(profile.strings)
        functions = {one.id: one for one in profile.functions}
        lines = {one.id: one.lines[0] for one in profile.locations}
        samples = []
        for sample in profile.samples:
            frames = [functions[lines[number].function_id] for number in sample.location_ids]
            names = [strings[frame.name] for frame in reversed(frames)]
            leaf = (strings[frames[0].filename], lines[sample.location_ids[0]].line)
            labels = {strings[label.key]: strings[label.str] for label in sample.labels}
            samples.append((*sample.values, names, leaf, labels))
        units = [(strings[one.type], strings[one.unit]) for one in profile.types]
        assert (strings[0], units, profile.period) == ("", [("space", "bytes")], 1)
        return samples

    return read


def test_one_sample_per_buffer_at_the_peak_with_its_stack(decode):
    samples = decode(xprof_export_command.pprof(REPORT))
    assert [size for size, *_ in samples] == [2**40, 300, 7]
    assert sum(size for size, *_ in samples) == REPORT.peak_bytes
    _, names, leaf, labels = samples[1]
    assert names == ["workspace", "blocks", "mlp", "dot_general", "fusion.1"]
    assert leaf == ("model/mlp.py", 42)
    assert labels == {"phase": "backward", "dtype": "f32", "shape": "3x25"}
    assert samples[0][2] == ("nowhere", 0)
    assert samples[2][3]["checkpoint_name"] == "qkv é ?"


def test_files_for_each_viewer(tmp_path, decode):
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


def test_an_empty_report_is_a_valid_profile(decode):
    assert decode(xprof_export_command.pprof(ReportRecord(0, 0, {}))) == []
