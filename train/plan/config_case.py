"""A config on its devices: what levers and remedies ask of it. Pure.

In: a report with the config that was compiled (`Report.config`, keys of the trainer's configs/base.py). Out: `Case`,
its keys with the sizes of the mesh and the tokens of an update; None for a program without such a config.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from bytescope.memory.formulas.expert_formulas import ExpertShape
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
        flat: dotted key -> value. axes: sizes of the mesh's axes, none of them -1.
        host_memory: whether there is a host to move state and residuals to; the CPU has no other memory.
        report: of the program that the config was compiled to.
    """

    flat: Mapping[str, Any]
    axes: Mapping[str, int]
    host_memory: bool
    report: ReportRecord

    @property
    def accumulates(self) -> bool:
        """Whether an update can have more than one micro-batch."""
        return not self.flat["optimizer.fused_backward"] and not self.flat["offload.params"]

    @property
    def by_layer(self) -> bool:
        """Whether an update can go layer by layer, as moments in host memory and a fused backward pass need."""
        closed = (self.flat["batch.accumulation_schedule"], self.flat["precision.preset"] == "fp16", self.adapters)
        return not any(closed)

    @property
    def adapters(self) -> bool:
        """Whether low-rank adapters are what is trained: their state is too small to narrow or to move."""
        return bool(self.flat.get("lora.rank"))  # a report of before there were adapters has no such key

    @property
    def micro_steps(self) -> int:
        """Micro-batches of an update; the most, with a schedule."""
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
        """Devices that may share state, replicas aside."""
        return self.axes["fsdp"] * self.axes["expert"] * self.axes["context"]

    def shards(self, ranks: int) -> bool:
        """Whether every width of a parameter that ZeRO shards, the ranks of latents included, is divisible by these."""
        keys = ["model.d_model"]
        if self.flat.get("model.attention_kind") == "mla":
            keys += ["model.mla_kv_rank", "model.mla_q_rank"]
        return not any(self.flat.get(key, 0) % ranks for key in keys)

    @property
    def routing(self) -> tuple[ExpertShape, int, int] | None:
        """(experts, tokens of a device and micro-step, devices that share the experts); None without experts, and for
        the kernel that has no rows."""
        if "model.moe_every" not in self.flat or self.flat["model.moe_kernel"] == "dense":
            return None
        experts = experts_of(self.flat)
        tokens = self.flat["batch.micro"] * self.flat["data.seq_len"] // self.axes["context"]
        return (experts, tokens, self.axes["expert"]) if experts else None

    @property
    def _tokens_per_row(self) -> int:
        return math.prod(self.axes[axis] for axis in BATCH_AXES) * self.flat["data.seq_len"]


def case_of(report: ReportRecord) -> Case | None:
    """The case of a report; None where the program has no config of the trainer's."""
    flat = report.config
    needed = (
        "batch.micro",
        "data.seq_len",
        "loss.kind",
        "mesh.fsdp",
        "offload.params",
        "optimizer.name",
        "remat.policy",
    )
    if any(key not in flat for key in needed):
        return None
    return Case(
        flat,
        mesh_of(flat, int(report.target.get("n_devices") or 1)),
        report.target.get("platform") not in (None, "cpu"),
        report,
    )


def schedule(flat: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(first update, micro-batches from it on) of `batch.accumulation_schedule`."""
    pairs = (str(text).split(":") for text in flat["batch.accumulation_schedule"])
    return [(int(start), int(count)) for start, count in pairs]
