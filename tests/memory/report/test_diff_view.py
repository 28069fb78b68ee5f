"""The difference of two reports: sizes, seconds and what differs between the programs."""

import re

import pytest

from bytescope.memory.__main__ import main
from bytescope.memory.records import report_diff
from bytescope.memory.records.parallel_records import Communication
from bytescope.memory.records.report_record import Buffer, Description, ReportRecord, TimelinePoint
from bytescope.memory.report import difference
from bytescope.memory.view import draw_terminal
from bytescope.memory.view.console import plain_text

GIB = 2**30


def taken(seconds):
    """The JSON of a prediction."""
    return {
        "seconds": seconds,
        "seconds_low": 0.5,
        "seconds_high": 9.0,
        "by_phase": {},
        "by_term": {},
        "bound_by": "products",
        "rates": "by hand",
    }


def make_report(residuals=4, gradients=2, *, points=40, target="h100:8", jax="0.10.2", **more):
    """A report of params, residuals and gradients in GiB, whose peak is in the middle of its schedule."""
    sizes = {"params": 8 * GIB, "residuals": residuals * GIB, "gradients": gradients * GIB, "fragmentation": GIB}
    peak = sum(sizes.values()) - GIB
    named = {"gate": residuals * GIB} if residuals else {}
    buffers = tuple(
        Buffer(f"b.{row}", size, (size,), "u8", row, "forward", "mlp", "blocks/mlp", end=points, at_peak=True)
        for row, size in sizes.items()
        if size and row != "fragmentation"
    )
    middle = points // 2
    line = tuple(
        TimelinePoint(i, peak if i == middle else peak // 2, "forward" if i < middle else "backward", f"op.{i}")
        for i in range(points)
    )
    fields = {
        "timeline": line,
        "peak_index": middle,
        "workspace_by_scope": {"backward/mlp": 5},
        "program": "jit_step",
        "limit_bytes": 72 * GIB,
        "fits": True,
        "verdict": "fits",
        "target": {"name": target, "kind": "NVIDIA"},
        "subject": Description("tiny", batch="16 sequences"),
        "versions": {"jax": jax},
        "config": {"remat": {"policy": "none"}, "seed": 0},
        "roofline": {"total": 1.0},
        "prediction": taken(2.0),
    }
    return ReportRecord(peak, peak + GIB, sizes, **{"buffers": buffers, "residuals_by_name": named, **fields, **more})


BEFORE = make_report()
AFTER = make_report(
    residuals=0,
    gradients=3,
    points=1000,
    config={"remat": {"policy": "full"}, "seed": 0},
    roofline={"total": 1.5},
    prediction=taken(2.5),
    workspace_by_scope={"backward/mlp": 9},
)


def test_the_command_reads_files_and_run_directories(tmp_path, capsys):
    for name, report in (("a.json", BEFORE), ("b.json", AFTER)):
        report.save(tmp_path / name)
    assert main(["diff", *(str(tmp_path / name) for name in ("a.json", "b.json")), "--fail-above=90"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"category residuals +4.00 GiB +0 B +-4.00 GiB +-100.0", printed)
    assert re.search(r"update, predicted +2.00 s +2.50 s +\+0.500 s +\+25.0", printed)
    for name, report in (("one", BEFORE), ("two", AFTER)):
        (tmp_path / name).mkdir()
        report.save(tmp_path / name / "memory.json")
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target": "h200"}, "different targets, h100:8 and h200"),
        ({"jax": "0.12.0"}, "jax, 0.10.2 and 0.12.0"),
        ({"method": "schedule"}, "derived from the schedule"),
    ],
)
def test_what_cannot_be_compared_is_said(change, said):
    after = make_report(**change)
    printed = plain_text(draw_terminal.draw(difference.document(BEFORE, after, report_diff.diff(BEFORE, after))), 200)
    assert said in printed and printed.count("warning:") == 1


@pytest.mark.parametrize("seconds", [10**400, float("nan"), -1, None, "2"])
def test_seconds_that_are_none_are_left_out(seconds):
    after = make_report(roofline={"total": seconds}, prediction={"seconds": seconds})
    assert "update, predicted" not in [row.name for row in report_diff.measures(BEFORE, after)]


def test_buffers_of_another_program_are_matched_by_role_and_shape():
    def program(op, size):
        gradient = Buffer("b", size, (size,), "u8", "gradients", "backward", op, f"{op}/dot", at_peak=True)
        return make_report(residuals=0, gradients=0, buffers=(gradient,), points=0)

    def rows(before, after):
        return [(c.name, c.growth) for c in report_diff.diff(before, after) if c.kind == "buffer"]

    assert rows(program("layers.0", 5), program("decoder", 5)) == []
    grown = rows(program("layers.0", 5), program("decoder", 7))
    assert sorted(growth for _, growth in grown) == [-5, 7], "another shape is another buffer"


def test_seconds_flops_and_traffic_are_compared():
    def measured(seconds, flops, sent):
        row = Communication("all-gather", ("fsdp",), 8, 2, 9, sent, 0)
        terms = {"by_term": {"products": 1.0, "collectives": seconds - 1}}
        return make_report(
            prediction=taken(seconds) | terms,
            work={"forward": {"flops": {"bf16": flops}}, "recompute": {"flops": {"bf16": flops // 2}}},
            communication=(row,),
        )

    before, after = measured(2.0, 10**12, 7), measured(3.0, 2 * 10**12, 21)
    rows = {row.name: (row.unit, row.before, row.after) for row in report_diff.measures(before, after)}
    assert rows == {
        "update, predicted": ("seconds", 2.0, 3.0),
        "spent on products": ("seconds", 1.0, 1.0),
        "spent on collectives": ("seconds", 1.0, 2.0),
        "FLOPs": ("FLOPs", 1.5e12, 3e12),
        "recomputed FLOPs": ("FLOPs", 0.5e12, 1e12),
        "sent by all-gather over fsdp": ("bytes", 7, 21),
    }
    printed = plain_text(draw_terminal.draw(difference.document(before, after, report_diff.diff(before, after))), 100)
    assert re.search(r"update, predicted +2.00 s +3.00 s +\+1.00 s +\+50.0\n", printed)
    assert re.search(r"spent on products +1.00 s +1.00 s +unchanged\n", printed)
    assert re.search(r"sent by all-gather over fsdp +7 B +21 B +\+14 B +\+200.0", printed)
