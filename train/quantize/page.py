"""A quantization as a page: perplexity, bytes by component, and the error by layer."""
from __future__ import annotations

from bytescope.train.quantize.result import Result


def render(result: Result) -> str:
    return ""
