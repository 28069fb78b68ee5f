"""A piece of HTML for an output area: a template inside one div element with its styles.

JupyterLab, VS Code and Colab each say in their own way whether they are dark; where nobody says it, the system does.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from markupsafe import Markup

from bytescope.memory.records.report_record import CATEGORIES
from bytescope.memory.view.frame import environment, static

# Selectors of the page around that say which theme it has: JupyterLab, VS Code, Colab and Sphinx.
_THEMES = {
    "light": (
        '[data-jp-theme-light="true"]',
        ".vscode-light",
        ".vscode-high-contrast-light",
        '[theme="light"]',
        '[data-theme="light"]',
    ),
    "dark": (
        '[data-jp-theme-light="false"]',
        ".vscode-dark",
        ".vscode-high-contrast:not(.vscode-high-contrast-light)",
        '[theme="dark"]',
        '[data-theme="dark"]',
    ),
}
# Of the colours of a page those that a piece uses.
_USED = re.compile(r"--(?!page\b|on-)[\w-]+: #[0-9a-f]{6};")


def render(template: str, **content: Any) -> str:
    """The template `notebook_TEMPLATE.html` as a piece. Raises jinja2.UndefinedError for a name that it lacks."""
    return environment().get_template(f"notebook_{template}.html").render(style=styles(), **content)


@functools.cache
def styles() -> Markup:
    """The styles of every piece: colours of both themes, from the pages' own, then `static/notebook.css`."""
    light, dark = palettes()
    rules = [
        f".bytescope {{ color-scheme: light; {light} }}",
        f"@media (prefers-color-scheme: dark) {{ .bytescope {{ color-scheme: dark; {dark} }} }}",
    ]
    for theme, colours in (("light", light), ("dark", dark)):
        around = ", ".join(f"{selector} .bytescope" for selector in _THEMES[theme])
        rules.append(f"{around} {{ color-scheme: {theme}; {colours} }}")
    rules += [f".bytescope .c-{row} {{ background: var(--c-{row}); }}" for row in CATEGORIES]
    return Markup("\n".join((*rules, static("notebook.css"))))


def palettes() -> tuple[str, str]:
    """The colours of the pages as declarations, light and dark."""
    light, dark = static("base.css").split('[data-theme="dark"]', 1)
    light_rule, dark_rule = light.split(":root", 1)[1].split("}")[0], dark.split("}")[0]
    return " ".join(_USED.findall(light_rule)), " ".join(_USED.findall(dark_rule))


def cut(text: str, most: int = 160) -> str:
    """Shortens a text to about `most` characters by leaving out its middle."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"
