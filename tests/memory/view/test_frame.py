"""What holds for every page: texts are escaped, names are given, and the scripts share one file of helpers."""

import ast
import json
import re
from importlib import resources

import pytest
from jinja2 import UndefinedError

from bytescope.memory import view
from bytescope.memory.formulas.memory_estimate import Question
from bytescope.memory.formulas.model_shape import StepLayout, gpt
from bytescope.memory.units import BINARY, human, plural
from bytescope.memory.view import elements, frame
from bytescope.memory.view.figures import seconds
from bytescope.memory.view.table_model import ColumnView, TableView
from bytescope.memory.view.table_views import page_table
from bytescope.train.plan import estimate_page
from support.browser import HOSTILE, Page, browse, literally

ROOM = resources.files(view)
TEMPLATES = sorted((ROOM / "templates").iterdir(), key=lambda file: file.name)
SCRIPTS = [file for file in (ROOM / "static").iterdir() if file.name.endswith(".js")]
ELEMENT = re.compile(r"</?[a-z][a-z0-9]*[ >]")


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.name)
def test_a_template_escapes_everything(file):
    """Escaping is on, nothing turns it off, and each value in an element stands in quotes."""
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"\|\s*safe\b|autoescape|\bMarkup\b", text)
    assert not re.search(r"=\{\{", text), "an attribute without quotes ends at the first space of its value"
    assert not re.search(r"\bon[a-z]+=", text), "what is put into a handler would be run"
    assert frame.environment().autoescape is True


def test_python_has_no_html():
    for file in ROOM.iterdir():
        if file.name.endswith(".py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            found = [text for text in texts if isinstance(text, str) and ELEMENT.search(text)]
            assert not found, f"{file.name}: {found}"


def test_macros_show_hostile_text_as_it_is():
    """In elements and attributes alike; what looks like an expression is not run."""
    show = (
        frame.environment()
        .from_string("""{% import "elements.html" as ui %}
        {{ ui.figures(figures) }}{{ ui.table(table) }}{{ ui.run(text) }}{{ ui.flags(text) }}{{ ui.notes(text, [text]) }}
        {{ ui.definitions(section) }}{% call ui.card(text, text, text) %}{{ text }}{% endcall %}
        {{ ui.plot(text, text) }}""")
        .render(
            text=HOSTILE,
            figures=[elements.HeaderFigure(*[HOSTILE] * 4)],
            section=elements.Section(HOSTILE, [(HOSTILE, HOSTILE)]),
            table=elements.PageTable(
                [elements.Head(HOSTILE, "name"), elements.Head(HOSTILE, "num")],
                [elements.PageRow([elements.Cell(HOSTILE), elements.Cell(*[HOSTILE] * 3)], "", HOSTILE)],
            ),
        )
    )
    page = Page(show)
    assert "script" not in page.tags and "b" not in page.tags and literally(page) == 3 + 4 + 2 + 2 + 3 + 3
    held = [value for name, value in page.attributes if name in ("title", "id", "aria-label")]
    assert held == [HOSTILE] * 6, "hover texts and names"


def test_what_no_browser_reads_is_null():
    """Python writes NaN and Infinity, at which JSON.parse gives up all of the data."""
    data = {"a": [1.5, float("nan")], "b": {"c": (float("inf"), "NaN")}, "d": -float("inf"), "e": None}
    text = frame.environment().from_string("{{ data|tojson }}").render(data=data)
    assert text == '{"a":[1.5,null],"b":{"c":[null,"NaN"]},"d":null,"e":null}'


def test_a_name_that_nobody_gives_is_an_error():
    with pytest.raises(UndefinedError, match="'notes' is undefined"):
        frame.page("estimate", "x", {})


def test_a_table_has_no_empty_column():
    columns = (
        ColumnView("a", "a", "text", path="0"),
        ColumnView("b", "b", "bytes", read=lambda row: None),
        ColumnView("c", "c", "bytes", path="1"),
    )
    table = page_table(TableView(columns, [("x", None), ("y", 2048)], lambda row: "total" if row[1] else ""))
    assert [head.title for head in table.heads] == ["a", "c"]
    assert [[cell.text for cell in line.cells] for line in table.lines] == [["x", ""], ["y", "2.00 KiB"]]
    assert table.lines[1].cells[1].title == "2,048 bytes" and [line.kind for line in table.lines] == ["", "total"]
    assert page_table(TableView((), [])) == ([], [])


def test_a_breakdown_is_shares_of_its_total_and_widths_of_its_scale():
    parts = elements.parts({"residuals": 3, "logits_loss": 1, "params": 0}, 4, 8)
    assert [(part.name, part.bytes, part.share, part.width) for part in parts] == [
        ("residuals", 3, 75, 37.5),
        ("logits and loss", 1, 25, 12.5),
    ]
    assert elements.parts({}, 0) == []


def test_where_a_program_was_compiled_for():
    assert elements.where({"name": "h200:8", "kind": "NVIDIA H200"}) == "h200:8 · NVIDIA H200 · per device"
    assert elements.where({"name": "cpu", "kind": "cpu"}) == "cpu · per device"
    assert elements.where({}) == "no target · per device"


# ---- the scripts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_helpers_stand_in_one_script(file):
    """What base.js has is not written again, and text of the data is never parsed as HTML."""
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    if file.name != "base.js":
        assert not re.search(r"2 \*\* [1-4]0,|getComputedStyle|createElement|JSON\.parse|matchMedia|&lt;", text), (
            "base.js has it"
        )


@pytest.fixture(scope="module")
def head():
    """The head of a page, with an empty body: base.js without a chart to draw."""
    page = estimate_page.render(Question(1e9, gpt(24, 2048, 16, 50304), StepLayout(), 1024, 1))
    return page[: page.index("<main>")] + "</body></html>"


def test_the_policy_refuses_what_the_page_was_not_made_with(head, browser):
    """A script, a handler, a style element and a style attribute that got into a page have no effect."""
    strange = (
        "<script>document.title = 'ran'</script><style>body { color: rgb(1, 2, 3) }</style>"
        "<p id='strange' style='color: rgb(1, 2, 3)' onclick='document.title = 1'>x</p></body>"
    )
    browser.open(head.replace("</body>", strange), 500)
    browser.call("document.getElementById('strange').click()")
    title, color = browser.call("[document.title, getComputedStyle(document.getElementById('strange')).color]")
    refused = [error for error in browser.errors() if error.startswith("CSP refuses")]
    assert title == re.search("<title>(.*?)<", head)[1] and color != "rgb(1, 2, 3)"
    assert [line.split()[2] for line in refused] == [
        "script-src-elem",
        "style-src-elem",
        "style-src-attr",
        "script-src-attr",
    ]


def seen(document):
    return re.search("<title>(.*?)<", document)[1]


def test_the_browser_writes_bytes_as_python_does(head, tmp_path):
    sizes = [int(scale * factor) for _, scale in BINARY for factor in (1, 1.5, 1023)] + [0, 1023, -3 * 2**30]
    script = f"document.title = JSON.stringify({json.dumps(sizes)}.map(base.human));"
    document = browse(tmp_path, head, script=script, options=["--dump-dom"])
    assert json.loads(seen(document)) == [human(size) for size in sizes]


def test_the_browser_counts_nouns_as_python_does(head, tmp_path):
    numbers = [0, 1, 2, 1000]
    script = f"document.title = JSON.stringify({json.dumps(numbers)}.map((n) => base.plural(n, 'more row')));"
    document = browse(tmp_path, head, script=script, options=["--dump-dom"])
    assert json.loads(seen(document)) == [plural(number, "more row") for number in numbers]
    assert plural(1, "more row") == "1 more row" and plural(1000, "copy", "copies") == "1,000 copies"


def test_the_browser_writes_seconds_as_python_does(head, tmp_path):
    values = [0.0000123, 0.01234, 0.0999, 0.1, 0.59, 1.0, 37.414, 999.4, 1000, 123456.7]
    script = f"document.title = JSON.stringify({json.dumps(values)}.map(base.seconds));"
    document = browse(tmp_path, head, script=script, options=["--dump-dom"])
    assert json.loads(seen(document)) == [seconds(value) for value in values]


@pytest.mark.parametrize(
    ("fragment", "dark", "theme"), [("", False, "light"), ("", True, "dark"), ("#theme=dark", False, "dark")]
)
def test_the_theme_is_set_before_anything_is_drawn(head, tmp_path, fragment, dark, theme):
    script = "document.title = document.documentElement.dataset.theme;"
    assert seen(browse(tmp_path, head, fragment, script, ["--dump-dom"], dark)) == theme
