"""The variants of a config that a fit may try: meshes, micro-batches and memory savings, as config keys. Compiles
nothing."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from bytescope.memory.errors import ReportError, remedy_for
from bytescope.train.data.batch_algebra import MAX_ACCUMULATION
from bytescope.train.plan.config_facts import BATCH_AXES
from bytescope.train.plan.config_grid import describe_remat
from bytescope.train.plan.lever_catalogue import SAVINGS

Keys = dict[str, str]

# Lever of `fit --vary` -> what the search may change.
LEVERS: Mapping[str, str] = {
    "remat": "the tensors that blocks save (remat.*)",
    "micro": "sequences per rank and micro-batch (batch.micro)",
    "accumulation": "micro-batches per update, within one step (batch.tokens, batch.mode)",
    "offload": "activations, optimizer state and parameters in host memory",
    "precision": "16-bit parameters, 8-bit moments, updates inside the backward pass: these change the arithmetic",
    "sharding": "the mesh (mesh.*, pipeline.*)",
    "xla": "options of XLA that need less memory (xla.memory_slop, xla.latency_hiding), if the budget is nearly met",
    "base": "the storage of weights frozen under LoRA adapters (lora.base): 16 bits, 8 bits, NF4",
}

# Prefix of a config key -> the lever that changes it. If the command line sets such a key, the lever is not used.
LEVER_OF_KEY = {
    "remat.": "remat",
    "batch.micro": "micro",
    "batch.accumulation": "accumulation",
    "mesh.": "sharding",
    "xla.": "xla",
}

AXES = ("stage", *BATCH_AXES, "context", "tensor")
ONE_AXIS = {
    "mesh.stage": "1",
    "mesh.data": "1",
    "mesh.expert": "1",
    "mesh.context": "1",
    "mesh.tensor": "1",
    "mesh.sequence_parallel": "false",
    "pipeline.virtual": "1",
}
# STAGES: numbers of pipeline stages that are tried in addition to one stage per host. CHUNKS: chunks of layers per
# stage. Several chunks have the smallest bubble, the V schedule stores the fewest activations (train/pipeline).
STAGES, CHUNKS = (2, 4, 8), 2


@dataclasses.dataclass(frozen=True)
class Squeeze:
    """A set of memory savings that `bytescope fit` tries together, in addition to recomputation.

    Attributes:
        what: a description of the savings.
        savings: names in the catalogue of savings (SAVINGS). Later savings override config keys of earlier ones.
        blocks_to_host: whether the set also allows saved activations in host memory. A set with a saving that moves
            state to host memory always allows this.
        always: whether the set is tried even if an earlier one fits, because the memory that it frees may make the step
            faster.
    """

    what: str
    savings: tuple[str, ...] = ()
    blocks_to_host: bool = False
    always: bool = False

    @property
    def keys(self) -> dict[str, str]:
        """The config keys that the savings set, dotted key -> text."""
        keys: dict[str, str] = {}
        for name in self.savings:
            keys |= SAVINGS[name].all_keys
        return keys

    @property
    def levers(self) -> tuple[str, ...]:
        """The kinds of change ("levers") that the flag `fit --vary` must all allow for this set of savings to be
        tried, such as "offload"."""
        groups = [SAVINGS[name].group for name in self.savings]
        if self.blocks_to_host:
            groups.append("offload")
        return tuple(dict.fromkeys(groups))

    @property
    def activations(self) -> bool:
        """Returns whether saved activations of transformer blocks may be moved to host memory."""
        return "offload" in self.levers

    @property
    def one_micro_batch(self) -> bool:
        """Returns whether an update must consist of one micro-batch, without accumulation."""
        return any(SAVINGS[name].one_micro_batch for name in self.savings)


# The squeezes in the order in which they are tried. Transfers to host memory come before changes of the arithmetic.
SQUEEZES = (
    Squeeze("recomputation"),
    Squeeze("activations in host memory", blocks_to_host=True),
    Squeeze("optimizer state in host memory", ("offload",)),
    Squeeze("optimizer state and parameters in host memory", ("offload_params",)),
    Squeeze("8-bit moments", ("adamw_8bit",)),
    Squeeze("8-bit moments and parameters in host memory", ("adamw_8bit", "offload_params")),
    Squeeze("16-bit parameters, 8-bit moments", ("bf16_params", "adamw_8bit")),
    Squeeze(
        "16-bit parameters updated inside the backward pass, moments in host memory",
        ("bf16_params", "fused_backward", "offload"),
    ),
    Squeeze(
        "16-bit parameters updated inside the backward pass, Adafactor",
        ("bf16_params", "fused_backward", "adafactor"),
    ),
)
# With adapters, the frozen weights are the only large state to quantize or to move. Decoding them takes time.
ADAPTER_SQUEEZES = (
    Squeeze("recomputation"),
    Squeeze("frozen weights in 8 bits", ("int8_base",), always=True),
    Squeeze("frozen weights in NF4", ("nf4_base",), always=True),
    Squeeze("activations in host memory", blocks_to_host=True),
    Squeeze("frozen weights in NF4, activations in host memory", ("nf4_base",), blocks_to_host=True),
)


@dataclasses.dataclass(frozen=True)
class Space:
    """The search space of `bytescope fit`: the meshes, micro-batches and memory savings that it may try for one config.

    Attributes:
        flat: the config before any change, dotted key -> value.
        given: the keys that the command line sets. No variant changes them.
        levers: what `bytescope fit` may change, such as "remat" or "sharding" (keys of LEVERS).
        n_devices: number of devices of the target.
        per_host: number of devices per host.
        tokens: tokens per update, over all devices.
        has_bf16: whether the target has compute units for 16-bit matmuls.
    """

    flat: Mapping[str, Any]
    given: frozenset[str]
    levers: frozenset[str]
    n_devices: int
    per_host: int
    tokens: int
    has_bf16: bool = True

    @property
    def sequences(self) -> int:
        """Number of sequences per update, over all devices."""
        return self.tokens // self.flat["data.seq_len"]

    def meshes(self) -> list[Keys]:
        """Returns the device meshes to try, each as config keys. Meshes that cannot divide the batch are left out.

        The config's own mesh, as the empty dict, comes first. Then follow ZeRO-3 over all devices, ZeRO-3 within each
        host with hosts as replicas, the other sharding strategies, experts sharded over all devices, over one host or
        over half a host, tensor parallelism within a host, and pipeline stages.
        """
        if "sharding" not in self.levers or self.n_devices == 1:
            return [{}]
        hosts, zero3 = self.n_devices // self.per_host, {**ONE_AXIS, "mesh.strategy": "zero3", "mesh.fsdp": "-1"}
        candidates: list[Keys] = [{}, zero3]
        if hosts > 1:
            candidates.append({**zero3, "mesh.data": str(hosts), "mesh.fsdp": str(self.per_host)})
        candidates += [{**zero3, "mesh.strategy": strategy} for strategy in ("zero2", "zero1", "ddp")]
        experts = self.flat["model.experts"]
        for size in (self.n_devices, self.per_host, self.per_host // 2):
            if experts and size > 1 and experts % size == 0:
                candidates.append({**zero3, "mesh.expert": str(size)})
        heads = math.gcd(self.flat["model.n_heads"], self.flat["model.n_kv_heads"])
        for size in (2, 4, 8):
            if self.per_host % size == 0 and heads % size == 0:
                candidates.append({**zero3, "mesh.tensor": str(size), "mesh.sequence_parallel": "true"})
        for keys in stage_meshes(self.flat, self.given, self.n_devices, self.per_host):
            candidates.append({**ONE_AXIS, **keys})
        different: dict[tuple[Any, ...], Keys] = {}
        for keys in candidates:
            different.setdefault(tuple(sorted(self.axes(keys).items())), keys)
        return [keys for keys in different.values() if self.micros(keys)]

    def axes(self, keys: Mapping[str, str]) -> dict[str, Any]:
        """Returns the axis sizes and settings of a device mesh, such as {"fsdp": 8, "tensor": 1, "strategy": "zero3"}.

        Each axis of AXES is a key, with its number of devices. The other keys are `strategy`: the sharding strategy
        ("ddp" if nothing is sharded), `schedule`: the pipeline schedule ("" without stages), and `sequence_parallel`:
        "true" or "false".

        keys: the config keys that select the mesh.
        """
        mesh: dict[str, Any] = {}
        for name in (*AXES, "strategy", "sequence_parallel"):
            key = f"mesh.{name}"
            mesh[name] = keys[key] if key in keys else self.flat[key]
        sizes = {axis: int(mesh[axis]) for axis in AXES}
        rest = math.prod(size for size in sizes.values() if size > 0)
        sizes = {axis: size if size > 0 else max(self.n_devices // rest, 1) for axis, size in sizes.items()}
        shared = sizes["fsdp"] * sizes["expert"] * sizes["context"] > 1
        return {
            **sizes,
            "strategy": mesh["strategy"] if shared else "ddp",
            "schedule": self.schedule(keys),
            "sequence_parallel": str(mesh["sequence_parallel"]).lower() if sizes["tensor"] > 1 else "false",
        }

    def schedule(self, mesh: Mapping[str, str]) -> str:
        """Returns the pipeline schedule of a mesh; "" for a mesh without pipeline stages.

        mesh: the config keys that select the mesh.
        """
        stages = mesh.get("mesh.stage") or self.flat["mesh.stage"]
        if int(stages) <= 1:
            return ""
        return mesh.get("pipeline.schedule") or self.flat["pipeline.schedule"]

    def ranks(self, mesh: Mapping[str, str]) -> int:
        """Returns the number of data-parallel ranks of a mesh.

        mesh: the config keys that select the mesh.
        """
        axes = self.axes(mesh)
        return math.prod(axes[axis] for axis in BATCH_AXES)

    def micros(self, mesh: Mapping[str, str]) -> list[int]:
        """Returns the micro-batch sizes that divide an update on a mesh, in sequences per rank, smallest first.

        The list is empty if the mesh cannot divide the batch.

        mesh: the config keys that select the mesh.
        """
        ranks, schedule = self.ranks(mesh), self.schedule(mesh)
        if self.sequences % ranks:
            return []
        per_rank = self.sequences // ranks
        if "accumulation" not in self.levers:
            steps = self.flat["batch.accumulation"]
            sizes = [per_rank // steps] if per_rank % steps == 0 else []
        else:
            sizes = [size for size in _divisors(per_rank) if per_rank // size <= MAX_ACCUMULATION]
        if schedule and mesh:
            stages = self.axes(mesh)["stage"]
            sizes = [size for size in sizes if runs_schedule(schedule, stages, per_rank // size)]
        if "micro" in self.levers:
            return sizes
        return [size for size in sizes if size == self.flat["batch.micro"]]

    def batch(self, mesh: Mapping[str, str], micro: int) -> Keys:
        """Returns the config keys that select a micro-batch size on a mesh, with the number of accumulated
        micro-batches that gives the same sequences per update.

        Micro-batches are accumulated within one call of the step, unless the command line sets `batch.mode`.

        Args:
            mesh: the config keys that select the mesh.
            micro: sequences per data-parallel rank, a value of `micros(mesh)`.
        """
        steps = self.sequences // (self.ranks(mesh) * micro)
        keys = {"batch.micro": str(micro), "batch.tokens": "0", "batch.accumulation": str(steps)}
        if "batch.mode" not in self.given and (steps > 1 or self.schedule(mesh)):
            keys["batch.mode"] = "scan"
        return keys

    def squeezes(self) -> list[Squeeze]:
        """Returns the sets of memory savings that `bytescope fit` may try, in order.

        A set is left out if a saving in it is not allowed, if it changes a key that the command line sets, or if it
        replaces an optimizer other than AdamW.
        """
        adam = str(self.flat["optimizer.name"]).startswith("adamw")
        allowed = []
        for squeeze in ADAPTER_SQUEEZES if self.flat["lora.rank"] else SQUEEZES:
            keeps_optimizer = adam or "optimizer.name" not in squeeze.keys
            if set(squeeze.levers) <= self.levers and not self.given.intersection(squeeze.keys) and keeps_optimizer:
                allowed.append(squeeze)
        return allowed

    def baseline(self) -> Keys:
        """Returns the config keys that all variants share, dotted key -> text.

        If the config is float32 throughout and the command may change the precision, the keys select bf16 compute with
        float32 master parameters. Otherwise there are no such keys.
        """
        fp32 = self.flat["precision.preset"] == "fp32" and "precision.preset" not in self.given
        return {"precision.preset": "bf16"} if fp32 and self.has_bf16 and "precision" in self.levers else {}


@functools.lru_cache
def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def stage_meshes(
    flat: Mapping[str, Any], given: Collection[str], n_devices: int, per_host: int
) -> Iterator[dict[str, str]]:
    """Yields the config keys of each device mesh with pipeline stages that `bytescope fit` should try.

    The numbers of stages are 2, 4, 8 and the number of hosts. On several hosts there is also a mesh with one stage per
    host and tensor parallelism within each host. Yields nothing if the config or the command line has a setting that
    the trainer cannot combine with stages.

    Args:
        flat: the config, dotted key -> value.
        given: the keys that the command line sets.
        n_devices: number of devices of the target.
        per_host: number of devices per host.
    """
    scheduled = "pipeline.schedule" in given or "pipeline.virtual" in given
    if scheduled or ("batch.mode" in given and flat["batch.mode"] != "scan"):
        return
    some_layers_dense = flat["model.experts"] and flat["model.moe_every"] > 1
    if not flat["model.scan"] or flat["optimizer.fused_backward"] or flat["offload.params"] or some_layers_dense:
        return  # the trainer cannot combine stages with these settings
    hosts, layers = n_devices // per_host, flat["model.n_layers"]
    sizes = sorted(size for size in {*STAGES, hosts} - {1} if n_devices % size == 0 and size <= layers)
    for size in sizes:
        chunks = CHUNKS if CHUNKS * size <= layers else 1
        yield _stage_mesh(size, "interleaved" if chunks > 1 else "1f1b", chunks)
    in_chunks = [size for size in sizes if CHUNKS * size <= layers]
    if in_chunks:
        yield _stage_mesh(in_chunks[-1], "v", CHUNKS)
    heads = math.gcd(flat["model.n_heads"], flat["model.n_kv_heads"])
    if hosts in in_chunks and hosts > 1 and heads % per_host == 0:
        mesh = _stage_mesh(hosts, "interleaved", CHUNKS)
        yield {**mesh, "mesh.tensor": str(per_host), "mesh.sequence_parallel": "true"}


def _stage_mesh(size: int, schedule: str, chunks: int) -> dict[str, str]:
    return {
        "mesh.stage": str(size),
        "mesh.strategy": "zero3",
        "mesh.fsdp": "-1",
        "pipeline.schedule": schedule,
        "pipeline.virtual": str(chunks),
    }


def runs_schedule(schedule: str, stages: int, micro_batches: int) -> bool:
    """Returns whether a pipeline schedule exists for this number of micro-batches per update, and has at least one
    micro-batch per stage."""
    return micro_batches >= stages and (schedule != "interleaved" or micro_batches % stages == 0)


def choose_levers(text: str | None) -> frozenset[str]:
    """Parses the flag `--vary=a,b,c`, which lists what `bytescope fit` may change ("levers", such as "remat" or
    "sharding"). If `text` is None, returns all levers.

    Raises:
        ReportError: a lever is unknown.
    """
    names = list(LEVERS) if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in LEVERS:
            raise ReportError(f"--vary={text}: unknown lever {name!r}: {remedy_for(name, LEVERS)}")
    return frozenset(names)


def space_of(
    flat: Mapping[str, Any],
    given: Collection[str],
    levers: frozenset[str],
    n_devices: int,
    per_host: int,
    tokens: int | None,
    has_bf16: bool = True,
) -> Space:
    """Returns the search space of `bytescope fit`: the variants of a config that may be tried on a target.

    Args:
        flat: the config, dotted key -> value.
        given: the keys that the command line sets.
        levers: what `bytescope fit` may change, such as "remat" or "sharding" (keys of LEVERS).
        n_devices: number of devices of the target.
        per_host: number of devices per host.
        tokens: tokens per update; None for the tokens of the config.
        has_bf16: whether the target has compute units for 16-bit matmuls.

    Raises:
        ReportError: no mesh can divide the batch.
    """
    length = flat["data.seq_len"]
    ranks = Space(flat, frozenset(), frozenset(), n_devices, per_host, 0).ranks({})
    tokens = tokens or flat["batch.tokens"] or flat["batch.micro"] * flat["batch.accumulation"] * ranks * length
    if tokens < length or tokens % length:
        raise ReportError(
            f"--batch-tokens={tokens} is not a multiple of the sequence length {length}: give a multiple of {length}"
        )
    levers -= {lever for start, lever in LEVER_OF_KEY.items() if any(key.startswith(start) for key in given)}
    space = Space(flat, frozenset(given), levers, n_devices, per_host, tokens, has_bf16)
    if not space.meshes() or not any(map(space.micros, space.meshes())):
        raise ReportError(_indivisible_batch_message(space))
    return space


def _indivisible_batch_message(space: Space) -> str:
    ranks = space.ranks({})
    fixed = {}
    for name in ("micro", "accumulation"):
        if name not in space.levers:
            fixed[f"batch.{name}"] = space.flat[f"batch.{name}"]
    works = ranks * space.flat["data.seq_len"] * math.prod(fixed.values())
    if space.tokens % works == 0 and space.tokens // works > MAX_ACCUMULATION:
        return (
            f"--batch-tokens={space.tokens} needs more than {MAX_ACCUMULATION} micro-batches per update: give at most "
            f"{MAX_ACCUMULATION * works}"
        )
    text = f"{space.tokens} tokens are {space.sequences} sequences, which cannot be divided over {ranks} ranks"
    if fixed:
        text += f" with {' and '.join(f'{key}={value}' for key, value in fixed.items())}"
    text += f": give --batch-tokens={works}"
    return text if len(fixed) == 2 else f"{text} or a multiple"


def describe_mesh(keys: Mapping[str, str], space: Space) -> str:
    """Returns a description of the device mesh of a variant of the config: its strategy, its axes and its pipeline
    schedule.

    keys: the config keys of the variant.
    """
    axes = space.axes(keys)
    split = [axis for axis in AXES if axes[axis] > 1]
    mesh = " x ".join(f"{axis} {axes[axis]}" for axis in split)
    if any(axis not in ("stage", "tensor") for axis in split):
        mesh = f"{axes['strategy']} {mesh}"
    return " ".join(filter(None, (mesh or "one device", axes["schedule"])))


def describe_variant(keys: Mapping[str, str], space: Space) -> str:
    """Returns a description of a variant of the config: its mesh, its micro-batch size times the number of accumulated
    micro-batches, and its memory savings.

    keys: the config keys of the variant.
    """
    micro, accumulation = keys.get("batch.micro", space.flat["batch.micro"]), keys.get("batch.accumulation", "?")
    parts = [describe_mesh(keys, space), f"{micro} x {accumulation}"]
    for key, value in keys.items():
        if key in ("precision.preset", "optimizer.name", "lora.base", "lora.rank", "data.seq_len"):
            parts.append(f"{key.rpartition('.')[2]}={value}")
        elif key.startswith("xla."):
            parts.append(f"{key}={value}")
        elif key.startswith(("offload.", "optimizer.fused_backward")):
            parts.append(key)
    return ", ".join(parts)


def describe_trial(keys: Mapping[str, str], space: Space) -> str:
    """Returns a description of a variant of the config with its remat policy, for the progress bar."""
    return ", ".join(filter(None, (describe_variant(keys, space), describe_remat(keys))))
