"""A `jax.checkpoint` policy that keeps chosen values of blocks whose values have no names.

jax asks a policy about each equation of a block's forward pass, with its primitive, operand shapes and parameters.
These are the `key` of the equation. Equations with equal keys are distinguished by their order: jax walks a block from
its first equation to its last, so the policy counts the equations whose order it knows, and restarts at the beginning
of each walk. Equations that differ between walks of one block (coefficients of derivatives, and bodies that jax
caches) are recognized only by their key. A value with a name is recognized by its name.
"""

from __future__ import annotations

import dataclasses
import enum
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.cost.flops import KERNELS
from bytescope.memory.errors import ReportError
from bytescope.memory.jaxprs import NAME
from bytescope.memory.units import plural

_PLAIN = (str, int, float, bool, type(None), enum.Enum)
# Parameters with devices and source lines, which are not part of a key.
_ELSEWHERE = ("sharding", "out_sharding", "mesh", "devices", "name_and_src_info", "debug_info")


def key_of(primitive: str, avals: Sequence[Any], params: Mapping[str, Any]) -> str:
    """Returns the text by which a remat policy recognizes an equation, such as "dot_general float32[8,32]
    float32[32,64] dimension_numbers=...".

    `avals`: the types of the operands. `params`: the parameters of the equation.
    """
    parameters = [
        f"{name}={value!r}" for name, value in sorted(params.items()) if name not in _ELSEWHERE and _plain(value)
    ]
    return " ".join([primitive, *map(type_of, avals), *parameters])


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return isinstance(value, _PLAIN) or type(value).__module__.startswith("numpy")


def type_of(aval: Any) -> str:
    """Returns the dtype and shape of a value as short text, such as "float32[8,32]"."""
    shape = ",".join(map(str, getattr(aval, "shape", ())))
    return f"{getattr(aval, 'dtype', type(aval).__name__)}[{shape}]"


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The values that a remat policy keeps, as data that can be saved.

    Fields:
        names: names of values (`checkpoint_name`).
        keys: keys (the texts of `key_of`) of the equations that are recognized only by their keys.
        order: for each kind of layer, the keys of the equations that are recognized by their position in this list.
        places: for each kind of layer, the indices in `order` of the equations whose results are kept.
        known: the keys of all equations of the layers. The policy warns about other keys of matrix products and similar
            kernels, because they are in layers for which it was not planned.
    """

    names: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    order: tuple[tuple[str, ...], ...] = ()
    places: tuple[frozenset[int], ...] = ()
    known: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, Any]:
        """Returns field -> value as plain JSON values: sets are sorted lists, tuples are lists."""
        return {
            "names": sorted(self.names),
            "keys": sorted(self.keys),
            "order": [list(keys) for keys in self.order],
            "places": [sorted(places) for places in self.places],
            "known": sorted(self.known),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Wanted:
        """Returns the record from the JSON values of `to_json`."""
        return cls(
            frozenset(values["names"]),
            frozenset(values["keys"]),
            tuple(map(tuple, values["order"])),
            tuple(map(frozenset, values["places"])),
            frozenset(values["known"]),
        )


@dataclasses.dataclass(frozen=True)
class Value:
    """One value that a layer can keep for the backward pass. Values that a remat policy cannot distinguish are one
    record.

    Fields:
        label: the text that identifies the value in a plan.
        kinds: the numbers of the kinds of layers that have the value.
        name: the checkpoint name, "" for none.
        key: the text by which a policy recognizes the equation.
        place: the index in the order of the layer's equations; -1 if the value is recognized by its key.
        type: the type in one layer, such as "bfloat16[8,1024,4096]".
        count: number of these values in all layers.
        bytes: bytes of all these values on one device.
        where: "file:line" of the equation.
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
    """A remat policy for `jax.checkpoint`, `flax.linen.remat` and similar functions, which keeps the values that
    `memory.plan_remat` chose.

    The policy recognizes these values only in the layers and shapes for which it was planned. It warns in other layers.
    Values that it does not recognize are recomputed, so the results of the program are always the same. After a trace,
    `check()` raises an error if a value to keep was missing.

    Attributes:
        wanted: the values that the policy keeps.
        lost: a description of the first difference between a traced program and the plan, "" for none.
    """

    def __init__(self, wanted: Wanted):
        self._start(wanted)

    def _start(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self._ordered: frozenset[str] = frozenset().union(*wanted.order)
        self._at: list[
            tuple[int, int]
        ] = []  # all possible positions: (kind of block, number of its keys that the walk has passed)
        self._met: set[Any] = set()
        self.lost = ""

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> bool:
        if primitive.name == NAME:
            return self._keep(params["name"]) if params["name"] in self.wanted.names else False
        key = key_of(primitive.name, avals, params)
        if key in self._ordered:
            return self._keep_next_in_order(key)
        if key not in self.wanted.known and primitive.name in KERNELS:
            self._tell(f"{key} is in none of the blocks that the policy was planned for")
        return self._keep(key) if key in self.wanted.keys else False

    def _keep_next_in_order(self, key: str) -> bool:
        """Returns whether to keep the result of the next equation that jax asks about. `key`: the text by which the
        equation is recognized. Used for layers whose equations are recognized by their order.
        """
        order = self.wanted.order
        after = [(kind, at + 1) for kind, at in self._at if at < len(order[kind]) and order[kind][at] == key]
        if not after:
            if self._at and not any(at == len(order[kind]) for kind, at in self._at):
                kind, at = self._at[0]
                self._tell(f"found {key} where {order[kind][at]} was expected")
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
                f"this block is not the block that the remat policy was planned for: {why}; call plan_remat again for "
                "these shapes and this version of jax",
                stacklevel=2,
            )

    def missed(self) -> list[str]:
        """Returns the names and keys of values to keep that have not occurred in any trace so far."""
        wanted = self.wanted
        missed = sorted((wanted.names | wanted.keys) - self._met)
        for kind, places in enumerate(wanted.places):
            missed += [wanted.order[kind][at] for at in sorted(places) if (kind, at) not in self._met]
        return missed

    def check(self) -> None:
        """Raises ReportError unless the programs traced so far contained every value that the policy should keep, in
        the expected order.
        """
        import jax

        missed = self.missed()
        if self.lost or missed:
            why = self.lost or f"{len(missed)} of the kept values were not in the program, the first is {missed[0]}"
            raise ReportError(
                "the remat policy does not recognize the layers of this program under jax "
                f"{jax.__version__}: {why}; call plan_remat again"
            )

    def __repr__(self) -> str:
        wanted = self.wanted
        many = len(wanted.names) + len(wanted.keys) + sum(map(len, wanted.places))
        return f"<RematPolicy: keeps {plural(many, 'value')} of a block>"

    def __getstate__(self) -> dict[str, Any]:
        return {"wanted": self.wanted}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._start(state["wanted"])
