"""Bubble, activation memory and parameter copies of pipeline schedules, as published. Publications assume a separate
program per stage.

Times are for all layers of a stage and one micro-batch: F is the forward pass, B the gradients of inputs, W the
gradients of weights.
"""

import dataclasses
from collections.abc import Callable, Mapping
from fractions import Fraction


@dataclasses.dataclass(frozen=True)
class PassTimes:
    """Duration of each pass of one micro-batch on one pipeline stage, in seconds or any other unit.

    Fields:
      forward: F, the forward pass.
      inputs: B, gradients of inputs.
      weights: W, gradients of weights.
    """

    forward: Fraction = Fraction(1)
    inputs: Fraction = Fraction(1)
    weights: Fraction = Fraction(1)

    @property
    def all(self) -> Fraction:
        """Duration of all passes of one micro-batch on one stage: F + B + W."""
        return self.forward + self.inputs + self.weights


EQUAL = PassTimes()


@dataclasses.dataclass(frozen=True)
class Published:
    """A pipeline schedule from a publication.

    Fields:
      source: the publication.
      bubble: (stages, pass times) -> time that a stage is idle in a step, in the unit of the pass times.
      held: (stages, micro-batches) -> number of micro-batches whose activations are stored on the stage that stores
        most.
      parameters: number of copies of its layers' parameters that a stage stores.
      ours: the most similar schedule of this package, a row of SCHEDULES; "" if there is none.
      differs: how the schedule `ours` differs from the published one, because in this package all stages run one
        program.
    """

    source: str
    bubble: Callable[[int, PassTimes], Fraction]
    held: Callable[[int, int], Fraction]
    parameters: int = 1
    ours: str = ""
    differs: str = ""

    def stash(self, stages: int, micro_batches: int) -> Fraction:
        """Returns the activation memory of the stage that stores most, as a multiple of the residuals (saved
        activations) of all layers for one micro-batch."""
        return Fraction(self.held(stages, micro_batches)) / stages

    def share(self, stages: int, micro_batches: int, work: PassTimes = EQUAL) -> Fraction:
        """Returns the fraction (0 to 1) of the time of a step that a stage is idle, if its passes take the times
        `work`."""
        idle = self.bubble(stages, work)
        return idle / (micro_batches * work.all + idle)


_ZB = "Qi et al. 2023, arXiv 2401.10241, table 1"
_V = "Qi et al. 2024, arXiv 2405.15362; bubbles about, with F = B = W"
_DUAL = "DeepSeek-AI 2024, arXiv 2412.19437, table 2"
_FUSED = "a tick has a forward and a backward pass: the first stage holds 2 - 1/P"
# DeepSeek-V3's ZB1P is the zero-bubble paper's ZB-H1; its B is B + W in this table. Interleaved has two chunks per
# stage.
PUBLISHED: Mapping[str, Published] = {
    "GPipe": Published(
        "Huang et al. 2018, arXiv 1811.06965", lambda P, w: (P - 1) * w.all, lambda P, M: Fraction(M), ours="gpipe"
    ),
    "1F1B": Published(
        "Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.3",
        lambda P, w: (P - 1) * w.all,
        lambda P, M: Fraction(min(P, M)),
        ours="1f1b",
        differs=_FUSED,
    ),
    "interleaved, 2 chunks": Published(
        "Narayanan et al. 2021, arXiv 2104.04473, section 2.2",
        lambda P, w: (P - 1) * w.all / 2,
        lambda P, M: P + Fraction(P - 1, 2),
        ours="interleaved",
        differs="the same stash: chunks run in turn",
    ),
    "ZB-H1, ZB1P": Published(
        _ZB,
        lambda P, w: (P - 1) * (w.forward + w.inputs - w.weights),
        lambda P, M: Fraction(min(P, M)),
        ours="zero_bubble",
        differs="outputs move once a tick, whatever is in it: (P - 1)(F + B) are lost",
    ),
    "ZB-H2": Published(
        _ZB,
        lambda P, w: (P - 1) * max(w.forward + w.inputs - 2 * w.weights, Fraction(0)),
        lambda P, M: Fraction(min(2 * P - 1, M)),
    ),
    "V-Min": Published(
        _V,
        lambda P, w: Fraction(2 * P, 3) * w.all,
        lambda P, M: Fraction((P + 4) // 3),
        ours="v",
        differs="both passes of a tick hold their slots: 1 on every stage",
    ),
    "V-Half": Published(
        _V,
        lambda P, w: Fraction(P, 2) * w.all,
        lambda P, M: Fraction((P + 2) // 2),
        ours="v",
        differs="both passes of a tick hold their slots: 1 on every stage",
    ),
    "V-ZB": Published(_V, lambda P, w: Fraction(0), lambda P, M: Fraction(P)),
    "DualPipe": Published(
        _DUAL,
        lambda P, w: (Fraction(P, 2) - 1) * (w.all + w.inputs + w.weights - 3 * w.weights),
        lambda P, M: Fraction(P + 1),
        parameters=2,
    ),
}
