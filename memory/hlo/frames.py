"""A module's table of source places (StackFrameIndexProto): the chain of frames around an operation, inmost first."""

from __future__ import annotations

from typing import NamedTuple

from bytescope.memory.hlo import wire
from bytescope.memory.hlo.wire import Span

_MAX_FRAMES = 64


class Frame(NamedTuple):
    """A place in a source file: the span of the expression, lines from 1, columns from 0 (0 for unknown)."""

    file: str
    line: int
    column: int = 0
    end_line: int = 0
    end_column: int = 0
    function: str = ""


class Frames:
    """The module's table of source frames, decoded once on first use."""

    def __init__(self, data: bytes, span: Span):
        self._data, self._span = data, span
        self._files: list[str] = []
        self._functions: list[str] = []
        self._locations: list[dict[int, int]] = []
        self._frames: list[dict[int, int]] = []
        self._chains: dict[int, tuple[Frame, ...]] = {}
        self._ready = False

    def chain(self, frame: int) -> tuple[Frame, ...]:
        """Places from the inmost frame outwards; () for an unknown frame."""
        if not self._ready:
            self._read()
        if frame not in self._chains:
            self._chains[frame] = self._walk(frame)
        return self._chains[frame]

    def _walk(self, frame: int) -> tuple[Frame, ...]:
        out: list[Frame] = []
        seen: set[int] = set()
        while 1 <= frame <= len(self._frames) and frame not in seen and len(out) < _MAX_FRAMES:
            seen.add(frame)
            fields = self._frames[frame - 1]
            where = fields.get(1, 0)
            place = self._locations[where - 1] if 1 <= where <= len(self._locations) else {}
            out.append(
                Frame(
                    _pick(self._files, place.get(1, 0)),
                    place.get(3, 0),
                    place.get(4, 0),
                    place.get(5, 0),
                    place.get(6, 0),
                    _pick(self._functions, place.get(2, 0)),
                )
            )
            frame = fields.get(2, 0)
        return tuple(out)

    def _read(self) -> None:
        self._ready = True
        for field, value in wire.fields(self._data, self._span):
            if field == 1:
                self._files.append(wire.text(self._data, value))
            elif field == 2:
                self._functions.append(wire.text(self._data, value))
            elif field == 3:
                self._locations.append(wire.plain(self._data, wire.message(value)))
            elif field == 4:
                self._frames.append(wire.plain(self._data, wire.message(value)))


def _pick(names: list[str], position: int) -> str:
    return names[position - 1] if 1 <= position <= len(names) else ""
