"""Builds the rates of a chip from `achieved`. A missing rate is taken from the nearest chip that has one, times the
ratio of the two data sheets."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from bytescope.memory.devices.chips import CHIPS, GPU_PLATFORMS, PCIE_5, Chip
from bytescope.memory.errors import ReportError
from bytescope.memory.seconds import achieved
from bytescope.memory.seconds.achieved import (
    ATTENTION_KERNELS,
    COLLECTIVES,
    LIKE,
    MEASURED,
    MESHES,
    NEAREST,
    NETWORKS,
    TWINS,
    Bus,
)
from bytescope.memory.seconds.rate_records import WAYS, CollectiveRate, Curve, DeviceRates, at


def rates_of_kind(kind: str) -> DeviceRates | None:
    """Returns the rates of a device kind (jax's device_kind) from published measurements; None for a chip that is not
    in `devices.chips`.
    """
    chip = next((chip for chip in CHIPS.values() if chip.kind == kind), None)
    return _rates(chip.name) if chip else None


def with_network(rates: DeviceRates, network: str) -> DeviceRates:
    """Returns a copy of a device's rates in which the measured collectives between hosts are replaced by measurements
    on another network.

    Raises ReportError if `network` is not a name in `achieved.NETWORKS`, such as "efa".
    """
    if network not in NETWORKS:
        raise ReportError(f"unknown network {network!r:.40}: choose one of {', '.join(NETWORKS)}")
    rows = tuple(CollectiveRate(row.kind, row.group, row.hosts, row.figure.points) for row in NETWORKS[network])
    inside = tuple(row for row in rates.collectives if row.hosts == 1)
    source = NETWORKS[network][0].figure.source
    return dataclasses.replace(
        rates,
        collectives=inside + rows,
        source=f"{rates.source}; between hosts: {source}",
        sources={**rates.sources, "collectives between hosts": source},
    )


def with_attention(rates: DeviceRates, kernel: str, kind: str) -> DeviceRates:
    """Returns a copy of a device's rates in which the attention rates are replaced by measurements of another kernel.

    The measurements are used as they are (`attention_slowdown` becomes 1). The factor `constants.ATTENTION`, by which
    attention is slower inside a training step than alone, was fitted to cuDNN's kernels on H100 only.

    Args:
        rates: the rates of the device.
        kernel: a name in `achieved.ATTENTION_KERNELS`, such as "flash-attention-2".
        kind: the device kind (jax's device_kind). If the kernel was not measured on this chip, its rates on the most
            similar chip are multiplied by the ratio of the data sheets.

    Raises ReportError if `kernel` is unknown, or if no chip has this kind.
    """
    if kernel not in ATTENTION_KERNELS:
        raise ReportError(f"unknown attention kernel {kernel!r:.40}: choose one of {', '.join(ATTENTION_KERNELS)}")
    chip = next((chip for chip in CHIPS.values() if chip.kind == kind), None)
    if chip is None:
        raise ReportError(f"no rates of attention kernel {kernel} are known for {kind!r:.40}: leave the kernel out")
    measured = ATTENTION_KERNELS[kernel]
    name = next(each for each in (chip.name, *NEAREST[chip.name], *measured) if each in measured)
    ratio = _of_16_bits(chip) / _of_16_bits(CHIPS[name])
    table: dict[str, dict[int, Curve]] = {way: {} for way in WAYS}
    for (way, width), figure in measured[name].items():
        table[way][width] = _times(figure.points, ratio)
    source = _name_chip(next(iter(measured[name].values())).source, name, chip.name)
    return dataclasses.replace(
        rates,
        attention=table,
        attention_slowdown=1.0,
        source=f"{rates.source}; attention: {source}",
        sources={**rates.sources, "attention": source},
    )


@functools.lru_cache(maxsize=64)
def _rates(name: str) -> DeviceRates:
    chip = CHIPS[name]
    products = _product_rates(chip)
    attention, attention_source = _attention_table(chip)
    (memory, memory_source), (host_link, host_link_source), (floor, floor_source) = (
        _nearest_rate(chip, (part,)) for part in ("memory", "host_link", "floor")
    )
    floor_seconds = floor[0][1]
    collectives, links_source = _collective_rates(chip)
    sources = {f"products {unit}": source for unit, (_, source) in products.items()} | {
        "attention": attention_source,
        "memory": memory_source,
        "collectives": links_source,
        "host link": host_link_source,
        "floor": floor_source,
        "hops": achieved.HOP_SOURCE,
        "start of a copy": achieved.HOST_LINK_SECONDS_SOURCE,
    }
    return DeviceRates(
        source=_summarize_sources(name, sources),
        peak_flops=dict(chip.peak_flops),
        attention=attention,
        memory=memory,
        products={
            unit: _beyond_floor(curve, floor_seconds, chip.peak_flops[unit]) for unit, (curve, _) in products.items()
        },
        floor_seconds=floor_seconds,
        host_link_bytes_per_s=host_link[0][1],
        host_link_seconds=achieved.HOST_LINK_SECONDS,
        collectives=collectives,
        hop_seconds=achieved.HOP_SECONDS,
        network_hop_seconds=achieved.NETWORK_HOP_SECONDS,
        cores=chip.gpu.cores if chip.gpu else 0,
        sources=sources,
    )


def _nearest_rate(chip: Chip, part: tuple[Any, ...]) -> tuple[Curve, str]:
    """Returns (rate curve, source) of one kind of work on a chip. If the chip has no measured curve, the curve of the
    most similar chip is multiplied by the ratio of their data-sheet rates. Raises KeyError if no similar chip has a
    curve.

    `part`: the kind of work, such as ("memory",) or ("products", "bf16").
    """
    for name in (chip.name, *NEAREST[chip.name]):
        for each in (part, *TWINS.get(part, ())):
            figure, ratio = MEASURED.get(name, {}).get(each), _data_sheet_ratio(each, part, chip, CHIPS[name])
            if figure and ratio:
                return _times(figure.points, ratio), _name_chip(figure.source, name, chip.name)
    raise KeyError(f"no measured rate of {part} for {chip.name} or a similar chip: add one to achieved.MEASURED")


def _product_rates(chip: Chip) -> dict[str, tuple[Curve, str]]:
    products: dict[str, tuple[Curve, str]] = {}
    for unit in chip.peak_flops:
        with contextlib.suppress(KeyError):
            products[unit] = _nearest_rate(chip, ("products", unit))
    for unit in chip.peak_flops:
        if unit not in products:
            like = next(each for each in LIKE[unit] if each in products)
            curve, source = products[like]
            ratio = chip.peak_flops[unit] / chip.peak_flops[like]
            products[unit] = _times(curve, ratio), f"efficiency of {like}: {source}"
    return {unit: products[unit] for unit in chip.peak_flops}


def _beyond_floor(curve: Curve, floor: float, peak: float) -> Curve:
    """Returns a published rate curve of square matrix products (side m = n = k -> FLOP/s) without the fixed `floor`
    seconds that each kernel takes, such as its launch. At most half of the measured seconds are subtracted.

    The rate is at most the data sheet's `peak`, because workstation GPUs may run at a higher clock than specified.
    """
    seconds = {side: 2 * side**3 / rate for side, rate in curve}
    return tuple((side, min(2 * side**3 / max(taken - floor, taken / 2), peak)) for side, taken in seconds.items())


def _attention_table(chip: Chip) -> tuple[dict[str, dict[int, Curve]], str]:
    """Returns the attention rates of a chip, from the most similar chip with measured attention: (way -> head dimension
    -> curve of FLOP/s over the number of keys, source).

    A way is forward or backward, with or without a causal mask (`WAYS`). If a way was not measured at a head dimension,
    its curve is derived from another way. The ratio of the two ways is taken from another head dimension or another
    chip.
    """
    name = next(each for each in (chip.name, *NEAREST[chip.name], "h100") if _cells(each))
    cells, others = _cells(name), [_cells(other) for other in (*NEAREST[name], "h100")]
    for way, like in (("backward", "forward"), ("forward_causal", "forward"), ("backward_causal", "backward")):
        for width in sorted({width for known_way, width in cells if known_way == like and (way, width) not in cells}):
            known, (one, other) = cells[like, width], _curves_to_convert(way, like, cells, *others)
            sizes = sorted({size for size, _ in (*known, *one)})
            cells[way, width] = tuple((size, at(known, size) * at(one, size) / at(other, size)) for size in sizes)
    ratio = _of_16_bits(chip) / _of_16_bits(CHIPS[name])
    table: dict[str, dict[int, Curve]] = {way: {} for way in WAYS}
    for (way, width), curve in sorted(cells.items()):
        table[way][width] = _times(curve, ratio)
    sources = dict.fromkeys(figure.source for part, figure in MEASURED[name].items() if part[0] == "attention")
    return table, _name_chip("; ".join(sources), name, chip.name)


def _cells(name: str) -> dict[tuple[str, int], Curve]:
    return {
        (part[1], part[2]): figure.points for part, figure in MEASURED.get(name, {}).items() if part[0] == "attention"
    }


def _curves_to_convert(way: str, like: str, *tables: Mapping[tuple[str, int], Curve]) -> tuple[Curve, Curve]:
    """Returns two measured rate curves of attention. Their ratio, `way` divided by `like`, converts a curve of the way
    `like` to the way `way`, for example forward without a mask to forward with a mask.

    Both curves are at the same head dimension, from the first table that has both ways. If a table lacks one of two
    backward ways, its forward ways are compared instead, because a mask has the same effect on both. `tables`: (way,
    head dimension) -> rate curve.

    Raises KeyError if no table has both ways.
    """
    for table in tables:
        for one, other in ((way, like), (way.replace("backward", "forward"), like.replace("backward", "forward"))):
            for width in (128, 64, 256):
                if one != other and (one, width) in table and (other, width) in table:
                    return table[one, width], table[other, width]
    raise KeyError(
        f"no head dimension has measured attention for both {way} and {like}: add its curve to achieved.MEASURED"
    )


def _of_16_bits(chip: Chip) -> float:
    return chip.peak_flops.get("bf16") or chip.peak_flops["fp16"]


def _data_sheet_ratio(measured: tuple[Any, ...], wanted: tuple[Any, ...], chip: Chip, other: Chip) -> float:
    """Returns the data-sheet rate of `chip` divided by the data-sheet rate of `other`, for one kind of work. Returns 0
    if one of them has no rate, and 1 for the fixed seconds that each kernel takes.

    `measured`: the kind of work on `other`, such as ("products", "bf16"). `wanted`: the kind of work on `chip`. The two
    differ only if a similar compute unit was measured.
    """
    if wanted[0] == "memory":
        return chip.hbm / other.hbm
    if wanted[0] == "host_link":
        return chip.host_link / other.host_link
    if wanted[0] == "floor":
        return 1.0
    peak = other.peak_flops.get(measured[1])
    return chip.peak_flops.get(wanted[1], 0.0) / peak if peak else 0.0


def _times(curve: Curve, ratio: float) -> Curve:
    return tuple((size, rate * ratio) for size, rate in curve)


def _name_chip(source: str, measured: str, name: str) -> str:
    return source if measured == name else "; ".join(f"efficiency of {measured}: {part}" for part in source.split("; "))


def _collective_rates(chip: Chip) -> tuple[tuple[CollectiveRate, ...], str]:
    """Returns (measured bandwidths of a chip's collectives, their sources). If a kind of collective was not measured on
    the chip, the bandwidths of the most similar chip are used, multiplied by the ratio of the link rates. Collectives
    within a host and between hosts are treated separately.
    """
    collectives: list[CollectiveRate] = []
    sources: dict[str, None] = {}
    for kind in dict.fromkeys(row.kind for rows in COLLECTIVES.values() for row in rows):
        for between in (False, True):
            name, rows = _measured_links(chip, kind, between)
            for row in rows:
                collectives += _on_links(chip, CHIPS[name], row)
                sources[_name_chip(row.figure.source, name, chip.name)] = None
    if chip.name in MESHES:
        sources[f"efficiency of {name}: shares of {achieved.MESH_SOURCE}"] = None
    return tuple(collectives), "; ".join(sources)


def _measured_links(chip: Chip, kind: str, between: bool) -> tuple[str, list[Bus]]:
    """Returns (name of the most similar chip with measured collectives of a kind, these measurements).

    `between`: whether collectives between hosts are wanted, rather than within a host. Within a host, chips that are
    connected by PCIe are similar only to each other. Between hosts, only the network cards matter.
    """
    names = [chip.name, *NEAREST[chip.name], "h100"]
    if not between and _uses_pcie_within_host(chip):
        names = ["rtx4090"]
    for name in names:
        rows = [row for row in COLLECTIVES.get(name, ()) if row.kind == kind and (row.hosts > 1) == between]
        if rows and (between or _uses_pcie_within_host(CHIPS[name]) == _uses_pcie_within_host(chip)):
            return name, rows
    return chip.name, []


def _uses_pcie_within_host(chip: Chip) -> bool:
    # PCI Express 5 with 16 lanes is slower than every NVLink. A comparison with the link to the host would not do: on
    # GH200, both links have the same bandwidth.
    return chip.platform in GPU_PLATFORMS and chip.in_host <= PCIE_5


def _on_links(chip: Chip, other: Chip, row: Bus) -> list[CollectiveRate]:
    if row.hosts > 1:
        bus = _times(row.figure.points, chip.between_hosts / other.between_hosts)
        return [CollectiveRate(row.kind, row.group, row.hosts, bus)]
    ratio = chip.in_host / other.in_host
    groups = MESHES.get(chip.name, {row.group: 1.0})
    if row.group < max(groups):
        return []  # a mesh has fewer links inside such a group than a switch
    rates = []
    for group, share in groups.items():
        rates.append(CollectiveRate(row.kind, group, 1, _times(row.figure.points, ratio * share)))
    return rates


def _summarize_sources(name: str, sources: Mapping[str, str]) -> str:
    chips_of: dict[str, dict[str, None]] = {}  # part -> the chips whose efficiency it has
    sixteen = next(f"products {unit}" for unit in ("bf16", "fp16") if f"products {unit}" in sources)
    for part, key in (
        ("products", sixteen),
        ("attention", "attention"),
        ("memory", "memory"),
        ("collectives", "collectives"),
    ):
        for source in sources[key].split("; "):
            like = next((chip for chip in CHIPS if source.startswith(f"efficiency of {chip}:")), name)
            chips_of.setdefault(part, {})[like] = None
    own = [part for part, chips in chips_of.items() if name in chips]
    alike: dict[str, list[str]] = {}  # chips with the same efficiency -> the parts that have it
    for part, chips in chips_of.items():
        if others := " and ".join(chip for chip in chips if chip != name):
            alike.setdefault(others, []).append(part)
    rest = "link to the host" if ("host_link",) in MEASURED.get(name, {}) else "nothing"
    return f"measured on {name}: {', '.join(own) or rest}" + "".join(
        f"; {', '.join(parts)} with the efficiency of {chips}" for chips, parts in alike.items()
    )
