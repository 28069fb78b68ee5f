"""Renders pages: a template filled with plain data, with the styles and scripts that all pages share.

The template of page NAME is `templates/NAME.html`, which extends `templates/frame.html`. Its styles and script are
`static/NAME.css` and `static/NAME.js`, after `base.css` and `base.js`. Every inserted value is escaped, because buffer
names are arbitrary text. A name that the template uses but that was not passed is an error. The
Content-Security-Policy of a page allows only its own scripts and styles, by their hashes.
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

from bytescope.memory.records.result import finite
from bytescope.memory.units import human

if TYPE_CHECKING:
    from jinja2 import Environment

# The scripts that draw charts, each after the scripts that it needs.
CHARTS = ("chart_parts.js", "chart_marks.js", "chart_pointing.js", "chart_axes.js", "charts.js")
# Page -> additional scripts that it needs.
MORE = {"report": ("treemap.js",), "estimate": ("estimate_formulas.js",)}


def page(name: str, title: str, data: Any, **content: Any) -> str:
    """Returns an HTML page as one text, which contains all of its scripts and styles and needs no network.

    Args:
        name: the name that the page's template, styles and script have in common.
        title: title of the document.
        data: JSON values that the page's script reads and draws.
        content: values of the template's variables.

    Raises:
        jinja2.UndefinedError: the template uses a variable that `content` lacks.
    """
    return environment().get_template(f"{name}.html").render(page=name, title=title, data=data, **content)


@functools.cache
def environment() -> Environment:
    """Returns the Jinja environment of the pages' templates.

    Its filters are `human` (bytes in readable units), `flags` (splits a command at its flags), `tojson`, `source_hash`
    and `without_style_attributes`. Its functions `static` and `library` insert files unchanged.
    """
    # Imported here, because modules that only print also contain the functions of their page.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("bytescope.memory.view"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Keys keep the order of the data, which is the order of rows. `tojson` escapes text that could end the script.
    templates.policies |= {"json.dumps_kwargs": {"separators": (",", ":")}, "json.dumps_function": dump_json}
    templates.filters |= {
        "human": human,
        "flags": lambda command: re.split(r" (?='?--)", command),
        "source_hash": source_hash,
        "without_style_attributes": without_style_attributes,
    }
    templates.globals |= {"static": static, "library": _chart_scripts}
    return templates


def dump_json(value: Any, **options: Any) -> str:
    """Returns a value as JSON text. NaN and Infinity become null, because browsers cannot parse them."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(finite(value), allow_nan=False, **options)


def source_hash(text: str) -> Markup:
    """Returns the hash of a script or style, such as "'sha256-...'". A page's Content-Security-Policy lists it to
    allow the script or style."""
    digest = hashlib.sha256(text.encode()).digest()
    return Markup(f"'sha256-{base64.b64encode(digest).decode()}'")


# Style attributes with numbers and units only, such as style="width:12.5%". The browser refuses any other.
_STYLE_ATTRIBUTE = re.compile(r' style="([\w:.% -]+)"')


def without_style_attributes(text: Markup) -> tuple[Markup, Markup]:
    """Moves inline styles of HTML into a stylesheet, because the page's Content-Security-Policy forbids style
    attributes. Returns (HTML, CSS rules).

    Each `style="..."` becomes `data-style="N"`, and a CSS rule selects the elements with this number. Only attributes
    in the templates can match, because text from the data is escaped and contains no quotes.
    """
    numbers: dict[str, int] = {}

    def refer(match: re.Match[str]) -> str:
        return f' data-style="{numbers.setdefault(match[1], len(numbers))}"'

    html = _STYLE_ATTRIBUTE.sub(refer, text)
    rules = [f':root [data-style="{number}"] {{ {declarations} }}\n' for declarations, number in numbers.items()]
    return Markup(html), Markup("".join(rules))


def static(name: str) -> Markup:
    """Returns the unescaped content of a file in the folder `static/`."""
    file = resources.files("bytescope.memory.view") / "static" / name
    return Markup(file.read_text(encoding="utf-8"))


def _chart_scripts(name: str) -> Markup:
    # The block hides all of their names except `charts`.
    return Markup('"use strict";\n{{\n{}}}').format(Markup("\n").join(map(static, (*CHARTS, *MORE.get(name, ())))))
