"""The rates of a chip: its own figures of `achieved`, and for the others those of the nearest chip that has them, times
the ratio of the two data sheets."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from bytescope.memory.devices.chips import CHIPS, Chip
from bytescope.memory.errors import ReportError
from bytescope.memory.seconds import achieved
from bytescope.memory.seconds.achieved import COLLECTIVES, LIKE, MEASURED, MESHES, NEAREST, NETWORKS, TWINS, Bus
from bytescope.memory.seconds.rate_records import WAYS, CollectiveRate, Curve, DeviceRates, at


def of(kind: str) -> DeviceRates | None:
    """The rates of a device kind, as jax calls it; None for a chip that `devices.chips` does not know."""
    chip = next((chip for chip in CHIPS.values() if chip.kind == kind), None)
    return _rates(chip.name) if chip else None


def over(found: DeviceRates, network: str) -> DeviceRates:
    """Rates with the collectives between hosts of another network, a name of `achieved.NETWORKS`.

    Raises ReportError for another name.
    """
    if network not in NETWORKS:
        raise ReportError(f"unknown network {network!r:.40}: one of {', '.join(NETWORKS)}")
    rows = tuple(CollectiveRate(row.kind, row.group, row.hosts, row.figure.points) for row in NETWORKS[network])
    inside = tuple(row for row in found.collectives if row.hosts == 1)
    source = NETWORKS[network][0].figure.source
    return dataclasses.replace(
        found,
        collectives=inside + rows,
        source=f"{found.source}; between hosts: {source}",
        sources={**found.sources, "collectives between hosts": source},
    )


@functools.lru_cache(maxsize=64)
def _rates(name: str) -> DeviceRates:
    chip = CHIPS[name]
    products, attention = _products(chip), _attention_table(chip)
    memory, host_link, floor = (_measured(chip, (part,)) for part in ("memory", "host_link", "floor"))
    collectives, links = _collectives(chip)
    sources = {f"products {unit}": source for unit, (_, source) in products.items()} | {
        "attention": attention[1],
        "memory": memory[1],
        "collectives": links,
        "host link": host_link[1],
        "floor": floor[1],
        "hops": achieved.HOP_SOURCE,
        "start of a copy": achieved.HOST_LINK_SECONDS_SOURCE,
    }
    return DeviceRates(
        source=_summary(name, sources),
        peak_flops=dict(chip.peak_flops),
        attention=attention[0],
        memory=memory[0],
        products={
            unit: _beyond_floor(curve, floor[0][0][1], chip.peak_flops[unit]) for unit, (curve, _) in products.items()
        },
        floor_seconds=floor[0][0][1],
        host_link_bytes_per_s=host_link[0][0][1],
        host_link_seconds=achieved.HOST_LINK_SECONDS,
        collectives=collectives,
        hop_seconds=achieved.HOP_SECONDS,
        network_hop_seconds=achieved.NETWORK_HOP_SECONDS,
        cores=chip.gpu.cores if chip.gpu else 0,
        sources=sources,
    )


def _measured(chip: Chip, part: tuple[Any, ...]) -> tuple[Curve, str]:
    nearest = _nearest(chip, part)
    if nearest is None:
        raise KeyError(f"no figure of {part} for {chip.name} or a chip like it: add one to achieved.MEASURED")
    return nearest


def _nearest(chip: Chip, part: tuple[Any, ...]) -> tuple[Curve, str] | None:
    """A part's curve and source: the chip's own, or the nearest one's times the ratio of their data sheets."""
    for name in (chip.name, *NEAREST[chip.name]):
        for each in (part, *TWINS.get(part, ())):
            figure, ratio = MEASURED.get(name, {}).get(each), _ratio(each, part, chip, CHIPS[name])
            if figure and ratio:
                return _times(figure.points, ratio), _said(figure.source, name, chip.name)
    return None


def _products(chip: Chip) -> dict[str, tuple[Curve, str]]:
    """Unit -> curve and source; a unit that nobody measured takes the efficiency of one nearly like it."""
    found: dict[str, tuple[Curve, str]] = {}
    for unit in chip.peak_flops:
        if measured := _nearest(chip, ("products", unit)):
            found[unit] = measured
    for unit in chip.peak_flops:
        if unit not in found:
            like = next(each for each in LIKE[unit] if each in found)
            curve, source = found[like]
            ratio = chip.peak_flops[unit] / chip.peak_flops[like]
            found[unit] = _times(curve, ratio), f"efficiency of {like}: {source}"
    return {unit: found[unit] for unit in chip.peak_flops}


def _beyond_floor(curve: Curve, floor: float, peak: float) -> Curve:
    """A curve of cubes as published, with the floors of kernels taken out of its times, of none more than half.

    Cards for workstations clock higher than their data sheets, to which they are held here.
    """
    seconds = {side: 2 * side**3 / rate for side, rate in curve}
    return tuple((side, min(2 * side**3 / max(taken - floor, taken / 2), peak)) for side, taken in seconds.items())


def _attention_table(chip: Chip) -> tuple[dict[str, dict[int, Curve]], str]:
    """Way -> head width -> curve, and the source: all of the nearest chip with figures of attention.

    A way or width that was not measured takes the ratio that another width, or another chip, has between them.
    """
    name = next(each for each in (chip.name, *NEAREST[chip.name], "h100") if _cells(each))
    cells, others = _cells(name), [_cells(other) for other in (*NEAREST[name], "h100")]
    for way, like in (("backward", "forward"), ("forward_causal", "forward"), ("backward_causal", "backward")):
        for width in sorted({width for known_way, width in cells if known_way == like and (way, width) not in cells}):
            cells[way, width] = _as_beside(cells[like, width], *_pair(way, like, cells, *others))
    ratio = _of_16_bits(chip) / _of_16_bits(CHIPS[name])
    table: dict[str, dict[int, Curve]] = {way: {} for way in WAYS}
    for (way, width), curve in sorted(cells.items()):
        table[way][width] = _times(curve, ratio)
    sources = dict.fromkeys(figure.source for part, figure in MEASURED[name].items() if part[0] == "attention")
    return table, _said("; ".join(sources), name, chip.name)


def _cells(name: str) -> dict[tuple[str, int], Curve]:
    return {
        (part[1], part[2]): figure.points for part, figure in MEASURED.get(name, {}).items() if part[0] == "attention"
    }


def _pair(way: str, like: str, *tables: Mapping[tuple[str, int], Curve]) -> tuple[Curve, Curve]:
    """The curves of two ways at one width, of the first table that has both; a mask costs as much backward."""
    for table in tables:
        for one, other in ((way, like), (way.replace("backward", "forward"), like.replace("backward", "forward"))):
            for width in (128, 64, 256):
                if one != other and (one, width) in table and (other, width) in table:
                    return table[one, width], table[other, width]
    raise KeyError(f"{way} beside {like}")


def _as_beside(curve: Curve, way: Curve, like: Curve) -> Curve:
    sizes = sorted({size for size, _ in (*curve, *way)})
    return tuple((size, at(curve, size) * at(way, size) / at(like, size)) for size in sizes)


def _of_16_bits(chip: Chip) -> float:
    return chip.peak_flops.get("bf16") or chip.peak_flops["fp16"]


# Part -> the figure of a data sheet that it is a share of; products have one a unit, a floor none.
_SHEET = {"memory": lambda chip: chip.hbm, "host_link": lambda chip: chip.host_link, "floor": lambda chip: 1.0}


def _ratio(measured: tuple[Any, ...], wanted: tuple[Any, ...], chip: Chip, other: Chip) -> float:
    """The ratio of two chips' data sheets for a part; 0 where one of them has no such unit."""
    if wanted[0] in _SHEET:
        return _SHEET[wanted[0]](chip) / _SHEET[wanted[0]](other)
    peak = other.peak_flops.get(measured[1])
    return chip.peak_flops.get(wanted[1], 0.0) / peak if peak else 0.0


def _times(curve: Curve, ratio: float) -> Curve:
    return tuple((size, rate * ratio) for size, rate in curve)


def _said(source: str, measured: str, name: str) -> str:
    """A source, of each of its parts that it is another chip's."""
    return source if measured == name else "; ".join(f"efficiency of {measured}: {part}" for part in source.split("; "))


def _collectives(chip: Chip) -> tuple[tuple[CollectiveRate, ...], str]:
    """The collectives of a chip and their sources: kind by kind, in a host and between hosts, its own rows or those of
    the nearest chip that has some, times the ratio of their links."""
    found: list[CollectiveRate] = []
    sources: dict[str, None] = {}
    for kind in dict.fromkeys(row.kind for rows in COLLECTIVES.values() for row in rows):
        for between in (False, True):
            name, rows = _measured_links(chip, kind, between)
            for row in rows:
                found += _on_links(chip, CHIPS[name], row)
                sources[_said(row.figure.source, name, chip.name)] = None
    if chip.name in MESHES:
        sources[f"efficiency of {name}: shares of {achieved.MESH_SOURCE}"] = None
    return tuple(found), "; ".join(sources)


def _measured_links(chip: Chip, kind: str, between: bool) -> tuple[str, list[Bus]]:
    """The nearest chip with rows of a kind, and these. Cards on PCIe are like cards on PCIe, others like others; the
    rows of a network are a host's cards', whatever joins its devices."""
    names = [chip.name, *NEAREST[chip.name], "h100"]
    if not between and _on_pcie(chip):
        names = ["rtx4090"]
    for name in names:
        rows = [row for row in COLLECTIVES.get(name, ()) if row.kind == kind and (row.hosts > 1) == between]
        if rows and (between or _on_pcie(CHIPS[name]) == _on_pcie(chip)):
            return name, rows
    return chip.name, []


def _on_pcie(chip: Chip) -> bool:
    """Whether the devices of a host meet over PCIe, as `devices.chips` has it."""
    return chip.platform == "cuda" and chip.in_host == chip.host_link


def _on_links(chip: Chip, other: Chip, row: Bus) -> list[CollectiveRate]:
    if row.hosts > 1:
        return [
            CollectiveRate(
                row.kind, row.group, row.hosts, _times(row.figure.points, chip.between_hosts / other.between_hosts)
            )
        ]
    ratio = chip.in_host / other.in_host
    groups = MESHES.get(chip.name, {row.group: 1.0})
    if row.group < max(groups):
        return []  # a part of a switch's devices: in a mesh it is the links among them that count
    return [
        CollectiveRate(row.kind, group, 1, _times(row.figure.points, ratio * share)) for group, share in groups.items()
    ]


def _summary(name: str, sources: Mapping[str, str]) -> str:
    """One line: which parts were measured on the chip, and which take another's efficiency."""
    by_chip: dict[str, list[str]] = {name: []}
    sixteen = next(f"products {unit}" for unit in ("bf16", "fp16") if f"products {unit}" in sources)
    for part, key in (
        ("products", sixteen),
        ("attention", "attention"),
        ("memory", "memory"),
        ("collectives", "collectives"),
    ):
        for source in sources[key].split("; "):
            like = next((chip for chip in CHIPS if source.startswith(f"efficiency of {chip}:")), name)
            if part not in by_chip.setdefault(like, []):
                by_chip[like].append(part)
    own = ", ".join(by_chip.pop(name)) or "nothing"
    return f"measured on {name}: {own}" + "".join(
        f"; {', '.join(parts)} with the efficiency of {chip}" for chip, parts in by_chip.items()
    )
