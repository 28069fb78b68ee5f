"""How a page is made: its template, filled in with plain data, around the styles and scripts that all pages share.

Page NAME is `templates/NAME.html`, which extends `templates/frame.html`; its styles and script are `static/NAME.css`
and `static/NAME.js`, after `base.css` and `base.js`. Every value is escaped where it is put in, the names of buffers
being other people's text, and a name that a template uses and nobody gives is an error.
The Content-Security-Policy of a page allows its own scripts and styles by their hashes and nothing else.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from bytescope.memory.records.report_json import finite
from bytescope.memory.units import human

if TYPE_CHECKING:
    from jinja2 import Environment

# The scripts that draw charts, in the order in which they need each other.
CHARTS = ("chart_parts.js", "chart_marks.js", "chart_pointing.js", "chart_axes.js", "charts.js")
# What a page needs besides.
MORE = {"report": ("treemap.js",), "estimate": ("estimate_formulas.js",)}


def page(name: str, title: str, data: Any, **content: Any) -> str:
    """The page NAME as text: one file that holds its charts' scripts and asks the network for nothing.

    Args:
      name: of the template, the styles and the script.
      title: of the document.
      data: JSON values that the script draws (`base.data()`).
      content: what the template shows, by the names that it uses.

    Raises:
      jinja2.UndefinedError: the template uses a name that `content` lacks.
    """
    return environment().get_template(f"{name}.html").render(page=name, title=title, data=data, **content)


@functools.cache
def environment() -> Environment:
    """Returns the template environment. Filters: `human`, `flags` (splits a command at its flags), `tojson`,
    `source_hash` and `without_style_attributes`; `static` and `library` insert files unchanged."""
    # Imported here: a view that only prints has its page in the same module.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("bytescope.memory.view"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # In the order of the data, which is the order of rows; `tojson` escapes what could end the script element.
    found.policies |= {"json.dumps_kwargs": {"separators": (",", ":")}, "json.dumps_function": written}
    found.filters |= {
        "human": human,
        "flags": lambda command: re.split(r" (?='?--)", command),
        "source_hash": source_hash,
        "without_style_attributes": without_style_attributes,
    }
    found.globals |= {"static": static, "library": _library}
    return found


def written(value: Any, **options: Any) -> str:
    """The JSON of a value, with null for NaN and Infinity: a browser reads no data at all that contain one."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(finite(value), allow_nan=False, **options)


def source_hash(text: str) -> Markup:
    """Returns the hash by which a Content-Security-Policy allows a script or style element: "'sha256-...'"."""
    digest = hashlib.sha256(text.encode()).digest()
    return Markup(f"'sha256-{base64.b64encode(digest).decode()}'")


# Style attributes of numbers and units, such as style="width:12.5%"; all others stay, and the browser refuses them.
_STYLE_ATTRIBUTE = re.compile(r' style="([\w:.% -]+)"')


def without_style_attributes(text: Markup) -> tuple[Markup, Markup]:
    """Returns the HTML with its style attributes replaced by references, and the CSS rules for these references.

    A policy without 'unsafe-inline' refuses style attributes. Text from the data is escaped and contains no quotes, so
    only attributes of the templates match.
    """
    numbers: dict[str, int] = {}

    def refer(match: re.Match[str]) -> str:
        return f' data-style="{numbers.setdefault(match[1], len(numbers))}"'

    html = _STYLE_ATTRIBUTE.sub(refer, text)
    rules = [f':root [data-style="{number}"] {{ {declarations} }}\n' for declarations, number in numbers.items()]
    return Markup(html), Markup("".join(rules))


def static(name: str) -> Markup:
    """A file of `static/`, as it is."""
    file = resources.files("bytescope.memory.view") / "static" / name
    return Markup(file.read_text(encoding="utf-8"))


def _library(name: str) -> Markup:
    """What draws the charts of the page NAME."""
    # In a block, so that `charts` alone is seen outside.
    return Markup('"use strict";\n{{\n{}}}').format(Markup("\n").join(map(static, (*CHARTS, *MORE.get(name, ())))))
