"""A config on its devices: what levers and remedies ask of it. Pure.

In: a report with the config that was compiled (`Report.config`, keys of the trainer's configs/base.py). Out: `Case`,
its keys with the sizes of the mesh and the tokens of an update; None for a program without such a config.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from bytescope.memory.config_keys import (
    BATCH_ACCUMULATION,
    BATCH_ACCUMULATION_SCHEDULE,
    BATCH_MICRO,
    BATCH_TOKENS,
    DATA_SEQ_LEN,
    LORA_RANK,
    LOSS_KIND,
    MESH,
    MESH_FSDP,
    MODEL_ATTENTION_KIND,
    MODEL_D_MODEL,
    MODEL_MLA_KV_RANK,
    MODEL_MLA_Q_RANK,
    OFFLOAD_PARAMS,
    OPTIMIZER_FUSED_BACKWARD,
    OPTIMIZER_NAME,
    PRECISION_PRESET,
    REMAT_POLICY,
)
from bytescope.memory.formulas.communication_volume import BATCH_AXES
from bytescope.memory.records.report_record import ReportRecord

# Keys of a config to change: dotted key -> text.
Keys = Mapping[str, str]


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
        return not self.flat[OPTIMIZER_FUSED_BACKWARD] and not self.flat[OFFLOAD_PARAMS]

    @property
    def by_layer(self) -> bool:
        """Whether an update can go layer by layer, as moments in host memory and a fused backward pass need."""
        closed = (self.flat[BATCH_ACCUMULATION_SCHEDULE], self.flat[PRECISION_PRESET] == "fp16", self.adapters)
        return not any(closed)

    @property
    def adapters(self) -> bool:
        """Whether low-rank adapters are what is trained: their state is too small to narrow or to move."""
        return bool(self.flat.get(LORA_RANK))  # a report of before there were adapters has no such key

    @property
    def micro_steps(self) -> int:
        """Micro-batches of an update; the most, with a schedule."""
        if self.flat[BATCH_ACCUMULATION_SCHEDULE]:
            return max(count for _, count in schedule(self.flat))
        if self.flat[BATCH_TOKENS]:
            return max(self.flat[BATCH_TOKENS] // (self.flat[BATCH_MICRO] * self._tokens_per_row), 1)
        return self.flat[BATCH_ACCUMULATION]

    @property
    def tokens(self) -> int:
        """Tokens of an update over all devices."""
        return self.flat[BATCH_TOKENS] or self.flat[BATCH_MICRO] * self.micro_steps * self._tokens_per_row

    @property
    def shared(self) -> int:
        """Devices that may share state, replicas aside."""
        return self.axes["fsdp"] * self.axes["expert"] * self.axes["context"]

    def shards(self, ranks: int) -> bool:
        """Whether every width of a parameter that ZeRO shards, the ranks of latents included, is divisible by these."""
        keys = [MODEL_D_MODEL]
        if self.flat.get(MODEL_ATTENTION_KIND) == "mla":
            keys += [MODEL_MLA_KV_RANK, MODEL_MLA_Q_RANK]
        return not any(self.flat.get(key, 0) % ranks for key in keys)

    @property
    def _tokens_per_row(self) -> int:
        return math.prod(self.axes[axis] for axis in BATCH_AXES) * self.flat[DATA_SEQ_LEN]


def case_of(report: ReportRecord) -> Case | None:
    """The case of a report; None where the program has no config of the trainer's."""
    flat = report.config
    needed = (BATCH_MICRO, DATA_SEQ_LEN, LOSS_KIND, MESH_FSDP, OFFLOAD_PARAMS, OPTIMIZER_NAME, REMAT_POLICY)
    if any(key not in flat for key in needed):
        return None
    # A report that was written before there was an axis has no key of it.
    axes = {axis: int(flat.get(MESH + axis, 1)) for axis in ("stage", *BATCH_AXES, "context", "tensor")}
    known = math.prod(size for size in axes.values() if size > 0)
    rest = max(int(report.target.get("n_devices") or 1) // known, 1)
    return Case(
        flat,
        {axis: size if size > 0 else rest for axis, size in axes.items()},
        report.target.get("platform") not in (None, "cpu"),
        report,
    )


def schedule(flat: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(first update, micro-batches from it on) of `batch.accumulation_schedule`."""
    pairs = (str(text).split(":") for text in flat[BATCH_ACCUMULATION_SCHEDULE])
    return [(int(start), int(count)) for start, count in pairs]
