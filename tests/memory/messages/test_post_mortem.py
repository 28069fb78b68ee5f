"""Where a step ran out of memory: what is said of it, and the cheapest ways out, on hand-made reports."""

import dataclasses
import io
import json
import random

import pytest
from rich.console import Console

from bytescope.memory.findings import finding_rules
from bytescope.memory.messages import explanation_document
from bytescope.memory.messages.explanation import explain
from bytescope.memory.messages.post_mortem import _BATCH, HeldArrays, PostMortem, memory_sum, ways_out
from bytescope.memory.records import report_record
from bytescope.memory.records.report_record import ROWS, AuditRow, Buffer, Finding, ReportRecord
from bytescope.memory.report import report_page
from bytescope.memory.units import GIB, MIB
from bytescope.memory.view import draw_terminal
from bytescope.memory.view.console import plain_text
from bytescope.memory.view.document import Bars
from support import memory_messages

pytestmark = pytest.mark.quick

KEPT = Buffer(
    "fusion.1",
    6 * GIB,
    (2, 3),
    "float32",
    "residuals",
    "backward",
    module="Decoder/layer_3",
    source="model.py:12",
    at_peak=True,
)
WIDE = Buffer("dot.2", 3 * GIB, (512, 1024), "bfloat16", "workspace", "forward", source="model.py:40", at_peak=True)


def report_of(*buffers, **fields):
    rows = dict.fromkeys(ROWS, 0)
    for buffer in buffers:
        rows[buffer.category] += buffer.bytes
    size = sum(rows.values())
    return ReportRecord(size, size, rows, buffers=buffers, limit_bytes=8 * GIB, **fields)


def test_a_foreign_program_has_its_findings_then_recomputation_then_parts():
    small = Finding("tiny", MIB, "next to nothing", "do nothing")
    donated = Finding("not_donated", 2 * GIB, "2 GiB of state is not donated", "donate argument 0")
    found = ways_out(report_of(KEPT, WIDE, findings=(small, donated)))
    assert [way.bytes for way in found] == [2 * GIB, 6 * GIB, 3 * GIB]
    assert found[0].words == "donate argument 0 (2 GiB of state is not donated)"
    assert found[1].words == (
        "use jax.checkpoint for Decoder/layer_3, which saves this for the backward pass, most of it from model.py:12"
    )
    assert found[2].words.startswith("compute bfloat16[512,1024] of model.py:40 in parts")
    alone = ways_out(report_of(dataclasses.replace(WIDE, source="")))
    assert [(way.bytes, way.words.partition(",")[0]) for way in alone] == [(3 * GIB // 2, "reduce the batch")]


def test_no_finding_that_takes_more_memory_and_none_said_twice():
    spare = Finding("spare_memory", 5 * GIB, "5 GiB are free", "keep more")
    saves = Finding("checkpoint_saves", 4 * GIB, "Decoder keeps 6 GiB", "wrap Decoder in jax.checkpoint")
    found = ways_out(report_of(KEPT, findings=(spare, saves)))
    assert [way.words.partition(" (")[0] for way in found] == ["wrap Decoder in jax.checkpoint", _BATCH]
    assert {spare.kind, saves.kind} <= {rule.__name__ for rule in finding_rules.RULES}, "the findings are called so"


def test_a_function_that_is_recomputed_already_is_not_proposed_for_it():
    kept = dataclasses.replace(KEPT, module="layer()")
    asked = AuditRow("checkpoint", "layer", "model.py:12", "recompute", "recomputed")
    assert [way.words for way in ways_out(report_of(kept, audit=(asked,)))] == [_BATCH]
    merged = dataclasses.replace(asked, done="kept")
    assert ways_out(report_of(kept, audit=(merged,)))[0].words.startswith("use jax.checkpoint for layer()")


def test_attention_scores_are_not_computed_in_parts():
    name = "jit(f)/jvp(D)/attn/bqhd,bkhd->bhqk/dot_general"
    scores = dataclasses.replace(WIDE, shape=(8, 512, 512), op_name=name)
    flash, checkpoint, parts = ways_out(report_of(KEPT, scores, dataclasses.replace(WIDE, source="other.py:3")))
    assert 'jax.nn.dot_product_attention(..., implementation="cudnn")' in flash.words and flash.bytes == 3 * GIB
    assert "jax.checkpoint" in checkpoint.words and "of other.py:3 in parts" in parts.words


def test_what_the_step_does_not_need_comes_first():
    held = (HeldArrays((8, 8), "float32", 3, 3 * GIB, 2, 2 * GIB), HeldArrays((), "int32", 5, 20, 5, 20))
    first, *_ = ways_out(report_of(KEPT), held)
    assert (
        first.bytes == 2 * GIB + 20
        and "delete 7 live arrays" in first.words
        and "2 of them float32[8,8]" in first.words
    )
    only = ways_out(None, (HeldArrays((4,), "int32", 1, 16, 1, 16),))
    assert len(only) == 1 and only[0].words.startswith(
        "delete a live array that is not an argument of the step, int32[4]:"
    )
    assert "delete" not in str(ways_out(report_of(KEPT), (HeldArrays((), "int32", 5, 20, 5, 20),)))


@pytest.mark.parametrize(("pool", "told"), [(60 * GIB, True), (73 * GIB, False), (0, False)])
def test_a_pool_that_leaves_a_quarter_of_the_card_idle(pool, told):
    ways = ways_out(report_of(KEPT, target={"device_memory_bytes": 80 * GIB}), pool=pool)
    assert (
        ways[0].words.startswith("set XLA_CLIENT_MEM_FRACTION=0.92") and ways[0].bytes == int(0.92 * 80 * GIB) - pool
    ) is told


@pytest.mark.parametrize("width", [80, 100, 160])
def test_it_is_one_screen_whatever_is_held(width):
    long = "x" * 300
    held = tuple(
        HeldArrays((number,), f"{long}{number}", 4, number * MIB, 2, number * MIB // 2) for number in range(50, 0, -1)
    )
    found = PostMortem(
        f"step[/b]\n\x1b[31m{long[:40]}",
        312,
        f"RESOURCE_EXHAUSTED: {long}",
        "NVIDIA H200",
        held,
        {
            "bytes_in_use": 7 * GIB,
            "bytes_limit": 8 * GIB,
            "largest_free_block_bytes": MIB,
            "largest_alloc_size": GIB,
            "num_allocs": 3,
            "peak_bytes_in_use": 8 * GIB,
        },
        report_of(
            KEPT,
            WIDE,
            residuals_by_name={f"{long}{n}": 6 * GIB // (n + 1) for n in range(9)},
            findings=tuple(Finding("a", GIB, long, long) for _ in range(5)),
        ),
    )
    console = Console(width=width, file=io.StringIO(), record=True, markup=False)
    shown = explanation_document.document(found.explanation, ("memory-post-mortem.html",))
    console.print(draw_terminal.draw(shown), crop=False)
    shown = console.export_text()
    lines = shown.splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= width
    whole = " ".join(shown.split())
    assert "call 312, on NVIDIA H200" in whole and "largest free block 1.00 MiB" in whole
    assert "memory-post-mortem.html" in whole and "96 more" in whole, "2 buffers and 2 x 2 of the arrays are shown"
    assert f"together {9 * GIB / GIB + sum(group.other_bytes for group in held) / GIB:.2f} GiB of 8.00 GiB" in whole


def test_the_json_is_a_report_too(tmp_path):
    found = PostMortem(
        "step", 3, "RESOURCE_EXHAUSTED", held=(HeldArrays((2,), "int8", 1, 2, 1, 2),), report=report_of(KEPT)
    )
    (tmp_path / "p.json").write_text(json.dumps(found.to_json()))
    assert report_record.load(tmp_path / "p.json") == found.report
    own = json.loads((tmp_path / "p.json").read_text())["post_mortem"]
    assert (own["call"], own["other_bytes"], own["needed_bytes"]) == (3, 2, 6 * GIB + 2)
    assert own["explanation"]["remedies"][0]["words"].startswith("Use jax.checkpoint for Decoder/layer_3")


def test_what_fits_by_the_figures_is_said_to():
    found = PostMortem("step", 1, "RESOURCE_EXHAUSTED", report=report_of(KEPT))
    assert memory_sum(found).startswith("The step takes 6.00 GiB of 8.00 GiB, 2.00 GiB should be left")
    assert memory_sum(dataclasses.replace(found, allocator={"bytes_limit": GIB})).endswith(
        "of 1.00 GiB, 5.00 GiB too much."
    )


@pytest.mark.parametrize(
    ("others", "limit", "cause", "words"),
    [
        (0, 8 * GIB, "unknown", "should fit by their figures"),
        (3 * GIB, 8 * GIB, "device_full", "The step alone fits."),
        (0, 5 * GIB, "saved_activations", "the forward pass keeps them"),
    ],
)
def test_the_figures_of_the_process_decide_what_the_text_leaves_open(others, limit, cause, words):
    held = (HeldArrays((3,), "float32", 1, others, 1, others),) if others else ()
    found = PostMortem("step", 1, "RESOURCE_EXHAUSTED: x", held=held, allocator={"bytes_limit": limit})
    found = dataclasses.replace(found, report=report_of(KEPT)).explanation
    assert found.cause_kind == cause and words in found.cause
    assert found.figures.get("missing", 0) == max(6 * GIB + others - limit, 0)
    text = plain_text(draw_terminal.draw(explanation_document.document(found)), 100)
    assert ("which may be enough" in text) is (cause != "unknown")


def test_buffers_of_the_report_and_other_arrays_are_one_list():
    layers = [
        dataclasses.replace(KEPT, module=f"Decoder/layer_{n}", bytes=GIB, op_name="jit(f)/jvp(D)/mlp/mul")
        for n in (3, 4)
    ]
    scores = dataclasses.replace(WIDE, shape=(8, 512, 512), op_name="jit(f)/jvp(D)/attn/bqhd,bkhd->bhqk/dot_general")
    gone = dataclasses.replace(WIDE, at_peak=False)
    held = (HeldArrays((7,), "int8", 3, 6 * GIB, 2, 4 * GIB),)
    found = PostMortem(
        "step", 1, "RESOURCE_EXHAUSTED: x", held=held, report=report_of(*layers, scores, gone)
    ).explanation
    rows = [(c.count, c.shape, c.bytes, c.identity, c.category, c.layers) for c in found.culprits]
    assert rows == [
        (2, "int8[7]", 4 * GIB, "other", "", ()),
        (1, "bfloat16[8,512,512]", 3 * GIB, "scores", "workspace", ()),
        (2, "float32[2,3]", 2 * GIB, "saved", "residuals", (3, 4)),
    ]
    shown = explanation_document.document(found)
    bars = next(part.items for card in shown.cards for part in card.parts if isinstance(part, Bars))
    assert [bar.row for bar in bars] == ["unattributed", "workspace", "residuals"]
    text = plain_text(draw_terminal.draw(shown), 120)
    assert (
        "2 x float32[2,3] " in text
        and "layers 3 to 4" in text
        and "live arrays that are not arguments of the step" in text
    )
    uncompiled = PostMortem("step", 1, "RESOURCE_EXHAUSTED: x", held=held).explanation
    assert [(c.count, c.identity) for c in uncompiled.culprits] == [(2, "other"), (1, "argument")]


@pytest.mark.parametrize("width", [80, 120])
def test_the_buffers_and_the_cause_of_the_exception_are_shown(width):
    sample = memory_messages.gpu_buffers(random.Random(2))
    held = tuple(HeldArrays((number,), "float32", 1, MIB, 1, MIB) for number in range(9))
    report = report_of(KEPT, WIDE)
    found = PostMortem("step", 1, "RESOURCE_EXHAUSTED", held=held, report=report, text=sample.text)
    alone = explain(sample.text, report)
    assert (found.explanation.cause_kind, found.explanation.cause) == (alone.cause_kind, alone.cause)
    assert found.explanation.requested_bytes == sample.requested
    shown = plain_text(draw_terminal.draw(explanation_document.document(found.explanation)), width)
    whole = " ".join(shown.split())
    assert f"cause: {alone.cause} {alone.evidence} " in whole and "The step takes 9.00 GiB" in whole
    assert "largest buffers" in shown and len(shown.splitlines()) <= 45
    page = report_page.render(report, found)
    assert alone.cause in page and 'id="explained-buffers"' in page and alone.culprits[0].shape in page
    assert found.to_json()["post_mortem"]["explanation"]["requested_bytes"] == sample.requested
