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

# Start of a key -> the lever that changes it: where such a key is given, the lever is not used.
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
        what: in words. savings: rows of the catalogue, later ones over earlier ones.
        blocks_to_host: whether tensors of blocks may go to host memory though no saving moves state there.
        beside: whether it is tried where one before it fits, too: the room that it leaves may be worth its time.
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
        return tuple(dict.fromkeys([*groups, *(["offload"] if self.blocks_to_host else [])]))

    @property
    def activations(self) -> bool:
        """Whether tensors of blocks may go to host memory."""
        return "offload" in self.levers

    @property
    def whole(self) -> bool:
        """Whether the whole batch of an update has to be one micro-batch, without accumulation."""
        return any(SAVINGS[name].one_micro_batch for name in self.savings)


# In the order in which they are tried: what costs transfers before what changes the arithmetic.
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
# Under adapters there is little state to narrow or to move, but the frozen weights. Decoding them takes time.
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
        """The meshes to try, as keys, the config's own ({}) first: ZeRO-3 over all devices, hosts as replicas, the
        other strategies, experts shared by all devices, by those of a host or half of them, tensor parallelism within
        a host, and stages. Those that cannot have the batch are left out."""
        if "sharding" not in self.levers or self.n_devices == 1:
            return [{}]
        hosts, found = self.n_devices // self.per_host, list[Keys]([{}])
        found.append({**ONE_AXIS, "mesh.strategy": "zero3", "mesh.fsdp": "-1"})
        if hosts > 1:
            found.append(
                {**ONE_AXIS, "mesh.strategy": "zero3", "mesh.data": str(hosts), "mesh.fsdp": str(self.per_host)}
            )
        found += [{**ONE_AXIS, "mesh.strategy": name, "mesh.fsdp": "-1"} for name in ("zero2", "zero1", "ddp")]
        experts, sizes = self.flat["model.experts"], (self.n_devices, self.per_host, self.per_host // 2)
        found += [
            {**ONE_AXIS, "mesh.strategy": "zero3", "mesh.fsdp": "-1", "mesh.expert": str(size)}
            for size in sizes
            if experts and size > 1 and experts % size == 0
        ]
        heads = math.gcd(self.flat["model.n_heads"], self.flat["model.n_kv_heads"])
        found += [
            {
                **ONE_AXIS,
                "mesh.strategy": "zero3",
                "mesh.fsdp": "-1",
                "mesh.tensor": str(size),
                "mesh.sequence_parallel": "true",
            }
            for size in (2, 4, 8)
            if self.per_host % size == 0 and heads % size == 0
        ]
        found += [{**ONE_AXIS, **keys} for keys in stage_meshes(self.flat, self.given, self.n_devices, self.per_host)]
        different: dict[tuple[Any, ...], Keys] = {}
        for keys in found:
            different.setdefault(tuple(sorted(self._axes(keys).items())), keys)
        return [keys for keys in different.values() if self.micros(keys)]

    def _axes(self, keys: Mapping[str, str]) -> dict[str, Any]:
        """Sizes of the mesh's axes without -1, and its strategy: "ddp" wherever nothing is sharded."""

        def value(name: str) -> Any:
            text = keys.get("mesh." + name)
            return self.flat["mesh." + name] if text is None else text

        sizes = {axis: int(value(axis)) for axis in AXES}
        rest = math.prod(size for size in sizes.values() if size > 0)
        sizes = {axis: size if size > 0 else max(self.n_devices // rest, 1) for axis, size in sizes.items()}
        shared = sizes["fsdp"] * sizes["expert"] * sizes["context"] > 1
        return {
            **sizes,
            "strategy": value("strategy") if shared else "ddp",
            "schedule": self.schedule(keys),
            "sequence_parallel": str(value("sequence_parallel")).lower() if sizes["tensor"] > 1 else "false",
        }

    def schedule(self, mesh: Mapping[str, str]) -> str:
        """The schedule of a mesh with stages, given as keys; "" of one without."""
        stages = mesh.get("mesh.stage") or self.flat["mesh.stage"]
        return mesh.get("pipeline.schedule") or self.flat["pipeline.schedule"] if int(stages) > 1 else ""

    def ranks(self, mesh: Mapping[str, str]) -> int:
        """Data-parallel ranks of a mesh, given as keys."""
        axes = self._axes(mesh)
        return math.prod(axes[axis] for axis in BATCH_AXES)

    def micros(self, mesh: Mapping[str, str]) -> list[int]:
        """Micro-batches that divide the update on a mesh, smallest first; [] for a mesh that cannot have the batch."""
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
            stages = self._axes(mesh)["stage"]
            sizes = [size for size in sizes if takes(schedule, stages, each // size)]
        own = self.flat["batch.micro"]
        return sizes if "micro" in self.levers else [size for size in sizes if size == own]

    def batch(self, mesh: Mapping[str, str], micro: int) -> Keys:
        """The keys of a micro-batch on a mesh. It is accumulated within one step, which holds one accumulator and
        updates once."""
        steps = self.sequences // (self.ranks(mesh) * micro)
        keys = {"batch.micro": str(micro), "batch.tokens": "0", "batch.accumulation": str(steps)}
        once = steps == 1 and not self.schedule(mesh)
        return keys if "batch.mode" in self.given or once else {**keys, "batch.mode": "scan"}

    def squeezes(self) -> list[Squeeze]:
        """The squeezes that the levers allow and no given key contradicts; none replaces an optimizer other than
        AdamW."""
        adam = str(self.flat["optimizer.name"]).startswith("adamw")
        table = ADAPTER_SQUEEZES if self.flat["lora.rank"] else SQUEEZES
        return [
            squeeze
            for squeeze in table
            if set(squeeze.levers) <= self.levers
            and not self.given.intersection(squeeze.keys)
            and (adam or "optimizer.name" not in squeeze.keys)
        ]

    def baseline(self) -> Keys:
        """The keys of every variant: bf16 compute over float32 master parameters, where the config is float32
        throughout and the lever `precision` is free; else none."""
        wide = self.flat["precision.preset"] == "fp32" and "precision.preset" not in self.given
        return {"precision.preset": "bf16"} if wide and self.narrow and "precision" in self.levers else {}


def stage_meshes(
    flat: Mapping[str, Any], given: Collection[str], n_devices: int, per_host: int
) -> Iterator[dict[str, str]]:
    """The keys of each mesh with stages; none where a config, or a key of the command line, cannot be combined with
    stages."""
    held = {"pipeline.schedule", "pipeline.virtual"}.intersection(given)
    if held or ("batch.mode" in given and flat["batch.mode"] != "scan") or not _allows_stages(flat):
        return
    hosts, layers = n_devices // per_host, flat["model.n_layers"]
    sizes = sorted(size for size in {*STAGES, hosts} - {1} if n_devices % size == 0 and size <= layers)
    for size in sizes:
        chunks = CHUNKS if CHUNKS * size <= layers else 1
        yield _mesh(size, "interleaved" if chunks > 1 else "1f1b", chunks)
    folded = [size for size in sizes if CHUNKS * size <= layers]
    if folded:
        yield _mesh(folded[-1], "v", CHUNKS)
    heads = math.gcd(flat["model.n_heads"], flat["model.n_kv_heads"])
    if hosts in folded and hosts > 1 and heads % per_host == 0:
        yield {**_mesh(hosts, "interleaved", CHUNKS), "mesh.tensor": str(per_host), "mesh.sequence_parallel": "true"}


def _mesh(size: int, schedule: str, chunks: int) -> dict[str, str]:
    return {
        "mesh.stage": str(size),
        "mesh.strategy": "zero3",
        "mesh.fsdp": "-1",
        "pipeline.schedule": schedule,
        "pipeline.virtual": str(chunks),
    }


def _allows_stages(flat: Mapping[str, Any]) -> bool:
    """Whether the trainer runs a config of these keys with stages."""
    refused = (
        flat["optimizer.fused_backward"],
        flat["offload.params"],
        flat["model.experts"] and flat["model.moe_every"] > 1,
    )
    return bool(flat["model.scan"]) and not any(refused)


def takes(schedule: str, stages: int, micro_batches: int) -> bool:
    """Whether a schedule runs so many micro-batches an update, and not mostly its bubble."""
    return micro_batches >= stages and (schedule != "interleaved" or micro_batches % stages == 0)


def ranks_of(flat: Mapping[str, Any], n_devices: int) -> int:
    """Data-parallel ranks of a config, dotted key -> value, on so many devices."""
    return Space(flat, frozenset(), frozenset(), n_devices, n_devices, 0).ranks({})


def tokens_of(flat: Mapping[str, Any], n_devices: int) -> int:
    """Tokens per update of a config, dotted key -> value, over all devices."""
    if flat["batch.tokens"]:
        return flat["batch.tokens"]
    return flat["batch.micro"] * flat["batch.accumulation"] * ranks_of(flat, n_devices) * flat["data.seq_len"]


def choose(text: str | None) -> frozenset[str]:
    """The levers named in `a,b,c`, all of them for None. Raises ReportError for one that does not exist."""
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
    """The space of a config on a target.

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
    """What to say of a batch that no mesh can have: the value, and the nearest that works."""
    ranks = space.ranks({})
    fixed = {
        "batch." + name: space.flat["batch." + name] for name in ("micro", "accumulation") if name not in space.levers
    }
    works = ranks * space.flat["data.seq_len"] * math.prod(fixed.values())
    text = f"{space.tokens} tokens are {space.sequences} sequences, which do not divide over {ranks} ranks"
    if fixed:
        text += f" with {' and '.join(f'{key}={value}' for key, value in fixed.items())}"
    text += f": give --batch-tokens={works}"
    return text if len(fixed) == 2 else f"{text} or a multiple"


def layout(keys: Mapping[str, str], space: Space) -> str:
    """The mesh of a variant in a few words: its strategy, its axes, the schedule of its stages."""
    axes = space._axes(keys)
    mesh = " x ".join(f"{axis} {axes[axis]}" for axis in AXES if axes[axis] > 1)
    if any(axes[axis] > 1 for axis in AXES if axis not in ("stage", "tensor")):
        mesh = f"{axes['strategy']} {mesh}"
    return " ".join(filter(None, (mesh or "one device", axes["schedule"])))


def words(keys: Mapping[str, str], space: Space) -> str:
    """A variant in a few words: mesh, batch as micro-batch x accumulation, squeezes."""
    parts = [
        layout(keys, space),
        f"{keys.get('batch.micro', space.flat['batch.micro'])} x {keys.get('batch.accumulation', '?')}",
    ]
    for key, value in keys.items():
        if key in ("precision.preset", "optimizer.name", "lora.base"):
            parts.append(f"{key.rpartition('.')[2]}={value}")
        elif key.startswith(("offload.", "optimizer.fused_backward")):
            parts.append(key)
    return ", ".join(parts)
