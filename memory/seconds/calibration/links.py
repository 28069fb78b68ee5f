"""Cases of links: collectives between the devices of this host, and copies between device and host."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bytescope.memory.hlo.jax_types import JaxDevice
from bytescope.memory.seconds.calibration.cases import (
    COLLECTIVES,
    HOST_LINK,
    KINDS,
    SHORT,
    SMALL,
    TO_DEVICE,
    TO_HOST,
    CalibrationCase,
    CalibrationSizes,
    Chain,
    links_of,
    normal,
)


@dataclasses.dataclass(frozen=True)
class Copies:
    """Copies of an array of `size` bytes from one sharding to another."""

    size: int
    source: Any
    there: Any

    def start(self) -> Callable[[], Any]:
        """Fills the array; a call begins a copy."""
        import jax
        import numpy as np

        array = normal(self.source, 0, (self.size // 4,), np.float32, 1.0)
        return lambda: jax.device_put(array, self.there)


def host_link(device: JaxDevice, sizes: CalibrationSizes) -> Iterator[CalibrationCase]:
    import jax

    kinds = {memory.kind for memory in device.addressable_memories()}
    kind = next((kind for kind in ("pinned_host", "unpinned_host") if kind in kinds), None)
    if kind is None:
        return
    on_host, on_device = (
        jax.sharding.SingleDeviceSharding(device, memory_kind=kind),
        jax.sharding.SingleDeviceSharding(device),
    )

    def make(way: str, size: int) -> Copies:
        return Copies(size, *((on_device, on_host) if way == TO_HOST else (on_host, on_device)))

    for size, needed in ((sizes.copied, True), (SHORT, True)):
        for way in (TO_HOST, TO_DEVICE):
            yield CalibrationCase(HOST_LINK, (way,), size, float(size), 1, functools.partial(make, way, size), needed)


def collectives(devices: Sequence[JaxDevice], sizes: CalibrationSizes, moved: float) -> Iterator[CalibrationCase]:
    groups = [group for group in dict.fromkeys((len(devices), 2)) if 2 <= group <= len(devices)]
    for size in (*sizes.payloads, SHORT):
        for group in groups:
            for kind in KINDS:
                if size == SHORT and kind != KINDS[-1]:
                    continue  # only what tells the seconds of a hop
                whole = size - size % (4 * group * group)
                links = links_of(whole, moved)
                yield CalibrationCase(
                    COLLECTIVES,
                    (kind, group),
                    whole,
                    float(whole),
                    links,
                    functools.partial(_send, tuple(devices[:group]), kind, whole, links),
                    needed=kind == KINDS[0] and (size, group) == (sizes.payloads[0], groups[0]),
                )


def _send(devices: tuple[JaxDevice, ...], kind: str, size: int, links: int) -> Chain:
    """A chain of one collective whose payload, the unsharded array, is `size` bytes on each device."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    count, axis = len(devices), "all"
    part = size // 4 // count
    mesh = jax.sharding.Mesh(np.array(devices), (axis,))
    ring = [(one, (one + 1) % count) for one in range(count)]
    # A maximum in place of a sum needs no scaling afterwards; what is gathered or scattered goes back into its place.
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
