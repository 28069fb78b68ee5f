"""XLA's dumps on disk: packed, in folders, as text; and the platform that a proto was compiled for."""

import gzip

import pytest

from bytescope import memory
from bytescope.memory.analysis import report_of
from bytescope.memory.hlo import dumps
from bytescope.memory.program.compilation import compiled_for
from support.formats import field

pytestmark = pytest.mark.quick


def proto(size, mark="", name="jit_step"):
    """An HloProto of one parameter in an allocation of `size` bytes; `mark`: in its backend config."""
    shape = field(2, 11) + field(3, size // 4)
    parameter = field(1, "p") + field(2, "parameter") + field(3, shape) + field(35, 1) + field(43, mark)
    computation = field(1, "main") + field(2, parameter) + field(5, 1) + field(6, 1)
    module = field(1, name) + field(2, "main") + field(3, computation) + field(6, 1)
    buffer = field(1, 1) + field(2, size) + field(3, field(4, 1))
    assigned = field(1, 1) + field(2, 0) + field(3, size)
    allocation = field(1, 0) + field(2, size) + field(5, 1) + field(6, 0) + field(7, 1) + field(9, assigned)
    return field(1, module) + field(3, field(1, buffer) + field(3, allocation))


GPU, CPU, TPU = '{"operation_queue_id":"0"}', '{"outer_dimension_partitions":[]}', '{"flag_configs":[]}'


def test_a_packed_proto_is_the_proto(tmp_path):
    (plain := tmp_path / "a.after_optimizations.hlo.pb").write_bytes(proto(4096))
    (packed := tmp_path / "b.after_optimizations.hlo.pb.gz").write_bytes(gzip.compress(proto(4096)))
    report = memory.analyze(plain)
    assert report.allocated_bytes == 4096
    assert memory.analyze(packed) == memory.analyze(packed.read_bytes()) == report
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(memory.ReportError, match=r"b\.after.*is damaged"):
        memory.analyze(packed)


def test_of_a_folder_the_largest_by_its_buffers(tmp_path):
    """Not by the size of its file, and however it is packed; the others are listed."""
    sizes = {"a": 400, "b": 4096, "c": 80}
    for name, size in sizes.items():
        (tmp_path / f"m.{name}.cpu_after_optimizations.hlo.pb").write_bytes(proto(size, name="x" * (9000 // size)))
    (tmp_path / "m.b.cpu_after_optimizations.hlo.pb").rename(tmp_path / "m.b.cpu_after_optimizations.hlo.pb.gz")
    packed = tmp_path / "m.b.cpu_after_optimizations.hlo.pb.gz"
    packed.write_bytes(gzip.compress(packed.read_bytes()))
    (tmp_path / "m.d.cpu_after_optimizations.hlo.pb").write_bytes(b"cut off")
    (tmp_path / "m.e.before_optimizations.hlo.pb").write_bytes(proto(9999))
    report = memory.analyze(tmp_path)
    assert report.allocated_bytes == 4096
    assert [note for note in report.notes if "largest" in note] == [
        f"the largest of 3 programs in {tmp_path}: m.b.cpu_after_optimizations.hlo.pb.gz, 4.00 KiB of buffers; the "
        "others: m.a.cpu_after_optimizations.hlo.pb 400 B, m.c.cpu_after_optimizations.hlo.pb 80 B"
    ]
    assert "damaged and left out: m.d.cpu_after_optimizations.hlo.pb" in report.notes


def test_a_folder_without_programs(tmp_path):
    with pytest.raises(memory.ReportError, match=r"no \*after_optimizations.hlo.pb in .*xla_dump_hlo_as_proto"):
        memory.analyze(tmp_path)
    (tmp_path / "m.after_optimizations.hlo.pb").write_bytes(b"\xff" * 9)
    with pytest.raises(memory.ReportError, match=r"m\.after_optimizations\.hlo\.pb is damaged: .*(protobuf|varint)"):
        memory.analyze(tmp_path)
    (tmp_path / "n.after_optimizations.hlo.pb.gz").write_bytes(gzip.compress(proto(4096))[:-9])
    with pytest.raises(memory.ReportError, match=r"m\.after.* is damaged: .*; damaged too: n\.after"):
        memory.analyze(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "HloModule jit_step, is_scheduled=true\n",
        "\n// a comment\nHloModule m\n",
        "module @jit_step attributes {mhlo.num_partitions = 1 : i32} {\n",
        "#loc = loc(unknown)\nmodule @jit_step {\n",
    ],
)
def test_text_is_told_how_to_dump_the_proto(tmp_path, text):
    (path := tmp_path / "m.after_optimizations.txt").write_text(text)
    for given in (path, text.encode()):
        with pytest.raises(memory.ReportError, match="HLO as text.*--xla_dump_hlo_as_proto") as refused:
            memory.analyze(given)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("mark", "platform", "named"), [(GPU, "gpu", "a GPU"), (CPU, "cpu", "the CPU"), (TPU, "tpu", "a TPU"), ("", "", "")]
)
def test_a_dump_names_its_platform(mark, platform, named):
    data = proto(4096, mark)
    assert dumps.platform_of(data) == platform
    note = " ".join(memory.analyze(data).notes)
    assert f"compiled for {named}" in note if named else "compiled for" not in note


@pytest.mark.parametrize(
    ("mark", "target", "judged"),
    [
        (GPU, "h200", True),
        (CPU, "h200", False),
        (GPU, "cpu:1", False),
        (TPU, "h200", False),
        (TPU, "v5e", True),
        (CPU, "cpu:1", True),
        ("", "h200", True),
    ],
)
def test_another_platform_does_not_judge_a_dump(mark, target, judged):
    compilation, found = compiled_for(proto(4096, mark), target=target)
    report = report_of(compilation, target=found)
    assert (report.verdict, report.limit_bytes is not None) == ("fits" if judged else "unknown", judged)
    assert judged != any(f"not compared with {target}, " in note for note in report.notes)
