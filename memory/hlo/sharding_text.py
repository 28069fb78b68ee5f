"""Reads XLA's text of a sharding, such as {devices=[2,1,4]<=[4,2]T(1,0)} or, from jax 0.12 on,
{mesh['x'=4,'y'=2], [{'y'}, {}, {'x'}]}, and draws it on the devices."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

_DEVICES = re.compile(
    r"devices=\[(?P<tiles>[\d,]+)\](?:<=\[(?P<reshape>[\d,]+)\](?:T\((?P<transpose>[\d,]+)\))?|(?P<list>[\d,]+))?"
)
_MESH = re.compile(r"mesh\[(?P<mesh>'[^\]]*)\],\s*\[(?P<dims>[^\]]*)\]")
# Maximum number of devices of a drawing, and of a sharding.
MAX_DRAWN, _MAX_DEVICES = 64, 1 << 20


@dataclasses.dataclass(frozen=True)
class ParsedSharding:
    """The sharding of an array, read from XLA's text.

    Fields:
        tiles: number of pieces along each dimension of the array; () if the array is not cut into pieces.
        copies: number of devices that hold the same piece; 0 if the array is not cut into pieces.
        devices: numbers of the devices in the order of the pieces; () if unknown.
    """

    tiles: tuple[int, ...] = ()
    copies: int = 0
    devices: tuple[int, ...] = ()

    def sentence(self) -> str:
        """Returns the sharding in words, such as "dimension 0 in 2 pieces, dimension 2 in 4 pieces"."""
        parts = [f"dimension {at} in {count}" for at, count in enumerate(self.tiles) if count > 1]
        if not parts:
            return "whole on every device"
        copies = f", each piece on {self.copies} devices" if self.copies > 1 else ""
        return f"{', '.join(parts)} pieces{copies}"

    def drawing(self) -> list[str]:
        """Draws the pieces of the array as rows of cells, such as ["|0,1|2,3|"]. A cell contains the numbers of the
        devices that hold the piece, and the rows are the pieces along the first sharded dimension. Returns [] if the
        array is not cut into pieces or has too many devices to draw."""
        sharded = [count for count in self.tiles if count > 1]
        if not sharded or not 0 < len(self.devices) <= MAX_DRAWN:
            return []
        rows = sharded[0]
        columns = math.prod(sharded[1:])
        if rows * columns * max(self.copies, 1) != len(self.devices):
            return []
        if columns == 1:
            rows, columns = 1, rows
        pieces = np.array(self.devices).reshape(rows, columns, -1)
        cells = [[",".join(map(str, piece)) for piece in row] for row in pieces.tolist()]
        width = max(len(cell) for row in cells for cell in row)
        return ["|" + "|".join(cell.rjust(width) for cell in row) + "|" for row in cells]


def parse_sharding(text: str) -> ParsedSharding | None:
    """Returns the sharding that XLA wrote as text, such as "{devices=[2,1]0,1}" or, in newer versions,
    "{devices=[2,1]<=[2]}"; None if the text contains no sharding."""
    if re.search(r"\b(?:replicated|maximal)\b", text) and "devices=" not in text:
        return ParsedSharding()
    match = _DEVICES.search(text)
    if match is None:
        return _parse_named(text)
    tiles = _numbers(match["tiles"])
    count = math.prod(tiles)
    if not 0 < count <= _MAX_DEVICES:
        return None
    devices: tuple[int, ...] = ()
    if match["list"]:
        devices = _numbers(match["list"])
    elif match["reshape"]:
        shape, order = _numbers(match["reshape"]), _numbers(match["transpose"] or "")
        if math.prod(shape) == count and sorted(order or range(len(shape))) == list(range(len(shape))):
            devices = tuple(np.arange(count).reshape(shape).transpose(order or range(len(shape))).ravel().tolist())
    copies = 1
    if "last_tile_dim" in text and len(tiles) > 1:
        tiles, copies = tiles[:-1], tiles[-1]
    return ParsedSharding(tiles, copies, devices if len(devices) == count else ())


def _parse_named(text: str) -> ParsedSharding | None:
    # The text names the mesh axes of each dimension. A part of an axis, such as 'x':(1)2, is not read.
    match = _MESH.search(text)
    if match is None:
        return None
    mesh = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d{1,7})", match["mesh"])}
    dims = [re.findall(r"'([^']+)'", part) for part in re.findall(r"\{([^}]*)\}", match["dims"])]
    used = [axis for axes in dims for axis in axes]
    if ":" in match["dims"] or not set(used) <= set(mesh) or not 0 < math.prod(mesh.values()) <= _MAX_DEVICES:
        return None
    names = list(mesh)
    order = [names.index(axis) for axis in (*used, *(name for name in names if name not in used))]
    devices = np.arange(math.prod(mesh.values())).reshape(list(mesh.values())).transpose(order).ravel()
    tiles = tuple(math.prod(mesh[axis] for axis in axes) for axes in dims)
    copies = math.prod(size for name, size in mesh.items() if name not in used)
    return ParsedSharding(tiles, copies, tuple(devices.tolist()))


def mesh_axes_of(sharding: ParsedSharding, mesh: Sequence[tuple[str, int]]) -> tuple[tuple[str, ...], ...] | None:
    """Returns the mesh axes that shard each dimension of an array, as in a PartitionSpec; None if the sharding follows
    no order of these axes. `mesh`: (name, size) of each axis, the last axis varies fastest over the devices."""
    sizes = dict(mesh)
    grid = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    if not sharding.devices or grid.size != len(sharding.devices):
        return ((),) * len(sharding.tiles) if all(tile == 1 for tile in sharding.tiles) else None
    names = [name for name, size in mesh if size > 1]
    for order in itertools.permutations(names):
        spec, left = [], list(order)
        for tile in sharding.tiles:
            axes: list[str] = []
            while left and math.prod(sizes[axis] for axis in axes) < tile:
                axes.append(left.pop(0))
            spec.append(tuple(axes))
        places = [list(sizes).index(name) for name in order]
        rest = [at for at in range(len(sizes)) if at not in places]
        matches = all(math.prod(sizes[axis] for axis in axes) == tile for axes, tile in zip(spec, sharding.tiles))
        if matches and tuple(grid.transpose([*places, *rest]).ravel().tolist()) == sharding.devices:
            return tuple(spec)
    return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.isdigit() and len(part) < 10)
