"""From checked choices to the functions of a pipelined step."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from bytescope.memory.pipeline.figures import bubble, full_ticks, simulate
from bytescope.memory.pipeline.schedule import Schedule
from bytescope.train.choices import Choices
from bytescope.train.loss_fn import make_cross_entropy
from bytescope.train.pipeline.forward import PipelineForward
from bytescope.train.pipeline.gradients import PipelineGradients
from bytescope.train.pipeline.units import stack_units
from bytescope.train.step.weights import Weights


def make_pipeline(choices: Choices, graph: nnx.GraphDef,
                  weights: Weights) -> tuple[PipelineGradients, Callable[..., Any]]:
    """(gradients of an update's micro-batches, loss of a held-out one)."""
    config, precision = choices.config, choices.precision
    units = tuple(stack_units(choices.abstract(place=choices.layout.staged), choices.stages.stacks, weights,
                              choices.schedule))
    cross_entropy = make_cross_entropy(config, choices.layout, precision, choices.batch.micro, choices.frozen)
    routed = choices.model.routed
    coefficients = tuple(value / routed[0] if routed else 0.0 for value in (config.loss.balance, config.loss.router_z))
    drops = choices.abstract().drops
    gradients = PipelineGradients(graph, cross_entropy, choices.schedule, units, weights, precision.accumulator, drops,
                                  coefficients, choices.model.experts)
    return gradients, PipelineForward(graph, choices.schedule, units).loss(cross_entropy)


def notes_on(schedule: Schedule | None) -> tuple[str, ...]:
    """What a report of a pipelined step has to say of its own figures; () without stages."""
    if schedule is None:
        return ()
    found, least = simulate(schedule), bubble(schedule.stages, schedule.micro_batches, schedule.virtual)
    return (f"{schedule.stages} stages, {schedule.name}: a bubble of {100 * found.bubble:.1f} % by its table "
            f"((P-1)/(vM+P-1) is {100 * float(least):.1f} %); each stage needs "
            f"{', '.join(map(str, schedule.stash_slots))} of the {max(schedule.stash_slots)} slots that all of them "
            "allocate for residuals",
            f"seconds count the {schedule.ticks} ticks as {full_ticks(schedule)} full ones, sent bytes all of them as "
            "full, idle stages included")
