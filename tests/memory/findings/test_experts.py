"""Empty rows of experts: by hand for every exchange, and the remedy compiled on eight simulated devices."""

import dataclasses

import pytest

from bytescope.memory.analysis import report_of
from bytescope.memory.findings import expert_findings as rule
from bytescope.memory.records.report_record import ROWS, Buffer, ReportRecord
from bytescope.memory.units import MIB
from bytescope.model.experts.exchange import EXCHANGES
from bytescope.model.names import NAMES
from bytescope.model.placement import Peers
from bytescope.train.plan.advice import open_levers
from bytescope.train.plan.lever_catalogue import case_of
from bytescope.train.program.config_files import flatten
from support.facts import NOTHING, facts_of, findings_of
from support.toy import small_config, small_program

MOE = {
    "model.experts": 8,
    "model.experts_per_token": 2,
    "model.d_expert": 256,
    "model.n_layers": 2,
    "batch.micro": 8,
    "remat.policy": "none",
    "mesh.expert": 8,
}


def room_of(report):
    """The room for rows of a device under the config of a report."""
    shape = case_of(report).routing
    return rule.room_for(*shape) if shape else None


def smaller(report):
    """The next smaller room."""
    shape = case_of(report).routing
    return rule.smaller_room(*shape) if shape else None


def made(buffers=(), peak=100 * MIB, n_devices=8, **keys):
    """A report made by hand of a step with experts."""
    config = flatten(small_config({**MOE, **{key.replace("__", "."): value for key, value in keys.items()}}))
    target = {"platform": "cuda", "n_devices": n_devices}
    return ReportRecord(peak, peak, dict.fromkeys(ROWS, 10 * MIB), buffers=tuple(buffers), config=config, target=target)


def row(shape, module="blocks/mlp/experts", size=20 * MIB):
    return Buffer("a", size, shape, "bfloat16", "residuals", module=module, at_peak=True)


@pytest.mark.parametrize(
    "keys, exchange, factor",
    [
        ({}, "ragged_all_to_all", 0.0),
        ({}, "allgather", 0.0),
        ({"model__capacity_factor": 2}, "allgather", 2.0),
        ({"model__moe_kernel": "capacity"}, "all_to_all", 1.25),
        ({"mesh__expert": 1}, "local", 0.0),
    ],
)
def test_the_room_is_the_trainers(keys, exchange, factor):
    room = room_of(made(**keys))
    peers = Peers("expert", 1 if exchange == "local" else 8)
    assert room.rows == EXCHANGES[exchange].shape(8 * 32, 2, 8, factor, 0, peers).rows
    assert room.filled == 8 * 32 * 2


def test_the_next_smaller_room():
    """Without a factor as many rows as all peers could send; on a device with all experts nothing is to be had."""
    assert smaller(made())[0] == 2.0
    assert smaller(made(model__capacity_factor=2))[0] == 1.25
    assert smaller(made(model__moe_kernel="capacity")) is None
    assert smaller(made(mesh__expert=1)) is None
    assert room_of(made(model__experts=0)) is room_of(made(model__moe_kernel="dense")) is None
    dropping = [lever for lever in open_levers(made()) if "model.capacity_factor" in lever.keys]
    assert [lever.curve for lever in dropping] == [False] and "are dropped" in dropping[0].costs
    assert not [lever for lever in open_levers(made(model__experts=0)) if "model.capacity_factor" in lever.keys]


def test_rows_are_told_by_shape_and_scope():
    rows = room_of(made()).rows
    found = [
        row((2, rows, 256)),
        row((rows // 64, 64, 32), "blocks/mlp/dispatch"),
        row((rows, 32), "blocks/attention"),
        row((rows + 1, 256)),
        dataclasses.replace(row((rows, 256)), at_peak=False),
    ]
    (one,) = [each for each in findings_of(made(found)) if each.kind == "empty_expert_rows"]
    assert one.bytes == int(40 * MIB * (1 - 512 / rows))
    assert (
        "(dispatch 20.00 MiB, experts 20.00 MiB)" in one.message and f"a device allocates {rows:,} rows" in one.message
    )
    assert one.flags == "--config.model.capacity_factor=2"
    assert "empty_expert_rows" not in {each.kind for each in findings_of(made(found[2:]))}
    assert rule.empty_expert_rows(made(found), NOTHING) is None


@pytest.mark.exhaustive
def test_the_remedy_frees_what_it_says(monkeypatch):
    """Compiled: rows of the never-dropping exchange, and those of twice the mean."""
    monkeypatch.setattr(rule, "TOY", 0)
    monkeypatch.setattr(rule, "NOTABLE", 0.0)

    def compiled(**keys):
        overrides = {**MOE, **keys}
        program = small_program(overrides, 8)
        config, facts = flatten(small_config(overrides)), facts_of(program)
        return report_of(program.compile_for_report(), config=config, facts=facts, names=NAMES)

    before, after = compiled(), compiled(**{"model.capacity_factor": 2})
    (finding,) = [each for each in before.findings if each.kind == "empty_expert_rows"]
    now, then = (room_of(report).rows for report in (before, after))
    assert finding.bytes > 0.3 * before.peak_bytes
    held = finding.bytes / room_of(before).empty
    freed = before.peak_bytes - after.peak_bytes
    assert freed == pytest.approx(held * (1 - then / now), rel=0.15)
