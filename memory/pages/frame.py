"""The frame of every HTML page: one head and one set of scripts, around the body of the page's own file.

Page NAME is `static/NAME.html`, its styles and script are `static/NAME.css` and `static/NAME.js`.
A page is one file that opens offline: plotly.js (about 5 MB) and the data stand in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any


def fill(name: str, title: str, data: Any, parts: Mapping[str, str], styles: Sequence[str] = ()) -> str:
    """A page as text: `parts` are HTML by placeholder, `title` is escaped, `data` is what the script draws.

    `styles`: names of the pages whose style comes before the page's own; the report's is always first.
    """
    files = dict.fromkeys(("report", *styles, name))
    everything = {
        **parts,
        "TITLE": escape(title),
        "STYLE": "".join(_file(each, "css") for each in files),
        "DATA": script_json(data),
        "PLOTLY": _plotly(),
        "SCRIPT": _file(name, "js"),
    }
    # One pass: what is put in is never searched for further placeholders.
    whole = _file("frame", "html").replace("{{BODY}}", _file(name, "html").strip())
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: everything[match[1]], whole)


def script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in, nor start a comment or an entity."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str, kind: str) -> str:
    file = resources.files("bytescope.memory.pages") / "static" / f"{name}.{kind}"
    return file.read_text(encoding="utf-8")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().replace("</script", "<\\/script")
