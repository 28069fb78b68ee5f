"""A notebook that is run: what its output areas hold, and what a browser makes of them, light and dark."""

import html
import json
import os
import re

import pytest

from bytescope import memory
from support.browser import Page, body, browse
from support.oracles import require
from support.pages.sweep import check_page
from support.rows import make_report

CELLS = {
    "report": """
import jax
import jax.numpy as jnp
from bytescope import memory

def step(params, x):
    with jax.named_scope("mlp"):
        loss = lambda params: (jnp.tanh(x @ params["w"]) @ params["v"]).sum()
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

spec = jax.ShapeDtypeStruct
params = {"w": spec((64, 256), "float32"), "v": spec((256, 64), "float32")}
arguments = (params, spec((32, 64), "float32"))
report = memory.analyze(step, *arguments, donate_argnums=0)
report""",
    "printed": "print(report)",
    "table": "report.table()",
    "diff": "report.diff(memory.analyze(step, *arguments))",
    "show": "report.show()",
    "error": "memory.analyze(\n    step, *arguments, target='h2000')",
    "guard": "memory.assert_fits(report, '1KiB')",
    "live": "memory.live()",
}
# What JupyterLab and VS Code style in an output area, made worse than it is there.
AROUND = """
.jp-RenderedHTMLCommon dl dt { float: left; width: 20%; } .jp-RenderedHTMLCommon table { table-layout: fixed; }
.jp-RenderedHTMLCommon ul:not(.list-inline) { padding-left: 2em; list-style: disc; }
:not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon td, :not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon th {
  text-align: right; padding: 2em; }
.jp-RenderedHTMLCommon tbody tr:nth-child(odd) { background: rgb(255, 0, 0); }
.jp-RenderedHTMLCommon p { color: rgb(255, 0, 0); }"""
THEMES = {
    "jupyter light": 'data-jp-theme-light="true"',
    "jupyter dark": 'data-jp-theme-light="false"',
    "vscode dark": 'class="vscode-dark"',
    "vscode contrast light": 'class="vscode-high-contrast-light vscode-high-contrast"',
}
LOOK = """
document.title = JSON.stringify([...document.querySelectorAll("main > div")].map((around) => {
  const find = (query) => around.querySelector(query), style = (query) => getComputedStyle(find(query));
  const wide = [...around.querySelectorAll(".bytescope")].filter((one) => one.scrollWidth > one.clientWidth + 1);
  const area = find("svg path").getBoundingClientRect();
  return {card: style(".bytescope").backgroundColor, ink: style(".bytescope p").color, wide: wide.length,
          float: style("dt").float, list: style("ul").paddingLeft, row: style("tbody tr").backgroundColor,
          name: style("tbody th").textAlign, figure: style("tbody td.num").textAlign,
          bar: style(".bar .c-params").backgroundColor, area: getComputedStyle(find("svg path")).fill,
          drawn: [area.width > 300, area.height > 20], closed: !find("details").open};
}));"""


@pytest.fixture(scope="module")
def outputs():
    """Name of a cell -> its outputs, from a kernel."""
    require("notebook")
    import nbformat
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(source.strip()) for source in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    environ = {**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    NotebookClient(notebook, timeout=120, allow_errors=True).execute(env=environ)
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells)}


def shown(outputs, name):
    """The text and the HTML of a cell that shows one object."""
    (output,) = outputs[name]
    assert output.output_type in ("execute_result", "display_data"), output
    return output.data["text/plain"], output.data["text/html"]


@pytest.mark.exhaustive
def test_objects_show_themselves_and_print_short(outputs):
    for name in ("report", "table", "diff", "show", "live"):
        text, piece = shown(outputs, name)
        assert len(text) < 2500 and "\x1b" not in text and "<script" not in piece and len(piece) < 60_000
    (printed,) = outputs["printed"]
    assert printed.output_type == "stream" and printed.text.strip() == shown(outputs, "report")[0].strip()
    assert "Report of jit_step on local (cpu)" in printed.text
    assert shown(outputs, "show")[1] == shown(outputs, "report")[1]


@pytest.mark.exhaustive
def test_a_buffer_is_found_in_its_cell(outputs):
    words = " ".join(Page(shown(outputs, "table")[1]).words)
    assert re.search(r"In\[1\]:[78]\b", words) and "params['w']" in words


@pytest.mark.exhaustive
def test_a_mistake_is_its_message_and_the_line_of_the_cell(outputs):
    for name, kind, message, line in (
        ("error", "ReportError", "unknown target 'h2000': did you mean h200?", "  line 1: memory.analyze("),
        ("guard", "GuardError", "jit_step takes ", "  line 1: memory.assert_fits(report, '1KiB')"),
    ):
        (output,) = outputs[name]
        said = "\n".join(output.traceback).splitlines()
        assert output.ename == kind and said[0].startswith(f"{kind}: {message}") and said[1:] == [line]


@pytest.mark.exhaustive
def test_output_areas_are_as_they_should_be_in_a_browser(outputs, tmp_path, browser):
    pieces = "".join(shown(outputs, name)[1] for name in ("report", "table", "diff", "live"))
    big = memory.Report.of(make_report(points=700))._repr_html_()
    areas = "".join(
        f'<div {theme}><div class="jp-RenderedHTMLCommon">{pieces}{big}</div></div>' for theme in THEMES.values()
    )
    page = f"<!doctype html><title></title><style>{AROUND}</style><body><main>{areas}</main></body>"
    check_page(browser, page)
    document = browse(tmp_path, page, script=LOOK, options=["--dump-dom", "--window-size=760,1400"])
    assert "limit" in body(document)
    found = dict(zip(THEMES, json.loads(html.unescape(re.search("<title>(.*?)</title>", document, re.S)[1]))))
    for theme, look in found.items():
        dark = theme.endswith("dark")
        assert look["card"] == ("rgb(22, 26, 32)" if dark else "rgb(255, 255, 255)"), theme
        assert look["ink"] == ("rgb(231, 234, 238)" if dark else "rgb(21, 24, 29)")
        assert look["bar"] == look["area"] == ("rgb(0, 114, 178)" if dark else "rgb(0, 109, 170)")
        assert (look["float"], look["list"], look["row"]) == ("none", "0px", "rgba(0, 0, 0, 0)")
        assert (look["name"], look["figure"]) == ("left", "right")
        assert look["drawn"] == [True, True] and look["closed"] and not look["wide"]
