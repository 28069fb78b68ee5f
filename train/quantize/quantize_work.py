"""Quantizes a model layer by layer: observe the inputs of a layer, find scales, round, write, then the next layer.

The host holds the activations of the calibration text in the original model, as in llm-awq. The device never holds
more than one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bytescope.memory.host.process_memory import release_free_memory
from bytescope.train.quantize.folds import fold_in
from bytescope.train.quantize.origin import Origin
from bytescope.train.quantize.output import Output
from bytescope.train.quantize.quantize_programs import Programs, put
from bytescope.train.weights import folder as folders
from bytescope.train.weights.leaves import parameters_of
from bytescope.train.weights.packed import Codes

Tell = Callable[[int, int, str], None]  # called with (finished layers, number of layers, description of the next work)


class Quantization:
    """Quantizes the weights of one model to 4 bits, layer by layer. Call `run`.

    Args:
      origin: the model and its unquantized weights.
      programs: the compiled device programs.
      tokens_NL: calibration windows, int32 [windows, tokens]. Their number is a multiple of the windows per program
        call.
      output: the folder to write.
      tell: function that is called with (layers done, number of layers, activity) to show progress.
    """

    def __init__(self, origin: Origin, programs: Programs, tokens_NL: np.ndarray, output: Output, tell: Tell):
        self.origin, self.programs, self.output = origin, programs, output
        self._tokens_NL, self._tell = tokens_NL, tell
        assert origin.source.parameter is not None  # open_origin refuses quantized weights
        self._parameter = origin.source.parameter
        paths = parameters_of(origin.model)
        self._within = {path.split(".", 2)[2] for path in paths if path.startswith("blocks.0.")}
        self._outside = [path for path in paths if not path.startswith("blocks.")]

    def run(self) -> list[dict[str, Any]]:
        """Quantizes and writes all layers. Returns the errors of each layer, the rows of
        `QuantizationResult.layers`."""
        outside = {path: self._parameter(path).astype(np.float32) for path in self._outside}
        self.output.write(-1, outside, {})
        shell, embed = put(outside, self.programs.shell_shapes), self.programs.embed().executable
        batches = [np.asarray(embed(shell, self._tokens_NL[rows])) for rows in self._batches()]
        x_NLD = np.concatenate(batches)
        del shell, outside, batches
        errors = []
        for layer in range(self.origin.model.n_layers):
            errors.append({"layer": layer, "weights": self._layer(layer, x_NLD)})
            folders.close()  # otherwise all pages that were read would count as memory of this process
            release_free_memory()
        return errors

    def _batches(self) -> list[slice]:
        rows = self.programs.sizes.rows
        return [slice(start, start + rows) for start in range(0, len(self._tokens_NL), rows)]

    def _layer(self, layer: int, x_NLD: np.ndarray) -> list[dict[str, Any]]:
        """Quantizes and writes a layer, and overwrites its input, the residual stream `x_NLD` of the calibration text,
        with its output. Returns the errors of its weights."""
        params = {path: self._parameter(f"blocks.{layer}.{path}").astype(np.float32) for path in self._within}
        on_device, sums = put(params, self.programs.block_shapes), self.programs.no_sums()
        watch, number = self.programs.watch().executable, np.int32(layer)
        self._tell_about(layer, "calibration")
        for rows in self._batches():
            y_BLD, sums = watch(on_device, number, x_NLD[rows], sums)
            x_NLD[rows] = np.asarray(y_BLD)
        del on_device, y_BLD
        scaled, scales, powers = dict(params), {}, {}
        for fold in self.programs.folds:
            self._tell_about(layer, f"scales of {fold.name}")
            # Errors are fractions, so X'X need not be divided by the number of tokens.
            size_I, gram_II = sums[fold.input]
            magnitudes_I = size_I / self._tokens_NL.size
            scales[fold.name], powers[fold.name] = np.ones(len(magnitudes_I), np.float32), 0.0
            if fold.before:
                flat = tuple(self._flat(scaled, path) for path in fold.weights)
                scale_I, power, _ = self.programs.search(fold).executable(gram_II, magnitudes_I, flat)
                scaled, scales[fold.name] = fold_in(fold, self.programs.config, scaled, np.asarray(scale_I))
                powers[fold.name] = float(power)
        codes, errors = {}, []
        for fold in self.programs.folds:
            self._tell_about(layer, f"rounding {fold.name}")
            gram_II = sums[fold.input][1]
            for path in fold.weights:
                program = self.programs.quantize(fold, path).executable
                own, error, rounding = program(
                    gram_II, scales[fold.name], self._flat(params, path), self._flat(scaled, path)
                )
                codes[path] = Codes(*map(np.asarray, own))
                row = {"weight": path, "power": powers[fold.name], "error": float(error), "rounding": float(rounding)}
                errors.append(row)
        self.output.write(layer, {path: array for path, array in scaled.items() if path not in codes}, codes)
        return errors

    def _tell_about(self, layer: int, what: str) -> None:
        self._tell(layer, self.origin.model.n_layers, f"layer {layer}: {what}")

    def _flat(self, params: Mapping[str, np.ndarray], path: str) -> np.ndarray:
        return np.ascontiguousarray(params[path].reshape(self.programs.matrices[path].sizes))
