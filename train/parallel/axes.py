"""Tables of sharding: the mesh axes, the mapping of logical axes to mesh axes, and one row per ZeRO strategy."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

# Stages are the outermost axis, because they send the fewest bytes.
AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
# The axes whose ranks read different sequences (BATCH), and with `context` the axes whose ranks read different tokens.
BATCH, TOKENS = ("data", "fsdp", "expert"), ("data", "fsdp", "expert", "context")

# Logical axis of an activation -> mesh axes. A sequence is on one data-parallel rank, or sharded over `context` (ring
# attention, Liu et al. 2023, arXiv 2310.01889). Heads, MLP width and vocabulary are sharded over the tensor group, in
# parameters and activations (Shoeybi et al. 2019, arXiv 1909.08053). `stream` is the sequence in norms and in the
# residual stream: sequence parallelism also shards it over the tensor group (Korthikanti et al. 2022, arXiv
# 2205.05198).
RULES: Mapping[str, tuple[str, ...]] = {
    "batch": BATCH,
    "rank": TOKENS,
    "length": ("context",),
    "stream": ("context",),
    "layers": ("stage",),
    "position": (),
    "d_model": (),
    "d_head": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "d_ff": ("tensor",),
    "vocab": ("stage", "tensor"),
    # Experts are sharded over `expert`, which is an axis of data-parallel ranks for all other parameters (GShard,
    # Lepikhin et al. 2020, arXiv 2006.16668). Expert rows are on the device that computes them, one copy per
    # tensor-parallel rank.
    "experts": ("expert",),
    "expert_width": (),
    "router": (),
    "d_expert": ("tensor",),
    "rows": TOKENS,
    "copies": ("tensor",),
    # Axes of partial sums: over ranks that hold replicas of the state, and over ranks that share the state.
    "replicas": ("data",),
    "sharers": ("fsdp", "context"),
    # The rank of adapters, and the rank in adapter matrices without a model-width axis.
    "adapter": (),
    "adapter_state": (),
    # The rank of attention latents, and the rank in matrices and norms without a model-width axis.
    "latent": (),
    "latent_state": (),
    # If the token table is sharded along the width, a device looks up its columns for all devices that share the
    # table.
    "table_batch": BATCH,
    "table_length": ("context",),
    "table_width": (),
    # Columns of the looked-up rows after the devices of one sequence have exchanged their columns for its positions.
    "row_width": (),
}
SEQUENCE_PARALLEL = {"stream": ("context", "tensor")}
# ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) shards the model width, which every matrix, table and norm has, with
# two exceptions that are sharded along their rank: adapter matrices without a model-width axis, and matrices from
# latents to heads. Devices that share a sequence also share state: for gradients they are data-parallel ranks.
SHARDS = ("fsdp", "expert", "context")
STATE_SHARDED = {
    "d_model": SHARDS,
    "adapter_state": SHARDS,
    "latent_state": SHARDS,
    "expert_width": ("fsdp", "context"),
}
TABLE_SHARDED = {"table_batch": ("data",), "table_length": (), "table_width": SHARDS, "row_width": ("fsdp", "expert")}


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A ZeRO strategy: which training state is sharded over the mesh axes `fsdp` and `context`. Along `data` the state
    is replicated.

    Fields:
      summary: one line that describes the strategy to the user.
      stored: True if master parameters and optimizer state are sharded.
      gradients: True if gradients are sharded too. The backward pass then sums each gradient over the devices, and
        each device stores only its shard of the sum.
      by_layer: True if a layer's parameters are gathered when the layer runs, and again in its backward pass. False if
        a step gathers a copy of all parameters at its start.
      reduce_once: True if gradients may be reduced once per step, after the accumulation over micro-batches.
    """

    summary: str
    stored: bool = False
    gradients: bool = False
    by_layer: bool = False
    reduce_once: bool = False


STRATEGIES: Mapping[str, Strategy] = {
    "ddp": Strategy("every device holds all state; gradients are summed", reduce_once=True),
    "zero1": Strategy("master parameters and optimizer state sharded", stored=True, reduce_once=True),
    "zero2": Strategy("gradients sharded too", stored=True, gradients=True),
    "zero3": Strategy(
        "parameters sharded too, gathered layer by layer (FSDP)", stored=True, gradients=True, by_layer=True
    ),
}


# The letters of shape suffixes (model/__init__.py) as logical axes of activations. Activations with the model width or
# the width of a latent are sharded like norms and the residual stream.
LETTERS = {"B": "batch", "L": "length", "H": "heads", "G": "kv_heads", "F": "d_ff", "V": "vocab", "X": "rows"}
STREAM_LETTERS = {**LETTERS, "L": "stream"}


def activation_axes(suffix: str) -> tuple[str | None, ...]:
    """Returns the logical axes of a block's activation, given the shape suffix of its name: "BLD" (batch, length, model
    width) -> ("batch", "stream", None). None means that the dimension is not sharded.
    """
    letters = STREAM_LETTERS if {"D", "c"} & set(suffix) else LETTERS
    return tuple(letters.get(letter) for letter in suffix)


def make_mesh(sizes: dict[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """Returns a mesh over `devices`. `sizes`: the number of devices on each axis of AXES. At most one size may be -1,
    which means all remaining devices.

    Raises:
      ValueError: the product of the sizes is not the number of devices. The message names the wrong size.
    """
    sizes_text = " x ".join(f"{axis} {sizes[axis]}" for axis in AXES)
    free = [axis for axis in AXES if sizes[axis] == -1]
    if len(free) > 1 or any(sizes[axis] < 1 and sizes[axis] != -1 for axis in AXES):
        raise ValueError(
            f"the mesh sizes {sizes_text} are invalid: give 1 or more for each axis, or -1 for at most one axis"
        )
    left = len(devices)
    taken: list[str] = []
    # Sizes that divide the number of devices come first, so that the message names one that does not.
    for axis in sorted(set(AXES) - set(free), key=lambda axis: (len(devices) % sizes[axis] > 0, AXES.index(axis))):
        size = sizes[axis]
        if left % size:
            shared = f"{left} device{'s' if left > 1 else ''}"
            if taken:
                shared = f"the {left} of {len(devices)} devices that {' x '.join(taken)} leaves"
            *others, last = map(str, (n for n in range(1, left + 1) if left % n == 0))
            choices = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(f"mesh.{axis}={size} does not divide {shared}: use {choices}")
        left //= size
        if size > 1:
            taken.append(f"mesh.{axis}={size}")
    if left > 1 and not free:
        raise ValueError(
            f"the mesh {sizes_text} takes {len(devices) // left} of {len(devices)} devices: set one of these "
            "sizes, such as mesh.fsdp, to -1"
        )
    sizes = {axis: left if axis in free else sizes[axis] for axis in AXES}
    return Mesh(np.asarray(devices).reshape([sizes[axis] for axis in AXES]), AXES)
