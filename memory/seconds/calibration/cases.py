"""A case of a calibration: one kernel at one size, as a program that runs a chain of it.

The program runs some links in a loop on the device, each of which needs the one before, and returns a scalar; calls
follow each other without waiting, so that dispatch hides behind them. Barriers keep XLA from fusing neighbouring links
into one kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from bytescope.memory.hlo.jax_types import JaxDevice
from bytescope.memory.units import human

# Parts of what is measured, in the order in which they are shown.
PRODUCTS, THIN, ATTENTION, MEMORY, FLOOR, CALL, COLLECTIVES, HOST_LINK = PARTS = (
    "products",
    "thin products",
    "attention",
    "memory",
    "floor",
    "call",
    "collectives",
    "host link",
)
TO_HOST, TO_DEVICE = "to host", "to device"
COPY, ADD = "copy", "add"
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# A call of a program is to take about so long; links of one call, and those that one turn of its loop has.
CALL_SECONDS, LEAST_LINKS, MOST_LINKS, UNROLLED = 5e-3, 4, 256, 8
MIB = 2**20
# The payload whose permutation tells the seconds of a hop, and whose copy those that a copy takes to begin.
SHORT = 4096
# What a link adds to what it chains: too little to overflow, too much for XLA to leave out.
SMALL = 1e-3


@dataclasses.dataclass(frozen=True)
class CalibrationCase:
    """One kernel at one size.

    Fields:
        part: of `PARTS`. key: what it is within its part: (unit,) of products, (unit, m, k, n) of thin ones, (way,
            head width) of attention, (COPY or ADD,) of memory, (kind, group) of collectives, (way,) of the host link.
        size: the side of a cube, keys, or bytes. work: FLOPs or bytes of one link. links: of one call.
        make: the program, or whatever else has `start()`: a function that begins one call and returns what to wait for.
        needed: measured however little time there is.
    """

    part: str
    key: tuple[Any, ...]
    size: int
    work: float
    links: int
    make: Callable[[], Any]
    needed: bool = False

    @property
    def label(self) -> str:
        """The case in words, for a progress bar."""
        size = human(self.size) if self.part in (MEMORY, COLLECTIVES, HOST_LINK) else str(self.size or "")
        return " ".join(filter(None, (self.part, *map(str, self.key), size)))


@dataclasses.dataclass(frozen=True)
class CalibrationSizes:
    """Which sizes are measured, most wanted first.

    Fields:
        units: of `cost.roofline.UNITS`. sides: of cubes. thin: (m, k, n). lengths: of attention. widths: of heads.
        tokens: of attention over all sequences. heads: elements of all heads together.
        arrays: bytes of an array that is copied. payloads: of a collective. copied: bytes over the host link.
    """

    units: tuple[str, ...]
    sides: tuple[int, ...]
    thin: tuple[tuple[int, int, int], ...]
    lengths: tuple[int, ...]
    widths: tuple[int, ...]
    tokens: int
    heads: int
    arrays: tuple[int, ...]
    payloads: tuple[int, ...]
    copied: int


ACCELERATOR = CalibrationSizes(
    units=("bf16", "tf32", "fp8", "fp16", "fp32"),
    sides=(4096, 8192, 1024, 2048, 512, 16384),
    thin=((8192, 4096, 14336), (16384, 4096, 1024), (512, 4096, 4096), (4096, 2048, 131072)),
    lengths=(2048, 8192, 512, 4096, 1024, 16384),
    widths=(128, 64, 256),
    tokens=16384,
    heads=2048,
    arrays=(256 * MIB, 16 * MIB, 64 * MIB, MIB, 1024 * MIB),
    payloads=(64 * MIB, MIB, 64 * 2**10, 512 * MIB, 8 * MIB),
    copied=256 * MIB,
)
HOST = CalibrationSizes(
    units=("fp32", "bf16"),
    sides=(512, 256, 1024, 128),
    thin=((1024, 256, 1024), (64, 512, 2048)),
    lengths=(256, 512, 128),
    widths=(64, 128),
    tokens=512,
    heads=256,
    arrays=(16 * MIB, MIB, 64 * MIB, MIB // 4),
    payloads=(MIB, 16 * MIB, MIB // 8),
    copied=16 * MIB,
)


def links_of(work: float, rate: float) -> int:
    """Links of one call, a multiple of `UNROLLED` where there are so many."""
    wanted = min(max(int(CALL_SECONDS * rate / work), LEAST_LINKS), MOST_LINKS)
    return wanted if wanted < UNROLLED else wanted - wanted % UNROLLED


@dataclasses.dataclass(frozen=True)
class Chain:
    """A program of links, each of which needs the one before: what `Case.make` makes.

    Fields:
        program: (before, x, *others) -> a first result that is the next call's `before`, and others.
        before: the shape of `before`, float32. inputs: (shape, dtype, scale) of x and the others, normal numbers of
            that scale. sharding: of all of them, on devices that need not be here.
    """

    program: Callable[..., Any]
    before: tuple[int, ...]
    inputs: Sequence[tuple[tuple[int, ...], Any, float]]
    sharding: Any

    def lower(self) -> Any:
        """The program, lowered for its devices: a `jax.stages.Lowered`."""
        import jax
        import jax.numpy as jnp

        arguments = [(self.before, jnp.float32), *(each[:2] for each in self.inputs)]
        return jax.jit(self.program).lower(
            *(jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding) for shape, dtype in arguments)
        )

    def start(self) -> Callable[[], Any]:
        """Compiles it and fills its inputs; a call begins a run, which waits for the one before."""
        import jax
        import jax.numpy as jnp

        compiled = self.lower().compile()
        values = [normal(self.sharding, number, *each) for number, each in enumerate(self.inputs)]
        last = [jax.device_put(jnp.zeros(self.before), self.sharding)]

        def run() -> Any:
            last[0], *_ = compiled(last[0], *values)
            return last[0]

        return run


def chain(
    device: JaxDevice,
    link: Callable[..., Any],
    links: int,
    inputs: Sequence[tuple[tuple[int, ...], Any, float]],
    prepare: Callable[..., tuple[Any, ...]] | None = None,
    unroll: int = UNROLLED,
) -> Chain:
    """`links` runs of `link(x, *others) -> x` on one device.

    Args:
        prepare: of the arguments once a call, outside of the chain.
    """
    import jax
    import jax.numpy as jnp

    def program(before: Any, x: Any, *others: Any) -> Any:
        x = x + (before * 0).astype(x.dtype)
        others = prepare(x, *others) if prepare else others
        out = jax.lax.fori_loop(0, links, lambda _, x: link(x, *others), x, unroll=min(unroll, links))
        # All of it is returned, so that all of it is computed.
        return out[(0,) * out.ndim].astype(jnp.float32), out

    return Chain(program, (), inputs, jax.sharding.SingleDeviceSharding(device))


def normal(sharding: Any, seed: int, shape: tuple[int, ...], dtype: Any, scale: float) -> Any:
    """An array of normal numbers, of which the first million repeat: zeros would spare a device power. Each device of a
    sharding over the first dimension makes its own part."""
    import jax
    import numpy as np

    part = sharding.shard_shape(shape)
    size = math.prod(part)
    numbers = scale * np.random.default_rng(seed).standard_normal(min(size, 2**20), np.float32)
    filled = np.resize(numbers.astype(dtype), size).reshape(part)
    return jax.block_until_ready(jax.make_array_from_callback(shape, sharding, lambda _: filled))
