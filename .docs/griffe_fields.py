"""Reads the section `Fields:` of our records' docstrings as the section that mkdocstrings knows as `Attributes:`."""

import re
from typing import Any

import griffe


class FieldsAreAttributes(griffe.Extension):
    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.docstring:
            cls.docstring.value = re.sub(r"^( *)Fields:$", r"\1Attributes:", cls.docstring.value, flags=re.M)
