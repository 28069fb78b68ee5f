"""The rates of a chip: its own figures of `achieved`, and for the others those of the nearest chip that has them, times
the ratio of the two data sheets."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from bytescope.memory.devices.chips import CHIPS, Chip
from bytescope.memory.seconds.achieved import (
    COLLECTIVES,
    FLOOR_SECONDS,
    FLOOR_SOURCE,
    HOP_SECONDS,
    HOST_LINK_SECONDS,
    HOST_LINK_SHARE,
    LIKE,
    MEASURED,
    NEAREST,
    NETWORK_HOP_SECONDS,
    TWINS,
)
from bytescope.memory.seconds.rate_records import WAYS, Collective, Curve, Rates, at


def of(kind: str) -> Rates | None:
    """The rates of a device kind, as jax calls it; None for a chip that `devices.chips` does not know."""
    chip = next((chip for chip in CHIPS.values() if chip.kind == kind), None)
    return _rates(chip.name) if chip else None


@functools.lru_cache(maxsize=64)
def _rates(name: str) -> Rates:
    chip = CHIPS[name]
    products, memory = _products(chip), _nearest(chip, ("memory",))
    attention, attention_source = _attention_table(chip)
    collectives, collectives_source = _collectives(chip)
    sources = {f"products {unit}": source for unit, (_, source) in products.items()} | {
        "attention": attention_source, "memory": memory[1], "collectives": collectives_source, "floor": FLOOR_SOURCE}
    return Rates(
        source=_summary(name, sources), peak_flops=dict(chip.peak_flops), attention=attention, memory=memory[0],
        products={unit: curve for unit, (curve, _) in products.items()}, floor_seconds=FLOOR_SECONDS,
        host_link_bytes_per_s=chip.host_link * HOST_LINK_SHARE, host_link_seconds=HOST_LINK_SECONDS,
        collectives=collectives, hop_seconds=HOP_SECONDS, network_hop_seconds=NETWORK_HOP_SECONDS,
        cores=chip.gpu.cores if chip.gpu else 0, sources=sources)


def _nearest(chip: Chip, part: tuple) -> tuple[Curve, str] | None:
    """A part's curve and source: the chip's own, or the nearest one's times the ratio of their data sheets."""
    for name in (chip.name, *NEAREST[chip.name]):
        for each in (part, *TWINS.get(part, ())):
            figure, ratio = MEASURED.get(name, {}).get(each), _ratio(each, part, chip, CHIPS[name])
            if figure and ratio:
                return _times(figure.points, ratio), _said(figure.source, name, chip.name)
    return None


def _products(chip: Chip) -> dict[str, tuple[Curve, str]]:
    """Unit -> curve and source; a unit that nobody measured takes the efficiency of one nearly like it."""
    found = {unit: _nearest(chip, ("products", unit)) for unit in chip.peak_flops}
    for unit in chip.peak_flops:
        if found[unit] is None:
            like = next(each for each in LIKE[unit] if found.get(each))
            curve, source = found[like]
            ratio = chip.peak_flops[unit] / chip.peak_flops[like]
            found[unit] = _times(curve, ratio), f"efficiency of {like}: {source}"
    return found


def _attention_table(chip: Chip) -> tuple[dict[str, dict[int, Curve]], str]:
    """Way -> head width -> curve, and the source: all of the nearest chip with figures of attention.

    A way or width that was not measured takes the ratio that another width, or another chip, has between them.
    """
    name = next(each for each in (chip.name, *NEAREST[chip.name], "h100") if _cells(each))
    cells, known = _cells(name), _cells("h100")
    for way, like in (("backward", "forward"), ("forward_causal", "forward"), ("backward_causal", "backward")):
        for width in sorted({width for known_way, width in cells if known_way == like and (way, width) not in cells}):
            cells[way, width] = _as_beside(cells[like, width], *_pair(way, like, cells, known))
    ratio = _of_16_bits(chip) / _of_16_bits(CHIPS[name])
    table: dict[str, dict[int, Curve]] = {way: {} for way in WAYS}
    for (way, width), curve in sorted(cells.items()):
        table[way][width] = _times(curve, ratio)
    sources = dict.fromkeys(figure.source for part, figure in MEASURED[name].items() if part[0] == "attention")
    return table, _said("; ".join(sources), name, chip.name)


def _cells(name: str) -> dict[tuple[str, int], Curve]:
    return {(part[1], part[2]): figure.points for part, figure in MEASURED.get(name, {}).items()
            if part[0] == "attention"}


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


def _ratio(measured: tuple, wanted: tuple, chip: Chip, other: Chip) -> float:
    """The ratio of two chips' data sheets for a part; 0 where one of them has no such unit."""
    if wanted[0] == "memory":
        return chip.hbm / other.hbm
    peak = other.peak_flops.get(measured[1])
    return chip.peak_flops.get(wanted[1], 0.0) / peak if peak else 0.0


def _times(curve: Curve, ratio: float) -> Curve:
    return tuple((size, rate * ratio) for size, rate in curve)


def _said(source: str, measured: str, name: str) -> str:
    return source if measured == name else f"efficiency of {measured}: {source}"


def _collectives(chip: Chip) -> tuple[tuple[Collective, ...], str]:
    """The collectives of a chip, its own or the nearest one's times the ratio of their links, and the source."""
    name = next(each for each in (chip.name, *NEAREST[chip.name], "h100") if each in COLLECTIVES)
    other, rows = CHIPS[name], COLLECTIVES[name]
    inside, between = chip.in_host / other.in_host, chip.between_hosts / other.between_hosts
    found = tuple(Collective(row.kind, row.group, row.hosts,
                             _times(row.figure.points, between if row.hosts > 1 else inside)) for row in rows)
    return found, _said("; ".join(dict.fromkeys(row.figure.source for row in rows)), name, chip.name)


def _summary(name: str, sources: Mapping[str, str]) -> str:
    """One line: which parts were measured on the chip, and which take another's efficiency."""
    by_chip: dict[str, list[str]] = {}
    for part, source in sources.items():
        like = next((chip for chip in CHIPS if source.find(f"efficiency of {chip}:") >= 0), name)
        group = part.split()[0]
        if part != "floor" and group not in by_chip.setdefault(like, []):
            by_chip[like].append(group)
    own = ", ".join(by_chip.pop(name, ())) or "nothing"
    rest = "".join(f"; {', '.join(groups)} with the efficiency of {chip}" for chip, groups in by_chip.items())
    return f"measured on {name}: {own}{rest}"
