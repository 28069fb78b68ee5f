"""LoRA by formula: the adapters of a model, and the bytes of the weights that they leave frozen. Plain arithmetic.

Low-rank adapters after Hu et al. 2021 (arXiv 2106.09685), frozen weights in 4 bits after Dettmers et al. 2023 (QLoRA,
arXiv 2305.14314). The activations that a layer keeps for adapters are in `transformer_formulas.LAYER`. Left out:
adapters of embedding tables, and the decoded weights, which exist for one layer at a time.
"""

from __future__ import annotations

from typing import NamedTuple

from bytescope.memory.formulas import expert_formulas
from bytescope.memory.formulas.model_shape import ModelShape, StepLayout, matrices


class FrozenBase(NamedTuple):
    """How frozen matrices are stored.

    element: bytes of an element, including the scales of blocks; 0 for the compute dtype. column: bytes per output.
    """

    summary: str
    element: float
    column: float = 0.0

    def size(self, itemsize: float = 2) -> float:
        """Bytes of an element; `itemsize`: bytes of an element in the compute dtype."""
        return self.element or itemsize


# Section 3 of QLoRA: codes of 4 bits in blocks of 64; scales of blocks in 8 bits, themselves in blocks of 256 with one
# float32 each: 8/64 + 32/(64 256) = 0.127 bits a parameter for scales, 4.127 in all. The mean of a matrix's scales is
# left out. Tables stay in the compute dtype; so do norms, which are counted as matrices.
BASES = {
    "bf16": FrozenBase("as they are computed with, 16 bits as a rule", 0.0),
    "nf4": FrozenBase("4-bit NormalFloat with double quantization (Dettmers et al. 2023)", 0.5 + (1 + 4 / 256) / 64),
    "int8": FrozenBase("8 bits, a float32 scale for each output (Dettmers et al. 2022, arXiv 2208.07339)", 1.0, 4.0),
}


def adapted(model: ModelShape) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a layer's matrices that have an adapter."""
    targets = model.adapters.targets if model.adapters else ()
    return {name: shape for name, shape in matrices(model).items() if name in targets}


def adapted_anywhere(model: ModelShape) -> list[str]:
    """Names of the matrices with an adapter in layers of any kind."""
    names: dict[str, None] = {}
    for kind in expert_formulas.by_kind(model):
        names |= dict.fromkeys(adapted(kind))
    return list(names)


def adapter_count(model: ModelShape) -> int:
    """Parameters of all adapters, r (inputs + outputs) for each matrix that has one (Hu et al. 2021, section 4.1)."""
    if model.adapters is None:
        return 0
    count = 0
    for kind in expert_formulas.by_kind(model):
        count += kind.layers * sum(inputs + outputs for inputs, outputs in adapted(kind).values())
    return model.adapters.rank * count


def frozen_bytes(
    model: ModelShape, parameters: float, tables: float, layout: StepLayout, sharded: bool, itemsize: int = 2
) -> float:
    """Bytes of the frozen weights on a device, 0 without adapters.

    parameters: number of the model's parameters, of which `tables` are in embedding tables. sharded: whether the ranks
    of `layout.data` shard parameters. itemsize: bytes of an element in the compute dtype.
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
    return size * layout.held(sharded, expert_formulas.routed_count(model) / parameters)
