"""A `jax.checkpoint` policy that keeps chosen values of blocks whose values have no names.

jax asks a policy about each equation of a block's forward pass: its primitive, the shapes that it reads, its
parameters. That is the equation's `key`. Equations with one key are told apart by their order: jax walks a block from
its first equation to its last, so the policy follows along the equations whose order it knows, and begins anew where a
walk does. What differs between walks of one block, coefficients of derivatives and bodies that jax remembers, is known
by its key alone. A value that has a name is known by that.
"""

from __future__ import annotations

import dataclasses
import enum
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.cost.flops import KERNELS
from bytescope.memory.errors import ReportError

_PLAIN = (str, int, float, bool, type(None), enum.Enum)
# Parameters that say where something is, or where it was written.
_ELSEWHERE = ("sharding", "out_sharding", "mesh", "devices", "name_and_src_info", "debug_info")


def key_of(primitive: Any, avals: Sequence[Any], params: Mapping[str, Any]) -> str:
    """An equation as a policy sees it: "dot_general float32[8,32] float32[32,64] dimension_numbers=..."."""
    parameters = [
        f"{name}={value!r}" for name, value in sorted(params.items()) if name not in _ELSEWHERE and _plain(value)
    ]
    return " ".join([str(primitive.name), *map(type_of, avals), *parameters])


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return isinstance(value, _PLAIN) or type(value).__module__.startswith("numpy")


def type_of(aval: Any) -> str:
    """ "float32[8,32]"."""
    shape = ",".join(map(str, getattr(aval, "shape", ())))
    return f"{getattr(aval, 'dtype', type(aval).__name__)}[{shape}]"


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a policy keeps. Plain data.

    Fields:
        names: values of `checkpoint_name`.
        keys: equations known by their keys alone. order: of each kind of block, the keys of the equations that are
            told apart by their order. places: of each kind, which of these are kept.
        known: all keys of the blocks.
    """

    names: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    order: tuple[tuple[str, ...], ...] = ()
    places: tuple[frozenset[int], ...] = ()
    known: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, Any]:
        """Every field as plain JSON values."""
        return {
            "names": sorted(self.names),
            "keys": sorted(self.keys),
            "order": [list(keys) for keys in self.order],
            "places": [sorted(places) for places in self.places],
            "known": sorted(self.known),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Wanted:
        """The same from `to_json`."""
        return cls(
            frozenset(values["names"]),
            frozenset(values["keys"]),
            tuple(map(tuple, values["order"])),
            tuple(map(frozenset, values["places"])),
            frozenset(values["known"]),
        )


@dataclasses.dataclass(frozen=True)
class Value:
    """A value that a layer can keep, or several that a policy cannot tell apart.

    Fields:
        label: how the plan writes it. kinds: the numbers of the layers' kinds that have it.
        name: its checkpoint name, "" for none; key: of its equation; place: its number in the layer's order, -1 where
        the key alone tells it.
        type: "bfloat16[8,1024,4096]" of one layer. count: of how many values, all layers together. bytes: of all of
        them on one device. where: file:line.
    """

    label: str
    kinds: tuple[int, ...]
    name: str
    key: str
    place: int
    type: str
    count: int
    bytes: int
    where: str


class RematPolicy:
    """A policy for `jax.checkpoint`, `flax.linen.remat` and the like, made by `memory.plan_remat`.

    It holds for blocks of the shapes for which it was planned. Met with others it warns, and what it does not know is
    recomputed; results are the same either way. `check()` after a trace says whether all that it keeps was there.

    Attributes:
        wanted: what it keeps. lost: how a trace so far differed from the plan, "" where none did.
    """

    def __init__(self, wanted: Wanted):
        self._start(wanted)

    def _start(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self._ordered = frozenset(key for keys in wanted.order for key in keys)
        self._at: list[tuple[int, int]] = []  # (kind of block, how many of its keys were met), all that are possible
        self._met: set[Any] = set()
        self.lost = ""

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> bool:
        if primitive.name == "name":
            return self._keep(params["name"]) if params["name"] in self.wanted.names else False
        key = key_of(primitive, avals, params)
        if key in self._ordered:
            return self._in_order(key)
        if key not in self.wanted.known and primitive.name in KERNELS:
            self._tell(f"{key} is in none of the blocks that it was planned for")
        return self._keep(key) if key in self.wanted.keys else False

    def _in_order(self, key: str) -> bool:
        """Follows the walk by one equation."""
        order = self.wanted.order
        after = [(kind, at + 1) for kind, at in self._at if at < len(order[kind]) and order[kind][at] == key]
        if not after:
            if self._at and not any(at == len(order[kind]) for kind, at in self._at):
                kind, at = self._at[0]
                self._tell(f"{key} comes where {order[kind][at]} was expected")
            after = [(kind, 1) for kind, keys in enumerate(order) if keys[:1] == (key,)]
        self._at = after
        kept = {(kind, at - 1) for kind, at in after if at - 1 in self.wanted.places[kind]}
        self._met |= kept
        return bool(kept)

    def _keep(self, what: Any) -> bool:
        self._met.add(what)
        return True

    def _tell(self, why: str) -> None:
        if not self.lost:
            self.lost = why
            warnings.warn(
                f"a remat policy meets another block than it was planned for: {why}; plan_remat again for "
                "these shapes and this version of jax",
                stacklevel=2,
            )

    def missed(self) -> list[str]:
        """What it keeps and did not meet in any trace so far."""
        wanted = self.wanted
        places = {(kind, at) for kind, places in enumerate(wanted.places) for at in places}
        return [
            *sorted((wanted.names | wanted.keys) - self._met),
            *(wanted.order[kind][at] for kind, at in sorted(places - self._met)),
        ]

    def check(self) -> None:
        """Raises ReportError unless every value that it keeps was met where it was expected, by the traces so far."""
        import jax

        missed = self.missed()
        if self.lost or missed:
            why = self.lost or f"{len(missed)} of the values that it keeps were not there, the first {missed[0]}"
            raise ReportError(
                "the remat policy does not recognize this program's blocks under jax "
                f"{jax.__version__}: {why}; plan_remat again"
            )

    def __repr__(self) -> str:
        wanted = self.wanted
        many = len(wanted.names) + len(wanted.keys) + sum(map(len, wanted.places))
        return f"<RematPolicy: keeps {many} values of a block>"

    def __getstate__(self) -> dict[str, Any]:
        return {"wanted": self.wanted}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._start(state["wanted"])
