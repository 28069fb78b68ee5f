"""The HTML page of a report: its data, its words and its escaping."""

import dataclasses
import io
import itertools
import json
import re

import pytest
from rich.console import Console

from bytescope.memory.records.report_record import (
    ROWS,
    Buffer,
    Collective,
    Communication,
    Description,
    Finding,
    LedgerRow,
    ReportRecord,
    TimelinePoint,
    Transfer,
    ZeroRow,
)
from bytescope.memory.records.schedule_records import Start
from bytescope.memory.report import report_data as report_data_page
from bytescope.memory.report import report_page, report_text
from support.browser import HOSTILE, Page, literally, one_file
from support.rows import make_report

MIB = 2**20


@pytest.fixture(scope="module")
def report():
    return make_report()


def test_the_page_is_one_file_with_everything_in_it(report):
    page = one_file(report_page.render(report))
    text = " ".join(page.words)
    for expected in (
        "jit_train_step",
        "h200:8",
        "9.9.9",
        "chunk the loss",
        "--config.loss.kind=chunked",
        "model.layers",
        "a note",
        report_page.human(report.peak_bytes),
        report_page.human(report.limit_bytes),
    ):
        assert expected in text
    assert page.data == json.loads(json.dumps(report_data_page.page_data(report)))
    assert "{{" not in re.sub(r"<script>.*?</script>", "", report_page.render(report), flags=re.S)


def test_the_page_does_not_hold_the_schedule(report):
    steps = tuple(Start(f"begun-{i}", "all-gather", "forward", 7654321) for i in range(50))
    long = dataclasses.replace(report, schedule=steps)
    assert report_page.render(long) == report_page.render(report)
    assert "begun-7" in json.dumps(long.to_json())


def test_the_header_says_what_was_compiled_and_what_it_can_reach_at_best(report):
    """Config, changes, batch, policy; seconds by a roofline are a lower bound, tokens/s and MFU upper ones.

    A device of 10 TFLOP/s takes 0.4 s for 4 TFLOP, of which the model needs 3, and waits as long for memory.
    """
    words = " ".join(one_file(report_page.render(report)).words)
    assert "one update" not in words and "MFU" not in words, "nothing is known"
    subject = Description(
        "llama_8b", ("batch.micro=2",), "2 micro-batches", "full", tokens=4000, calls=2, model_flops=8 * 3 * 10**12
    )
    target = {
        **report.target,
        "n_devices": 8,
        "peak_flops": {"bf16": 1e13},
        "hbm_bytes_per_s": 1e12,
        "host_link_bytes_per_s": 1e9,
        "interconnect_bytes_per_s": {"in_host": 1e9, "between_hosts": 1e9},
    }
    known = dataclasses.replace(
        report,
        subject=subject,
        target=target,
        work={"forward": {"flops": {"bf16": 4e12}}},
        roofline={"total": 0.8, "source": "data-sheet rates", "by_term": {}},
    )
    text = report_page.render(known)
    words = " ".join(" ".join(Page(text).words).split())
    assert re.search(r'</header>\s*<section class="card">\s*<div class="head"><h2>Findings', text), "below the verdict"
    assert words.index("The figures in detail") > words.index("About this report")
    assert "<title>llama_8b on h200:8 · memory</title>" in text
    for expected in (
        "llama_8b",
        "with batch.micro=2",
        "batch: 2 micro-batches",
        "policy: full · program: jit_train_step",
        "one update, at least 1.60 s by data-sheet rates",
        "tokens/s, at most 2,500 over all",
        "MFU, at most 38% of the peak",
    ):
        assert expected in words, expected
    again = ReportRecord.from_json(json.loads(json.dumps(known.to_json())))
    assert again.subject == subject and report_page.render(again) == text
    old = {key: value for key, value in known.to_json().items() if key != "subject"}
    assert ReportRecord.from_json(old).subject == Description() and "jit_train_step" in report_page.render(
        ReportRecord.from_json(old)
    )


def test_modules_of_a_kind_are_one_bar_with_their_number():
    """As on the terminal; their bytes are the sum."""
    blocks = tuple(
        Buffer(
            "fusion",
            MIB,
            category="workspace",
            phase="backward",
            component="CausalAttn",
            at_peak=True,
            module=f"Net/blocks_{n}/CausalAttn_0",
        )
        for n in range(6)
    )
    found = ReportRecord(
        6 * MIB,
        6 * MIB,
        {"workspace": 6 * MIB},
        buffers=blocks,
        workspace_by_scope={"backward/CausalAttn": 6 * MIB},
        residuals_by_name={"(mlp/mul)": MIB},
    )
    words = " ".join(" ".join(one_file(report_page.render(found)).words).split())
    assert "backward/CausalAttn x 6 6.00 MiB" in words and "(mlp/mul) 1.00 MiB" in words
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report_text.render(found))
    assert re.search(r"backward/CausalAttn x 6 +6.00 MiB", console.export_text())


def test_no_name_can_break_the_page(report):
    hostile = dataclasses.replace(
        report,
        program=HOSTILE,
        subject=Description(HOSTILE, (HOSTILE,), HOSTILE, HOSTILE),
        versions={HOSTILE: HOSTILE},
        config={HOSTILE: HOSTILE},
        notes=(HOSTILE,),
        target={"name": HOSTILE, "kind": HOSTILE},
        residuals_by_name={HOSTILE: 1},
        workspace_by_scope={HOSTILE: 1},
        findings=(Finding(HOSTILE, 1, HOSTILE, HOSTILE, HOSTILE),),
        ledger=(LedgerRow(HOSTILE, HOSTILE, 1, 1, 1.0),),
        zero=(ZeroRow(HOSTILE, 1.0, 2.0, HOSTILE),),
        communication=(Communication(HOSTILE, (HOSTILE,), 2, 1, 1, 1, 1, 1, HOSTILE),),
        collectives=(
            Collective(HOSTILE, HOSTILE, (HOSTILE,), 2, HOSTILE, phase=HOSTILE, module=HOSTILE, op_name=HOSTILE),
        ),
        method=HOSTILE,
        verdict=HOSTILE,
        transfers=(Transfer(HOSTILE, HOSTILE, 1, 1.0),),
        timeline=tuple(dataclasses.replace(p, instruction=HOSTILE, phase=HOSTILE) for p in report.timeline),
        buffers=tuple(
            dataclasses.replace(
                b,
                name=HOSTILE,
                module=HOSTILE,
                source=HOSTILE,
                phase=HOSTILE,
                op_name=HOSTILE,
                checkpoint_name=HOSTILE,
                dtype=HOSTILE,
                category=HOSTILE,
            )
            for b in report.buffers
        ),
    )
    text = report_page.render(hostile)
    page = one_file(text)
    assert "<!--&amp;'" not in text and HOSTILE in page.data["strings"] and literally(page) > 20


def test_the_host_link_is_a_table_where_something_moves(report):
    assert 'id="transfers"' not in report_page.render(report)
    rows = (
        Transfer("optimizer", "to device", 3 * 2**30, 0.05),
        Transfer("", "to host", 2 * 2**30, 0.0),
        Transfer("backward", "to device", 2**30, 0.015),
    )
    moving = dataclasses.replace(report, transfers=rows)
    page = report_page.render(moving)
    card = Page(page[page.index('<section class="card" id="transfers">') : page.index('<div class="columns">')])
    words = [word for word in card.words if word.strip()]
    assert words[words.index("seconds") + 1 :] == [
        "to device",
        "optimizer",
        "3.00 GiB",
        "0.05",
        "to host",
        "model",
        "2.00 GiB",
        "to device",
        "backward",
        "1.00 GiB",
        "0.015",
    ]
    assert f'title="{3 * 2**30:,} bytes"' in page


def test_a_report_with_nothing_in_it_still_gives_a_page():
    page = one_file(report_page.render(ReportRecord(0, 0, {})))
    assert "no limit known" in " ".join(page.words)


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (None, "-"), (3 * 2**30, "3.00 GiB"), (-(2**40), "-1.00 TiB")],
)
def test_sizes_for_people(count, text):
    assert report_page.human(count) == text


def test_thinning_keeps_every_summit(report):
    long = make_report(points=700, buffers=500)
    kept = report_data_page.thin(long.timeline, long.peak_index, most=60)
    assert len(kept) <= 63 and kept == sorted(set(kept)) and {0, 699, long.peak_index} <= set(kept)
    live = [p.bytes for p in long.timeline]
    for k in range(30):
        stretch = range(k * 700 // 30, (k + 1) * 700 // 30)
        assert max(live[i] for i in stretch) == max(live[i] for i in kept if i in stretch)
    assert report_data_page.thin(report.timeline, 0) == list(range(120))


def test_the_stacked_categories_are_the_live_bytes(report):
    device = [b for b in report.buffers if b.memory == "device"]
    shown = [0, 7, report.peak_index, 119]
    series = report_data_page.by_category(device, len(report.timeline), shown)
    for k, point in enumerate(shown):
        assert sum(column[k] for column in series.values()) == report.timeline[point].bytes
    assert "outputs" not in series


def test_phase_bands_cover_the_schedule_once():
    phases = ["forward"] * 5 + ["backward", "recompute"] * 200 + ["optimizer"] * 5
    timeline = [TimelinePoint(i, 0, phase, "") for i, phase in enumerate(phases)]
    for most in (1000, 20):
        bands = report_data_page.phase_bands(timeline, most)
        assert len(bands) <= max(most, 1) and bands[0][0] == 0 and bands[-1][1] == len(phases) - 1
        assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(bands))
    assert report_data_page.phase_bands([]) == []


@pytest.mark.parametrize("most", [5, 1000])
def test_tiles_add_up_to_the_breakdown(report, most):
    rows = {id(buffer): row for row, buffer in enumerate(report.buffers)}
    tiles = report_data_page.tiles(report, report.buffers, rows, most)
    ids = [tile[0] for tile in tiles]
    assert len(ids) == len(set(ids)) and all(parent == "" or parent in ids for _, parent, *_ in tiles)
    for row in ROWS:
        assert sum(size for *_, size, of, _ in tiles if of == row) == report.breakdown[row]
    assert sum(size for *_, size, _, _ in tiles) == report.allocated_bytes
    leaves = [(size, report.buffers[row]) for *_, size, _, row in tiles if row >= 0]
    assert len(leaves) == min(most, sum(b.at_peak for b in report.buffers))
    assert all(size == buffer.bytes and buffer.at_peak for size, buffer in leaves)


def test_what_a_buffer_is_shown_under():
    groups = {
        "params['blocks']": Buffer("params['blocks']['wq']", 1, category="params", phase="argument"),
        "state.opt[0].mu": Buffer("state.opt[0].mu['wq']", 1, category="optimizer", phase="argument"),
        "tokens": Buffer("tokens", 1, category="batch", phase="argument"),
        "qkv": Buffer("while.1", 1, category="residuals", component="attention", checkpoint_name="qkv"),
        "backward/mlp": Buffer("fusion", 1, category="workspace", phase="backward", component="mlp"),
        "other": Buffer("fusion", 1, category="gradients"),
    }
    assert {report_data_page.group_of(buffer) for buffer in groups.values()} == set(groups)
    for group, buffer in groups.items():
        assert report_data_page.group_of(buffer) == group


@pytest.mark.parametrize(
    "buffer, words",
    [
        (Buffer("params['w']", 1, phase="argument", module="x"), "params['w']"),
        (Buffer("while.3", 1, module="blocks/mlp", op_name="jit(f)/jvp(blocks)/mlp/mul"), "blocks/mlp · mul"),
        (Buffer("fusion.1", 1, component="mlp"), "mlp"),
        (Buffer("fusion.1", 1), "fusion.1"),
        (Buffer("copy.2", 1, module="optimizer", op_name="optimizer"), "optimizer"),
        (Buffer("fusion.2", 1, category="gradients", module="mlp", parameter="params['w']"), "gradient of params['w']"),
    ],
)
def test_what_a_buffer_is_called(buffer, words):
    assert report_data_page.what(buffer) == words


def test_a_long_report_lists_the_largest_and_all_of_the_peak(report, monkeypatch):
    monkeypatch.setattr(report_data_page, "MAX_BUFFERS", sum(b.at_peak for b in report.buffers) + 3)
    columns = report_data_page.page_data(report)["buffers"]
    assert sum(columns["at_peak"]) == sum(b.at_peak for b in report.buffers)
    assert columns["bytes"] == sorted(columns["bytes"], reverse=True)
