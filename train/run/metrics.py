"""Metrics of a run: one JSON object per row, and the FLOPs of the model for its utilization."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bytescope.model import ModelConfig
from bytescope.model.layers import MLPS
from bytescope.train.run.workdir import write_atomically


def matmul_parameters(model: ModelConfig) -> int:
    """Number of parameters in products with each token: all matrices except the embedding tables."""
    D, K = model.d_model, model.d_head
    attention = D * K * (2 * model.n_heads + 2 * model.n_kv_heads)
    mlp = D * model.d_ff * (3 if MLPS[model.mlp][0] else 2)
    return model.n_layers * (attention + mlp) + D * model.vocab_size


def model_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """FLOPs of one training step per token: forward and backward, nothing recomputed.

    6 per matrix parameter (Kaplan et al. 2020, arXiv 2001.08361) and 12 N H K L for the attention core
    (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), which counts the masked half, as is usual.
    Leaves out norms, activations, softmax and the optimizer.
    """
    core = 12 * model.n_layers * model.n_heads * model.d_head * seq_len
    return 6.0 * matmul_parameters(model) + core


def has_evaluation(path: Path, step: int) -> bool:
    """Whether the rows of a run in the file `path` contain the evaluation of `step`."""
    rows = [_parse(line) for line in _lines(path)]
    return any(row is not None and row["step"] == step and "eval_loss" in row for row in rows)


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _parse(line: str) -> dict[str, Any] | None:
    """The row of a line, None for one that is incomplete or damaged."""
    try:
        row = json.loads(line)
        return row if isinstance(row["step"], int) and ("loss" in row or "eval_loss" in row) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class MetricsLog:
    """`metrics.jsonl`, whose rows reach the disk one by one.

    Opening drops an incomplete last line and every row after `step`, so that a resumed run writes them again.
    With `enabled=False` it writes nothing: another process does.
    """

    def __init__(self, path: Path, step: int, enabled: bool = True):
        self.path, self._file = path, None
        if not enabled:
            return
        kept = [row for line in _lines(path) if (row := _parse(line)) is not None and row["step"] <= step]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = open(path, "a")  # noqa: SIM115  (closed by close())

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row."""
        if self._file is None:
            return
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
