"""Quantizes a model layer by layer: observe the inputs of a layer, find scales, round, write, then the next layer.

The host holds three streams of activations: calibration text and held-out text through the original model, and
held-out text through the quantized model. Scales are found with inputs of the original model, as in llm-awq. At the
end both perplexities are known, and the device never holds more than one layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from bytescope.memory.host.process_memory import release_free_memory
from bytescope.model.quantized import groups
from bytescope.train.quantize.folds import Fold, fold_in
from bytescope.train.quantize.origin import Origin
from bytescope.train.quantize.output import Output
from bytescope.train.quantize.quantize_programs import Programs, put
from bytescope.train.weights import folder as folders
from bytescope.train.weights.leaves import parameters_of
from bytescope.train.weights.packed import Codes

Tell = Callable[[int, int, str], None]  # called with (finished program calls, total calls, description of the next)


class Quantization:
    """Quantizes the weights of one model to 4 bits, layer by layer. Call `run`.

    Args:
      origin: the model and its unquantized weights.
      programs: the compiled device programs.
      tokens: calibration windows and held-out windows, each int32 [windows, tokens]. Both numbers of windows are
        multiples of the windows per program call.
      output: the folder to write.
      tell: function that is called with (calls done, total calls, activity) to show progress.
    """

    def __init__(
        self,
        origin: Origin,
        programs: Programs,
        tokens: tuple[np.ndarray, np.ndarray],
        output: Output,
        tell: Tell,
    ):
        self.origin, self.programs, self.output = origin, programs, output
        self._calibration, self._held_out = tokens
        self._tell, self._calls = tell, 0
        assert origin.source.parameter is not None  # open_origin refuses quantized weights
        self._parameter = origin.source.parameter
        paths = parameters_of(origin.model)
        self._within = {path.split(".", 2)[2] for path in paths if path.startswith("blocks.0.")}
        self._outside = [path for path in paths if not path.startswith("blocks.")]

    @property
    def calls(self) -> int:
        """Total number of program calls that run a batch of windows through a layer, for the progress display."""
        rows = self.programs.sizes.rows
        return self.origin.model.n_layers * (len(self._calibration) + 2 * len(self._held_out)) // rows

    def run(self) -> tuple[float, float]:
        """Quantizes and writes all layers. A layer that an interrupted command has finished is read instead of
        quantized again. Returns the perplexity of the held-out text with the original and with the quantized weights.
        """
        self.output.write(-1, self._outside_parameters(), {})
        shell = put(self._outside_parameters(), self.programs.shell_shapes)
        calibration, original = (self._embed(shell, tokens) for tokens in (self._calibration, self._held_out))
        del shell  # frees the device: the tables are read again at the end
        written = self._embed(self._load_written_non_layer_parameters(), self._held_out)
        for layer in range(self.origin.model.n_layers):
            self._layer(layer, calibration, original, written)
            folders.close()  # otherwise all pages that were read would count as memory of this process
            release_free_memory()
        before = self._perplexity(put(self._outside_parameters(), self.programs.shell_shapes), original)
        return before, self._perplexity(self._load_written_non_layer_parameters(), written)

    # ---- a layer ----------------------------------------------------------------------------------------------

    def _layer(self, layer: int, calibration: np.ndarray, original: np.ndarray, written: np.ndarray) -> None:
        """Quantizes and writes a layer, and moves the three residual streams [windows, tokens, d_model] through it.

        Args:
          calibration, original: the calibration text and the held-out text in the original model.
          written: the held-out text in the quantized model.
        """
        params = {path: self._parameter(f"blocks.{layer}.{path}").astype(np.float32) for path in self._within}
        finished = layer < len(self.output.done)
        on_device = put(params, self.programs.block_shapes)
        sums = self._run_block_in_place(layer, on_device, calibration, "calibration", watch=not finished)
        self._run_block_in_place(layer, on_device, original, "held-out text")
        del on_device
        if finished:
            kept, codes = self.output.read(layer)
        else:
            kept, codes, errors = self._quantize_layer(layer, params, sums)
            self.output.write(layer, kept, codes)
        del sums
        rounded = {path: array.astype(np.float16).astype(np.float32) for path, array in kept.items()}
        rounded |= {path: decoded(one).reshape(params[path].shape) for path, one in codes.items()}
        self._run_block_in_place(layer, put(rounded, self.programs.block_shapes), written, "what was written")
        if not finished:
            self.output.note({"layer": layer, "stream": drift(written, original), "weights": errors})

    def _run_block_in_place(self, layer: int, params: Any, x_NLD: np.ndarray, what: str, watch: bool = False) -> Any:
        """Runs the residual stream x_NLD (N windows, L tokens, D `d_model`) through a block, in batches of windows, and
        overwrites it with the block's output.

        If `watch` is set, returns statistics that are summed over the tokens for each input X [tokens, inputs] of the
        block's weights: the sum of |x| and X'X. Else returns None. `what`: the activity that the progress display
        shows.
        """
        rows, number = self.programs.sizes.rows, np.int32(layer)
        program = (self.programs.watch() if watch else self.programs.block()).executable
        sums = self.programs.no_sums() if watch else None
        for start in range(0, len(x_NLD), rows):
            self._tell(self._calls, self.calls, f"layer {layer}: {what}")
            x_BLD = x_NLD[start : start + rows]
            if watch:
                y_BLD, sums = program(params, number, x_BLD, sums)
            else:
                y_BLD = program(params, number, x_BLD)
            x_NLD[start : start + rows] = np.asarray(y_BLD)
            self._calls += 1
        return sums

    def _quantize_layer(
        self, layer: int, params: dict[str, np.ndarray], sums: Any
    ) -> tuple[dict[str, np.ndarray], dict[str, Codes], list[dict[str, Any]]]:
        """Quantizes a layer. Returns (path -> unquantized parameter that was multiplied or divided by the scales, path
        -> 4-bit weight, a row of errors for each weight).

        Args:
          params: path in the layer -> parameter.
          sums: the statistics of the weights' inputs over the calibration tokens, from `_run_block_in_place`.
        """
        scaled, scales, powers = dict(params), {}, {}
        for fold in self.programs.folds:
            self._tell(self._calls, self.calls, f"layer {layer}: scales of {fold.name}")
            size_I, gram_II = sums[
                fold.input
            ]  # errors are fractions, so X'X need not be divided by the number of tokens
            magnitudes_I = size_I / self._calibration.size
            scales[fold.name], powers[fold.name] = np.ones(len(magnitudes_I), np.float32), 0.0
            if fold.before:
                flat = tuple(self._flat(scaled, path) for path in fold.weights)
                scale_I, power, _ = self.programs.search(fold).executable(gram_II, magnitudes_I, flat)
                scaled, scales[fold.name] = fold_in(fold, self.programs.config, scaled, np.asarray(scale_I))
                powers[fold.name] = float(power)
        codes, errors = {}, []
        for fold in self.programs.folds:
            self._tell(self._calls, self.calls, f"layer {layer}: rounding {fold.name}")
            for path in fold.weights:
                codes[path], row = self._quantize_weight(
                    fold, path, sums[fold.input][1], scales[fold.name], params, scaled
                )
                errors.append({"weight": path, "power": powers[fold.name], **row})
        return {path: array for path, array in scaled.items() if path not in codes}, codes, errors

    def _quantize_weight(
        self,
        fold: Fold,
        path: str,
        gram_II: jax.Array,
        scale_I: np.ndarray,
        params: Mapping[str, np.ndarray],
        scaled: Mapping[str, np.ndarray],
    ) -> tuple[Codes, dict[str, float]]:
        # Both errors are fractions of the mean square of the outputs; `plain` is the error of plain rounding.
        program = self.programs.quantize(fold, path).executable
        codes, error, plain = program(gram_II, scale_I, self._flat(params, path), self._flat(scaled, path))
        return Codes(*map(np.asarray, codes)), {"error": float(error), "rounding": float(plain)}

    def _flat(self, params: Mapping[str, np.ndarray], path: str) -> np.ndarray:
        return np.ascontiguousarray(params[path].reshape(self.programs.matrices[path].sizes))

    # ---- both ends --------------------------------------------------------------------------------------------

    def _outside_parameters(self) -> dict[str, np.ndarray]:
        return {path: self._parameter(path).astype(np.float32) for path in self._outside}

    def _load_written_non_layer_parameters(self) -> Any:
        stored, like = self.output.read(-1)[0], self.programs.shell_shapes
        sizes = {".".join(path): leaf.shape for path, leaf in flatten_dict(like).items()}
        padded = {}
        for path, array in stored.items():
            padded[path] = np.pad(array, [(0, size - own) for own, size in zip(array.shape, sizes[path])])
        return put(padded, like)

    def _embed(self, shell: Any, tokens_NL: np.ndarray) -> np.ndarray:
        rows = self.programs.sizes.rows
        return np.concatenate(
            [
                np.asarray(self.programs.embed().executable(shell, tokens_NL[start : start + rows]))
                for start in range(0, len(tokens_NL), rows)
            ]
        )

    def _perplexity(self, shell: Any, x_NLD: np.ndarray) -> float:
        self._tell(self._calls, self.calls, "perplexity")
        rows = self.programs.sizes.rows
        head = self.programs.head().executable
        total = sum(
            float(head(shell, x_NLD[start : start + rows], self._held_out[start : start + rows]))
            for start in range(0, len(x_NLD), rows)
        )
        return math.exp(min(total / (len(x_NLD) * (x_NLD.shape[1] - 1)), 700))


def decoded(one: Codes) -> np.ndarray:
    """Returns a 4-bit weight dequantized, float32 [inputs, outputs]."""
    return np.asarray(groups.decode(*map(jnp.asarray, (one.codes_IO, one.zeros_GO, one.scales_GO))))


def drift(written: np.ndarray, original: np.ndarray) -> float:
    """Returns how far the quantized model is from the original: the mean square difference between their residual
    streams of the held-out text, as a fraction of the original stream's mean square."""
    difference = power = 0.0
    for mine, theirs in zip(written, original):
        mine, theirs = mine.astype(np.float32), theirs.astype(np.float32)
        difference += float(np.square(mine - theirs).sum())
        power += float(np.square(theirs).sum())
    return difference / max(power, 1e-30)
