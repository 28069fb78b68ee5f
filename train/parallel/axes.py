"""Sharding as data: the logical axes, the mesh axes that tables map them to, and one row per strategy."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

# Stages of a pipeline are furthest apart: they send the least.
AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
# The axes whose ranks read different sequences, and with `context` different tokens.
BATCH, TOKENS = ("data", "fsdp", "expert"), ("data", "fsdp", "expert", "context")

# Logical axis -> mesh axes, of activations. A sequence lives on one data-parallel rank, or is sharded over `context`
# (ring attention, Liu et al. 2023, arXiv 2310.01889). Heads, MLP width and vocabulary are sharded over the tensor
# group, in parameters and activations (Shoeybi et al. 2019, arXiv 1909.08053). `stream` is the sequence in norms and in
# the residual stream: sequence parallelism shards it over that group too (Korthikanti et al. 2022, arXiv 2205.05198).
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
    # Experts are shared out over `expert`, to all other parameters an axis of data-parallel ranks (GShard, Lepikhin et
    # al. 2020, arXiv 2006.16668). Rows of experts lie on the device that computes them, once per tensor-parallel rank.
    "experts": ("expert",),
    "expert_width": (),
    "router": (),
    "d_expert": ("tensor",),
    "rows": TOKENS,
    "copies": ("tensor",),
    # Sums of which each device has its part: over ranks that hold replicas, and over those that share the state.
    "replicas": ("data",),
    "sharers": ("fsdp", "context"),
    # The rank of adapters, and that of those halves which have no model width.
    "adapter": (),
    "adapter_state": (),
    # The rank of latents of attention, and that in matrices and norms which have no model width.
    "latent": (),
    "latent_state": (),
    # Where the token table stays sharded along the width, a device looks its rows up for all that share the table.
    "table_batch": BATCH,
    "table_length": ("context",),
    "table_width": (),
}
SEQUENCE_PARALLEL = {"stream": ("context", "tensor")}
# ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) shards the width: every matrix, table and norm has it; of adapters
# one half has, the other's rank is sharded, and so is that of latents in matrices that make heads. The devices that
# share a sequence share state as well: to gradients they are data-parallel ranks.
SHARDS = ("fsdp", "expert", "context")
STATE_SHARDED = {
    "d_model": SHARDS,
    "adapter_state": SHARDS,
    "latent_state": SHARDS,
    "expert_width": ("fsdp", "context"),
}
TABLE_SHARDED = {"table_batch": ("data",), "table_length": (), "table_width": SHARDS}


@dataclasses.dataclass(frozen=True)
class Strategy:
    """What the devices of `mesh.fsdp` and `mesh.context` share; the devices of `mesh.data` hold replicas.

    stored: master parameters and optimizer state are sharded. gradients: gradients too, each reduced to its owner in
    the backward pass.
    by_layer: parameters are gathered for one layer at a time and again in its backward pass; otherwise the compute copy
    of all of them is made once per step. reduce_once: gradients may wait for their reduction until the end of in-step
    accumulation.
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


# The letters of shape suffixes (model/__init__.py) as logical axes of activations. Activations that have the width of
# the model, or of a latent of attention, are sharded as norms and the residual stream are.
LETTERS = {"B": "batch", "L": "length", "H": "heads", "G": "kv_heads", "F": "d_ff", "V": "vocab", "X": "rows"}
STREAM_LETTERS = {**LETTERS, "L": "stream"}


def activation_axes(suffix: str) -> tuple[str | None, ...]:
    """Returns the logical axes of an activation of a block from its shape letters: BLD is (batch, stream, None)."""
    letters = STREAM_LETTERS if {"D", "c"} & set(suffix) else LETTERS
    return tuple(letters.get(letter) for letter in suffix)


def make_mesh(sizes: dict[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of `sizes` (one per axis of AXES, at most one of them -1) over `devices`.

    Raises:
      ValueError: the product of the sizes is not the number of devices; the message names the wrong size.
    """
    shown = " x ".join(f"{axis} {sizes[axis]}" for axis in AXES)
    free = [axis for axis in AXES if sizes[axis] == -1]
    if len(free) > 1 or any(sizes[axis] < 1 and sizes[axis] != -1 for axis in AXES):
        raise ValueError(f"mesh {shown}: give sizes of 1 or more, and at most one -1")
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
            f"mesh {shown} takes {len(devices) // left} of {len(devices)} devices: set one of these "
            "sizes, such as mesh.fsdp, to -1"
        )
    sizes = {axis: left if axis in free else sizes[axis] for axis in AXES}
    return Mesh(np.asarray(devices).reshape([sizes[axis] for axis in AXES]), AXES)
