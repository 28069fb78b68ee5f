"""From checked choices to the functions of a pipelined step."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx

from bytescope.train.pipeline.forward import PipelineForward
from bytescope.train.pipeline.gradients import PipelineGradients
from bytescope.train.pipeline.schedule_figures import expected_bubble, full_ticks, simulate
from bytescope.train.pipeline.stage_units import stack_units
from bytescope.train.pipeline.stages import Stages
from bytescope.train.program.choices import Choices
from bytescope.train.step.loss_fn import make_cross_entropy, token_mask
from bytescope.train.step.state import TrainState
from bytescope.train.step.step_weights import Weights


def make_pipeline(
    choices: Choices, graph: nnx.GraphDef, weights: Weights
) -> tuple[PipelineGradients, Callable[..., Any]]:
    """(gradients of an update's micro-batches, loss of a held-out one)."""
    config, precision, schedule, stages = choices.config, choices.precision, choices.schedule, choices.stages
    assert schedule is not None and stages is not None
    staged = choices.layout.staged
    inside = dataclasses.replace(weights, layout=staged)
    units = tuple(stack_units(choices.abstract(place=staged), stages.stacks, inside, schedule))
    cross_entropy = make_cross_entropy(
        choices.loss,
        choices.model,
        config.data.seq_len,
        choices.layout,
        precision,
        choices.batch.micro,
        choices.frozen,
    )
    routed = choices.model.routed
    coefficients = (0.0, 0.0)
    if routed:
        coefficients = config.loss.balance / routed[0], config.loss.router_z / routed[0]
    drops = choices.abstract().drops
    mask = partial(token_mask, experts=choices.model.experts > 0, layout=choices.layout)
    pooled = bool(routed) and config.loss.balance_layers == "pooled"
    gradients = PipelineGradients(
        graph,
        cross_entropy,
        schedule,
        units,
        weights,
        precision.accumulator,
        drops,
        coefficients,
        choices.model.experts,
        pooled,
        mask,
    )
    return gradients, PipelineForward(graph, schedule, units).loss(cross_entropy, mask)


def notes_on(choices: Choices, state: TrainState) -> tuple[str, ...]:
    """What a report of a pipelined step has to say of its own figures; () without stages."""
    schedule, stages = choices.schedule, choices.stages
    if schedule is None or stages is None:
        return ()
    empty = _empty_rows(stages, state)
    padding = (
        (
            f"{empty:,} of the parameters are rows of no layer, since all stages hold as many of each kind as the "
            "fullest",
        )
        if empty
        else ()
    )
    found, (formula, least) = simulate(schedule), expected_bubble(schedule)
    return (
        f"{schedule.stages} stages, {schedule.name}: a bubble of {100 * found.bubble:.1f} % by its table "
        f"({formula} is {100 * float(least):.1f} %); each stage needs "
        f"{', '.join(map(str, schedule.stash_slots))} of the {max(schedule.stash_slots)} slots that all of them "
        "allocate for residuals",
        f"seconds count the {schedule.ticks} ticks as {full_ticks(schedule)} full ones, sent bytes all of them as "
        "full, idle stages included; the timeline between the first and the last tick is that of one",
        *padding,
    )


def _empty_rows(stages: Stages, state: TrainState) -> int:
    """Parameters in rows of the stacks that hold no layer."""
    return sum(
        math.prod(leaf.shape) * rows.order.count(-1) // len(rows.order)
        for rows in stages.stacks
        for leaf in jax.tree.leaves(state.model_params[rows.stack])
    )
