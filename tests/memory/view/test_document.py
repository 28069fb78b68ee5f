"""Results as documents: the terminal, notebooks and pages show the same figures, and names are shown as they are."""

import dataclasses
import html
import random
import re
from types import SimpleNamespace

import pytest

from bytescope import memory
from bytescope.memory.commands import budgets, calibration_document, check_command, names_program
from bytescope.memory.devices import targets
from bytescope.memory.messages import explanation_document
from bytescope.memory.profile import trace_document
from bytescope.memory.records import report_diff
from bytescope.memory.records.audit_record import AuditRow
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.remat.recognition import Value
from bytescope.memory.report import audit_view, difference
from bytescope.memory.seconds.calibration.cases import MEMORY, PRODUCTS
from bytescope.memory.seconds.calibration.measure import Calibration, Sample
from bytescope.memory.view import draw_page, draw_terminal
from bytescope.memory.view.console import plain_text
from bytescope.memory.view.document import Card, Paragraph, ResultDocument, Rows
from bytescope.memory.view.table_model import PAGE, TERMINAL, ColumnView, TableView
from bytescope.train.commands import names_config
from support import memory_messages
from support.browser import HOSTILE, Page, literally
from support.pages.sweep import check_page
from support.rows import make_report

GIB, MIB = 2**30, 2**20
FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?")


def explanation(form):
    def of(name):
        log = getattr(memory_messages, form)(random.Random(3)).text
        return explanation_document.document(memory.explain(log.replace("model.py", name)))

    return of


def trace(name):
    cells = [("forward", name, 0.5), ("backward", name, 0.25), ("backward", "attention", 0.125)]
    instruction = {"phase": "forward", "component": name, "path": "mlp", "opcode": "dot", "seconds": 0.25, "count": 4}
    work = {"name": name, "seconds": 0.5, "device_idle_seconds": 0.0625, "count": 2}
    compared = {"measured_seconds": 0.5, "predicted_seconds": 0.4}
    return trace_document.document(
        {
            "program": "step",
            "steps": [3, 4],
            "devices": 2,
            "total": 1.0,
            "without_pauses": 0.75,
            "busy": 0.875,
            "idle": 0.125,
            "hidden": {"collectives": 0.5},
            "instructions": [instruction | {"name": f"{name}.{n}"} for n in range(4)],
            "cells": [{"phase": phase, "component": part, "seconds": seconds} for phase, part, seconds in cells],
            "host": [work],
            "comparison": {
                "by_kind": [{"kind": "products", **compared}],
                "by_phase": [{"phase": "forward", **compared}],
            },
        }
    )


def compared_reports(name):
    before, after = make_report(), dataclasses.replace(make_report(seed=1), target={"name": name})
    return difference.document(before, after, report_diff.diff(before, after))


def audit(name):
    rows = (
        AuditRow("name", name, "/w/model.py:7", "save", "ignored", 0, message="no value has this name"),
        AuditRow("checkpoint", "block", "/w/model.py:9", "recompute", "recomputed", 2**30, 10**12, count=12),
    )
    return audit_view.document(ReportRecord(GIB, GIB, {}, program="jit_step", audit=rows))


def calibration(name):
    target = targets.parse("h200")
    samples = (
        Sample(PRODUCTS, ("bf16",), 8192, 2.0 * 8192**3, 0.002, 0.01),
        Sample(MEMORY, ("copy",), 64 * MIB, 128 * MIB, 7e-5, 0.02),
    )
    left_out = {name: "no time: give more --seconds"}
    rates = SimpleNamespace(source="measured on this machine")
    return calibration_document.document(Calibration(rates, samples, left_out), target)


def names_of_a_function(name):
    values = [Value(name, (0,), name, "", 0, "bfloat16[8,1024]", 4, 16 * MIB, "model.py:7")]
    return names_program.document([*values, dataclasses.replace(values[0], name="", count=2)])


def names_of_a_config(name):
    sizes = 123_400 * 10**9, "", 0, False, "B data", 128 * MIB, 4 * GIB
    return names_config.document([names_config.NamedTensorRow(name, (8, 4096), "bf16", 2, 32, *sizes)])


def check(name):
    report = dataclasses.replace(make_report(), verdict="fits")
    kept = budgets.BudgetResult(budgets.Budget(name, "m:f", "", "h100:8"), report, before=make_report(seed=1))
    return check_command.document([kept, budgets.BudgetResult(kept.budget, error="it cannot be compiled")])


RESULTS = {
    "a failed request": explanation("gpu_buffers"),
    "a sharding": explanation("spmd"),
    "a full pool": explanation("bfc"),
    "padding": explanation("tpu_padding"),
    "trace": trace,
    "diff": compared_reports,
    "audit": audit,
    "calibrate": calibration,
    "names of a function": names_of_a_function,
    "names of a config": names_of_a_config,
    "check": check,
}


# Results in which the name is not shown, or only its first line.
WITHOUT_NAMES = ("a failed request", "a sharding", "a full pool", "padding", "diff")


def without_parts_of(document, place):
    cards = [
        dataclasses.replace(card, parts=[part for part in card.parts if part.only != place]) for card in document.cards
    ]
    return dataclasses.replace(document, cards=cards)


def figures_of(text):
    return set(FIGURE.findall(text))


@pytest.mark.quick
@pytest.mark.parametrize("result", RESULTS)
def test_the_terminal_notebooks_and_pages_show_the_same_figures(result):
    document = RESULTS[result]("model.py")
    text = plain_text(draw_terminal.draw(document), 100)
    notebook = html.unescape(re.sub(r"<[^>]*>", "", draw_terminal.draw_notebook(document)))
    assert notebook.strip("\n").splitlines() == text.splitlines()
    shared = figures_of(plain_text(draw_terminal.draw(without_parts_of(document, TERMINAL)), 200))
    page = draw_page.draw(document)
    assert shared and shared <= figures_of(" ".join(Page(page).words))
    assert "<script src" not in page and "http" not in page.partition("<main>")[2]


@pytest.mark.quick
@pytest.mark.parametrize("result", RESULTS)
def test_a_page_shows_a_hostile_name_as_it_is(result):
    text = draw_page.draw(RESULTS[result](HOSTILE))
    assert "<b>x</b>" not in text
    assert literally(Page(text)) or result in WITHOUT_NAMES


@pytest.mark.exhaustive
@pytest.mark.parametrize("result", RESULTS)
def test_a_page_is_sound_when_it_is_used(result, browser):
    page = draw_page.draw(RESULTS[result]("model.py"))
    check_page(browser, page)
    if 'class="ledger sortable"' in page:  # a click on a heading sorts the table
        browser.open(page, 1440)
        heading = "document.querySelectorAll('.sortable thead th')[1]"
        browser.call(f"{heading}.querySelector('button').click()")
        assert browser.call(f"{heading}.getAttribute('aria-sort')") in ("ascending", "descending")
        assert not browser.errors()


@pytest.mark.quick
def test_empty_sections_and_cards_are_left_out_and_other_rows_are_counted():
    table = TableView((ColumnView("name", "", path="0"),), [("one",), ("two",), ("three",)])
    empty = [Paragraph(""), Rows(dataclasses.replace(table, rows=[]))]
    document = ResultDocument(
        [Card("Nothing", empty), Card("Names", [Rows(table, {TERMINAL: 2, PAGE: 1})])], heading="x"
    )
    assert plain_text(draw_terminal.draw(document), 80).splitlines() == ["names", "one", "two", "and 1 more"]
    words = Page(draw_page.draw(document)).words
    assert "Nothing" not in words and "two" not in words and "and 2 more" in words
