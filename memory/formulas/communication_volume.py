"""Formulas for the bytes that a device sends to other devices in one training step.

Data parallelism follows Rajbhandari et al. 2020 (arXiv 1910.02054), section 7. Tensor parallelism follows Shoeybi et
al. 2019 (arXiv 1909.08053), section 3, and with sequence parallelism Korthikanti et al. 2022 (arXiv 2205.05198),
section 4.2. Not included: the vocabulary-parallel embedding and loss, norms and other small sums, the gathers and
reductions of pipeline stages, and the keys and values of ring attention.

Experts: all-to-all of slots of fixed size follows Lepikhin et al. 2020 (arXiv 2006.16668), rows of varying number
follow Gale et al. 2022 (arXiv 2211.15841), and tokens gathered by all devices follow Megatron-Core's all-gather
dispatcher. A row is the activation of one token for one of its experts. A layer sends rows to the experts and back,
and so does its backward pass. A policy that does not save the dispatched rows sends them to the experts once more. The
router's weights, one float32 per row, are sent with the rows and have one gradient. Not included: the counts of rows,
one number per expert and device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from bytescope.memory.formulas import expert_formulas
from bytescope.memory.formulas.expert_formulas import slots
from bytescope.memory.formulas.memory_estimate import Question
from bytescope.memory.formulas.model_facts import STATE_ROLES, ModelFacts
from bytescope.memory.formulas.model_shape import ExpertShape

# Bytes per element of a gradient that is summed over micro-batches before it is reduced: the sum is in float32.
ACCUMULATOR_BYTES = 4
# Bytes of the router's weight, which is sent with a row.
_NUMBER = 4


@dataclasses.dataclass(frozen=True)
class Expected:
    """The bytes that published formulas give for one kind of collective over some mesh axes, in one training step.

    Fields:
        kind: the kind of collective, such as "all-gather".
        axes: the mesh axes over which it communicates.
        group: number of devices along these axes.
        bytes: payload per device and step: the bytes of the unsharded arrays.
        formula: the formula as text, such as "2 x parameters".
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
    """Returns the collectives that gather parameters and reduce gradients over data-parallel ranks (Rajbhandari et al.
    2020, section 7).

    Args:
        zero: stage of ZeRO, 0 to 3, which decides what is sharded.
        parameters: number of parameters of one tensor-parallel rank. itemsize: bytes per gathered parameter.
        data: mesh axis -> number of ranks that replicate the training state.
        shard: mesh axis -> number of ranks that shard the training state.
        gathers: number of times that stage 3 gathers a layer's parameters in one micro-step.
        reductions: number of gradient reductions per step. This is the number of micro-steps, or 1 if each rank sums
            its gradients first.
        gradient_bytes: bytes per element of a reduced gradient; 0 means `itemsize`.
        words: the name of the parameters in the formula's text.
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


class LayerExchange(NamedTuple):
    """The bytes of one kind of collective that sends tokens to the devices of their experts and back, in one layer and
    micro-step.

    Fields:
        kind: the kind of collective, such as "all-to-all".
        bytes: total bytes of these collectives.
        formula: the formula as text.
    """

    kind: str
    bytes: float
    formula: str


# Dispatch method of the experts -> collectives. A collective is (kind, exchanges of rows, exchanges of router weights,
# exchanges of rows that each recomputation adds, exchanges of router weights that each recomputation adds, unit in the
# formula's text). All-gather sends tokens with their expert indices and weights.
EXCHANGES: dict[str, tuple[tuple[str, int, int, int, int, str], ...]] = {
    "allgather": (
        ("all-gather", 2, 2, 1, 2, "tokens of the group"),
        ("reduce-scatter", 2, 1, 0, 0, "tokens of the group"),
    ),
    "all_to_all": (("all-to-all", 4, 2, 1, 1, "slots"),),
    "ragged_all_to_all": (("ragged-all-to-all", 4, 2, 1, 1, "k x tokens"),),
}


def layer_exchanges(
    exchange: str,
    experts: ExpertShape,
    *,
    tokens: int,
    width: int,
    itemsize: int,
    size: int,
    row_repeats: int = 0,
    weight_repeats: int = 0,
) -> list[LayerExchange]:
    """Returns the collectives that send tokens to their experts and back, in one layer and micro-step, forward and
    backward.

    Args:
        exchange: how tokens are sent: "allgather", "all_to_all" or "ragged_all_to_all".
        experts: number and size of the routed experts.
        tokens: tokens of one device. width: model width. itemsize: bytes per element of an activation.
        size: number of devices that share the experts.
        row_repeats: number of recomputations that exchange activations again.
        weight_repeats: number of recomputations that exchange router weights again.
    """
    if exchange == "allgather":
        sent_rows, sent_numbers = tokens * size, tokens * size * experts.per_token
    elif exchange == "all_to_all":
        sent_rows = sent_numbers = experts.count * slots(experts, tokens)
    else:
        sent_rows = sent_numbers = tokens * experts.per_token
    out = []
    for kind, rows, numbers, more_rows, more_numbers, unit in EXCHANGES[exchange]:
        times, with_numbers = rows + more_rows * row_repeats, numbers + more_numbers * weight_repeats
        moved = times * sent_rows * width * itemsize + with_numbers * sent_numbers * _NUMBER
        out.append(LayerExchange(kind, moved, f"{times} x {unit} per layer"))
    return out


def expert_parallel(facts: ModelFacts, question: Question, ranks: Mapping[str, int], tokens: int) -> list[Expected]:
    """Returns the collectives that send tokens to their experts and back in a training step. Returns [] if one device
    has all experts, or if the kind of exchange has no formula.

    facts: the trainer's description of the step. question: model shape, sharding and precision of the step. ranks: mesh
    axis -> number of devices that share the experts. tokens: tokens of one device and micro-step.
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
        for one in layer_exchanges(
            facts.exchange,
            experts,
            tokens=tokens,
            width=question.model.width,
            itemsize=facts.sent_parameter,
            size=size,
            row_repeats=0 if kept else passes,
            weight_repeats=passes,
        )
    ]


# ---- tensors and stages ---------------------------------------------------------------------------------------------


def tensor_parallel(
    ranks: Mapping[str, int], layers: int, activation: int, *, sequence_parallel: bool = False, repeated: int = 0
) -> list[Expected]:
    """Returns the collectives of activations between tensor-parallel devices, forward and backward.

    Args:
        ranks: mesh axis -> number of tensor-parallel devices. layers: number of blocks.
        activation: bytes of one [batch, sequence, width] activation, not sharded along the sequence.
        repeated: number of all-reduces of a block's forward pass that recomputation repeats.

    Without sequence parallelism there are 2 all-reduces per block and direction (Shoeybi et al. 2019, section 3). With
    sequence parallelism, each becomes an all-gather and a reduce-scatter. Two inputs that are stored sharded are
    gathered again in the backward pass (Korthikanti et al. 2022, section 4.2).
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
    """Returns the bytes that a pipeline stage sends to its neighbours in one training step, as one collective-permute;
    [] without a pipeline.

    In every iteration of the schedule's loop, a stage sends one activation forward and one gradient back, each of batch
    x sequence x width elements. In a V-shaped schedule, it sends an activation and a gradient to both neighbours,
    except at the ends of the V. Published programs send both only once per micro-batch and chunk of layers.

    facts: the trainer's description of the step. question: model shape, sharding and precision of the step. mesh: axis
    -> number of devices.
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
    """Returns all collectives that published formulas give for a training step. Returns [] if `facts` is None, if the
    step has no formula, or if no mesh axis shards the batch.

    facts: the trainer's description of the step, None if there is no trainer. mesh: axis -> number of devices; the
    result has the order of these axes. parameters: number of the model's parameters over all devices.
    """
    question = facts.question if facts else None
    if facts is None or question is None or not facts.sent_parameter or not parameters:
        return []
    if not any(facts.roles.get(axis) in ("replica", "state") for axis in mesh):
        return []
    if facts.devices("stage", mesh=mesh) > 1:  # gathers and reductions of a stage depend on its ticks: not included
        return stage_sends(facts, question, mesh)
    model, policy, itemsize = question.model, facts.policy, facts.sent_parameter
    replicas, sharers = facts.axes("replica", mesh=mesh), facts.axes(*STATE_ROLES, mesh=mesh)
    context, tensor = facts.devices("sequence", mesh=mesh), facts.axes("tensor", mesh=mesh)
    zero, micro_steps = (question.layout.zero if sharers else 0), facts.micro_steps_per_call
    if zero == 0:  # no rank shards state: all ranks are replicas
        replicas, sharers = facts.axes("replica", *STATE_ROLES, mesh=mesh), {}
    # If no devices share a sequence, DDP and ZeRO stage 1 reduce gradients only after the last micro-batch.
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
        # A device stores and gathers only its own experts.
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
