"""Renders HTML for a notebook's output area: a template inside one div element, with its styles.

JupyterLab, VS Code and Colab each mark a dark theme differently. Without a known mark, the system's theme is used.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from markupsafe import Markup

from bytescope.memory.records.report_record import CATEGORIES
from bytescope.memory.view.frame import environment, static

# Selectors by which the surrounding page marks its theme: JupyterLab, VS Code, Colab and Sphinx.
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
# The colours of pages that notebook output uses.
_USED = re.compile(r"--(?!page\b|on-)[\w-]+: #[0-9a-f]{6};")


def render(template: str, **content: Any) -> str:
    """Returns the HTML for a notebook from the template file `notebook_TEMPLATE.html`.

    content: values of the template's variables. Raises jinja2.UndefinedError if a variable is missing.
    """
    return environment().get_template(f"notebook_{template}.html").render(style=styles(), **content)


@functools.cache
def styles() -> Markup:
    """Returns the CSS of notebook output: the colours of the light and dark theme, then `static/notebook.css`."""
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
    """Returns the colours of the light and the dark theme, each as CSS declarations."""
    light, dark = static("base.css").split('[data-theme="dark"]', 1)
    light_rule, dark_rule = light.split(":root", 1)[1].split("}")[0], dark.split("}")[0]
    return " ".join(_USED.findall(light_rule)), " ".join(_USED.findall(dark_rule))


def cut(text: str, max_length: int = 160) -> str:
    """Shortens a text to about `max_length` characters by replacing its middle with an ellipsis."""
    half = max_length // 2
    return text if len(text) <= max_length else f"{text[:half]}…{text[-half:]}"
