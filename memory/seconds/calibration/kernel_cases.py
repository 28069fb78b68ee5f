"""Cases of one device's kernels: floors, products, attention and what moves memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bytescope.memory.devices.targets import platform_of
from bytescope.memory.hlo.jax_types import JaxDevice
from bytescope.memory.seconds.calibration.cases import (
    ADD,
    ATTENTION,
    CALL,
    COPY,
    FLOOR,
    MEMORY,
    MOST_LINKS,
    PRODUCTS,
    SMALL,
    THIN,
    UNROLLED,
    CalibrationCase,
    CalibrationSizes,
    Chain,
    chain,
    links_of,
)
from bytescope.memory.seconds.rate_records import WAYS

# Multiplications of a backward pass of attention (five products) over those of a forward one (two).
_BACKWARD = 2.5


def floors(device: JaxDevice) -> Iterator[CalibrationCase]:
    import jax
    import jax.numpy as jnp

    def make(links: int) -> Chain:
        return chain(
            device,
            lambda x: jax.lax.optimization_barrier(x * 1.0001),
            links,
            [((1024,), jnp.float32, 1.0)],
            unroll=4 * UNROLLED,
        )

    yield CalibrationCase(FLOOR, (), 0, 0.0, MOST_LINKS, functools.partial(make, MOST_LINKS), needed=True)
    yield CalibrationCase(CALL, (), 0, 0.0, 1, functools.partial(make, 1), needed=True)


def _dtype(unit: str) -> Any:
    import jax.numpy as jnp

    return {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp8": jnp.float8_e4m3fn}.get(unit, jnp.float32)


def _times(unit: str) -> Callable[[Any, Any], Any]:
    """x, w -> x @ w in a unit, rounded to the dtype of x; fp8 sums in float32 and is rounded to bfloat16 first."""
    import jax
    import jax.numpy as jnp

    preset = jax.lax.DotAlgorithmPreset.TF32_TF32_F32 if unit == "tf32" else None
    precision = preset or (jax.lax.Precision.HIGHEST if unit == "fp32" else None)
    out = jnp.bfloat16 if unit == "fp8" else None
    return lambda x, w: jnp.matmul(x, w, precision=precision, preferred_element_type=out).astype(x.dtype)


def products(
    device: JaxDevice, units: Sequence[str], sizes: CalibrationSizes, flops: float
) -> Iterator[CalibrationCase]:
    def make(unit: str, side: int, links: int) -> Chain:
        shape = (side, side), _dtype(unit)
        return chain(device, _times(unit), links, [(*shape, 1.0), (*shape, side**-0.5)])

    for side in sizes.sides:
        for unit in units:
            work = 2.0 * side**3
            links = links_of(work, flops)
            yield CalibrationCase(
                PRODUCTS,
                (unit,),
                side,
                work,
                links,
                functools.partial(make, unit, side, links),
                needed=(unit, side) == (units[0], sizes.sides[0]),
            )


def thin(device: JaxDevice, unit: str, sizes: CalibrationSizes, flops: float) -> Iterator[CalibrationCase]:
    """Pairs of products as in a transformer's block: (m, k) x (k, n), and back to (m, k)."""

    def make(m: int, k: int, n: int, links: int) -> Chain:
        times, dtype = _times(unit), _dtype(unit)
        return chain(
            device,
            lambda x, up, down: times(times(x, up), down),
            links,
            [((m, k), dtype, 1.0), ((k, n), dtype, k**-0.5), ((n, k), dtype, n**-0.5)],
        )

    for m, k, n in sizes.thin:
        work = 4.0 * m * k * n
        links = links_of(work, flops)
        yield CalibrationCase(THIN, (unit, m, k, n), 0, work, links, functools.partial(make, m, k, n, links))


def memory(device: JaxDevice, sizes: CalibrationSizes, moved: float) -> Iterator[CalibrationCase]:
    import jax
    import jax.numpy as jnp

    apart = jax.lax.optimization_barrier
    kinds: Mapping[str, tuple[int, Callable[..., Any]]] = {
        COPY: (2, lambda x: apart(x * 1.0001)),
        ADD: (3, lambda x, y: apart(x + y)),
    }

    def make(kind: str, size: int, links: int) -> Chain:
        arrays, link = kinds[kind]
        return chain(device, link, links, [((size // 4,), jnp.float32, scale) for scale in (1.0, SMALL)][: arrays - 1])

    for size in sizes.arrays:
        for kind, (arrays, _) in kinds.items():
            links = links_of(arrays * size, moved)
            yield CalibrationCase(
                MEMORY,
                (kind,),
                size,
                float(arrays * size),
                links,
                functools.partial(make, kind, size, links),
                needed=size == sizes.arrays[0],
            )


def attention(device: JaxDevice, unit: str, sizes: CalibrationSizes, flops: float) -> Iterator[CalibrationCase]:
    for length in sizes.lengths:
        for width in sizes.widths:
            for way in WAYS:
                batch, heads = max(sizes.tokens // length, 1), max(sizes.heads // width, 1)
                causal, backward = way.endswith("causal"), way.startswith("backward")
                work = 4.0 * batch * heads * length**2 * width * (0.5 if causal else 1.0)
                links = links_of(work * (_BACKWARD if backward else 1.0), flops)
                # A call of a backward chain begins with one forward pass.
                work *= _BACKWARD + 1 / links if backward else 1.0
                make = functools.partial(_attend, device, unit, (batch, length, heads, width), causal, backward, links)
                yield CalibrationCase(
                    ATTENTION,
                    (way, width),
                    length,
                    work,
                    links,
                    make,
                    needed=(length, width) == (sizes.lengths[0], sizes.widths[0]),
                )


def _attend(device: JaxDevice, unit: str, shape: tuple[int, ...], causal: bool, backward: bool, links: int) -> Chain:
    """cuDNN's kernel on NVIDIA GPUs that multiply in bfloat16, as older ones have none; XLA's products elsewhere."""
    import jax

    implementation = "cudnn" if platform_of(device) == "cuda" and unit == "bf16" else "xla"
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation=implementation)
    arrays = [(shape, _dtype(unit), 1.0)] * 3
    if not backward:
        return chain(device, lambda q, k, v: q + SMALL * attend(q, k, v).astype(q.dtype), links, arrays)

    def pull(g: Any, back: Any) -> Any:
        return g + SMALL * sum(back(g))

    return chain(device, pull, links, [arrays[0], *arrays], prepare=lambda g, q, k, v: (jax.vjp(attend, q, k, v)[1],))
