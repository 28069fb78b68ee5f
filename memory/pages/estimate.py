"""The calculator as one HTML file that opens offline: inputs, the same formulas in JavaScript, a stacked bar.

The page gets the tables of formulas/transformer.py as data, so that a tensor, a precision or an optimizer is one row in
one place; what the script repeats is the arithmetic, which tests/memory/formulas/test_estimate.py compares with
Python's.
"""

from __future__ import annotations

from typing import Any

from bytescope.memory.formulas import training_state, transformer
from bytescope.memory.formulas.estimate import ASPECT, NOTES, Question
from bytescope.memory.pages.frame import page


def render(question: Question) -> str:
    """The page, as text, filled in with `question`."""
    return page("estimate", "Training memory by formula", page_data(question), notes=NOTES)


def page_data(question: Question) -> dict[str, Any]:
    """What the script works with: the tables of the formulas, and the inputs' first values."""
    return {
        "inputs": inputs(question), "aspect": ASPECT, "zero": training_state.ZERO,
        "layer": [row._asdict() for row in transformer.LAYER],
        "flash": transformer.FLASH._asdict(), "block_input": transformer.BLOCK_INPUT._asdict(),
        "outside": [row._asdict() for row in (transformer.EMBEDDING_MASK, *transformer.HEAD)],
        "logits": transformer.LOGITS._asdict(),
        "precisions": {name: row._asdict() for name, row in training_state.PRECISIONS.items()},
        "optimizers": {name: row._asdict() for name, row in training_state.OPTIMIZERS.items()},
        "offloads": training_state.OFFLOAD, "parts": training_state.ROLES, "recompute": transformer.RECOMPUTE,
        "attention": transformer.ATTENTION,
    }


def inputs(question: Question) -> dict[str, Any]:
    """Input of the page -> value."""
    q, layout, model = question, question.layout, question.model
    return {
        "parameters": q.parameters, "layers": model.layers, "width": model.width, "heads": model.heads,
        "kv_heads": model.kv_heads, "head_width": model.head_width, "mlp_width": model.mlp_width,
        "vocabulary": model.vocabulary, "gated": model.gated, "tied": model.tied, "dropout": model.dropout,
        "sequence": q.sequence, "batch": q.batch, "logit_tokens": q.logit_tokens or 0,
        "mlp_tokens": q.mlp_tokens, "offload": q.offload, "fused": q.fused, "attention": q.attention,
        "recompute": "none", "precision": q.precision, "optimizer": q.optimizer, "tensor": layout.tensor,
        "sequence_parallel": layout.sequence, "data": layout.data, "zero": layout.zero, "memory": 80,
    }
