"""The catalogue of memory savings: the config keys of each saving, the memory that it frees, its cost, and when it
applies.

Each saving is a row of SAVINGS. `levers` applies them one after the other (`levers.py`), `fit` combines them if
recomputation is not enough (`fit/fit_space.py`) and tries those of XLA where a little memory lacks
(`fit/fit_walk.py`), and the advice for a run that does not fit lists the savings that its
config does not use yet (`advice.py`). To add a saving, add a row to SAVINGS, its place in one of these three
orders, and a case in tests/train/plan. `case_of` builds the facts on which savings depend (`Case`) from a report that
contains the compiled config. This module compiles nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from bytescope.memory.formulas.model_shape import ExpertShape
from bytescope.memory.records.report_record import ReportRecord, RowName
from bytescope.train.plan.config_facts import BATCH_AXES, experts_of, mesh_of

# Keys of a config to change: dotted key -> text.
Keys = Mapping[str, str]

# Keys by which a report of one of the trainer's configs is recognized.
_NEEDED = ("batch.micro", "data.seq_len", "loss.kind", "mesh.fsdp", "offload.params", "optimizer.name", "remat.policy")
# Categories of the memory breakdown that grow with the batch.
BATCH_ROWS: tuple[RowName, ...] = ("residuals", "workspace", "logits_loss", "batch")
# Positions of the sequence for which the MLP is computed at a time (`model.mlp_chunk`).
TILE = 4096
# Remat policies that save more tensors than `selective`, and policies that save no more than `full`.
_ABOVE_SELECTIVE = ("none", "dots", "minimal")
_NO_MORE_THAN_FULL = ("full", "sqrt", "offload", "auto")


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


@dataclasses.dataclass(frozen=True)
class Saving:
    """A memory saving: a change of the config that makes a training step need less memory.

    Attributes:
        keys: the config keys that the saving sets, dotted key -> text.
        frees: category of the memory breakdown, such as "gradients" -> the largest fraction of it that the saving
            frees, 0.0 to 1.0.
        why: the effect and the cost of the saving, for the table of `levers`.
        costs: the cost only, for advice; "" if the cost is negligible.
        group: the word in the flag `fit --vary=...` that allows the saving, such as "offload".
        same_curve: whether the loss curve stays the same.
        one_micro_batch: whether an update must consist of one micro-batch, without accumulation.
        needs: the name of another saving whose keys are set too; "" for none.
        applies: returns whether a config and its report could still use the saving.
        title: the title in the table of `levers`; "" leaves the saving out of the table.
    """

    keys: Mapping[str, str]
    frees: Mapping[RowName, float]
    why: str = ""
    costs: str = ""
    group: str = ""
    same_curve: bool = True
    one_micro_batch: bool = False
    needs: str = ""
    applies: Callable[[Case], bool] = lambda case: True
    title: str = ""

    @property
    def all_keys(self) -> dict[str, str]:
        """The config keys that the saving sets, including the keys of the saving that it needs, dotted key -> text."""
        needed = SAVINGS[self.needs].all_keys if self.needs else {}
        return {**needed, **self.keys}


def _selective_applies(case: Case) -> bool:
    return case.flat["remat.policy"] in _ABOVE_SELECTIVE and not case.flat["remat.layers"]


def _full_applies(case: Case) -> bool:
    return case.flat["remat.policy"] not in _NO_MORE_THAN_FULL or bool(case.flat["remat.layers"])


def _tiles_apply(case: Case) -> bool:
    length = case.flat["data.seq_len"] // max(case.axes["context"], 1)
    return not case.flat["model.mlp_chunk"] and length >= 2 * TILE and length % TILE == 0


def _blocks_can_move(case: Case) -> bool:
    return case.host_memory and case.axes["stage"] == 1 and case.flat["remat.policy"] in ("full", "sqrt")


def _moments_can_move(case: Case) -> bool:
    return case.host_memory and not case.flat["offload.optimizer"] and case.by_layer


def _params_can_move(case: Case) -> bool:
    streamed = case.flat["mesh.strategy"] in ("zero3", "ddp") or case.state_devices == 1
    unused = not case.flat["offload.params"] and case.micro_steps == 1
    return case.host_memory and unused and streamed and case.by_layer


def _fused_applies(case: Case) -> bool:
    one_step = not case.flat["optimizer.fused_backward"] and case.micro_steps == 1
    return one_step and bool(case.flat["model.scan"]) and case.by_layer and case.flat["remat.policy"] != "sqrt"


SAVINGS: Mapping[str, Saving] = {
    "fp32": Saving(
        {"precision.preset": "fp32"},
        {},
        "no saving: nothing is recomputed, nothing is in host memory",
        title="fp32",
    ),
    "bf16": Saving(
        {"precision.preset": "bf16"},
        dict.fromkeys(BATCH_ROWS, 0.5),
        "activations take half the bytes, master parameters stay in float32; values are rounded",
        "changes the arithmetic",
        "precision",
        same_curve=False,
        applies=lambda case: case.flat["precision.preset"] == "fp32",
        title="bf16",
    ),
    "loss": Saving(
        {"loss.kind": "chunked"},
        {"logits_loss": 1.0, "residuals": 1.0},
        "logits exist for one chunk at a time and are recomputed in the backward pass",
        applies=lambda case: case.flat["loss.kind"] == "full",
        title="+ chunked loss",
    ),
    "attention": Saving(
        {"model.attention": "auto"},
        {"residuals": 1.0, "workspace": 1.0},
        "attention scores are never in memory; the kernel recomputes them in the backward pass",
        applies=lambda case: case.flat["model.attention"] == "naive",
        title="+ flash attention",
    ),
    "selective": Saving(
        {"remat.policy": "selective"},
        {"residuals": 1.0},
        "the attention core, norms and rotations are recomputed",
        group="remat",
        applies=_selective_applies,
        title="+ selective remat",
    ),
    "full": Saving(
        {"remat.policy": "full"},
        {"residuals": 1.0},
        "every block is recomputed: its forward pass runs twice",
        "the forward pass of every block runs twice",
        "remat",
        applies=_full_applies,
        title="+ full remat",
    ),
    "parts": Saving(
        {"remat.granularity": "parts"},
        {"workspace": 0.5},
        "attention and MLP of a block are recomputed separately, one after the other",
        group="remat",
        applies=lambda case: (
            case.flat["remat.policy"] in ("full", "offload") and case.flat["remat.granularity"] == "block"
        ),
    ),
    "adamw_8bit": Saving(
        {"optimizer.name": "adamw_8bit"},
        {"optimizer": 0.75},
        "each optimizer moment takes one byte; moments have a quantization error",
        "changes the arithmetic",
        "precision",
        same_curve=False,
        applies=lambda case: case.flat["optimizer.name"] == "adamw" and not case.adapters,
        title="+ 8-bit moments",
    ),
    "adafactor": Saving(
        {"optimizer.name": "adafactor"},
        {"optimizer": 1.0},
        "second moments are stored as one row and one column per matrix; there are no first moments",
        "changes the arithmetic",
        "precision",
        same_curve=False,
        applies=lambda case: False,  # another optimizer needs another learning rate: only fit tries it
    ),
    "fused_backward": Saving(
        {"optimizer.fused_backward": "true", "optimizer.clip": "layer"},
        {"gradients": 1.0},
        "each layer is updated as soon as its gradient exists; no accumulation, and each layer is "
        "clipped by its own norm",
        "each layer is clipped by its own norm",
        "precision",
        same_curve=False,
        one_micro_batch=True,
        applies=_fused_applies,
        title="+ fused backward",
    ),
    "offload": Saving(
        {"offload.optimizer": "true"},
        {"optimizer": 1.0},
        "optimizer moments are in host memory and cross the host link twice per update",
        "moments cross the host link each update",
        "offload",
        applies=_moments_can_move,
        title="+ offload",
    ),
    "offload_params": Saving(
        {"offload.params": "true"},
        {"optimizer": 1.0, "params": 1.0},
        "master parameters are in host memory too",
        "parameters and moments cross the host link",
        "offload",
        one_micro_batch=True,
        needs="offload",
        applies=_params_can_move,
        title="+ offload of params",
    ),
    "bf16_params": Saving(
        {"precision.preset": "bf16_params"},
        {"params": 0.5, "gradients": 0.5},
        "no float32 master parameters; updates are rounded stochastically",
        "no float32 master parameters",
        "precision",
        same_curve=False,
        applies=lambda case: case.flat["precision.preset"] == "bf16" and not case.adapters,
        title="+ 16-bit params",
    ),
    "offload_blocks": Saving(
        {"remat.policy": "offload"},
        {"residuals": 1.0},
        "block inputs are moved to host memory and read back in the backward pass",
        "block inputs cross the host link",
        "offload",
        applies=_blocks_can_move,
        title="+ offload of block inputs",
    ),
    "mlp_chunk": Saving(
        {"model.mlp_chunk": str(TILE)},
        {"workspace": 1.0, "residuals": 1.0},
        "the MLP is computed for pieces of the sequence and recomputed in the backward pass",
        applies=_tiles_apply,
        title="+ tiled MLP",
    ),
    "memory_slop": Saving(
        {"xla.memory_slop": "50"},
        {"workspace": 0.5, "collectives": 1.0},
        "XLA's scheduler plans with half of the free memory, so that collectives overlap less if memory is short",
        "collectives may overlap less with compute",
        "xla",
        applies=lambda case: False,  # it frees little, so only fit and levers try it
        title="+ half of XLA's memory limit",
    ),
    "scheduler_off": Saving(
        {"xla.latency_hiding": "off"},
        {"workspace": 0.5, "collectives": 1.0},
        "XLA schedules for the least memory; collectives do not overlap with compute",
        "collectives do not overlap with compute",
        "xla",
        applies=lambda case: False,
        title="+ no latency-hiding scheduler",
    ),
    "int8_base": Saving(
        {"lora.base": "int8"},
        {"frozen": 0.5},
        "frozen weights are stored in 8 bits",
        "frozen weights are rounded to 8 bits",
        "base",
        same_curve=False,
        applies=lambda case: False,  # nf4_base frees more, and advice names only one format
    ),
    "nf4_base": Saving(
        {"lora.base": "nf4"},
        {"frozen": 1.0},  # the exact fraction depends on the current format: see advice.py
        "frozen weights are stored in 4 bits",
        "frozen weights are rounded to 4 bits",
        "base",
        same_curve=False,
        applies=lambda case: case.adapters and case.flat["lora.base"] != "nf4",
    ),
}
