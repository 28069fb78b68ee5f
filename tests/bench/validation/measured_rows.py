"""Rows that other projects measured: the record of one row, the sets of rows, and the conversion from tables.

The tables are data/NAME.csv. `setups_NAME.py` gives for each row of set NAME the nearest config, or the reason why
there is none.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.errors import ReportError, remedy_for
from bytescope.memory.units import GIB

# A row of a table. A setup is the base config with its overrides, or the reason why no config can describe the row.
Fact = Mapping[str, str]
Setup = tuple[str, Mapping[str, str]] | str
# What ran a measured program: JAX, or PyTorch with or without torch.compile.
FRAMEWORKS = ("jax", "compiled torch", "eager torch")
# The reason not to compare a run of a model that is outside of what any config describes.
NO_TRANSFORMER = "the model consists of convolutions or classifies images, which no config describes"
# Source -> the family of the sources that the same people published with the same framework.
_FAMILIES = {
    **dict.fromkeys(
        ("pax_2024-04", "pax_2023-08", "pax_2023-07-oldest", "pax_llama2_7b_sft", "pax_llama2_7b_lora32"), "pax"
    ),
    **dict.fromkeys(("dgxc_l2_70b", "dgxc_l2_70b_old"), "dgxc"),
    **dict.fromkeys(("gpurecipes_h200_70b", "gpurecipes_b200_405b", "gpurecipes_b200_70b"), "gpu-recipes"),
    **dict.fromkeys(("axlearn_fuji7b_v1", "axlearn_fuji7b_v2", "axlearn_fuji70b_v2"), "axlearn"),
    **dict.fromkeys(("alpa_intra", "alpa_e2e", "alpa_readme"), "alpa"),
    **dict.fromkeys(("playbook", "old_bench"), "nanotron"),
    **dict.fromkeys(("torchtitan_202412", "torchtitan_asynctp", "torchtitan_a100_2024"), "torchtitan"),
}
# Rows on more devices are not compiled, because their compile time is too long.
MAX_GPUS = 512

# Name of a set -> its content in one line. `setups_NAME.py` has its rows.
SETS: Mapping[str, str] = {
    "playbook": "the Ultra-Scale Playbook's own runs of nanotron on 8, 32 and 64 H100",
    "jax": "MaxText, Pax, Alpa, axlearn and UvA's tutorial on A5000, V100, A100, H100, H200, B200 and TPU v6e",
    "torch": "llm-foundry, fms-fsdp, torchtitan and KempnerForge on A100, H100 and H200",
}


@dataclasses.dataclass(frozen=True)
class MeasuredRow:
    """A published measurement: the time and memory of one training run of another project, and our config that is
    nearest to the run.

    Attributes:
        set, id: the name of the set of measurements, and the index of the measurement in the set.
        model, chip, gpus: the model that was trained, the type of GPU, and the number of GPUs.
        config, overrides, target: the config, overrides (dotted key -> text) and target of our nearest program; empty
            if there is none.
        measured_seconds: seconds per update; None if the source does not state them.
        measured_bytes: bytes on one device; None if the source does not state them.
        quality: "A": read from a table, log or script with a known setup. "B": one or two facts are derived. "C": from
            prose.
        source: where the figures were read.
        reason: why the run is not compiled or not scored; "" if it is.
        setup: a description of how the run differs from other runs of the model.
        tensor: size of the tensor-parallel group.
        stages: number of pipeline stages.
        launch_seconds: minimum seconds that the measured framework's host needs to launch the kernels of an update; 0
            if launches were not the limit, or are unknown. Our programs have no such minimum.
        host_bound: whether kernel launches determine the seconds, so that the run says nothing about the device; None
            if unknown.
        network: a key of `seconds.achieved.NETWORKS` for the links between hosts; "" for the chip's default.
        attention: a key of `seconds.achieved.ATTENTION_KERNELS`, the attention kernel that the run used according to
            its project; "" for the chip's default.
        differs: a description of known differences between the measured run and our program.
        bytes_are: what `measured_bytes` counts: "reserved" (an upper bound of the bytes needed), "allocated" or "".
        bytes_reason: why `measured_bytes` is not compared with our prediction; "" if it is.
        cohort: the name of a group of runs of all models that are scored together, for example of one quality and age;
            "" if the run is scored only with runs of its model and number of GPUs.
        framework_bytes: bytes on one device that the measured framework allocates by its source code and that our
            program does not have: name -> bytes. They are added to our bytes in the comparison.
        framework: what ran the program, one of FRAMEWORKS.
        other_program: why the measured program is known to be a different program than ours, so that we do not claim
            to predict it; "" if we claim it. Such a run still has a prediction.
        unreliable: why the measured seconds do not describe the program, for example because of trouble in the network,
            so that we do not claim to predict them; "" if they do. Such a run still has a prediction, and its bytes are
            compared.
        published: year and month of the publication, such as "2025-02"; "" if unknown.
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
    attention: str = ""
    differs: str = ""
    bytes_are: str = ""
    bytes_reason: str = ""
    cohort: str = ""
    framework_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    framework: str = "jax"
    other_program: str = ""
    published: str = ""
    unreliable: str = ""

    @property
    def source_id(self) -> str:
        """The short name of the source, which is the part of `source` before the colon."""
        return self.source.partition(":")[0]

    @property
    def family(self) -> str:
        """The publishers of the run: the source, or several sources of the same people and framework."""
        return _FAMILIES.get(self.source_id, self.source_id)

    @property
    def counts(self) -> bool:
        """Whether the run counts for the coverage of intervals: it trains a transformer of text, and its seconds are
        stated and not second-hand."""
        return self.measured_seconds is not None and self.quality != "C" and self.reason != NO_TRANSFORMER

    @property
    def claims_seconds(self) -> bool:
        """Whether we claim to predict the measured seconds: the program is ours, and the seconds are reliable."""
        return not (self.other_program or self.unreliable)

    @property
    def claims_bytes(self) -> bool:
        """Whether we claim to predict the measured bytes: the program is ours."""
        return not self.other_program

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches that a device computes per update, from the overrides of our nearest config."""
        return int(self.overrides.get("batch.accumulation", "1"))


def rows(name: str) -> tuple[MeasuredRow, ...]:
    """Returns the published measurements of a set.

    name: the name of the set, a key of SETS.

    Raises:
        ReportError: the set is unknown.
    """
    if name not in SETS:
        raise ReportError(f"unknown set of measured rows {name!r}: {remedy_for(name, SETS)}")
    return importlib.import_module(f"setups_{name}").rows()


def facts(name: str) -> list[Fact]:
    """Reads the table data/NAME.csv of published measurements. Returns one `Fact` (column -> text) for each row of the
    table."""
    with (Path(__file__).parent / "data" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def shape(fact: Fact) -> dict[str, str]:
    """Returns the config overrides for the model, sequence length and batch of a measured run.

    `loss.kind=full` computes all logits as one array, as the measured programs do.

    fact: the row of the table with the run's published data, column -> text.
    """
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


def reason_not_compared(fact: Fact) -> str:
    """Returns the reason why a measured run is not compared with a prediction; "" if it is compared.

    fact: the row of the table with the run's published data, column -> text.
    """
    if fact["status"] != "ok":
        return f"nothing was measured: {fact['status']}"
    if not (fact["step_s"] or fact["mem_gib"]):
        return "neither time nor bytes are stated"
    if fact["quality"] == "C":
        return "the figure is second-hand or from prose, too uncertain for a score"
    if not fact["n_gpus"].isdigit():
        return "the number of GPUs is not stated"
    if int(fact["n_gpus"]) > MAX_GPUS:
        return f"more than {MAX_GPUS} devices; smaller runs of the same model are compared"
    return ""


# Number of TPU chips -> the slice of v6e with these chips.
_TPU_SLICES = {8: "2x4", 16: "4x4", 32: "4x8"}


def target(chip: str, gpus: int, per_host: int) -> str:
    """Returns the name of the compile target with this number of GPUs, such as "h100:4" or "h100:2x8" (2 hosts with 8
    GPUs each), or the slice of a TPU, such as "v6e:4x4".

    Args:
        chip: the type of GPU.
        gpus: the total number of GPUs. If it exceeds `per_host`, whole hosts are used.
        per_host: number of GPUs per host.
    """
    if chip == "v6e":
        return f"{chip}:{_TPU_SLICES[gpus]}"
    return f"{chip}:{gpus}" if gpus <= per_host else f"{chip}:{gpus // per_host}x{per_host}"


# Why fp8 runs of other projects are other programs than ours.
FP8 = "fp8 matmuls of a library with one scale per array or row; ours scale tiles of 128 in their own kernel"


def row_of(
    name: str,
    number: int,
    fact: Fact,
    nearest: Setup,
    chip: str,
    gpus: int,
    per_host: int,
    other_program: str = "",
    **more: Any,
) -> MeasuredRow:
    """Converts one row of a table of published measurements into a `MeasuredRow`.

    Args:
        name: the name of the set.
        number: the index of the row in the table.
        fact: the row of the table with the run's published data, column -> text.
        nearest: the config and overrides of our nearest program, or the reason why there is none.
        chip: the type of GPU.
        gpus: the total number of GPUs.
        per_host: number of GPUs per host.
        other_program: why the measured program is another program than ours. Runs in fp8 always are other programs;
            their nearest program is in our fp8.
        more: other fields of `MeasuredRow`.
    """
    config, overrides = ("", {}) if isinstance(nearest, str) else nearest
    if "fp8" in fact["precision"]:
        overrides = {**overrides, "precision.preset": "fp8"}
        other_program = "; ".join(filter(None, (FP8, other_program)))
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
        reason=nearest if isinstance(nearest, str) else "",
        other_program=other_program,
        **more,
    )
