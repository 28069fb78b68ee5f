"""Rows that other projects measured: one row, the sets of them by name, and how tables and decoders become rows.

The tables are data/NAME.csv. `setups_NAME.py` says each row of set NAME as a config of ours, or why none does.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib
import io
from collections.abc import Mapping
from importlib import resources
from typing import Any

from bytescope.memory.errors import ReportError, remedy_for
from bytescope.memory.units import GIB

# A row of a table, and its setup: base config and overrides, or the reason why there is none.
Fact = Mapping[str, str]
Setup = tuple[str, Mapping[str, str]] | str
# Rows on more devices are not compiled: the compile time is out of proportion to what a row adds.
MAX_GPUS = 512

# Set -> what it holds, in a line; `setups_NAME.py` has its rows.
SETS: Mapping[str, str] = {
    "playbook": "the Ultra-Scale Playbook's own runs of nanotron on 8, 32 and 64 H100",
    "jax": "MaxText, Pax, Alpa and UvA's tutorial on A5000, V100, A100, H100, H200 and B200",
    "torch": "llm-foundry and fms-fsdp on A100 and H100",
}


@dataclasses.dataclass(frozen=True)
class MeasuredRow:
    """One run that somebody measured.

    Fields:
        set, id: name of the set and of the row in it. model, chip, gpus: what was trained, and on what.
        config, overrides (dotted key -> text), target: what compiles our nearest program; empty if there is none.
        measured_seconds: of an update. measured_bytes: of one device. None if the source does not state it.
        quality: "A": read from a table, log or script with a known setup; "B": one or two facts are derived; "C": from
            prose.
        source: where the figures were read. reason: why the row is not compiled or not scored; "" if it is.
        setup: the differences from other rows of the model, in words.
        tensor: size of the tensor-parallel group. stages: number of pipeline stages.
        launch_seconds: minimum seconds that the measured framework's host needs to launch the update; 0 if launches
            were not the bound, or are unknown. Our programs have no such minimum.
        host_bound: whether launches set the pace, so that the row says nothing of the device; None if unknown.
        network: a key of `seconds.achieved.NETWORKS` for the links between hosts; "" for the chip's own.
        differs: known differences between the measured run and the predicted one, in words.
        bytes_are: what `measured_bytes` counts: "reserved" (an upper bound of the bytes needed), "allocated" or "".
        bytes_reason: why our bytes are not compared with `measured_bytes`; "" if they are.
        cohort: name of the rows, over all models, that are scored together, such as one quality and vintage; "" if the
            row is scored with its model and number of GPUs only.
    """

    set: str
    id: str
    model: str
    chip: str
    gpus: int
    overrides: Mapping[str, str]
    config: str
    target: str
    measured_seconds: float | None
    measured_bytes: int | None
    quality: str
    source: str
    reason: str = ""
    setup: str = ""
    tensor: int = 1
    stages: int = 1
    launch_seconds: float = 0.0
    host_bound: bool | None = None
    network: str = ""
    differs: str = ""
    bytes_are: str = ""
    bytes_reason: str = ""
    cohort: str = ""

    @property
    def source_id(self) -> str:
        """The source's short name."""
        return self.source.partition(":")[0]


def rows(name: str) -> tuple[MeasuredRow, ...]:
    """Returns the rows of a set. Raises ReportError for a set that does not exist."""
    if name not in SETS:
        raise ReportError(f"no set {name!r}: {remedy_for(name, SETS)}")
    return importlib.import_module(f"bytescope.train.plan.validation.setups_{name}").rows()


def facts(name: str) -> list[Fact]:
    """Returns the rows of the table data/NAME.csv, in order; the id of a row is its number there."""
    table = resources.files("bytescope.train.plan.validation") / "data" / f"{name}.csv"
    return list(csv.DictReader(io.StringIO(table.read_text(encoding="utf-8"), newline="")))


def shape(fact: Fact) -> dict[str, str]:
    """Returns the overrides for model, sequence and batch of a row. All logits are one array (`loss.kind=full`), as in
    the measured programs."""
    heads, width = int(fact["heads"]), int(fact["hidden"])
    return {
        "model.n_layers": fact["layers"],
        "model.d_model": fact["hidden"],
        "model.n_heads": fact["heads"],
        "model.n_kv_heads": fact["kv"],
        "model.d_head": f"{width // heads}",
        "model.d_ff": fact["ffn"],
        "model.vocab_size": fact["vocab"],
        "model.max_seq_len": fact["seq"],
        "data.seq_len": fact["seq"],
        "batch.micro": fact["bs_per_gpu"],
        "loss.kind": "full",
        "model.rope_scaling": "()",
    }


def refused(fact: Fact) -> str:
    """Returns the reason why a row, of any source, is not compared; "" if there is none."""
    if fact["status"] != "ok":
        return f"nothing was measured: {fact['status']}"
    if not (fact["step_s"] or fact["mem_gib"]):
        return "neither time nor bytes are stated"
    if fact["quality"] == "C":
        return "second hand, or a figure of a text: not to be scored against"
    if "fp8" in fact["precision"]:
        return "8-bit products of a library, one scale an array: ours scales tiles of 128, in a kernel of its own"
    if not fact["n_gpus"].isdigit():
        return "the number of GPUs is not stated"
    if int(fact["n_gpus"]) > MAX_GPUS:
        return f"over {MAX_GPUS} devices: smaller runs of the same are compared"
    return ""


def target(chip: str, gpus: int, per_host: int) -> str:
    """Returns the target of so many GPUs: part of a host, or several whole hosts."""
    return f"{chip}:{gpus}" if gpus <= per_host else f"{chip}:{gpus // per_host}x{per_host}"


def row_of(
    name: str, number: int, fact: Fact, said: Setup, chip: str, gpus: int, per_host: int, **more: Any
) -> MeasuredRow:
    """Returns the row of a table as a measured run.

    name: of the set. said: config and overrides, or the reason why there are none. more: other fields of the row.
    """
    config, overrides = ("", {}) if isinstance(said, str) else said
    return MeasuredRow(
        set=name,
        id=str(number),
        model=fact["model"],
        chip=chip,
        gpus=gpus,
        overrides=overrides,
        config=config,
        target=target(chip, gpus, per_host) if config else "",
        measured_seconds=float(fact["step_s"]) if fact["step_s"] else None,
        measured_bytes=int(float(fact["mem_gib"]) * GIB) if fact["mem_gib"] else None,
        quality=fact["quality"],
        source=f"{fact['source_id']}: {fact['source_url']}",
        reason=said if isinstance(said, str) else "",
        **more,
    )
