"""Bytes that a training step sends to other devices, by formula: per step and device.

Data parallelism after Rajbhandari et al. 2020 (arXiv 1910.02054), section 7; tensor parallelism after Shoeybi et
al. 2019 (arXiv 1909.08053), section 3; with sequence parallelism after Korthikanti et al. 2022 (arXiv 2205.05198),
section 4.2. Left out: the vocabulary-parallel embedding and loss, norms and other small sums, what the stages of a
pipeline gather and reduce, and the keys and values of ring attention.

Experts: slots of fixed size by all-to-all after Lepikhin et al. 2020 (arXiv 2006.16668), rows of varying number after
Gale et al. 2022 (arXiv 2211.15841), tokens gathered by all devices as in Megatron-Core's all-gather dispatcher. A layer
moves rows to the experts and back, and so does its backward pass; a policy that does not keep the dispatched rows moves
them to the experts once more. The router's weights go with the rows, one float32 each, and have one gradient. Left out:
counts of rows, one number per expert and device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from bytescope.memory.formulas import expert_formulas
from bytescope.memory.formulas.expert_formulas import slots
from bytescope.memory.formulas.memory_estimate import Question
from bytescope.memory.formulas.model_facts import STATE_ROLES, ModelFacts
from bytescope.memory.formulas.model_shape import ExpertShape

# Bytes of a gradient that is summed over micro-batches before it is reduced: the sum is in float32.
ACCUMULATOR_BYTES = 4
# Bytes of the number that goes with a row: the router's weight.
_NUMBER = 4


@dataclasses.dataclass(frozen=True)
class Expected:
    """The bytes that a formula expects of one kind of collective over some axes of the mesh.

    kind: as in `memory.cost.collectives.WIRE`. group: number of devices along the axes. bytes: payload per step and
    device, the size of the unsharded array. formula: the formula in words and letters.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    bytes: int
    formula: str


def data_parallel(
    zero: int,
    parameters: int,
    itemsize: int,
    data: Mapping[str, int],
    shard: Mapping[str, int],
    *,
    gathers: int = 2,
    reductions: int = 1,
    gradient_bytes: int = 0,
    words: str = "parameters",
) -> list[Expected]:
    """Collectives of parameters and gradients over data-parallel ranks (Rajbhandari et al. 2020, section 7).

    Args:
        zero: stage of ZeRO, 0 to 3.
        parameters: P, number of parameters of one tensor-parallel rank; itemsize: bytes of a gathered parameter.
        data: mesh axis -> number of ranks that are replicas; shard: mesh axis -> number of ranks that shard state.
        gathers: times that stage 3 gathers a layer's parameters in one micro-step.
        reductions: times per step that gradients are summed: micro-steps, or 1 if they are summed at the end.
        gradient_bytes: bytes of a gradient that is sent; 0 for `itemsize`.
        words: the name of the parameters in the formula.
    """
    gradient = (gradient_bytes or itemsize) * parameters * reductions
    times = "" if reductions == 1 else f" x {reductions}"
    shards = math.prod(shard.values())
    out: list[Expected] = []
    reduced, formula, axes = gradient, f"gradients{times}", {**data, **shard}
    if zero and shards > 1:
        gathered = parameters * itemsize  # the compute copy of all parameters, once per step
        if zero == 3:
            repeats = gathers * reductions
            gathered, words = repeats * gathered, f"{repeats} x {words}"
        out.append(Expected("all-gather", tuple(shard), shards, gathered, words))
        out.append(Expected("reduce-scatter", tuple(shard), shards, gradient, f"gradients{times}"))
        reduced, formula, axes = gradient // shards, f"gradient shards{times}", dict(data)
    group = math.prod(axes.values())
    if group > 1:
        out.append(Expected("all-reduce", tuple(axes), group, reduced, formula))
    return out


# ---- experts --------------------------------------------------------------------------------------------------------


class Moved(NamedTuple):
    """Bytes that a device sends in one move: rows, and one number (the router's weight) per row."""

    rows: float
    numbers: float


class Sent(NamedTuple):
    """One kind of collective in one layer and micro-step: bytes of all its moves, and the formula in words."""

    kind: str
    bytes: float
    formula: str


def _gathered(experts: ExpertShape, tokens: int, width: int, itemsize: int, size: int) -> Moved:
    return Moved(tokens * size * width * itemsize, tokens * size * experts.per_token * _NUMBER)


def _slotted(experts: ExpertShape, tokens: int, width: int, itemsize: int, size: int) -> Moved:
    rows = experts.count * slots(experts, tokens)
    return Moved(rows * width * itemsize, rows * _NUMBER)


def _chosen(experts: ExpertShape, tokens: int, width: int, itemsize: int, size: int) -> Moved:
    rows = tokens * experts.per_token
    return Moved(rows * width * itemsize, rows * _NUMBER)


# How tokens reach their experts -> (bytes of one move, (kind, moves of rows, moves of numbers, both without
# recomputation; moves of rows, moves of numbers that each recomputation adds; unit of the formula)). Tokens are
# gathered with their experts' numbers and weights.
EXCHANGES: dict[str, tuple[Callable[..., Moved], tuple[tuple[str, int, int, int, int, str], ...]]] = {
    "allgather": (
        _gathered,
        (("all-gather", 2, 2, 1, 2, "tokens of the group"), ("reduce-scatter", 2, 1, 0, 0, "tokens of the group")),
    ),
    "all_to_all": (_slotted, (("all-to-all", 4, 2, 1, 1, "slots"),)),
    "ragged_all_to_all": (_chosen, (("ragged-all-to-all", 4, 2, 1, 1, "k x tokens"),)),
}


def sent(
    exchange: str,
    experts: ExpertShape,
    *,
    tokens: int,
    width: int,
    itemsize: int,
    size: int,
    again: int = 0,
    redone: int = 0,
) -> list[Sent]:
    """Returns the bytes that one layer sends in one micro-step, forward and backward.

    Args:
        exchange: a row of EXCHANGES. tokens: of a device. width: D; itemsize: bytes of an element of an activation.
        size: devices that share the experts. again: recomputations that move rows; redone: recomputations that move
            their numbers.
    """
    measure, kinds = EXCHANGES[exchange]
    moved = measure(experts, tokens, width, itemsize, size)
    out = []
    for kind, rows, numbers, more_rows, more_numbers, unit in kinds:
        times, with_numbers = rows + more_rows * again, numbers + more_numbers * redone
        out.append(Sent(kind, times * moved.rows + with_numbers * moved.numbers, f"{times} x {unit} per layer"))
    return out


def expert_parallel(facts: ModelFacts, question: Question, ranks: Mapping[str, int], tokens: int) -> list[Expected]:
    """Returns the collectives of rows between the `ranks` (axis -> devices) that share the experts.

    `tokens`: of one device and micro-step. Returns [] for one device, and for an exchange without a formula.
    """
    experts, size = question.model.experts, math.prod(ranks.values())
    if experts is None or size == 1 or not facts.exchange:
        return []
    kept = "dispatched" in facts.policy.save | facts.policy.offload
    passes = facts.policy.forward_passes
    layers = sum(kind.layers for kind in expert_formulas.by_kind(question.model) if kind.experts)
    times = layers * facts.micro_steps_per_call
    return [
        Expected(one.kind, tuple(ranks), size, round(times * one.bytes), one.formula)
        for one in sent(
            facts.exchange,
            experts,
            tokens=tokens,
            width=question.model.width,
            itemsize=facts.sent_parameter,
            size=size,
            again=0 if kept else passes,
            redone=passes,
        )
    ]


# ---- tensors and stages ---------------------------------------------------------------------------------------------


def tensor_parallel(
    ranks: Mapping[str, int], layers: int, activation: int, *, sequence_parallel: bool = False, repeated: int = 0
) -> list[Expected]:
    """Returns the collectives of activations of `layers` blocks over the tensor group, forward and backward.

    Args:
        ranks: mesh axis -> devices of the group.
        activation: bytes of one [b, s, h] of a rank: its sequences, not sharded along the sequence.
        repeated: forward all-reduces of a block that recomputation repeats.

    Without sequence parallelism there are 2 all-reduces per block and direction (Shoeybi et al. 2019, section 3). With
    it, each becomes an all-gather and a reduce-scatter, and the two inputs that are kept sharded are gathered again in
    the backward pass (Korthikanti et al. 2022, section 4.2).
    """
    axes, size = tuple(ranks), math.prod(ranks.values())
    if size == 1:
        return []
    sums = (4 + repeated) * layers
    if not sequence_parallel:
        return [Expected("all-reduce", axes, size, sums * activation, f"{4 + repeated} x bsh per block")]
    gathers = (6 + repeated) * layers
    return [
        Expected("all-gather", axes, size, gathers * activation, f"{6 + repeated} x bsh per block"),
        Expected("reduce-scatter", axes, size, sums * activation, f"{4 + repeated} x bsh per block"),
    ]


def stage_sends(facts: ModelFacts, question: Question, mesh: Mapping[str, int]) -> list[Expected]:
    """Returns the sends between pipeline stages: in every tick the output of a chunk and the gradient of its input, bsh
    each. A V sends in both directions, except at its ends. Published programs send 2 x bsh per micro-batch and chunk.
    """
    ranks = facts.axes("stage", mesh=mesh)
    stages = math.prod(ranks.values())
    if facts.pipeline is None:
        return []
    shared = facts.devices("tensor", mesh=mesh) if question.layout.sequence else 1
    activation = question.batch * question.sequence * question.model.width * facts.sent_parameter // shared
    each, words = 2.0, "2 x bsh per tick"
    if facts.pipeline.bends:
        each, words = 4 * (stages - 1) / stages, "4 x bsh per tick, but the ends"
    size = round(facts.pipeline.ticks * each * activation)
    return [Expected("collective-permute", tuple(ranks), stages, size, words)]


def expected_collectives(facts: ModelFacts | None, mesh: Mapping[str, int], parameters: int) -> list[Expected]:
    """Returns all collectives that the formulas expect of a training step, with axes in the order of the mesh.

    Returns [] without facts or a formula, and for a mesh none of whose axes shards the batch. `mesh`: axis -> devices;
    `parameters`: of the model, over all devices.
    """
    question = facts.question if facts else None
    if facts is None or question is None or not facts.sent_parameter or not parameters:
        return []
    if not any(facts.roles.get(axis) in ("replica", "state") for axis in mesh):
        return []
    if facts.devices("stage", mesh=mesh) > 1:  # how often a stage gathers and reduces follows from its ticks
        return stage_sends(facts, question, mesh)
    model, policy, itemsize = question.model, facts.policy, facts.sent_parameter
    replicas, sharers = facts.axes("replica", mesh=mesh), facts.axes(*STATE_ROLES, mesh=mesh)
    context, tensor = facts.devices("sequence", mesh=mesh), facts.axes("tensor", mesh=mesh)
    zero, micro_steps = (question.layout.zero if sharers else 0), facts.micro_steps_per_call
    if zero == 0:  # all of them are replicas
        replicas, sharers = facts.axes("replica", *STATE_ROLES, mesh=mesh), {}
    # Without devices that share a sequence, ddp and stage 1 reduce gradients at the end of the micro-batches.
    once = context == 1 and (zero == 1 or (zero == 0 and micro_steps > 1))
    routed = expert_formulas.routed_count(model)
    experts, groups = facts.axes("expert", mesh=mesh), math.prod(tensor.values())
    gathers, reductions = (3 if policy.groups else 2), (1 if once else micro_steps)
    gradient = facts.sent_gradient or (ACCUMULATOR_BYTES if once and micro_steps > 1 else 0)
    out = data_parallel(
        zero,
        (parameters - routed) // groups,
        itemsize,
        replicas,
        sharers,
        gathers=gathers,
        reductions=reductions,
        gradient_bytes=gradient,
    )
    tokens = int(question.batch * question.sequence) // context
    if model.experts:
        # A device holds and gathers only its own experts.
        out += data_parallel(
            zero,
            routed // math.prod(experts.values()) // groups,
            itemsize,
            {axis: size for axis, size in replicas.items() if axis not in experts},
            {axis: size for axis, size in sharers.items() if axis not in experts},
            gathers=gathers,
            reductions=reductions,
            gradient_bytes=gradient,
            words="experts' parameters",
        )
        out += expert_parallel(facts, question, experts, tokens)
    out += tensor_parallel(
        tensor,
        model.layers * micro_steps,
        tokens * model.width * itemsize,
        sequence_parallel=question.layout.sequence,
        repeated=policy.forward_passes if policy.keeps_nothing else 0,
    )
    return [entry for entry in out if entry.bytes]
