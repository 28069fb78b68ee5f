"""What rows of several sets share: their tables, shapes of decoders as overrides, targets, and a row of a decoder."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from importlib import resources
from typing import Any

from bytescope.train.plan.validation.measured_rows import Row

# A row of a table, and its setup: base config and overrides, or the reason why there is none.
Fact = Mapping[str, str]
Setup = tuple[str, Mapping[str, str]] | str
GIB = 1 << 30
# Of more devices the compiler's time is out of proportion to what a row adds.
LARGEST = 512


def facts(name: str) -> list[Fact]:
    """The measured rows of a set, in the order of its table; a row's id is its number there."""
    table = resources.files("bytescope.train.plan.validation") / "data" / f"{name}.csv"
    return list(csv.DictReader(io.StringIO(table.read_text(encoding="utf-8"), newline="")))


def shape(fact: Fact) -> dict[str, str]:
    """Model, sequence and batch of a row, with all logits in one array, as the measured programs have them."""
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
    """The reason for which a row of any source is not compared, or ""."""
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
    if int(fact["n_gpus"]) > LARGEST:
        return f"over {LARGEST} devices: smaller runs of the same are compared"
    return ""


def target(chip: str, gpus: int, per_host: int) -> str:
    """Described devices: part of a host, or whole ones."""
    return f"{chip}:{gpus}" if gpus <= per_host else f"{chip}:{gpus // per_host}x{per_host}"


def row_of(name: str, number: int, fact: Fact, said: Setup, chip: str, gpus: int, per_host: int, **more: Any) -> Row:
    """The row of a set. said: its config and overrides, or why there are none. more: other fields of the row."""
    config, overrides = ("", {}) if isinstance(said, str) else said
    return Row(
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
