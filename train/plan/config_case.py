"""A config on its devices: the facts that levers and remedies depend on. Pure.

In: a report with the config that was compiled (`Report.config`, keys of the trainer's configs/base.py). Out: `Case`,
its keys with the sizes of the mesh and the tokens of an update; None for a program without such a config.
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
    """A config on its devices.

    Fields:
        flat: dotted key -> value. axes: axis of the mesh -> size, -1 replaced.
        host_memory: whether state and residuals can move to host memory; False on the CPU, which has no other memory.
        report: of the compiled program.
    """

    flat: Mapping[str, Any]
    axes: Mapping[str, int]
    host_memory: bool
    report: ReportRecord

    @property
    def accumulates(self) -> bool:
        """Returns whether an update can have more than one micro-batch."""
        return not self.flat["optimizer.fused_backward"] and not self.flat["offload.params"]

    @property
    def by_layer(self) -> bool:
        """Returns whether an update can go layer by layer, as moments in host memory and a fused backward pass need."""
        scheduled, scaled = self.flat["batch.accumulation_schedule"], self.flat["precision.preset"] == "fp16"
        return not (scheduled or scaled or self.adapters)

    @property
    def adapters(self) -> bool:
        """Returns whether low-rank adapters are trained, whose state is too small to narrow or to move."""
        return bool(self.flat.get("lora.rank"))  # an old report has no such key

    @property
    def micro_steps(self) -> int:
        """Micro-batches of an update; with a schedule, the maximum."""
        if self.flat["batch.accumulation_schedule"]:
            return max(count for _, count in schedule(self.flat))
        if self.flat["batch.tokens"]:
            return max(self.flat["batch.tokens"] // (self.flat["batch.micro"] * self._tokens_per_row), 1)
        return self.flat["batch.accumulation"]

    @property
    def tokens(self) -> int:
        """Tokens of an update over all devices."""
        return self.flat["batch.tokens"] or self.flat["batch.micro"] * self.micro_steps * self._tokens_per_row

    @property
    def shared(self) -> int:
        """Number of devices that may share state; replicas are not counted."""
        return self.axes["fsdp"] * self.axes["expert"] * self.axes["context"]

    def shards(self, ranks: int) -> bool:
        """Returns whether `ranks` divides every width that ZeRO shards, including the ranks of latent attention."""
        keys = ["model.d_model"]
        if self.flat.get("model.attention_kind") == "mla":
            keys += ["model.mla_kv_rank", "model.mla_q_rank"]
        return not any(self.flat.get(key, 0) % ranks for key in keys)

    @property
    def routing(self) -> tuple[ExpertShape, int, int] | None:
        """(experts, tokens of a device and micro-step, devices that share the experts); None without experts, and for
        the dense kernel, which has no rows."""
        if "model.moe_every" not in self.flat or self.flat["model.moe_kernel"] == "dense":
            return None
        experts = experts_of(self.flat)
        tokens = self.flat["batch.micro"] * self.flat["data.seq_len"] // self.axes["context"]
        return (experts, tokens, self.axes["expert"]) if experts else None

    @property
    def _tokens_per_row(self) -> int:
        return math.prod(self.axes[axis] for axis in BATCH_AXES) * self.flat["data.seq_len"]


def case_of(report: ReportRecord) -> Case | None:
    """Returns the case of a report; None for a program without a config of the trainer."""
    flat = report.config
    if any(key not in flat for key in _NEEDED):
        return None
    axes = mesh_of(flat, int(report.target.get("n_devices") or 1))
    return Case(flat, axes, report.target.get("platform") not in (None, "cpu"), report)


def schedule(flat: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(first update, micro-batches from it on) of `batch.accumulation_schedule`."""
    pairs = (str(text).split(":") for text in flat["batch.accumulation_schedule"])
    return [(int(start), int(count)) for start, count in pairs]
