"""The gradient function of a layer, cut into what has to be kept for it and what the backward pass finds by itself."""

import dataclasses
from typing import Any

import jax

Leaves = list[jax.Array]


@dataclasses.dataclass
class Pullback:
    """The gradient function of one layer: which of its residuals are kept, and where the others are found.

    Filled while the forward loop is traced; the backward loop rebuilds each layer's pullback from it.
    """

    tree: Any = None
    sources: list[tuple[str, Any]] = dataclasses.field(default_factory=list)

    def split(self, pullback: Any, own: Leaves, shared: Leaves) -> Leaves:
        """The residuals that have to be kept: not the layer's parameters, which the backward loop reads anyway, nor
        what is `shared` by all layers."""
        leaves, self.tree = jax.tree.flatten(pullback)
        self.sources = []
        kept: Leaves = []
        known = {
            id(leaf): (where, place)
            for where, found in (("shared", shared), ("own", own))
            for place, leaf in enumerate(found)
        }
        for leaf in leaves:
            if not isinstance(leaf, jax.core.Tracer):  # a constant
                self.sources.append(("here", leaf))
            elif id(leaf) in known:
                self.sources.append(known[id(leaf)])
            else:
                self.sources.append(("kept", len(kept)))
                kept.append(leaf)
        return kept

    def join(self, kept: Leaves, own: Leaves, shared: Leaves) -> Any:
        """The pullback of the layer with these residuals, parameters and arrays that all layers share."""
        places = {"own": own, "kept": kept, "shared": shared}
        return self.tree.unflatten([what if where == "here" else places[where][what] for where, what in self.sources])


def row_of(tree: Any, number: jax.Array) -> Any:
    """Row `number` of every leaf: a layer of stacked ones, a micro-batch."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), tree)
