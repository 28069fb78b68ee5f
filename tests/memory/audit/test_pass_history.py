"""The pass of XLA's compiler that undid a recomputation or an offload, from dumps after each pass."""

import jax
import jax.numpy as jnp
import pytest

from bytescope import memory
from bytescope.memory.audit import pass_history
from bytescope.memory.audit.pass_history import PassDump, _Counted, changing_passes, list_passes, with_passes
from bytescope.memory.devices.compiler import pass_dumps
from bytescope.memory.errors import ReportError
from bytescope.memory.records.audit_record import AuditRow
from bytescope.memory.report import audit_view
from support import checkpoint_programs as programs
from support.oracles import require


def round_trip(x):
    held = jax.device_put(jnp.sin(x), jax.memory.Space.Host)
    return (x @ x.T) @ x + jax.device_put(held, jax.memory.Space.Device)


def rows_with_passes(folder, step, arguments, target):
    require("cuda")
    with pass_dumps(folder):
        report = memory.analyze(step, *arguments, target=target)
    return [row for row in with_passes(report.audit, folder) if row.honored is False and row.kind != "name"]


def test_cse_merges_unrolled_layers(tmp_path):
    (row,) = rows_with_passes(tmp_path, *programs.unrolled(prevent_cse=False), "h100")
    assert row.undone_by == "cse" and row.compiler_pass.endswith("/cse"), row
    numbers = [dump.number for dump in list_passes(tmp_path)]
    assert numbers == sorted(numbers) and len(numbers) > 20


@pytest.mark.exhaustive
@pytest.mark.oracle("tpu")
def test_cse_on_a_tpu(tmp_path, monkeypatch):
    """XLA:TPU keeps the metadata of the recomputation, so that its source lines do not show what was merged. Smaller
    values are in the on-chip memory, and waste no device memory."""
    for name, size in (("ROWS", 2**15), ("WIDTH", 512), ("HIDDEN", 2048)):
        monkeypatch.setattr(programs, name, size)
    with pass_dumps(tmp_path):
        step, arguments = programs.unrolled(prevent_cse=False)
        report = memory.analyze(step, *arguments, target="v5e:1x1")
    rows = with_passes(report.audit, tmp_path)
    assert {(row.kind, row.done, row.compiler_pass) for row in rows} == {
        ("checkpoint", "kept", "simplification-1/cse"),
        ("name", "kept", "simplification-1/cse"),
    }


def test_the_pass_that_removes_a_move_to_the_host(tmp_path):
    array = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    (row,) = rows_with_passes(tmp_path, round_trip, (array,), "h200")
    assert row.undone_by == "offloader" and row.compiler_pass == "post-layout_assignment/algsimp", row


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_the_pass_that_copies_a_donated_array(tmp_path):
    def step(state, x):
        return state - x.sum(), state

    shapes = [jax.ShapeDtypeStruct((rows, 2048), jnp.float32) for rows in (2048, 1024)]
    with pass_dumps(tmp_path):
        report = memory.analyze(step, *shapes, target="cpu:1", donate_argnums=(0, 1))
    rows = [row for row in report.audit if row.honored is False]
    named = {row.undone_by: row for row in with_passes(rows, tmp_path)}
    assert named["copies"].compiler_pass == "copy-insertion/adding_copies_to_resolve_interference"
    assert named["lowering"].compiler_pass == ""  # jax drops the donation of x before XLA runs
    assert [row.inferred for row in rows] == [True, True] and not named["copies"].inferred
    column = next(column for column in audit_view.COLUMNS if column.key == "undone_by")
    assert {column.read(row) for row in rows} == {"copies (inferred)", "lowering (inferred)"}
    assert column.read(named["copies"]) == named["copies"].compiler_pass


@pytest.mark.quick
def test_a_merged_name_has_the_pass_of_its_function(tmp_path, monkeypatch):
    monkeypatch.setattr(pass_history, "changing_passes", lambda history, counted: [f"p/{len(counted)}"] * len(counted))
    merged = AuditRow("checkpoint", "layer", "/w/m.py:3", "recompute", "kept", undone_by="cse")
    name = AuditRow("name", "hidden", "/w/m.py:2", "recompute", "kept", undone_by="cse")
    missing = AuditRow("name", "hiden", "/w/m.py:2", "save", "ignored", undone_by="tracing")
    rows = with_passes([name, merged, missing], tmp_path)
    assert [row.compiler_pass for row in rows] == ["p/1", "p/1", ""] and not any(row.inferred for row in rows)
    assert [row.compiler_pass for row in with_passes([name, missing], tmp_path)] == ["", ""]


@pytest.mark.quick
def test_the_pass_with_most_changes(tmp_path, monkeypatch):
    def passes(numbers, history, added=False):
        counts = iter(numbers)
        return changing_passes(history, [_Counted(lambda module: next(counts), added)])

    history = [PassDump(at, "simplification", name, tmp_path) for at, name in enumerate("abacba")]
    monkeypatch.setattr(pass_history, "_read", lambda path: None)
    assert passes([12, 10, 10, 4, 5, 3], history) == ["simplification/c"]
    assert passes([12, 10, 10, 4, 5, 3], history, added=True) == ["simplification/b"]
    assert passes([1], history[:1]) == passes([], []) == [""]


@pytest.mark.quick
def test_files_of_passes(tmp_path):
    for name in (
        "module_0001.jit_step.0012.simplification.after_cse.before_dce.hlo.pb",
        "module_0001.jit_step.0003.optimization.after_pipeline-start.before_x.hlo.pb",
        "module_0001.jit_step.0059.copy-insertion.after_removing_unnecessary_copies.hlo.pb",
        "module_0002.fused_slice.5.0000.cublaslt.after_pipeline-start.before_y.hlo.pb",
        "module_0001.jit_step.1.ptx",
    ):
        (tmp_path / name).write_bytes(b"\x0a\xff" * (1 if "0002" in name else 40))
    dumps = list_passes(tmp_path)
    assert [(dump.number, dump.name) for dump in dumps] == [
        (3, "pipeline-start"),
        (12, "cse"),
        (59, "removing_unnecessary_copies"),
    ]
    with pytest.raises(ReportError, match="module_0001.jit_step.0003"):
        changing_passes(dumps, [_Counted(lambda module: 1)])
    assert list_passes(tmp_path / "..") == []
