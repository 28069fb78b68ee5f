"""LoRA formulas: the parameters of adapters, and the bytes of the frozen weights. Plain arithmetic.

Low-rank adapters follow Hu et al. 2021 (arXiv 2106.09685), frozen 4-bit weights follow Dettmers et al. 2023 (QLoRA,
arXiv 2305.14314). The activations that a layer keeps for adapters are in `transformer_formulas.LAYER`. Not included:
adapters of embedding tables, and the dequantized weights, which exist for one layer at a time.
"""

from __future__ import annotations

from typing import NamedTuple

from bytescope.memory.formulas import expert_formulas
from bytescope.memory.formulas.model_shape import ModelShape, StepLayout, matrices


class FrozenBase(NamedTuple):
    """How frozen weight matrices are stored.

    Fields:
        summary: a description of the storage format for users.
        element: bytes per element, including the scales of quantized blocks. 0 means the size of the compute dtype.
        column: additional bytes per output column.
    """

    summary: str
    element: float
    column: float = 0.0

    def size(self, itemsize: float = 2) -> float:
        """Returns the bytes per element of a frozen matrix. itemsize: bytes per element in the compute dtype."""
        return self.element or itemsize


# Section 3 of QLoRA: 4-bit codes in blocks of 64. The scales of blocks have 8 bits, in blocks of 256 with one float32
# each: 8/64 + 32/(64 256) = 0.127 bits per parameter for scales, 4.127 bits in total. The mean of a matrix's scales is
# not included. Tables stay in the compute dtype, and so do norms, which are counted as matrices.
BASES = {
    "bf16": FrozenBase("the compute dtype, usually 16 bits", 0.0),
    "nf4": FrozenBase("4-bit NormalFloat with double quantization (Dettmers et al. 2023)", 0.5 + (1 + 4 / 256) / 64),
    "int8": FrozenBase("8 bits, a float32 scale for each output (Dettmers et al. 2022, arXiv 2208.07339)", 1.0, 4.0),
}


def adapted(model: ModelShape) -> dict[str, tuple[int, int]]:
    """Returns the weight matrices of a layer that have a low-rank adapter: name -> (input width, output width)."""
    targets = model.adapters.targets if model.adapters else ()
    return {name: shape for name, shape in matrices(model).items() if name in targets}


def adapted_anywhere(model: ModelShape) -> list[str]:
    """Returns the names of the matrices that have an adapter in at least one layer of the model."""
    names: dict[str, None] = {}
    for kind in expert_formulas.by_kind(model):
        names |= dict.fromkeys(adapted(kind))
    return list(names)


def adapter_count(model: ModelShape) -> int:
    """Returns the number of parameters of all adapters. The adapter of a matrix has rank x (input width + output
    width) parameters (Hu et al. 2021, section 4.1)."""
    if model.adapters is None:
        return 0
    count = 0
    for kind in expert_formulas.by_kind(model):
        count += kind.layers * sum(inputs + outputs for inputs, outputs in adapted(kind).values())
    return model.adapters.rank * count


def frozen_bytes(
    model: ModelShape, parameters: float, tables: float, layout: StepLayout, sharded: bool, itemsize: int = 2
) -> float:
    """Returns the bytes of the frozen weights on a device; 0 if the model has no adapters.

    layout: how the step is sharded over devices. parameters: number of the model's parameters. tables: number of
    parameters in embedding tables. sharded: whether data-parallel ranks shard the parameters. itemsize: bytes per
    element in the compute dtype.
    """
    if model.adapters is None:
        return 0.0
    base = BASES[model.adapters.base]
    columns = 0
    for kind in expert_formulas.by_kind(model):
        outputs = sum(outputs for _, outputs in matrices(kind).values())
        columns += kind.layers * (outputs + expert_formulas.columns(kind))
    size = base.size(itemsize) * max(parameters - tables, 0) + base.column * columns
    size += itemsize * min(tables, parameters)
    return size * layout.held_share(sharded, expert_formulas.routed_count(model) / parameters)
