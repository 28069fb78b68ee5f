"""What a fit may change: meshes, micro-batches and squeezes of a config, as keys of its command line. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bytescope.memory.config_keys import (
    BATCH,
    BATCH_ACCUMULATION,
    BATCH_ACCUMULATION_SCHEDULE,
    BATCH_MICRO,
    BATCH_MODE,
    BATCH_TOKENS,
    DATA_SEQ_LEN,
    MESH,
    MESH_CONTEXT,
    MESH_DATA,
    MESH_FSDP,
    MESH_SEQUENCE_PARALLEL,
    MESH_STRATEGY,
    MESH_TENSOR,
    MODEL_N_HEADS,
    MODEL_N_KV_HEADS,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAMS,
    OPTIMIZER_CLIP,
    OPTIMIZER_FUSED_BACKWARD,
    OPTIMIZER_NAME,
    PRECISION_PRESET,
    REMAT,
)
from bytescope.memory.errors import ReportError

Keys = dict[str, str]

LEVERS: Mapping[str, str] = {
    "remat": "what blocks keep (remat.*)",
    "micro": "sequences of a rank at once (batch.micro)",
    "accumulation": "micro-batches of an update, within one step (batch.tokens, batch.mode)",
    "offload": "activations, optimizer state and parameters in host memory",
    "precision": "16-bit parameters, 8-bit moments, updates inside the backward pass: the arithmetic changes",
    "sharding": "the mesh",
}

# A key of the command line holds everywhere: the lever that would change it is none.
HELD = {REMAT: "remat", BATCH_MICRO: "micro", BATCH_ACCUMULATION: "accumulation", MESH: "sharding"}

ONE_AXIS = {MESH_DATA: "1", MESH_CONTEXT: "1", MESH_TENSOR: "1", MESH_SEQUENCE_PARALLEL: "false"}


@dataclasses.dataclass(frozen=True)
class Squeeze:
    """A way to make a step smaller beside recomputation. `levers`: which allow it; `keys`: what it sets; `activations`:
    tensors of blocks may go to host memory; `whole`: it takes the global batch at once, without accumulation."""

    what: str
    levers: tuple[str, ...] = ()
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    activations: bool = False
    whole: bool = False


_MOMENTS = {OFFLOAD_OPTIMIZER: "true"}
_STATE = {**_MOMENTS, OFFLOAD_PARAMS: "true"}
_BYTES = {OPTIMIZER_NAME: "adamw_8bit"}
_NARROW = {PRECISION_PRESET: "bf16_params"}
_FUSED = {OPTIMIZER_FUSED_BACKWARD: "true", OPTIMIZER_CLIP: "layer"}
# In the order in which they are tried: what costs transfers before what changes the arithmetic.
SQUEEZES = (
    Squeeze("recomputation"),
    Squeeze("activations on the host", ("offload",), {}, True),
    Squeeze("optimizer state on the host", ("offload",), _MOMENTS, True),
    Squeeze("optimizer state and parameters on the host", ("offload",), _STATE, True, True),
    Squeeze("8-bit moments", ("precision",), _BYTES),
    Squeeze("8-bit moments and parameters on the host", ("precision", "offload"), {**_BYTES, **_STATE}, True, True),
    Squeeze("16-bit parameters, 8-bit moments", ("precision",), {**_NARROW, **_BYTES}),
    Squeeze("16-bit parameters updated inside the backward pass, moments on the host", ("precision", "offload"),
            {**_NARROW, **_FUSED, **_MOMENTS}, True, True),
    Squeeze("16-bit parameters updated inside the backward pass, Adafactor", ("precision",),
            {**_NARROW, **_FUSED, OPTIMIZER_NAME: "adafactor"}, False, True),
)


@dataclasses.dataclass(frozen=True)
class Space:
    """The variants of one config that a fit may try.

    Fields:
        flat: the config as given, dotted key -> value. given: keys of the command line; they hold everywhere.
        levers: names of LEVERS. n_devices, per_host: of the target. tokens: of one update, over all devices.
        narrow: whether the target has units for 16-bit products.
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
        """Of one update."""
        return self.tokens // self.flat[DATA_SEQ_LEN]

    def meshes(self) -> list[Keys]:
        """The meshes to try, the config's own first: ZeRO-3 over all, hosts as replicas, the other strategies, and
        tensor parallelism within a host."""
        if "sharding" not in self.levers or self.n_devices == 1:
            return [{}]
        hosts, found = self.n_devices // self.per_host, [{}]
        found.append({**ONE_AXIS, MESH_STRATEGY: "zero3", MESH_FSDP: "-1"})
        if hosts > 1:
            found.append({**ONE_AXIS, MESH_STRATEGY: "zero3", MESH_DATA: str(hosts),
                          MESH_FSDP: str(self.per_host)})
        found += [{**ONE_AXIS, MESH_STRATEGY: name, MESH_FSDP: "-1"} for name in ("zero2", "zero1", "ddp")]
        heads = math.gcd(self.flat[MODEL_N_HEADS], self.flat[MODEL_N_KV_HEADS])
        found += [{**ONE_AXIS, MESH_STRATEGY: "zero3", MESH_FSDP: "-1", MESH_TENSOR: str(size),
                   MESH_SEQUENCE_PARALLEL: "true"}
                  for size in (2, 4, 8) if self.per_host % size == 0 and heads % size == 0]
        different: dict[tuple[Any, ...], Keys] = {}
        for keys in found:
            different.setdefault(tuple(sorted(self._axes(keys).items())), keys)
        return [keys for keys in different.values() if self.micros(keys)]

    def _axes(self, keys: Mapping[str, str]) -> dict[str, Any]:
        """Sizes of the mesh's axes without -1, and its strategy, which is the same for any where nothing is shared."""
        def value(name: str) -> Any:
            text = keys.get(MESH + name)
            return self.flat[MESH + name] if text is None else text

        sizes = {axis: int(value(axis)) for axis in ("data", "fsdp", "context", "tensor")}
        rest = math.prod(size for size in sizes.values() if size > 0)
        sizes = {axis: size if size > 0 else max(self.n_devices // rest, 1) for axis, size in sizes.items()}
        shared = sizes["fsdp"] * sizes["context"] > 1
        return {**sizes, "strategy": value("strategy") if shared else "ddp",
                "sequence_parallel": str(value("sequence_parallel")).lower() if sizes["tensor"] > 1 else "false"}

    def ranks(self, mesh: Mapping[str, str]) -> int:
        """Data-parallel ranks of a mesh."""
        axes = self._axes(mesh)
        return axes["data"] * axes["fsdp"]

    def micros(self, mesh: Mapping[str, str]) -> list[int]:
        """Micro-batches that divide the update on a mesh, smallest first; () for a mesh that cannot have it."""
        ranks = self.ranks(mesh)
        if self.sequences % ranks:
            return []
        each = self.sequences // ranks
        if "accumulation" not in self.levers:
            steps = _steps(self.flat)
            sizes = [each // steps] if each % steps == 0 else []
        else:
            sizes = [size for size in range(1, each + 1) if each % size == 0]
        own = self.flat[BATCH_MICRO]
        return sizes if "micro" in self.levers else [size for size in sizes if size == own]

    def batch(self, mesh: Mapping[str, str], micro: int) -> Keys:
        """The keys of a micro-batch: accumulated within one step, which holds one accumulator and updates once."""
        steps = self.sequences // (self.ranks(mesh) * micro)
        keys = {BATCH_MICRO: str(micro), BATCH_TOKENS: "0", BATCH_ACCUMULATION: str(steps)}
        return keys if BATCH_MODE in self.given or steps == 1 else {**keys, BATCH_MODE: "scan"}

    def squeezes(self) -> list[Squeeze]:
        """Those that the levers allow and no given key contradicts; none swaps AdamW in for another optimizer."""
        adam = str(self.flat[OPTIMIZER_NAME]).startswith("adamw")
        return [squeeze for squeeze in SQUEEZES if set(squeeze.levers) <= self.levers
                and not self.given.intersection(squeeze.keys) and (adam or OPTIMIZER_NAME not in squeeze.keys)]

    def baseline(self) -> Keys:
        """bf16 compute over float32 masters, where the config asks for float32 throughout and precision is free."""
        wide = self.flat[PRECISION_PRESET] == "fp32" and PRECISION_PRESET not in self.given
        return {PRECISION_PRESET: "bf16"} if wide and self.narrow and "precision" in self.levers else {}


def _steps(flat: Mapping[str, Any]) -> int:
    return flat[BATCH_ACCUMULATION]


def ranks_of(flat: Mapping[str, Any], n_devices: int) -> int:
    """Data-parallel ranks of a config on so many devices."""
    return Space(flat, frozenset(), frozenset(), n_devices, n_devices, 0).ranks({})


def tokens_of(flat: Mapping[str, Any], n_devices: int) -> int:
    """Tokens of one update of a config, over all devices."""
    if flat[BATCH_TOKENS]:
        return flat[BATCH_TOKENS]
    return flat[BATCH_MICRO] * flat[BATCH_ACCUMULATION] * ranks_of(flat, n_devices) * flat[DATA_SEQ_LEN]


def choose(text: str | None) -> frozenset[str]:
    """The levers of `a,b,c`, all of them for None. Raises ReportError for one that does not exist."""
    names = list(LEVERS) if text is None else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in LEVERS:
            raise ReportError(f"--levers={text}: no lever {name!r}; choose from {', '.join(LEVERS)}")
    return frozenset(names)


def space_of(flat: Mapping[str, Any], given: Collection[str], levers: frozenset[str], n_devices: int, per_host: int,
             tokens: int | None, narrow: bool = True) -> Space:
    """The space of a config on a target. Raises ReportError for a batch that no mesh of it can have."""
    if flat[BATCH_ACCUMULATION_SCHEDULE]:
        raise ReportError(f"{BATCH_ACCUMULATION_SCHEDULE}: a fit looks for one batch; fit the largest with "
                          "--batch-tokens, and give the schedule when training")
    length = flat[DATA_SEQ_LEN]
    tokens = tokens or tokens_of(flat, n_devices)
    if tokens < length or tokens % length:
        raise ReportError(f"--batch-tokens={tokens}: sequences have {length} tokens; give a multiple of that")
    levers -= {lever for start, lever in HELD.items() if any(key.startswith(start) for key in given)}
    space = Space(flat, frozenset(given), levers, n_devices, per_host, tokens, narrow)
    if not space.meshes() or not any(map(space.micros, space.meshes())):
        ranks = space.ranks({})
        fixed = {BATCH + name: flat[BATCH + name] for name in ("micro", "accumulation") if name not in levers}
        kept = " and ".join(f"{key}={value}" for key, value in fixed.items())
        least = ranks * length * math.prod(fixed.values())
        raise ReportError(f"{tokens} tokens are {space.sequences} sequences, which do not divide over {ranks} ranks"
                          + f" with {kept}" * bool(kept)
                          + f": give --batch-tokens={least}" + " or a multiple" * (len(fixed) < 2))
    return space


def words(keys: Mapping[str, str], space: Space) -> str:
    """A variant in a few words: mesh, batch, squeezes."""
    axes = space._axes(keys)
    sizes = " x ".join(f"{axis} {axes[axis]}" for axis in ("data", "fsdp", "context", "tensor") if axes[axis] > 1)
    parts: Sequence[str] = (
        (f"{axes['strategy']} {sizes}" if axes["data"] * axes["fsdp"] * axes["context"] > 1 else sizes) or "one device",
        f"{keys.get(BATCH_MICRO, space.flat[BATCH_MICRO])} x {keys.get(BATCH_ACCUMULATION, '?')}",
        *(f"{key.rpartition('.')[2]}={value}" if key.startswith("precision") or key.endswith("name")
          else key for key, value in keys.items()
          if key.partition(".")[0] in ("offload", "precision", "optimizer") and key != OPTIMIZER_CLIP))
    return ", ".join(parts)
