"""What a fit may change: meshes, micro-batches and squeezes of a config, as keys of its command line. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from bytescope.memory.errors import ReportError, remedy_for
from bytescope.train.plan.config_facts import BATCH_AXES
from bytescope.train.plan.lever_catalogue import SAVINGS

Keys = dict[str, str]

# Lever -> what it changes.
LEVERS: Mapping[str, str] = {
    "remat": "what blocks keep (remat.*)",
    "micro": "sequences per rank and micro-batch (batch.micro)",
    "accumulation": "micro-batches per update, within one step (batch.tokens, batch.mode)",
    "offload": "activations, optimizer state and parameters in host memory",
    "precision": "16-bit parameters, 8-bit moments, updates inside the backward pass: the arithmetic changes",
    "sharding": "the mesh",
    "base": "how weights frozen under LoRA adapters are stored (lora.base): 16 bits, 8 bits, NF4",
}

# Start of a key -> the lever that changes it. If such a key is given, the lever is not used.
HELD = {"remat.": "remat", "batch.micro": "micro", "batch.accumulation": "accumulation", "mesh.": "sharding"}

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
# Numbers of pipeline stages that are tried in addition to one stage per host, and chunks of layers per stage. Several
# chunks have the smallest bubble, the V schedule has the smallest stash (train/pipeline).
STAGES, CHUNKS = (2, 4, 8), 2


@dataclasses.dataclass(frozen=True)
class Squeeze:
    """Savings that make a step smaller in addition to recomputation.

    Fields:
        what: in words. savings: rows of the catalogue; later ones override keys of earlier ones.
        blocks_to_host: whether tensors of blocks may go to host memory though no saving moves state there.
        beside: whether it is tried even if an earlier one fits, because the memory that it frees may save time.
    """

    what: str
    savings: tuple[str, ...] = ()
    blocks_to_host: bool = False
    beside: bool = False

    @property
    def keys(self) -> dict[str, str]:
        """What it sets, dotted key -> text."""
        keys: dict[str, str] = {}
        for name in self.savings:
            keys |= SAVINGS[name].all_keys
        return keys

    @property
    def levers(self) -> tuple[str, ...]:
        """The levers that all have to be allowed."""
        groups = [SAVINGS[name].group for name in self.savings]
        if self.blocks_to_host:
            groups.append("offload")
        return tuple(dict.fromkeys(groups))

    @property
    def activations(self) -> bool:
        """Whether tensors of blocks may go to host memory."""
        return "offload" in self.levers

    @property
    def whole(self) -> bool:
        """Whether the whole batch of an update has to be one micro-batch, without accumulation."""
        return any(SAVINGS[name].one_micro_batch for name in self.savings)


# In the order in which they are tried: transfers before changes of the arithmetic.
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
# With adapters, the frozen weights are the only large state to narrow or to move. Decoding them takes time.
ADAPTER_SQUEEZES = (
    Squeeze("recomputation"),
    Squeeze("frozen weights in 8 bits", ("int8_base",), beside=True),
    Squeeze("frozen weights in NF4", ("nf4_base",), beside=True),
    Squeeze("activations in host memory", blocks_to_host=True),
    Squeeze("frozen weights in NF4, activations in host memory", ("nf4_base",), blocks_to_host=True),
)


@dataclasses.dataclass(frozen=True)
class Space:
    """The variants of one config that a fit may try.

    Fields:
        flat: the config as given, dotted key -> value. given: keys of the command line; no variant changes them.
        levers: names of LEVERS. n_devices, per_host: devices of the target, and of one of its hosts.
        tokens: per update, over all devices. narrow: whether the target has units for 16-bit products.
    """

    flat: Mapping[str, Any]
    given: frozenset[str]
    levers: frozenset[str]
    n_devices: int
    per_host: int
    tokens: int
    narrow: bool = True

    @property
    def sequences(self) -> int:
        """Sequences per update, over all devices."""
        return self.tokens // self.flat["data.seq_len"]

    def meshes(self) -> list[Keys]:
        """Returns the meshes to try, as keys, without those that cannot have the batch.

        The config's own ({}) comes first, then ZeRO-3 over all devices, with hosts as replicas, the other strategies,
        experts shared by all devices, by those of a host or by half of them, tensor parallelism within a host, and
        pipeline stages.
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
        """Returns the sizes of the mesh's axes without -1, its strategy ("ddp" if nothing is sharded), the schedule of
        its stages, and whether sequences are sharded too."""
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
        """Returns the schedule of a mesh, given as keys; "" without stages."""
        stages = mesh.get("mesh.stage") or self.flat["mesh.stage"]
        if int(stages) <= 1:
            return ""
        return mesh.get("pipeline.schedule") or self.flat["pipeline.schedule"]

    def ranks(self, mesh: Mapping[str, str]) -> int:
        """Returns the number of data-parallel ranks of a mesh, given as keys."""
        axes = self.axes(mesh)
        return math.prod(axes[axis] for axis in BATCH_AXES)

    def micros(self, mesh: Mapping[str, str]) -> list[int]:
        """Returns the micro-batches that divide the update on a mesh, smallest first; [] if the mesh cannot have the
        batch."""
        ranks, schedule = self.ranks(mesh), self.schedule(mesh)
        if self.sequences % ranks:
            return []
        each = self.sequences // ranks
        if "accumulation" not in self.levers:
            steps = self.flat["batch.accumulation"]
            sizes = [each // steps] if each % steps == 0 else []
        else:
            sizes = [size for size in range(1, each + 1) if each % size == 0]
        if schedule and mesh:
            stages = self.axes(mesh)["stage"]
            sizes = [size for size in sizes if runs_schedule(schedule, stages, each // size)]
        if "micro" in self.levers:
            return sizes
        return [size for size in sizes if size == self.flat["batch.micro"]]

    def batch(self, mesh: Mapping[str, str], micro: int) -> Keys:
        """Returns the keys of a micro-batch on a mesh. It is accumulated within one step, which has one accumulator and
        updates once."""
        steps = self.sequences // (self.ranks(mesh) * micro)
        keys = {"batch.micro": str(micro), "batch.tokens": "0", "batch.accumulation": str(steps)}
        if "batch.mode" not in self.given and (steps > 1 or self.schedule(mesh)):
            keys["batch.mode"] = "scan"
        return keys

    def squeezes(self) -> list[Squeeze]:
        """Returns the squeezes that the levers allow and no given key contradicts. Only AdamW is replaced by another
        optimizer."""
        adam = str(self.flat["optimizer.name"]).startswith("adamw")
        allowed = []
        for squeeze in ADAPTER_SQUEEZES if self.flat["lora.rank"] else SQUEEZES:
            keeps_optimizer = adam or "optimizer.name" not in squeeze.keys
            if set(squeeze.levers) <= self.levers and not self.given.intersection(squeeze.keys) and keeps_optimizer:
                allowed.append(squeeze)
        return allowed

    def baseline(self) -> Keys:
        """Returns the keys of every variant: bf16 compute over float32 master parameters, if the config is float32
        throughout and the lever `precision` is free; else none."""
        fp32 = self.flat["precision.preset"] == "fp32" and "precision.preset" not in self.given
        return {"precision.preset": "bf16"} if fp32 and self.narrow and "precision" in self.levers else {}


def stage_meshes(
    flat: Mapping[str, Any], given: Collection[str], n_devices: int, per_host: int
) -> Iterator[dict[str, str]]:
    """Yields the keys of each mesh with pipeline stages; none if the config, or a key of the command line, cannot be
    combined with stages.

    2, 4 and 8 stages are tried, and one on each host; on several hosts also one on each host with tensor parallelism
    inside it.
    """
    scheduled = "pipeline.schedule" in given or "pipeline.virtual" in given
    if scheduled or ("batch.mode" in given and flat["batch.mode"] != "scan"):
        return
    some_layers_dense = flat["model.experts"] and flat["model.moe_every"] > 1
    if not flat["model.scan"] or flat["optimizer.fused_backward"] or flat["offload.params"] or some_layers_dense:
        return  # the trainer refuses stages for these
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
    """Returns whether a schedule runs so many micro-batches an update without being mostly idle."""
    return micro_batches >= stages and (schedule != "interleaved" or micro_batches % stages == 0)


def ranks_of(flat: Mapping[str, Any], n_devices: int) -> int:
    """Returns the number of data-parallel ranks of a config, dotted key -> value, on so many devices."""
    return Space(flat, frozenset(), frozenset(), n_devices, n_devices, 0).ranks({})


def tokens_of(flat: Mapping[str, Any], n_devices: int) -> int:
    """Returns the tokens per update of a config, dotted key -> value, over all devices."""
    if flat["batch.tokens"]:
        return flat["batch.tokens"]
    return flat["batch.micro"] * flat["batch.accumulation"] * ranks_of(flat, n_devices) * flat["data.seq_len"]


def choose(text: str | None) -> frozenset[str]:
    """Returns the levers named in `a,b,c`, all levers for None. Raises ReportError for one that does not exist."""
    names = list(LEVERS) if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in LEVERS:
            raise ReportError(f"--levers={text}: no lever {name!r}: {remedy_for(name, LEVERS)}")
    return frozenset(names)


def space_of(
    flat: Mapping[str, Any],
    given: Collection[str],
    levers: frozenset[str],
    n_devices: int,
    per_host: int,
    tokens: int | None,
    narrow: bool = True,
) -> Space:
    """Returns the space of a config on a target.

    Args:
        flat: the config, dotted key -> value. given: keys of the command line. levers: names of LEVERS.
        n_devices, per_host: devices of the target, and of one of its hosts.
        tokens: per update, None for the config's. narrow: whether the target has units for 16-bit products.

    Raises ReportError for a schedule of batches, and for a batch that no mesh can have.
    """
    if flat["batch.accumulation_schedule"]:
        raise ReportError(
            "batch.accumulation_schedule: a fit plans one batch size; fit the largest one with "
            "--batch-tokens, and give the schedule when training"
        )
    length = flat["data.seq_len"]
    tokens = tokens or tokens_of(flat, n_devices)
    if tokens < length or tokens % length:
        raise ReportError(f"--batch-tokens={tokens}: sequences have {length} tokens; give a multiple of that")
    levers -= {lever for start, lever in HELD.items() if any(key.startswith(start) for key in given)}
    space = Space(flat, frozenset(given), levers, n_devices, per_host, tokens, narrow)
    if not space.meshes() or not any(map(space.micros, space.meshes())):
        raise ReportError(_indivisible(space))
    return space


def _indivisible(space: Space) -> str:
    """Returns the error for a batch that no mesh can have, with the nearest batch that works."""
    ranks = space.ranks({})
    fixed = {}
    for name in ("micro", "accumulation"):
        if name not in space.levers:
            fixed[f"batch.{name}"] = space.flat[f"batch.{name}"]
    works = ranks * space.flat["data.seq_len"] * math.prod(fixed.values())
    text = f"{space.tokens} tokens are {space.sequences} sequences, which do not divide over {ranks} ranks"
    if fixed:
        text += f" with {' and '.join(f'{key}={value}' for key, value in fixed.items())}"
    text += f": give --batch-tokens={works}"
    return text if len(fixed) == 2 else f"{text} or a multiple"


def layout(keys: Mapping[str, str], space: Space) -> str:
    """Returns the mesh of a variant in a few words: its strategy, its axes, the schedule of its stages."""
    axes = space.axes(keys)
    split = [axis for axis in AXES if axes[axis] > 1]
    mesh = " x ".join(f"{axis} {axes[axis]}" for axis in split)
    if any(axis not in ("stage", "tensor") for axis in split):
        mesh = f"{axes['strategy']} {mesh}"
    return " ".join(filter(None, (mesh or "one device", axes["schedule"])))


def words(keys: Mapping[str, str], space: Space) -> str:
    """Returns a variant in a few words: mesh, batch as micro-batch x accumulation, squeezes."""
    micro, accumulation = keys.get("batch.micro", space.flat["batch.micro"]), keys.get("batch.accumulation", "?")
    parts = [layout(keys, space), f"{micro} x {accumulation}"]
    for key, value in keys.items():
        if key in ("precision.preset", "optimizer.name", "lora.base"):
            parts.append(f"{key.rpartition('.')[2]}={value}")
        elif key.startswith(("offload.", "optimizer.fused_backward")):
            parts.append(key)
    return ", ".join(parts)
