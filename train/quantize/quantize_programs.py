"""The programs on the device: embedding, one block, head, and the search for scales, each compiled once.

The device may be a described one; then nothing can be run, and `peak_bytes` says what it would take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import SingleDeviceSharding

from bytescope.memory.analysis import report_of
from bytescope.memory.devices.compiler import Compilation, compile_lowered
from bytescope.memory.devices.targets import Target
from bytescope.model import ModelConfig, Precision, Transformer
from bytescope.model.names import collect_tagged
from bytescope.train.quantize import scale_search
from bytescope.train.quantize.folds import Fold, folds_of, shared
from bytescope.train.step.optimizer.host_offload import device_bytes
from bytescope.train.weights.packed_folder import matrices


@dataclasses.dataclass(frozen=True)
class CallSizes:
    """Static sizes of the programs: windows in one call, tokens of a window, inputs that share a scale."""

    rows: int
    length: int
    group: int


class Programs:
    """The programs of one model. Those named here take and give arrays of the device.

    Args:
      config: a dense model. precision: parameters float32, computed in its compute dtype. clip: whether groups may be.
    """

    def __init__(self, config: ModelConfig, precision: Precision, sizes: CallSizes, device: jax.Device, clip: bool):
        # One layer on its own, and an attention kernel whose input to the output product can be seen.
        self.config = dataclasses.replace(
            config, scan=False, unroll=1, attention="naive", mlp_chunk=0, dropout=0.0, n_layers=1
        )
        self.sizes, self.precision = sizes, precision
        self.folds, self.matrices, self._clip = folds_of(config), matrices(config), clip
        self._place = SingleDeviceSharding(device)
        self._made: dict[Any, Compilation] = {}
        model = nnx.eval_shape(lambda: Transformer(self.config, precision, rngs=nnx.Rngs(params=0)))
        block, model.blocks = model.blocks[0], nnx.List([])
        self._block, block_state = nnx.split(block)
        self._shell, shell_state = nnx.split(model)
        self.block_shapes, self.shell_shapes = (
            jax.tree.map(self._like, nnx.to_pure_dict(state)) for state in (block_state, shell_state)
        )

    # ---- shapes -----------------------------------------------------------------------------------------------

    def _like(self, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._place)

    def _array(self, *shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._place)

    @property
    def _x(self) -> jax.ShapeDtypeStruct:
        return self._array(self.sizes.rows, self.sizes.length, self.config.d_model, dtype=self.precision.compute)

    @property
    def _tokens(self) -> jax.ShapeDtypeStruct:
        return self._array(self.sizes.rows, self.sizes.length, dtype=jnp.int32)

    def inputs_of(self, fold: Fold) -> int:
        """Returns the number of inputs of a fold's weights."""
        return self.matrices[fold.weights[0]].sizes[0]

    @property
    def _sums(self) -> dict[str, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
        """Checkpoint name of an input -> sum of |x| [I], X'X [I, I]."""
        sums = {}
        for fold in self.folds:
            size = self.inputs_of(fold)
            sums[fold.input] = self._array(size), self._array(size, size)
        return sums

    def no_sums(self) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Sums of no tokens, on the device."""
        return jax.tree.map(lambda like: jax.device_put(np.zeros(like.shape, like.dtype), self._place), self._sums)

    def _weight(self, path: str) -> jax.ShapeDtypeStruct:
        return self._array(*self.matrices[path].sizes)

    # ---- programs ---------------------------------------------------------------------------------------------

    def _compiled(self, key: tuple, run: Callable, *shapes: Any, **options: Any) -> Compilation:
        if key not in self._made:
            self._made[key] = compile_lowered(jax.jit(run, **options).lower(*shapes), exact=False)
        return self._made[key]

    def embed(self) -> Compilation:
        """(tables, tokens [B, L]) -> the input of the first block [B, L, D]."""

        def run(params, tokens_BL):
            return nnx.merge(self._shell, params).begin(tokens_BL, None, None)

        return self._compiled(("embed",), run, self.shell_shapes, self._tokens)

    def block(self) -> Compilation:
        """(parameters of a block, the number of its layer, x) -> x; in place."""
        return self._compiled(
            ("block",), self._run_block, self.block_shapes, self._array(dtype=jnp.int32), self._x, donate_argnums=2
        )

    def watch(self) -> Compilation:
        """(parameters, number, x, sums) -> (x, sums with those of these tokens' inputs); in place."""

        def run(params, layer, x_BLD, sums):
            with collect_tagged() as found:
                y_BLD = self._run_block(params, layer, x_BLD)
            added = {}
            for name, (size_I, gram_II) in sums.items():
                x_TI = found[name].reshape(-1, size_I.size)
                gram = jnp.einsum("ti,tj->ij", x_TI, x_TI, preferred_element_type=jnp.float32)
                added[name] = size_I + jnp.abs(x_TI).sum(0, dtype=jnp.float32), gram_II + gram
            return y_BLD, added

        return self._compiled(
            ("watch",), run, self.block_shapes, self._array(dtype=jnp.int32), self._x, self._sums, donate_argnums=(2, 3)
        )

    def _run_block(self, params: Any, layer: jax.Array, x_BLD: jax.Array) -> jax.Array:
        block = nnx.merge(self._block, params).set(layer, regather=False)
        return block(x_BLD)[0]

    def head(self) -> Compilation:
        """(tables, x of the last block, tokens) -> the sum of -log p of all tokens but the first of each row."""

        def run(params, x_BLD, tokens_BL):
            model = nnx.merge(self._shell, params)
            logits_BLV = model.logits(model.finish(x_BLD), jnp.float32)[:, :-1]
            chosen_BL = jnp.take_along_axis(logits_BLV, tokens_BL[:, 1:, None], axis=-1)[..., 0]
            return (jax.nn.logsumexp(logits_BLV, axis=-1) - chosen_BL).sum()

        return self._compiled(("head",), run, self.shell_shapes, self._x, self._tokens)

    def search(self, fold: Fold) -> Compilation:
        """(X'X, mean |x|, weights [I, O]) -> as `search.search_scale`."""
        size = self.inputs_of(fold)
        weights = tuple(map(self._weight, fold.weights))

        def run(gram_II, magnitudes_I, weights):
            return scale_search.search_scale(
                gram_II, shared(fold, self.config, magnitudes_I), weights, self.sizes.group
            )

        return self._compiled(("search", fold.name), run, self._array(size, size), self._array(size), weights)

    def quantize(self, fold: Fold, path: str) -> Compilation:
        """(X'X, scales, the weight, the weight scaled) -> (codes, the error of them, that of plain rounding)."""
        shape, clip, group = self.matrices[path].sizes, self._clip and path in fold.clipped, self.sizes.group

        def run(gram_II, scale_I, w_IO, scaled_IO):
            found, error = scale_search.quantize(gram_II, scale_I, scaled_IO, group, clip)
            return found, error, scale_search.rounding_error(gram_II, w_IO, group)

        weight = self._array(*shape)
        return self._compiled(
            ("quantize", shape, clip), run, self._array(shape[0], shape[0]), self._array(shape[0]), weight, weight
        )

    # ---- memory -----------------------------------------------------------------------------------------------

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters of one block on the device."""
        return device_bytes(self.block_shapes)

    def peak_bytes(
        self, target: Target | None = None, tell: Callable[[str], None] = lambda name: None, searching: bool = True
    ) -> dict[str, int]:
        """Returns program -> bytes on the device while it runs, including arrays that other programs keep there."""

        def of(name: str, compilation: Compilation, beside: int = 0) -> int:
            tell(name)
            return report_of(compilation, target=target).predicted_bytes + beside

        found = {"embedding": of("embedding", self.embed()), "one block": of("one block", self.watch())}
        grams = {fold.input: device_bytes(self._sums[fold.input]) for fold in self.folds}
        for fold in self.folds:
            beside = sum(grams.values()) - grams[fold.input]
            if searching and fold.before:
                found[f"scales of {fold.name}"] = of(f"scales of {fold.name}", self.search(fold), beside)
            name = f"rounding of {fold.name}"
            found[name] = max(of(name, self.quantize(fold, path), beside) for path in fold.weights)
        found["head"] = of("head", self.head())
        return found


def put(flat: Mapping[str, Any], like: Any) -> Any:
    """Puts arrays of the host, by dotted path, on the device of `like`; returns them as a tree with its dtypes."""
    return jax.tree.map(
        lambda array, shape: jax.device_put(np.asarray(array).astype(shape.dtype, copy=False), shape.sharding),
        unflatten_dict(flat, sep="."),
        like,
    )
