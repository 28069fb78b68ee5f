"""Writes the metrics of a run to metrics.jsonl, one JSON object per row, and counts the model FLOPs from which MFU
(model FLOPs utilization) is computed."""

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
from bytescope.train.checkpoints.workdir import write_atomically
from bytescope.train.weights.leaves import parameters_of, stored_at

# Every row of metrics has one of these keys, except for the last row of a start, with "host_memory". A resumed run
# removes that row, because it has the memory of an earlier process.
KINDS = ("loss", "eval_loss")


def _matmul_counts(model: ModelConfig) -> dict[str, int]:
    """Returns dotted path -> number of parameters, for the weight matrices that a token is multiplied with. Of the
    experts of a layer these are the first `experts_per_token`, because all have the same size."""
    head = "w_token" if model.tie_embeddings else "w_head"
    counts = {head: model.d_model * model.vocab_size}
    for path, shape in parameters_of(model).items():
        expert = path.rpartition(".")[2]
        visited = not expert.isdecimal() or int(expert) < model.experts_per_token
        if path.startswith("blocks.") and ".w_" in path and visited:
            counts[path] = math.prod(shape)
    return counts


def matmul_parameters(model: ModelConfig) -> int:
    """Returns the number of parameters that each token is multiplied with.

    It counts all matrices except the embedding tables. Only the experts that a token visits are counted.
    """
    return sum(_matmul_counts(model).values())


def frozen_matmul_parameters(model: ModelConfig, frozen: Collection[str]) -> int:
    """Returns the number of frozen parameters that each token is multiplied with. Embedding tables are not counted, and
    only the experts that a token visits are. `frozen`: dotted paths of the frozen parameters."""
    arrays = {path.removesuffix(".codes") for path in frozen}  # a quantized parameter is counted once, by its codes
    counts = _matmul_counts(model)
    return sum(count for path, count in counts.items() if stored_at(model, path, arrays))


def adapter_parameters(params: Any) -> int:
    """Returns the number of adapter parameters in a tree of parameters."""
    count = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if is_adapter(dotted(path)):
            count += math.prod(leaf.shape)
    return count


def model_flops_per_token(model: ModelConfig, seq_len: int, frozen: Collection[str] = (), adapters: int = 0) -> float:
    """Returns the FLOPs of one training step per token: forward and backward, without recomputation.

    Each matrix parameter that a token is multiplied with takes 6 FLOPs (Kaplan et al. 2020, arXiv 2001.08361). A
    frozen parameter takes 4, because its own gradient is not computed. Attention scores and context take 12 N H K L
    for N layers with H heads of width K and sequences of L tokens (Chowdhery et al. 2022, arXiv 2204.02311, appendix
    B), masked scores included. Norms, activations, softmax and the optimizer are not counted.

    Args:
      frozen: dotted paths of frozen parameters.
      adapters: number of adapter parameters, which take 6 FLOPs each.
    """
    widths = 2 * model.d_head
    if model.attention_kind == "mla":
        widths = model.d_head + model.mla_d_rope + model.mla_d_value
    core = 6 * model.n_layers * model.n_heads * widths * seq_len
    return 6.0 * (matmul_parameters(model) + adapters) - 2.0 * frozen_matmul_parameters(model, frozen) + core


def has_evaluation(path: Path, step: int) -> bool:
    """Returns True if the metrics file `path` contains an evaluation after step `step`."""
    for line in _lines(path):
        row = _parse_row(line)
        if row is not None and row["step"] == step and "eval_loss" in row:
            return True
    return False


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _parse_row(line: str) -> dict[str, Any] | None:
    # None if the line is incomplete or damaged.
    try:
        row = json.loads(line)
        return row if isinstance(row["step"], int) and any(kind in row for kind in KINDS) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class MetricsLog:
    """Appends rows to the file `metrics.jsonl`. Each row is synchronized to disk.

    Opening the file removes an incomplete last line and every row after `step`, because the resumed run writes these
    rows again.

    Args:
      path: the file.
      step: number of updates that are done when the run starts or resumes.
      enabled: False to write nothing, because another process writes the file.
    """

    def __init__(self, path: Path, step: int, enabled: bool = True):
        self.path, self._file = path, None
        if not enabled:
            return
        kept = []
        for line in _lines(path):
            row = _parse_row(line)
            if row is not None and row["step"] <= step:
                kept.append(json.dumps(row) + "\n")
        write_atomically(path, "".join(kept))
        self._file = open(path, "a")  # noqa: SIM115  (closed by close())

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row of metrics, key -> value, as one line of JSON and waits until it is on disk."""
        if self._file is None:
            return
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file. Does nothing if another process writes it."""
        if self._file is not None:
            self._file.close()
