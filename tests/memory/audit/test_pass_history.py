"""The pass of XLA's compiler that undid a recomputation or an offload, from dumps after each pass."""

import jax
import jax.numpy as jnp
import pytest

from bytescope import memory
from bytescope.memory.audit.pass_history import PassDump, list_passes, undoing_pass, with_passes
from bytescope.memory.devices.compiler import pass_dumps
from bytescope.memory.errors import ReportError
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


def test_the_pass_that_removes_a_move_to_the_host(tmp_path):
    array = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    (row,) = rows_with_passes(tmp_path, round_trip, (array,), "h200")
    assert row.undone_by == "offloader" and row.compiler_pass == "post-layout_assignment/algsimp", row


@pytest.mark.quick
def test_the_pass_with_most_removals(tmp_path, monkeypatch):
    counts = iter([12, 10, 10, 4, 5, 3])
    history = [PassDump(at, "simplification", name, tmp_path) for at, name in enumerate("abacba")]
    monkeypatch.setattr("bytescope.memory.audit.pass_history._read", lambda path: None)
    assert undoing_pass(history, lambda module: next(counts)) == "simplification/c"
    assert undoing_pass(history[:1], lambda module: 1) == undoing_pass([], lambda module: 1) == ""


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
        undoing_pass(dumps, lambda module: 1)
    assert list_passes(tmp_path / "..") == []
