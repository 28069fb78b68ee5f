"""Splits the residuals of a layer's gradient function into those to save and those the backward pass can read
elsewhere."""

import dataclasses
from typing import Any

import jax

Leaves = list[jax.Array]


@dataclasses.dataclass
class Pullback:
    """Records which residuals of a layer's gradient function (pullback) are saved, and where the backward pass gets the
    others.

    The record is filled while the forward loop is traced. The backward loop rebuilds each layer's pullback from it.

    Fields:
      tree: tree structure of the pullback.
      sources: for each leaf of the pullback a pair (list, index), or ("constant", value). The lists are "kept" (the
        saved residuals), "own" (the layer's parameters) and "shared" (arrays that all layers share).
    """

    tree: Any = None
    sources: list[tuple[str, Any]] = dataclasses.field(default_factory=list)

    def split(self, pullback: Any, own: Leaves, shared: Leaves) -> Leaves:
        """Returns the residuals of `pullback` to save.

        Excluded are the layer's parameters (`own`), which the backward loop reads anyway, and arrays that all layers
        share (`shared`).
        """
        leaves, self.tree = jax.tree.flatten(pullback)
        self.sources = []
        kept: Leaves = []
        known = {id(leaf): ("shared", place) for place, leaf in enumerate(shared)}
        known |= {id(leaf): ("own", place) for place, leaf in enumerate(own)}
        for leaf in leaves:
            if not isinstance(leaf, jax.core.Tracer):  # a constant
                self.sources.append(("constant", leaf))
            elif id(leaf) in known:
                self.sources.append(known[id(leaf)])
            else:
                self.sources.append(("kept", len(kept)))
                kept.append(leaf)
        return kept

    def join(self, kept: Leaves, own: Leaves, shared: Leaves) -> Any:
        """Rebuilds the pullback of a layer, for its backward pass, from the saved residuals `kept`, the layer's
        parameters `own` and the arrays `shared` by all layers."""
        places = {"own": own, "kept": kept, "shared": shared}
        return self.tree.unflatten(
            [what if where == "constant" else places[where][what] for where, what in self.sources]
        )


def row_of(tree: Any, number: jax.Array) -> Any:
    """Returns row `number` of every leaf, along the first axis. A row is a layer of a stack, or a micro-batch."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), tree)
