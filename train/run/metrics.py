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
from bytescope.train.checkpoints.workdir import write_atomically

KINDS = ("loss", "eval_loss")  # a row of metrics has one of them


def _attention(model: ModelConfig) -> dict[str, int]:
    """Parameters of the matrices of attention, by the last key of their paths."""
    D, H, K = model.d_model, model.n_heads, model.d_head
    if model.attention_kind == "gqa":
        return {"w_q": D * H * K, "w_k": D * model.n_kv_heads * K, "w_v": D * model.n_kv_heads * K, "w_o": D * H * K}
    q_rank, kv_rank, wide = model.mla_q_rank, model.mla_kv_rank, H * (K + model.mla_d_rope)
    queries = {"w_q_down": D * q_rank, "w_q_up": q_rank * wide} if q_rank else {"w_q": D * wide}
    values = H * model.mla_d_value
    return {
        **queries,
        "w_kv_down": D * (kv_rank + model.mla_d_rope),
        "w_k_up": kv_rank * H * K,
        "w_v_up": kv_rank * values,
        "w_o": values * D,
    }


def _matrices(model: ModelConfig, routed: bool) -> dict[str, int]:
    """Parameters that a token meets in each matrix of one layer, by the last two keys of its path; `routed`: of one
    with experts, of which k count."""
    D, gated = model.d_model, MLPS[model.mlp][0]
    names = ("w_gate", "w_up", "w_down") if gated else ("w_up", "w_down")
    found = {f"attention.{name}": size for name, size in _attention(model).items()}
    if not routed:
        return found | {f"mlp.{name}": D * model.d_ff for name in names}
    active, shared = (count * D * model.expert_width for count in (model.experts_per_token, model.shared_experts))
    return (
        found
        | {"experts.w_router": D * model.experts}
        | {f"experts.{name}": active for name in names}
        | {f"shared.{name}": shared for name in names}
    )


def matmul_parameters(model: ModelConfig) -> int:
    """Number of parameters in products with each token: all matrices except the embedding tables, and the experts that
    a token does not go to."""
    routed = model.expert_layers
    layers = [(model.n_layers - routed, False), (routed, True)]
    in_layers = sum(count * sum(_matrices(model, kind).values()) for count, kind in layers)
    return in_layers + model.d_model * model.vocab_size


def frozen_matmul_parameters(model: ModelConfig, frozen: Collection[str]) -> int:
    """Those of `matmul_parameters` that are not trained; `frozen`: dotted paths of parameters."""
    head = "w_token" if model.tie_embeddings else "w_head"
    table = {**_matrices(model, False), **_matrices(model, True), head: model.d_model * model.vocab_size}
    routed = model.expert_layers
    scanned = {"blocks": routed or model.n_layers, "dense_blocks": model.n_layers - routed} if model.scan else {}
    names = [path.removesuffix(".codes").split(".") for path in frozen]  # of quantized ones the codes count, once
    return sum(table.get(".".join(keys[-2:]), 0) * scanned.get(keys[0], 1) for keys in names)


def adapter_parameters(params: Any) -> int:
    """Number of parameters of adapters in a tree of parameters."""
    return sum(
        math.prod(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(params) if is_adapter(dotted(path))
    )


def model_flops_per_token(model: ModelConfig, seq_len: int, frozen: Collection[str] = (), adapters: int = 0) -> float:
    """FLOPs of one training step per token: forward and backward, nothing recomputed.

    6 per matrix parameter that a token meets (Kaplan et al. 2020, arXiv 2001.08361; of experts those that it goes to)
    and 12 N H K L for the attention core (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), which counts the
    masked half, as is usual: 6 each for the width of queries and of values. A frozen one
    (`frozen`: dotted paths) has no gradient, which leaves 4: its output, and the gradient of its input. 6 too for each
    of so many parameters of `adapters`.
    Leaves out norms, activations, softmax and the optimizer.
    """
    widths = 2 * model.d_head
    if model.attention_kind == "mla":
        widths = model.d_head + model.mla_d_rope + model.mla_d_value
    core = 6 * model.n_layers * model.n_heads * widths * seq_len
    return 6.0 * (matmul_parameters(model) + adapters) - 2.0 * frozen_matmul_parameters(model, frozen) + core


def has_evaluation(path: Path, step: int) -> bool:
    """Whether the rows of a run in the file `path` contain the evaluation of `step`."""
    rows = [_parse(line) for line in _lines(path)]
    return any(row is not None and row["step"] == step and "eval_loss" in row for row in rows)


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _parse(line: str, kinds: Collection[str] = KINDS) -> dict[str, Any] | None:
    """The row of a line, None for one that is incomplete or damaged."""
    try:
        row = json.loads(line)
        return row if isinstance(row["step"], int) and any(kind in row for kind in kinds) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class MetricsLog:
    """`metrics.jsonl`, whose rows reach the disk one by one.

    Opening drops an incomplete last line and every row after `step`, so that a resumed run writes them again.
    With `enabled=False` it writes nothing: another process does. `kinds`: of these keys each row has one.
    """

    def __init__(self, path: Path, step: int, enabled: bool = True, kinds: Collection[str] = KINDS):
        self.path, self._file = path, None
        if not enabled:
            return
        kept = [row for line in _lines(path) if (row := _parse(line, kinds)) is not None and row["step"] <= step]
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
