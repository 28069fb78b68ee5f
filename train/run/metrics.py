"""Metrics of a run: one JSON object per row, and the FLOPs of the model for its utilization."""

import json
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from bytescope.model import ModelConfig
from bytescope.model.adapters import is_adapter
from bytescope.model.frozen import dotted
from bytescope.model.layers import MLPS
from bytescope.train.run.workdir import write_atomically


def _matrices(model: ModelConfig) -> dict[str, int]:
    """Parameters of each matrix of one layer, by the last key of its path."""
    D, queries, keys = model.d_model, model.n_heads * model.d_head, model.n_kv_heads * model.d_head
    mlp = ("w_gate", "w_up", "w_down") if MLPS[model.mlp][0] else ("w_up", "w_down")
    return {"w_q": D * queries, "w_k": D * keys, "w_v": D * keys, "w_o": D * queries,
            **dict.fromkeys(mlp, D * model.d_ff)}


def matmul_parameters(model: ModelConfig) -> int:
    """Number of parameters in products with each token: all matrices except the embedding tables."""
    return model.n_layers * sum(_matrices(model).values()) + model.d_model * model.vocab_size


def frozen_matmul_parameters(model: ModelConfig, frozen: Collection[str]) -> int:
    """Those of `matmul_parameters` that are not trained; `frozen`: dotted paths of parameters."""
    table = {**_matrices(model), "w_token" if model.tie_embeddings else "w_head": model.d_model * model.vocab_size}
    names = [path.removesuffix(".codes").split(".") for path in frozen]  # of quantized ones the codes count, once
    return sum(table.get(keys[-1], 0) * (model.n_layers if keys[0] == "blocks" and model.scan else 1)
               for keys in names)


def adapter_parameters(params: Any) -> int:
    """Number of parameters of adapters in a tree of parameters."""
    return sum(math.prod(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(params)
               if is_adapter(dotted(path)))


def model_flops_per_token(model: ModelConfig, seq_len: int, frozen: Collection[str] = (),
                          adapters: int = 0) -> float:
    """FLOPs of one training step per token: forward and backward, nothing recomputed.

    6 per matrix parameter (Kaplan et al. 2020, arXiv 2001.08361) and 12 N H K L for the attention core
    (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), which counts the masked half, as is usual. A frozen one
    (`frozen`: dotted paths) has no gradient, which leaves 4: its output, and the gradient of its input. 6 too for each
    of so many parameters of `adapters`.
    Leaves out norms, activations, softmax and the optimizer.
    """
    core = 12 * model.n_layers * model.n_heads * model.d_head * seq_len
    return 6.0 * (matmul_parameters(model) + adapters) - 2.0 * frozen_matmul_parameters(model, frozen) + core


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
