"""The facts about a config and its devices on which memory savings and remedies depend.

`case_of` builds a `Case` from a report that contains the compiled config (`Report.config`, with the keys of
configs/base.py). It returns None for a report without such a config. This module compiles nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from bytescope.memory.formulas.model_shape import ExpertShape
from bytescope.memory.records.report_record import ReportRecord
from bytescope.train.plan.config_facts import BATCH_AXES, experts_of, mesh_of

# Keys of a config to change: dotted key -> text.
Keys = Mapping[str, str]

# Keys by which a report of one of the trainer's configs is recognized.
_NEEDED = ("batch.micro", "data.seq_len", "loss.kind", "mesh.fsdp", "offload.params", "optimizer.name", "remat.policy")


@dataclasses.dataclass(frozen=True)
class Case:
    """A config together with its devices and the report of its compiled program.

    Attributes:
        flat: the config, dotted key -> value.
        axes: mesh axis -> number of devices. An axis of -1 in the config is replaced by its number.
        host_memory: whether training state and saved activations can be moved to host memory. False on a CPU, which has
            no separate memory.
        report: the report of the compiled program.
    """

    flat: Mapping[str, Any]
    axes: Mapping[str, int]
    host_memory: bool
    report: ReportRecord

    @property
    def accumulates(self) -> bool:
        """Returns whether the config allows gradient accumulation, which means several micro-batches per update."""
        return not self.flat["optimizer.fused_backward"] and not self.flat["offload.params"]

    @property
    def by_layer(self) -> bool:
        """Returns whether the optimizer can update one layer at a time. Updates fused into the backward pass and
        optimizer moments in host memory need this."""
        return self.flat["precision.preset"] != "fp16" and not self.adapters

    @property
    def adapters(self) -> bool:
        """Returns whether only low-rank adapters are trained. Their optimizer state is too small to be worth
        quantizing or moving to host memory."""
        return bool(self.flat.get("lora.rank"))  # reports of older versions lack this key

    @property
    def micro_steps(self) -> int:
        """Number of micro-batches per update."""
        if self.flat["batch.tokens"]:
            return max(self.flat["batch.tokens"] // (self.flat["batch.micro"] * self._tokens_per_row), 1)
        return self.flat["batch.accumulation"]

    @property
    def tokens(self) -> int:
        """Number of tokens per update, over all devices."""
        return self.flat["batch.tokens"] or self.flat["batch.micro"] * self.micro_steps * self._tokens_per_row

    @property
    def state_devices(self) -> int:
        """Number of devices over which the training state may be sharded. Replicas (mesh axis `data`) are not
        counted."""
        return self.axes["fsdp"] * self.axes["expert"] * self.axes["context"]

    def shards(self, ranks: int) -> bool:
        """Returns whether ZeRO can divide every parameter evenly over this number of devices (`ranks`).

        `ranks` must divide `model.d_model` and, with latent attention, `model.mla_kv_rank` and `model.mla_q_rank`.
        """
        keys = ["model.d_model"]
        if self.flat.get("model.attention_kind") == "mla":
            keys += ["model.mla_kv_rank", "model.mla_q_rank"]
        return not any(self.flat.get(key, 0) % ranks for key in keys)

    @property
    def routing(self) -> tuple[ExpertShape, int, int] | None:
        """Returns (shape of the experts, tokens per device and micro-batch, number of devices that share the experts).

        These are the arguments of the formulas that count the tokens sent to experts. Returns None if no tokens are
        sent: the model has no experts, or `model.moe_kernel=dense`.
        """
        if "model.moe_every" not in self.flat or self.flat["model.moe_kernel"] == "dense":
            return None
        experts = experts_of(self.flat)
        tokens = self.flat["batch.micro"] * self.flat["data.seq_len"] // self.axes["context"]
        return (experts, tokens, self.axes["expert"]) if experts else None

    @property
    def _tokens_per_row(self) -> int:
        return math.prod(self.axes[axis] for axis in BATCH_AXES) * self.flat["data.seq_len"]


def case_of(report: ReportRecord) -> Case | None:
    """Returns the config and the devices of a memory report, together with the report, as a `Case`; None if the report
    is not about one of the trainer's configs."""
    flat = report.config
    if any(key not in flat for key in _NEEDED):
        return None
    axes = mesh_of(flat, int(report.target.get("n_devices") or 1))
    return Case(flat, axes, report.target.get("platform") not in (None, "cpu"), report)
