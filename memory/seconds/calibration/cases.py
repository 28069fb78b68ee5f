"""Lists the cases of a calibration: one kernel or copy at one size, each as a program that runs a chain of it.

The program runs the links of the chain in a loop on the device, where each link needs the result of the link before,
and returns a scalar. Calls follow each other without waiting, so that dispatch is hidden behind them. Barriers keep
XLA from fusing neighbouring links into one kernel. `list_cases` lists all cases of a machine's devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bytescope.memory.cost import roofline
from bytescope.memory.devices.targets import Target, platform_of
from bytescope.memory.hlo.jax_types import JaxDevice
from bytescope.memory.seconds.achieved import BACKWARD_FLOPS
from bytescope.memory.seconds.rate_records import WAYS
from bytescope.memory.units import MIB, human

# Parts of a calibration, in the order in which reports show them.
PRODUCTS, ATTENTION, MEMORY, FLOOR, COLLECTIVES, HOST_LINK = PARTS = (
    "products",
    "attention",
    "memory",
    "floor",
    "collectives",
    "host link",
)
TO_HOST, TO_DEVICE = "to host", "to device"
COPY, ADD = "copy", "add"
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# Target seconds of one call of a program; minimum and maximum links of one call; links in one turn of its loop.
CALL_SECONDS, MIN_LINKS, MAX_LINKS, UNROLLED = 5e-3, 4, 256, 8
# Bytes of the payload that is permuted to measure the seconds of a hop, and copied to measure the latency of a copy.
SHORT = 4096
# Factor of the value that a link adds to its chain: too small to overflow, too large for XLA to leave out.
SMALL = 1e-3
# Assumed rates of an accelerator without a data sheet, until it is measured: FLOP/s, bytes per second.
_GUESS = (1e14, 1e12)


@dataclasses.dataclass(frozen=True)
class CalibrationCase:
    """A measurement case of the calibration: one kernel at one size.

    Fields:
        part: one of `PARTS`.
        key: identifies the kernel within `part`: (compute unit,) for products, (way, head dimension) for attention (the
            way is one of `WAYS`, such as "forward_causal"), (COPY or ADD,) for memory, (kind, number of devices) for
            collectives, (direction,) for the host link.
        size: the side m = k = n of a matrix product, the number of keys of attention, or bytes.
        work: FLOPs or bytes of one run of the kernel.
        links: number of runs of the kernel, one after the other, in one call.
        make: function that returns an object with a method `start()`. `start()` returns a function that begins one call
            and returns an array to wait for.
        needed: whether predictions need the case, so that it is measured even if time is short.
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
        """The kernel and its size in words, for the progress display."""
        size = human(self.size) if self.part in (MEMORY, COLLECTIVES, HOST_LINK) else str(self.size or "")
        return " ".join(filter(None, (self.part, *map(str, self.key), size)))


@dataclasses.dataclass(frozen=True)
class CalibrationSizes:
    """The sizes of the kernels that a calibration measures. Each list begins with the most important size.

    Fields:
        units: compute units (of `cost.roofline.UNITS`).
        sides: sides m = k = n of matrix products.
        lengths: sequence lengths of attention.
        widths: head dimensions of attention.
        tokens: number of tokens in all sequences of one attention call.
        heads: total size of all attention heads (number of heads times head dimension).
        arrays: bytes of an array that is copied in device memory.
        payloads: payloads of a collective in bytes.
        copied: bytes copied over the host link.
    """

    units: tuple[str, ...]
    sides: tuple[int, ...]
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
    lengths=(256, 512, 128),
    widths=(64, 128),
    tokens=512,
    heads=256,
    arrays=(16 * MIB, MIB, 64 * MIB, MIB // 4),
    payloads=(MIB, 16 * MIB, MIB // 8),
    copied=16 * MIB,
)


def choose_sizes(target: Target) -> CalibrationSizes:
    """Returns the sizes of the kernels to measure on the devices of a target."""
    return HOST if target.platform == "cpu" else ACCELERATOR


def list_cases(devices: Sequence[JaxDevice], target: Target, sizes: CalibrationSizes) -> list[CalibrationCase]:
    """Returns the measurement cases of a calibration in the order in which they are compiled: first the cases that
    predictions need, then the others, one of each part (such as matrix products or collectives) in turn.
    """
    units = [unit for unit in sizes.units if unit in target.peak_flops or not target.peak_flops]
    if target.peak_flops:
        flops, bandwidth = target.peak_flops[units[0]], target.hbm_bytes_per_s
    elif target.platform == "cpu":
        flops, bandwidth = roofline.machine_rates()
    else:
        flops, bandwidth = _GUESS
    parts = [
        list(_floor_cases(devices[0])),
        list(_product_cases(devices[0], units, sizes, flops)),
        list(_memory_cases(devices[0], sizes, bandwidth)),
        list(_attention_cases(devices[0], units[0], sizes, flops / 2)),
        list(_host_link_cases(devices[0], sizes)),
        list(_collective_cases(devices, sizes, bandwidth / 10)),
    ]
    cases = []
    for turn in range(max(map(len, parts))):
        cases += [part[turn] for part in parts if turn < len(part)]
    return sorted(cases, key=lambda case: not case.needed)


# ---- chains ---------------------------------------------------------------------------------------------------


def count_links(work: float, rate: float) -> int:
    """Returns the number of kernel runs that together take about `CALL_SECONDS`, between `MIN_LINKS` and `MAX_LINKS`.
    Numbers above `UNROLLED` are rounded down to a multiple of it, because the loop that runs the kernel is unrolled by
    this factor.

    `work`: FLOPs or bytes of one run. `rate`: FLOPs or bytes per second.
    """
    wanted = min(max(int(CALL_SECONDS * rate / work), MIN_LINKS), MAX_LINKS)
    return wanted if wanted < UNROLLED else wanted - wanted % UNROLLED


@dataclasses.dataclass(frozen=True)
class Chain:
    """A program that runs one kernel many times. Each run reads the result of the previous run, so that no two runs
    overlap.

    Fields:
        program: function (before, x, *others) -> results. `x` is the array that the kernel updates, `others` are its
            constant operands. The first result is passed as `before` to the next call, so that calls do not overlap
            either.
        before: the shape of `before`, a float32 array.
        inputs: (shape, dtype, scale) of x and the other arguments, which are filled with normally distributed numbers
            of standard deviation `scale`.
        sharding: the sharding of all arguments. `lower` also accepts devices that this machine does not have.
    """

    program: Callable[..., Any]
    before: tuple[int, ...]
    inputs: Sequence[tuple[tuple[int, ...], Any, float]]
    sharding: Any

    def lower(self) -> Any:
        """Returns the program lowered for its devices, a `jax.stages.Lowered`."""
        import jax
        import jax.numpy as jnp

        arguments = [(self.before, jnp.float32), *(each[:2] for each in self.inputs)]
        return jax.jit(self.program).lower(
            *(jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding) for shape, dtype in arguments)
        )

    def start(self) -> Callable[[], Any]:
        """Compiles the program and fills its inputs. Returns a function that begins a call, which waits for the call
        before it.
        """
        import jax
        import jax.numpy as jnp

        compiled = self.lower().compile()
        values = [_random_array(self.sharding, number, *each) for number, each in enumerate(self.inputs)]
        last = [jax.device_put(jnp.zeros(self.before), self.sharding)]

        def run() -> Any:
            last[0], *_ = compiled(last[0], *values)
            return last[0]

        return run


def _chain(
    device: JaxDevice,
    link: Callable[..., Any],
    links: int,
    inputs: Sequence[tuple[tuple[int, ...], Any, float]],
    prepare: Callable[..., tuple[Any, ...]] | None = None,
    unroll: int = UNROLLED,
) -> Chain:
    """Returns a program that computes `x = link(x, *others)` `links` times on one device.

    `link`: one run of the kernel. `inputs`: (shape, dtype, standard deviation of the values) of each argument, `x`
    first. `prepare`: function that computes `others` from the program's arguments, once per call and before the first
    link.
    """
    import jax
    import jax.numpy as jnp

    def program(before: Any, x: Any, *others: Any) -> Any:
        x = x + (before * 0).astype(x.dtype)
        others = prepare(x, *others) if prepare else others
        out = jax.lax.fori_loop(0, links, lambda _, x: link(x, *others), x, unroll=min(unroll, links))
        # The whole array is returned, so that XLA computes all of it.
        return out[(0,) * out.ndim].astype(jnp.float32), out

    return Chain(program, (), inputs, jax.sharding.SingleDeviceSharding(device))


def _random_array(sharding: Any, seed: int, shape: tuple[int, ...], dtype: Any, scale: float) -> Any:
    import jax
    import numpy as np

    part = sharding.shard_shape(shape)
    size = math.prod(part)
    # Devices compute on zeros with less power.
    numbers = scale * np.random.default_rng(seed).standard_normal(min(size, 2**20), np.float32)
    filled = np.resize(numbers.astype(dtype), size).reshape(part)
    return jax.block_until_ready(jax.make_array_from_callback(shape, sharding, lambda _: filled))


# ---- cases of one device ---------------------------------------------------------------------------------------


def _floor_cases(device: JaxDevice) -> Iterator[CalibrationCase]:
    import jax
    import jax.numpy as jnp

    make = functools.partial(
        _chain,
        device,
        lambda x: jax.lax.optimization_barrier(x * 1.0001),
        MAX_LINKS,
        [((1024,), jnp.float32, 1.0)],
        unroll=4 * UNROLLED,
    )
    yield CalibrationCase(FLOOR, (), 0, 0.0, MAX_LINKS, make, needed=True)


def _dtype(unit: str) -> Any:
    import jax.numpy as jnp

    return {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp8": jnp.float8_e4m3fn}.get(unit, jnp.float32)


def _matmul_in_unit(unit: str) -> Callable[[Any, Any], Any]:
    import jax
    import jax.numpy as jnp

    preset = jax.lax.DotAlgorithmPreset.TF32_TF32_F32 if unit == "tf32" else None
    precision = preset or (jax.lax.Precision.HIGHEST if unit == "fp32" else None)
    # An fp8 product is summed in float32 and rounded to bfloat16 first.
    out = jnp.bfloat16 if unit == "fp8" else None
    return lambda x, w: jnp.matmul(x, w, precision=precision, preferred_element_type=out).astype(x.dtype)


def _product_cases(
    device: JaxDevice, units: Sequence[str], sizes: CalibrationSizes, flops: float
) -> Iterator[CalibrationCase]:
    def make(unit: str, side: int, links: int) -> Chain:
        shape = (side, side), _dtype(unit)
        return _chain(device, _matmul_in_unit(unit), links, [(*shape, 1.0), (*shape, side**-0.5)])

    for side in sizes.sides:
        for unit in units:
            work = 2.0 * side**3
            links = count_links(work, flops)
            yield CalibrationCase(
                PRODUCTS,
                (unit,),
                side,
                work,
                links,
                functools.partial(make, unit, side, links),
                needed=(unit, side) == (units[0], sizes.sides[0]),
            )


def _memory_cases(device: JaxDevice, sizes: CalibrationSizes, bandwidth: float) -> Iterator[CalibrationCase]:
    import jax
    import jax.numpy as jnp

    barrier = jax.lax.optimization_barrier
    # Kind -> (number of arrays that a link reads and writes, the link).
    kinds: Mapping[str, tuple[int, Callable[..., Any]]] = {
        COPY: (2, lambda x: barrier(x * 1.0001)),
        ADD: (3, lambda x, y: barrier(x + y)),
    }

    def make(kind: str, size: int, links: int) -> Chain:
        arrays, link = kinds[kind]
        inputs = [((size // 4,), jnp.float32, scale) for scale in (1.0, SMALL)]
        return _chain(device, link, links, inputs[: arrays - 1])

    for size in sizes.arrays:
        for kind, (arrays, _) in kinds.items():
            links = count_links(arrays * size, bandwidth)
            yield CalibrationCase(
                MEMORY,
                (kind,),
                size,
                float(arrays * size),
                links,
                functools.partial(make, kind, size, links),
                needed=size == sizes.arrays[0],
            )


def _attention_cases(device: JaxDevice, unit: str, sizes: CalibrationSizes, flops: float) -> Iterator[CalibrationCase]:
    for length in sizes.lengths:
        for width in sizes.widths:
            for way in WAYS:
                batch, heads = max(sizes.tokens // length, 1), max(sizes.heads // width, 1)
                causal, backward = way.endswith("causal"), way.startswith("backward")
                work = 4.0 * batch * heads * length**2 * width * (0.5 if causal else 1.0)
                links = count_links(work * (BACKWARD_FLOPS if backward else 1.0), flops)
                # A call of a backward chain begins with one forward pass.
                work *= BACKWARD_FLOPS + 1 / links if backward else 1.0
                make = functools.partial(
                    _attention_chain, device, unit, (batch, length, heads, width), causal, backward, links
                )
                yield CalibrationCase(
                    ATTENTION,
                    (way, width),
                    length,
                    work,
                    links,
                    make,
                    needed=(length, width) == (sizes.lengths[0], sizes.widths[0]),
                )


def _attention_chain(
    device: JaxDevice, unit: str, shape: tuple[int, ...], causal: bool, backward: bool, links: int
) -> Chain:
    """Returns a program that runs attention many times, each time on the previous result. It uses cuDNN's kernel on
    NVIDIA GPUs that compute in bfloat16, and XLA's matrix products on other devices.

    `shape`: (batch, tokens, heads, head dimension) of queries, keys and values. `causal`: whether there is a causal
    mask. `backward`: whether only the backward pass is repeated. `links`: number of runs.
    """
    import jax

    implementation = "cudnn" if platform_of(device) == "cuda" and unit == "bf16" else "xla"
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation=implementation)
    arrays = [(shape, _dtype(unit), 1.0)] * 3
    if not backward:
        return _chain(device, lambda q, k, v: q + SMALL * attend(q, k, v).astype(q.dtype), links, arrays)

    def pull(g: Any, back: Any) -> Any:
        return g + SMALL * sum(back(g))

    return _chain(device, pull, links, [arrays[0], *arrays], prepare=lambda g, q, k, v: (jax.vjp(attend, q, k, v)[1],))


# ---- cases of links --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Copies:
    """Repeated copies of an array of `size` bytes from the sharding `source` to the sharding `destination`, one of
    which is in host memory.
    """

    size: int
    source: Any
    destination: Any

    def start(self) -> Callable[[], Any]:
        import jax
        import numpy as np

        array = _random_array(self.source, 0, (self.size // 4,), np.float32, 1.0)
        return lambda: jax.device_put(array, self.destination)


def _host_link_cases(device: JaxDevice, sizes: CalibrationSizes) -> Iterator[CalibrationCase]:
    import jax

    kinds = {memory.kind for memory in device.addressable_memories()}
    kind = next((kind for kind in ("pinned_host", "unpinned_host") if kind in kinds), None)
    if kind is None:
        return
    on_host = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    on_device = jax.sharding.SingleDeviceSharding(device)
    for size in (sizes.copied, SHORT):
        for way, source, destination in ((TO_HOST, on_device, on_host), (TO_DEVICE, on_host, on_device)):
            make = functools.partial(_Copies, size, source, destination)
            yield CalibrationCase(HOST_LINK, (way,), size, float(size), 1, make, needed=True)


def _collective_cases(
    devices: Sequence[JaxDevice], sizes: CalibrationSizes, bandwidth: float
) -> Iterator[CalibrationCase]:
    groups = [group for group in dict.fromkeys((len(devices), 2)) if 2 <= group <= len(devices)]
    for size in (*sizes.payloads, SHORT):
        for group in groups:
            for kind in KINDS:
                if size == SHORT and kind != KINDS[-1]:
                    continue  # this size is only measured for the permutation, to get the seconds of a hop
                whole = size - size % (4 * group * group)
                links = count_links(whole, bandwidth)
                yield CalibrationCase(
                    COLLECTIVES,
                    (kind, group),
                    whole,
                    float(whole),
                    links,
                    functools.partial(_collective_chain, tuple(devices[:group]), kind, whole, links),
                    needed=kind == KINDS[0] and (size, group) == (sizes.payloads[0], groups[0]),
                )


def _collective_chain(devices: tuple[JaxDevice, ...], kind: str, size: int, links: int) -> Chain:
    """Returns a program that runs a collective of one kind `links` times on these devices, each time on the previous
    result. The payload, the unsharded array, has `size` bytes on each device.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    count, axis = len(devices), "all"
    part = size // 4 // count
    mesh = jax.sharding.Mesh(np.array(devices), (axis,))
    ring = [(one, (one + 1) % count) for one in range(count)]
    # The all-reduce is a maximum, because a sum would need scaling. Gathered or scattered values are written back in
    # place.
    send: Mapping[str, Callable[[Any], Any]] = {
        "all-reduce": lambda x: jax.lax.pmax(x, axis),
        "all-gather": lambda x: jax.lax.all_gather(x, axis, tiled=True)[:part] + SMALL,
        "reduce-scatter": lambda x: x.at[:part].set(jax.lax.psum_scatter(x, axis, tiled=True) * SMALL),
        "all-to-all": lambda x: jax.lax.all_to_all(x, axis, 0, 0, tiled=True),
        "collective-permute": lambda x: jax.lax.ppermute(x, axis, ring),
    }

    def program(before: Any, x: Any) -> Any:
        x = jax.lax.fori_loop(0, links, lambda _, x: send[kind](x), x + before[0] * 0)
        return x[:1], x

    spec = jax.sharding.PartitionSpec(axis)
    local = part if kind == "all-gather" else part * count
    mapped = jax.shard_map(program, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec), check_vma=False)
    return Chain(mapped, (count,), [((local * count,), jnp.float32, 1.0)], jax.sharding.NamedSharding(mesh, spec))
