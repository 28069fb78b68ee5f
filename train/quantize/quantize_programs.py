"""The device programs of a quantization: embedding, one block, and scale search. Each is compiled once.

`peak_bytes` predicts their memory before anything is run.
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
from bytescope.memory.devices.targets import parse
from bytescope.model import ModelConfig, Precision, Transformer
from bytescope.model.names import collect_tagged
from bytescope.model.quantized import groups
from bytescope.train.quantize import scale_search
from bytescope.train.quantize.folds import Fold, folds_of, shared
from bytescope.train.step.optimizer.host_offload import device_bytes
from bytescope.train.weights.packed import matrices


@dataclasses.dataclass(frozen=True)
class CallSizes:
    """The sizes of the arrays for which the quantization programs are compiled.

    Attributes:
      rows: windows (rows of tokens) per call.
      length: tokens per window.
      group: number of inputs whose 4-bit codes share a quantization scale.
    """

    rows: int
    length: int
    group: int


class Programs:
    """The compiled programs that quantize one model. They take and return arrays on the device.

    Array axes: B windows of text, L tokens per window, D `d_model`, I inputs and O outputs of a weight. X'X is the Gram
    matrix of a weight's inputs X [tokens, I].

    Args:
      config: config of a dense model.
      precision: float32 parameters, and the compute dtype.
      sizes: the sizes of the arrays for which the programs are compiled.
      device: the device that runs the programs.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        sizes: CallSizes,
        device: jax.Device,
    ):
        # A single layer, with the attention kernel that gives its context a checkpoint name.
        self.config = dataclasses.replace(
            config, scan=False, unroll=1, attention="naive", mlp_chunk=0, dropout=0.0, n_layers=1
        )
        self.sizes, self.precision = sizes, precision
        self.folds, self.matrices = folds_of(config), matrices(config)
        self._place = SingleDeviceSharding(device)
        self._compilations: dict[Any, Compilation] = {}
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
        """Returns the number of input channels of the weights in a group that shares an input."""
        return self.matrices[fold.weights[0]].sizes[0]

    @property
    def _sum_shapes(self) -> dict[str, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
        """Returns the shapes of the statistics that are summed over the calibration tokens for each input X [tokens, I]
        of weights: name of the input -> (shape [I] of the sum of |x|, shape [I, I] of X'X)."""
        sums = {}
        for fold in self.folds:
            size = self.inputs_of(fold)
            sums[fold.input] = self._array(size), self._array(size, size)
        return sums

    def no_sums(self) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Returns zeros on the device, the statistics of weight inputs before any token is added: name of the input X
        -> (sum of |x| [I], X'X [I, I]), with I inputs."""
        return jax.tree.map(
            lambda like: jax.device_put(np.zeros(like.shape, like.dtype), self._place), self._sum_shapes
        )

    # ---- programs ---------------------------------------------------------------------------------------------

    def _compiled(self, key: tuple, run: Callable, *shapes: Any, **options: Any) -> Compilation:
        if key not in self._compilations:
            lowered = jax.jit(run, **options).lower(*shapes)
            self._compilations[key] = compile_lowered(lowered, exact=False)
        return self._compilations[key]

    def embed(self) -> Compilation:
        """Compiles the program that embeds tokens.

        It takes the parameters outside the layers and the tokens [B, L], B windows of L tokens. It returns the input of
        the first block, [B, L, D].
        """

        def run(params, tokens_BL):
            return nnx.merge(self._shell, params).begin(tokens_BL, None, None)

        return self._compiled(("embed",), run, self.shell_shapes, self._tokens)

    def watch(self) -> Compilation:
        """Compiles the program that runs a block and adds statistics of its tokens to sums. The statistics of each
        weight input X [tokens, I] are the sum of |x| [I] and X'X [I, I].

        It takes the parameters of the block, the layer number, x [B, L, D] and the sums so far; x and the sums are
        donated. It returns the output of the block [B, L, D], and the sums with these tokens added.
        """

        def run(params, layer, x_BLD, sums):
            with collect_tagged() as named:
                y_BLD = nnx.merge(self._block, params).set(layer, regather=False)(x_BLD)[0]
            added = {}
            for name, (size_I, gram_II) in sums.items():
                x_TI = named[name].reshape(-1, size_I.size)
                gram = jnp.einsum("ti,tj->ij", x_TI, x_TI, preferred_element_type=jnp.float32)
                added[name] = size_I + jnp.abs(x_TI).sum(0, dtype=jnp.float32), gram_II + gram
            return y_BLD, added

        return self._compiled(
            ("watch",),
            run,
            self.block_shapes,
            self._array(dtype=jnp.int32),
            self._x,
            self._sum_shapes,
            donate_argnums=(2, 3),
        )

    def search(self, fold: Fold) -> Compilation:
        """Compiles the program that finds the scales of the input channels that the weights of `fold` share. The best
        scales give the smallest error of the quantized weights' outputs.

        It takes X'X [I, I] and the mean of |x| [I] of the input X [tokens, I], and the weights, each [I, O]. It returns
        the scales [I], the exponent of the magnitudes |x| in them, and the error of each exponent that was tried.
        """
        size = self.inputs_of(fold)
        weights = tuple(self._array(*self.matrices[path].sizes) for path in fold.weights)

        def run(gram_II, magnitudes_I, weights):
            return scale_search.search_scale(
                gram_II, shared(fold, self.config, magnitudes_I), weights, self.sizes.group
            )

        return self._compiled(("search", fold.name), run, self._array(size, size), self._array(size), weights)

    def quantize(self, fold: Fold, path: str) -> Compilation:
        """Compiles the program that quantizes the weight at `path`, which belongs to the group `fold` of weights with
        the same input.

        It takes X'X [I, I] of the input X [tokens, I], the scales of the input channels [I], the weight [I, O] and the
        scaled weight [I, O]. It returns the 4-bit codes with zero points and scales, their error, and the error of
        plain rounding without scales for comparison. Errors are fractions of the outputs' mean square.
        """
        shape, clip, group = self.matrices[path].sizes, path in fold.clipped, self.sizes.group

        def run(gram_II, scale_I, w_IO, scaled_IO):
            codes, error = scale_search.quantize(gram_II, scale_I, scaled_IO, group, clip)
            rounded_IO = groups.decode(*groups.encode(w_IO, group))  # without scales, for comparison
            return codes, error, scale_search.share_of(gram_II, w_IO, rounded_IO)

        weight = self._array(*shape)
        return self._compiled(
            ("quantize", shape, clip), run, self._array(shape[0], shape[0]), self._array(shape[0]), weight, weight
        )

    # ---- memory -----------------------------------------------------------------------------------------------

    def peak_bytes(self, tell: Callable[[str], None]) -> dict[str, int]:
        """Compiles the programs. Returns program -> bytes on the device while it runs, including arrays that other
        programs keep there.

        Args:
          tell: function that is called with the name of each program.
        """

        target = parse("local")

        def measure(name: str, compilation: Compilation, beside: int = 0) -> int:
            tell(name)
            return report_of(compilation, target=target).predicted_bytes + beside

        peaks = {"embedding": measure("embedding", self.embed()), "one block": measure("one block", self.watch())}
        grams = {fold.input: device_bytes(self._sum_shapes[fold.input]) for fold in self.folds}
        for fold in self.folds:
            beside = sum(grams.values()) - grams[fold.input]
            if fold.before:
                peaks[f"scales of {fold.name}"] = measure(f"scales of {fold.name}", self.search(fold), beside)
            name = f"rounding of {fold.name}"
            peaks[name] = max(measure(name, self.quantize(fold, path), beside) for path in fold.weights)
        return peaks


def put(flat: Mapping[str, Any], like: Any) -> Any:
    """Moves the host arrays `flat`, dotted path -> array, to the device. Returns them as a tree with the structure and
    dtypes of `like`.
    """
    return jax.tree.map(
        lambda array, shape: jax.device_put(np.asarray(array).astype(shape.dtype, copy=False), shape.sharding),
        unflatten_dict(flat, sep="."),
        like,
    )
