"""Computes the seconds of a schedule by simulating the streams of one device at the rates that the device reaches.

One stream computes, kernel after kernel. Collectives have a stream of their own, and so has each direction of the host
link. A transfer begins when compute reaches its start and the previous transfer on its stream has ended. Compute
continues in the meantime, slower by `constants.SLOWDOWN` while a collective runs, because the collective occupies
multiprocessors and memory bandwidth. Compute stops where the schedule waits for a transfer that has not ended. So the
order of the schedule determines the overlap, and the waiting if overlap falls short. A step ends when every stream is
done.

The iterations of a loop are simulated one by one, until an iteration takes as long as the one before and leaves the
same transfers in flight. All further iterations would be equal, so their seconds are added without simulating them.
Nested loops are simulated in the same way.

Not modelled: waiting for other devices that reach a collective later, and a host that launches too slowly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from bytescope.memory.records.report_record import STEP_PHASES
from bytescope.memory.records.schedule_records import (
    ATTENTION,
    ATTENTION_BACKWARD,
    CONVOLUTION,
    GROUPED,
    PRODUCT,
    TILED,
    TO_DEVICE,
    TO_HOST,
    Loop,
    ScheduledKernel,
    Start,
    Steps,
)
from bytescope.memory.seconds import constants, operation_seconds
from bytescope.memory.seconds.rate_records import DeviceRates

# Parts of the seconds of a step. products: matrix products and convolutions; memory: kernels that move memory, and
# kernels of libraries; launch: the floors of kernels; collectives and host_link: time in which compute waits for them.
TERMS = ("products", "attention", "memory", "launch", "collectives", "host_link")
_TERM = {
    **dict.fromkeys((PRODUCT, TILED, GROUPED, CONVOLUTION), "products"),
    **dict.fromkeys((ATTENTION, ATTENTION_BACKWARD), "attention"),
}
_COLLECTIVES = "collectives"
# Kind of a copy over the host link -> its stream; other transfers are collectives.
_STREAM = {TO_HOST: TO_HOST, TO_DEVICE: TO_DEVICE}
STREAMS = (_COLLECTIVES, TO_HOST, TO_DEVICE)
# Maximum number of iterations of a loop that are simulated. If the iterations still differ then, the mean of the later
# half is used for the remaining ones.
_MAX_ITERATIONS = 64
# Maximum number of steps that are simulated, where an iteration of a loop adds _ITERATION steps. Beyond it, only one
# iteration of each loop is simulated and multiplied. The maximum is a hundred times the steps of a real program and
# takes about a second; it stops the simulation of a damaged report with endlessly nested loops.
_MAX_STEPS, _ITERATION = 400_000, 10
# Relative difference below which two iterations are equal.
_TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True)
class Walked:
    """The predicted seconds of one call of a step.

    Fields:
        seconds: time until the last stream is finished.
        by_phase: phase (`records.STEP_PHASES`, or "" if unknown) -> seconds, which add up to `seconds`.
        by_term: term (`TERMS`) -> seconds, which add up to `seconds`.
    """

    seconds: float
    by_phase: Mapping[str, float]
    by_term: Mapping[str, float]


def walk(steps: Steps, rates: DeviceRates) -> Walked:
    """Returns the predicted seconds of a schedule at these rates. They come from a simulation of one device, in which
    kernels, collectives and copies over the host link overlap.
    """
    clock = _DeviceClock(_Prices(rates))
    clock.walk(steps)
    clock.wait_for_all_streams()
    by_phase, by_term = dict.fromkeys(STEP_PHASES, 0.0), dict.fromkeys(TERMS, 0.0)
    for (phase, term), taken in clock.spent.items():
        by_phase[phase] = by_phase.get(phase, 0.0) + taken
        by_term[term] += taken
    return Walked(clock.now, by_phase, by_term)


class _Prices:
    """The seconds of kernels and transfers at the rates of a device. The seconds of equal ones are computed once."""

    def __init__(self, rates: DeviceRates):
        self.rates = rates
        self._known: dict[ScheduledKernel | Start, float] = {}

    def seconds(self, step: ScheduledKernel | Start) -> float:
        """Returns the seconds of one run of a kernel, or of a transfer."""
        if step not in self._known:
            rule = operation_seconds.transfer_seconds if isinstance(step, Start) else operation_seconds.kernel_seconds
            self._known[step] = rule(step, self.rates)  # type: ignore[arg-type]  # the rule is for the step's type
        return self._known[step]


class _DeviceClock:
    """The state of the simulation: the current time, the time until which each stream is busy, the transfers in flight,
    and the seconds spent so far by (phase, term). Times are in seconds from the start of the step.
    """

    def __init__(self, prices: _Prices) -> None:
        self.prices = prices
        self.now = 0.0
        self.free = dict.fromkeys(STREAMS, 0.0)
        # Stream -> (phase, term) to which waiting for its last transfer is added.
        self.last: dict[str, tuple[str, str]] = {}
        self.started: dict[str, tuple[float, str, tuple[str, str]]] = {}  # name -> (end, stream, (phase, term))
        self.spent: dict[tuple[str, str], float] = {}
        self.steps = 0

    def walk(self, steps: Steps) -> None:
        self.steps += len(steps)
        for step in steps:
            if isinstance(step, ScheduledKernel):
                self._compute(step)
            elif isinstance(step, Start):
                self._start(step)
            elif isinstance(step, Loop):
                self._run_loop(step)
            elif step.name in self.started:  # a wait without a start is ignored
                end, _, counts = self.started.pop(step.name)
                self._wait(end, counts)

    def wait_for_all_streams(self) -> None:
        for stream in sorted(self.last, key=lambda stream: self.free[stream]):
            self._wait(self.free[stream], self.last[stream])

    def _compute(self, kernel: ScheduledKernel) -> None:
        once = self.prices.seconds(kernel)
        alone, launching = once * kernel.times, min(self.prices.rates.floor_seconds, once) * kernel.times
        beside = max(self.free[_COLLECTIVES] - self.now, 0.0)
        slower = 1.0 + constants.SLOWDOWN
        taken = min(alone * slower, alone + beside * (1 - 1 / slower))
        share = taken / alone if alone else 1.0
        self._spend((kernel.phase, "launch"), launching * share)
        self._spend((kernel.phase, _TERM.get(kernel.kind, "memory")), taken - launching * share)
        self.now += taken

    def _start(self, step: Start) -> None:
        stream = _STREAM.get(step.kind, _COLLECTIVES)
        end = max(self.now, self.free[stream]) + self.prices.seconds(step)
        counts = step.phase, "collectives" if stream == _COLLECTIVES else "host_link"
        self.free[stream] = end
        self.last[stream] = counts
        if step.name:
            self.started[step.name] = end, stream, counts
        else:
            self._wait(end, counts)

    def _wait(self, end: float, counts: tuple[str, str]) -> None:
        if end > self.now:
            self._spend(counts, end - self.now)
            self.now = end

    def _spend(self, counts: tuple[str, str], taken: float) -> None:
        self.spent[counts] = self.spent.get(counts, 0.0) + taken

    def _run_loop(self, loop: Loop) -> None:
        # A clock that starts at 0: if the times of the iterations were added to the time of a long step, rounding would
        # hide that two iterations take equally long.
        inside, began = _DeviceClock(self.prices), self.now
        inside.free = {stream: free - began for stream, free in self.free.items()}
        inside.started = {name: (end - began, stream, to) for name, (end, stream, to) in self.started.items()}
        inside.last, inside.steps = self.last, self.steps
        inside.run_iterations(loop)
        self.now, self.steps = began + inside.now, inside.steps
        self.free = {stream: began + free for stream, free in inside.free.items()}
        self.started = {name: (began + end, stream, to) for name, (end, stream, to) in inside.started.items()}
        for counts, taken in inside.spent.items():
            self._spend(counts, taken)

    def run_iterations(self, loop: Loop) -> None:
        """Simulates the iterations of a loop until one is equal to the one before. Then adds the seconds of the
        remaining iterations. The time of this clock must be 0 at the start.
        """
        first = second = half = self._state()
        for number in range(loop.trips):
            self.walk(loop.steps)
            self.steps += _ITERATION
            third, left = self._state(), loop.trips - number - 1
            if self.steps > _MAX_STEPS or (number and _is_steady(first, second, third)):
                self._skip_iterations(second, third, left)
                return
            if number + 1 == _MAX_ITERATIONS // 2:
                half = third
            if number + 1 == _MAX_ITERATIONS:
                self._skip_iterations(half, third, left / (_MAX_ITERATIONS // 2))
                return
            first, second = second, third

    def _state(self) -> _State:
        ends = {name: (end, stream) for name, (end, stream, _) in self.started.items() if end > self.now}
        return _State(self.now, dict(self.free), ends, dict(self.spent))

    def _skip_iterations(self, before: _State, after: _State, times: float) -> None:
        """Advances the clock by `times` times the change from the state `before` to the state `after`, instead of
        simulating further iterations of a loop that would change it equally.
        """
        if not times:
            return
        self.now += times * (after.now - before.now)
        grown = {stream: times * (after.free[stream] - before.free[stream]) for stream in STREAMS}
        for stream in STREAMS:
            self.free[stream] += grown[stream]
        for name, (end, stream) in after.ends.items():
            self.started[name] = end + grown[stream], *self.started[name][1:]
        for counts, taken in after.spent.items():
            self.spent[counts] += times * (taken - before.spent.get(counts, 0.0))


@dataclasses.dataclass(frozen=True)
class _State:
    """A copy of the clock's state between two loop iterations, in seconds.

    Fields:
        now: the current time.
        free: stream -> time at which its last transfer ends.
        ends: name of a transfer in flight -> (time at which it ends, its stream).
        spent: (phase, term) -> seconds so far.
    """

    now: float
    free: Mapping[str, float]
    ends: Mapping[str, tuple[float, str]]
    spent: Mapping[tuple[str, str], float]

    def seconds_left(self) -> dict[str, float]:
        streams = {f"stream {stream}": max(free - self.now, 0.0) for stream, free in self.free.items()}
        return streams | {name: end - self.now for name, (end, _) in self.ends.items()}


def _is_steady(first: _State, second: _State, third: _State) -> bool:
    """Returns whether two consecutive loop iterations are equal: they take the same time and leave the same transfers
    in flight. `first`, `second` and `third` are the clock before, between and after the two iterations.
    """
    length = third.now - second.now
    allowed = _TOLERANCE * max(length, 1e-12)
    before, after = second.seconds_left(), third.seconds_left()
    return (
        math.isclose(length, second.now - first.now, rel_tol=_TOLERANCE, abs_tol=allowed)
        and before.keys() == after.keys()
        and all(abs(before[key] - after[key]) <= allowed for key in before)
    )
