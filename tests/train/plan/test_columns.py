"""Every column that compare, levers, fit, front and diff show is declared once, for terminal and page."""

import dataclasses
import html
import io
import json
import re

import pytest

from bytescope.memory.compare import compare_columns, compare_page, compare_rows, compare_text, fit_view
from bytescope.memory.records import report_diff
from bytescope.memory.records.result import plain
from bytescope.memory.report import difference as report_difference
from bytescope.memory.view import draw_page, draw_terminal
from bytescope.memory.view.console import make_console
from bytescope.memory.view.table_model import KINDS, PAGE, TERMINAL
from bytescope.memory.view.text_table import FigureTable
from bytescope.train.plan import frontier, frontier_view, levers, levers_view
from bytescope.train.plan.config_grid import ConfigRow
from bytescope.train.plan.fit import fit_tables
from bytescope.train.plan.fit.fit_reach import Reach
from support.browser import Page, body, browse
from support.fit_trials import as_json, walk
from support.rows import GIB, make_report, row

pytestmark = pytest.mark.quick

TARGET, VERSIONS = {"name": "h100:8", "limit_bytes": 40 * GIB}, {"jax": "9"}
SPEED = {
    "predicted_seconds": 0.75,
    "predicted_seconds_low": 0.684,
    "predicted_seconds_high": 0.852,
    "predicted_tokens_per_s": 87381.3,
    "predicted_mfu": 0.4321,
    "least_seconds": 0.5,
}
FORMULA = {"residual_bytes": 5 * GIB, "peak_bytes": 11 * GIB, "model_flops": 6e12, "hardware_flops": 9e12}
MEASURED = {"step_seconds": 0.8, "tokens_per_s": 81920.0, "peak_bytes": 9 * GIB}
COMMAND = compare_columns.command_column(str)
# Where a table is shown.
BOTH = (TERMINAL, PAGE)


def full_row(policy, gib, share=0.25, **more):
    """A row with a value for every column."""
    found = row(policy, gib, share, measured=MEASURED, formula=FORMULA, **SPEED, **more)
    moved = {"host_bytes": GIB, "to_host_bytes": GIB, "to_device_bytes": GIB, "kernel_recompute_flops": 1e9}
    return dataclasses.replace(found, **moved)


ROWS = compare_rows.mark_pareto(
    [
        full_row(policy, gib, keys={"data.seq_len": n})
        for n in (1024, 2048)
        for policy, gib in (("none", 60), ("full", 9))
    ]
)


def comparison():
    out = plain(compare_rows.make_result(ROWS, TARGET, VERSIONS))
    compare_text.render(ROWS, TARGET, VERSIONS)
    compare_text.show_row_formulas(ROWS, make_console(file=io.StringIO()))
    keys = compare_columns.key_columns(compare_rows.varying(ROWS))
    tables = [
        ((*keys, compare_columns.MARKED_VERDICT, *compare_columns.COLUMNS), BOTH),
        (compare_columns.BY_FORMULA, PAGE),
        ((*keys, *compare_columns.BESIDE_FORMULAS), TERMINAL),
        (compare_page.BEST_COLUMNS, PAGE),
    ]
    return tables, compare_page.render(out, ConfigRow)


def staircase():
    def level(stage, gib):
        adds = levers.STAGES[stage].keys
        return levers.Level(stage, adds, adds, "", "cudnn", full_row("none", gib))

    out = levers.to_json([level("fp32", 60), level("bf16", 30)], {}, TARGET, VERSIONS)
    levers_view.render_text(out)
    return [((*levers_view.COLUMNS, COMMAND), BOTH)], levers_view.render_page(out)


def front():
    full = frontier.Fixed("full", "", full_row("full", 20))
    points = [frontier.Point(gib * GIB, f"plan {gib}", "", full_row("x", gib), full, 3) for gib in (20, 30)]
    counts = {"cost": "time", "offload": False, "programs": 9, "compiled": 4, "missing": 0}
    out = frontier.to_json(points, [full], **counts, target=TARGET, versions=VERSIONS)
    tables = [((*frontier_view.POINT_COLUMNS, COMMAND), BOTH), ((*frontier_view.POLICY_COLUMNS, COMMAND), BOTH)]
    frontier_view.render_text(out)
    return tables, frontier_view.render_page(out)


def fit():
    done = walk(8, "remat,micro,accumulation,base,offload", lora_rank=16)
    reach = Reach(done)
    reach.run()
    mesh = {"what": "a, b", "fits": True, "allocated_bytes": GIB, "verdict": "fits", "slower": 0.5}
    meshes = [{**mesh, "layout": name, "predicted_seconds": 1.0, "least_seconds": None} for name in "ab"]
    out = {**as_json(done, reach), "layouts": meshes}
    tables = [
        ((*fit_view.WALK_COLUMNS, COMMAND), PAGE),
        ((*fit_tables.REACH_COLUMNS, COMMAND), BOTH),
        (fit_tables.LAYOUT_COLUMNS, BOTH),
    ]
    more = fit_tables.tables_of(out)
    fit_view.render_text(out, more)
    return tables, fit_view.render_page(out, more)


def difference():
    before, after = make_report(), make_report(seed=1)
    before, after = (
        dataclasses.replace(report, prediction={"seconds": seconds, "by_term": {"products": seconds}})
        for report, seconds in ((before, 1.0), (after, 2.0))
    )
    tables = [
        (report_difference.change_columns("bytes of one device", str), BOTH),
        (report_difference.change_columns("buffers that changed most", str), BOTH),
        (report_difference.MEASURE_COLUMNS, BOTH),
    ]
    shown = report_difference.document(before, after, report_diff.diff(before, after))
    draw_terminal.draw(shown)
    return tables, draw_page.draw(shown)


VIEWS = {
    "compare": comparison,
    "levers": staircase,
    "front": front,
    "fit": fit,
    "diff": difference,
}


@pytest.fixture
def printed(monkeypatch):
    """The headings of all tables that are made for the terminal, also by hand."""
    found, init = set(), FigureTable.__init__

    def recording(self, *columns, **more):
        found.update(str(column.title) for column in columns)
        init(self, *columns, **more)

    monkeypatch.setattr(FigureTable, "__init__", recording)
    return found


def headings_of(page):
    """The headings of all tables of a page, also of the one that the script of a comparison draws."""
    if not page:
        return set()
    found = {html.unescape(head) for head in re.findall(r'<th scope="col"[^>]*>([^<]*)', page)}
    data = Page(page).data
    if "policies" in data:
        found |= {data["verdict"], data["command"], *(title for _, title in data["keys"])}
        found |= {title for _, title, *_ in data["columns"]}
    return found


@pytest.mark.parametrize("name", VIEWS)
def test_what_is_shown_is_declared_and_what_is_declared_is_shown(name, printed):
    """A column that somebody adds to the terminal or to the page alone has to say so in its declaration."""
    tables, page = VIEWS[name]()
    declared = {place: set() for place in (TERMINAL, PAGE)}
    for columns, places in tables:
        for column in columns:
            if TERMINAL in places and column.only in ("", TERMINAL):
                declared[TERMINAL].add(column.heading)
            if PAGE in places and column.only in ("", PAGE):
                declared[PAGE].add(column.title)
    assert printed == declared[TERMINAL]
    assert headings_of(page) == declared[PAGE]


@pytest.mark.parametrize("name", VIEWS)
def test_declarations_are_whole(name):
    for columns, _ in VIEWS[name]()[0]:
        keys = [column.key for column in columns]
        assert len(set(keys)) == len(keys), "each column has its own key"
        assert all(column.kind in KINDS and column.only in ("", TERMINAL, PAGE) for column in columns)


def test_the_script_of_a_comparison_draws_the_declared_columns(tmp_path):
    page = compare_page.render(plain(compare_rows.make_result(ROWS, TARGET, VERSIONS)), ConfigRow)
    script = """document.getElementById("columns").click();
      const heads = [...document.querySelectorAll("#rows thead th")];
      document.title = JSON.stringify(heads.map((one) => one.textContent));"""
    document = browse(tmp_path, page, script=script, options=["--dump-dom"])
    assert 'data-ready="yes"' in body(document)
    heads = json.loads(html.unescape(re.search("<title>(.*?)<", document, re.S)[1]))
    data = Page(page).data
    columns = [title for _, title, *_ in data["columns"]]
    assert heads == [*(title for _, title in data["keys"]), data["verdict"], *columns, data["command"]]
