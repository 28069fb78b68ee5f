"""Solves exactly for the least recomputation within a byte budget, without a compiler.

There are two steps. `pareto_patterns` finds all useful patterns of values that one layer keeps. It visits the equations
of the layer from the last to the first, as the recomputation of `jax.checkpoint` does, and for every set of values that
are still needed it retains only the choices that are Pareto-optimal in bytes, cost and host bytes. `solve` then gives
every layer one of these patterns, with at most two patterns in a plan, so that the bytes fit the budget at the lowest
cost. Transfers of offloaded tensors overlap with the forward and the backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bytescope.memory.remat.layer_graph import LAYER_INPUT, GraphStep, LayerGraph
from bytescope.memory.remat.remat_problem import MAX_RANGES, KeepPattern, LayerPlan, PassSeconds, RecomputeRates

# Number of times that the bytes of a tensor are read or written. A kept tensor is copied into the stack of its loop
# and out of it, an offloaded tensor is copied to the host and back, a recomputed tensor is written and read by
# kernels.
STACKED, OFFLOADED, RECOMPUTED = 4.0, 2.0, 2.0
# The decision about a named value.
RECOMPUTE, KEEP, OFFLOAD = 0, 1, 2
# Fronts are exact up to MAX_FRONT points; of a longer front, only the best point in each cell of a grid is kept.
# MAX_STATES is the maximum number of states that are followed at once; with more states, fewer names are decided.
MAX_FRONT, GRID, MAX_STATES = 1000, 30, 4096
# Number of first patterns that are compared with all others in one array.
CHUNK = 32
# Passes of zero seconds, which hide no transfer.
NO_PASSES = PassSeconds()
# Costs that differ by less than this fraction are equal except for rounding.
ROUNDING = 1e-12


# ---- one layer -------------------------------------------------------------------------------------------------------


def pareto_patterns(
    graph: LayerGraph, rates: RecomputeRates, *, offload: bool = False, cost: str = "seconds"
) -> list[KeepPattern]:
    """Returns the Pareto-optimal choices of the values that a layer keeps for its backward pass, fewest bytes first. No
    other choice is at least as good in all three of device bytes, host bytes and cost of recomputation.

    Args:
        graph: the forward pass of the layer, with the bytes and FLOPs of each value.
        rates: FLOP/s and memory bandwidth of a device.
        offload: whether tensors may be offloaded to host memory.
        cost: the cost of recomputation to minimize: "seconds" or "flops".
    """
    # Of equally good choices, the first one is used. It keeps the values that are computed last.
    everywhere = (KEEP, OFFLOAD, RECOMPUTE) if offload else (KEEP, RECOMPUTE)
    names = list(graph.names)
    while True:
        try:
            front = _explore(graph, rates, dict.fromkeys(names, everywhere), cost)
            break
        except _TooManyStates:
            names = _most_saving_half(graph, rates, names)
    carried = graph.carry_bytes
    bytes_, host, seconds, _, decisions = front
    seconds = seconds + STACKED * carried / rates.memory
    front = front._replace(bytes=bytes_ + carried, seconds=seconds)
    if offload:
        moved = decisions.copy()
        moved[:, -1] = OFFLOAD
        difference = (OFFLOADED - STACKED) * carried / rates.memory
        on_host = front._replace(bytes=bytes_, host=host + carried, seconds=seconds + difference, decisions=moved)
        front = _pareto([front, on_host], cost)
    return [_pattern(graph, front, number) for number in range(len(front.bytes))]


def pattern_keeping(graph: LayerGraph, rates: RecomputeRates, policy: str, names: Collection[str]) -> KeepPattern:
    """Returns the bytes, seconds and FLOPs of a layer under the jax remat policy named `policy`. The policy keeps the
    values called `names` for the backward pass, and all other values are recomputed.
    """
    kept = set(names).union(*(graph.bound.get(name, ()) for name in names))
    front = _explore(graph, rates, dict.fromkeys(kept, (KEEP,)), "seconds")
    front = front._replace(
        bytes=front.bytes + graph.carry_bytes, seconds=front.seconds + STACKED * graph.carry_bytes / rates.memory
    )
    return _pattern(graph, front, 0, policy)


def pattern_keeping_all(graph: LayerGraph, rates: RecomputeRates, policy: str) -> KeepPattern:
    """Returns the bytes and seconds of a layer that is not under `jax.checkpoint`. Such a layer keeps all values that
    its backward pass reads and recomputes nothing. `policy`: the name that the result has as its policy.
    """
    return KeepPattern(graph.none_bytes, STACKED * graph.none_bytes / rates.memory, policy=policy)


class _Front(NamedTuple):
    """Pareto-optimal choices of the named values that a layer keeps, as arrays with one choice per row.

    Fields:
        bytes, host: bytes kept on one device and in host memory.
        seconds, flops: seconds and FLOPs of recomputation. The seconds include moving the kept values.
        decisions: int8 [choices, names + 1], each RECOMPUTE, KEEP or OFFLOAD. The last column is the decision for the
            input of the layer.
    """

    bytes: np.ndarray
    host: np.ndarray
    seconds: np.ndarray
    flops: np.ndarray
    decisions: np.ndarray


class _TooManyStates(Exception):
    """Raised by `_explore` if it would have to follow more than MAX_STATES combinations of choices at once."""


def _explore(graph: LayerGraph, rates: RecomputeRates, allowed: Mapping[str, Sequence[int]], cost: str) -> _Front:
    """Returns the Pareto-optimal choices for the names in `allowed`. The values of all other names are recomputed.

    The steps, which are the equations of the layer, are visited from the last to the first. Choices that need the same
    values from the steps still to visit, and have made the same decisions about them, form a state. All choices of a
    state have the same remaining cost, so only the Pareto-optimal ones are retained.

    `allowed`: name -> its possible decisions (KEEP, OFFLOAD, RECOMPUTE). `cost`: the cost to minimize, "seconds" or
    "flops". Raises _TooManyStates if there are more than MAX_STATES states.
    """
    column = {name: number for number, name in enumerate(graph.names)}
    keepers = graph.keepers
    last_visit: dict[str, int] = {}  # steps are visited from the last to the first
    for number, name in reversed(list(enumerate(keepers))):
        last_visit[name] = number
    empty = np.zeros(1)
    start = _Front(empty, empty, empty, empty, np.zeros((1, len(column) + 1), np.int8))
    states: dict[tuple[frozenset[int], tuple[tuple[str, int], ...]], _Front] = {(frozenset(graph.read), ()): start}
    for number in range(len(graph.steps) - 1, -1, -1):
        step, name = graph.steps[number], keepers[number]
        following: dict[tuple[frozenset[int], tuple[tuple[str, int], ...]], list[_Front]] = {}
        for (needed, decided), front in states.items():
            wanted = [value in needed for value in step.outs]
            known = dict(decided)
            if not any(wanted):
                still = tuple(item for item in decided if last_visit[item[0]] < number)
                following.setdefault((needed, still), []).append(front)
                continue
            options: Sequence[int] = (RECOMPUTE,)
            if name in known:
                options = (known[name],)
            elif name in allowed:
                options = allowed[name]
            for option in options:
                if option == OFFLOAD and name in graph.bound:
                    continue  # the kernel to which the value is bound reads it on the device
                rest = needed.difference(step.outs)
                choices = dict(known)
                if option == RECOMPUTE:
                    flops, seconds = _recompute_cost(step, wanted, rates)
                    after = front._replace(seconds=front.seconds + seconds, flops=front.flops + flops)
                    rest = rest.union(step.ins)
                else:
                    counted = name in known and not step.name  # a kernel whose named result is kept
                    size = 0 if counted else graph.kept_bytes(number)
                    after = _keep_value(front, size, option, column[name], rates)
                if name in allowed:
                    choices[name] = option
                if option == KEEP:
                    choices.update(dict.fromkeys(graph.bound.get(name, ()), KEEP))
                still = tuple(sorted(item for item in choices.items() if last_visit.get(item[0], number) < number))
                following.setdefault((rest, still), []).append(after)
        states = {state: _pareto(fronts, cost) if len(fronts) > 1 else fronts[0] for state, fronts in following.items()}
        if len(states) > MAX_STATES:
            raise _TooManyStates
    return _pareto(list(states.values()), cost)


def _keep_value(front: _Front, size: int, option: int, column: int, rates: RecomputeRates) -> _Front:
    decisions = front.decisions.copy()
    decisions[:, column] = option
    if option == KEEP:
        seconds = front.seconds + STACKED * size / rates.memory
        return front._replace(bytes=front.bytes + size, seconds=seconds, decisions=decisions)
    seconds = front.seconds + OFFLOADED * size / rates.memory
    return front._replace(host=front.host + size, seconds=seconds, decisions=decisions)


def _recompute_cost(step: GraphStep, wanted: Sequence[bool], rates: RecomputeRates) -> tuple[float, float]:
    """Returns (FLOPs, seconds) of computing results of a step again. A step is one equation of the layer, and `wanted`
    has a flag for each of its results.

    A matrix product runs at the FLOP/s of its compute unit. The results of matrix products and named results are also
    written to device memory and read once. Other elementwise work takes no time, because it is assumed to be fused into
    other kernels.
    """
    flops = float(sum(count for count, result in zip(step.flops, wanted) if result))
    for results, count in step.shared:
        flops -= count * max(sum(wanted[number] for number in results) - 1, 0)
    seconds = 0.0
    if step.all_flops:
        seconds += flops / (rates.flops[step.dtype] * rates.devices)
    if step.name or step.all_flops:
        seconds += sum(RECOMPUTED * size / rates.memory for size, result in zip(step.bytes, wanted) if result)
    return flops, seconds


def _pareto(fronts: Sequence[_Front], cost: str) -> _Front:
    """Merges several sets of choices, and drops each choice that another choice equals or beats in bytes, cost and
    host bytes.

    `cost`: "seconds" or "flops", the cost of recomputation to minimize.
    """
    merged = _Front(*(np.concatenate(column) for column in zip(*fronts)))
    first, second = (merged.seconds, merged.flops) if cost == "seconds" else (merged.flops, merged.seconds)
    order = np.lexsort((second, merged.host, first, merged.bytes))
    merged, costs = _rows(merged, order), first[order]
    if merged.host.any():
        useful = _undominated(costs, merged.host)
    else:
        lowest = np.minimum.accumulate(costs)
        useful = np.concatenate([[True], costs[1:] * (1 + ROUNDING) < lowest[:-1]])
    merged, costs = _rows(merged, useful), costs[useful]
    if len(costs) <= MAX_FRONT:
        return merged
    # The cheapest choice in each cell of a grid of bytes and host bytes, and the one with the fewest bytes.
    cells = _cells(merged.bytes) * GRID + _cells(merged.host) if merged.host.any() else _cells(merged.bytes, MAX_FRONT)
    cheapest_first = np.argsort(costs, kind="stable")
    _, cheapest = np.unique(cells[cheapest_first], return_index=True)
    return _rows(merged, np.unique(np.append(cheapest_first[cheapest], 0)))


def _cells(sizes: np.ndarray, count: int = GRID) -> np.ndarray:
    low, high = sizes.min(), sizes.max()
    return np.minimum((sizes - low) * count // max(high - low, 1), count - 1)


def _rows(front: _Front, which: np.ndarray) -> _Front:
    return _Front(*(column[which] for column in front))


def _undominated(costs: np.ndarray, host: np.ndarray, chunk: int = 256) -> np.ndarray:
    """Returns a mask of the Pareto-optimal rows: True for a row if no earlier row is at least as good in cost and host
    bytes. The rows are choices sorted by bytes. `costs`, `host`: cost and host bytes of each row. `chunk`: number of
    rows that are compared at once.
    """
    useful = np.zeros(len(costs), bool)
    kept_costs, kept_host = np.empty(0), np.empty(0)
    for start in range(0, len(costs), chunk):
        own_costs, own_host = costs[start : start + chunk], host[start : start + chunk]
        highest = own_costs[:, None] * (1 + ROUNDING)
        beaten = ((kept_costs <= highest) & (kept_host <= own_host[:, None])).any(1)
        earlier = np.tri(len(own_costs), k=-1, dtype=bool)
        beaten |= ((own_costs <= highest) & (own_host <= own_host[:, None]) & earlier).any(1)
        useful[start : start + chunk] = ~beaten
        kept_costs = np.concatenate([kept_costs, own_costs[~beaten]])
        kept_host = np.concatenate([kept_host, own_host[~beaten]])
    return useful


def _pattern(graph: LayerGraph, front: _Front, number: int, policy: str = "") -> KeepPattern:
    names = (*graph.names, LAYER_INPUT)
    decisions = front.decisions[number]
    return KeepPattern(
        int(front.bytes[number]),
        float(front.seconds[number]),
        int(front.host[number]),
        int(front.flops[number]),
        tuple(name for name, decision in zip(names, decisions) if decision == KEEP),
        tuple(name for name, decision in zip(names, decisions) if decision == OFFLOAD),
        policy,
    )


def _most_saving_half(graph: LayerGraph, rates: RecomputeRates, names: Sequence[str]) -> list[str]:
    nothing = pattern_keeping(graph, rates, "", ())

    def saved_per_byte(name: str) -> float:
        alone = pattern_keeping(graph, rates, "", (name,))
        return (nothing.flops - alone.flops) / max(alone.bytes - nothing.bytes, 1)

    return sorted(names, key=saved_per_byte, reverse=True)[: len(names) // 2]


# ---- all layers ------------------------------------------------------------------------------------------------------


def solve(
    patterns: Sequence[KeepPattern],
    layers: int,
    budget: float,
    passes: PassSeconds = NO_PASSES,
    *,
    cost: str = "time",
    host_budget: float = np.inf,
    ranges: int = MAX_RANGES,
) -> LayerPlan | None:
    """Returns the plan that gives each of `layers` equal layers one of `patterns`, keeps at most `budget` bytes on one
    device and has the lowest cost. Returns None if no plan fits.

    Args:
        patterns: choices of the values that one layer keeps, with their bytes and costs.
        passes: seconds of the forward and the backward pass of all layers, and the rate of transfers to the host, which
            overlap with them (`LayerPlan.seconds`).
        cost: "time" to minimize seconds, or "flops" to minimize recomputed FLOPs regardless of transfers.
        host_budget: bytes of host memory per device.
        ranges: maximum number of different patterns in the plan, 1 or 2.
    """
    if cost != "time":
        passes = PassSeconds()
    forward, backward, link = passes.forward, passes.backward, passes.host_link
    exposed, hidden = passes.exposed, 1 - passes.exposed
    patterns = sorted(patterns, key=lambda pattern: pattern.bytes)
    kept = np.array([pattern.bytes for pattern in patterns], float)
    host = np.array([pattern.host_bytes for pattern in patterns], float)
    moved = host / link if link else np.zeros(len(patterns))
    recomputed = np.array([pattern.seconds if cost == "time" else pattern.flops for pattern in patterns], float)
    columns = np.array([kept, host, moved, recomputed])
    fits_alone = np.flatnonzero(
        kept * layers <= budget
    )  # if a plan of two patterns fits, so does a plan of one of them
    lowest = np.inf, -np.inf  # cost and bytes
    best: tuple[int, int, int] | None = None  # the indices of two patterns, and the number of layers with the first
    for start in range(0, len(fits_alone), CHUNK):
        first = fits_alone[start : start + CHUNK, None]
        second = np.arange(len(patterns))[None] if ranges > 1 else first
        # Each sum over all layers is linear in the number of layers that have the first pattern, and the cost is
        # convex in this number. So the minimum is where a budget is used up, at a bend of the cost, or at an end.
        if_none, step = layers * columns[:, second], columns[:, first] - columns[:, second]
        with np.errstate(divide="ignore", invalid="ignore"):
            points = [(budget - if_none[0]) / step[0]]
            if np.isfinite(host_budget):
                points.append((host_budget - if_none[1]) / step[1])
            if link:
                points.append((forward - hidden * if_none[2]) / (hidden * step[2]))
                points.append((backward + if_none[3] - hidden * if_none[2]) / (hidden * step[2] - step[3]))
        points = np.clip(np.nan_to_num(points), 0, layers)
        ends = np.full_like(points[:1], layers)
        counts = np.concatenate([np.floor(points), np.ceil(points), 0 * ends, ends])
        kept_sum = if_none[0] + counts * step[0]
        moved_sum = if_none[2] + counts * step[2] if link else 0.0
        recomputed_sum = if_none[3] + counts * step[3]
        waiting = exposed * moved_sum
        costs = np.maximum(forward + waiting, moved_sum) + np.maximum(backward + recomputed_sum + waiting, moved_sum)
        costs[kept_sum > budget] = np.inf
        if np.isfinite(host_budget):
            costs[if_none[1] + counts * step[1] > host_budget] = np.inf
        cheapest = np.flatnonzero(costs == costs.min())
        chosen = cheapest[np.argmin(kept_sum.ravel()[cheapest])]
        if (costs.flat[chosen], kept_sum.flat[chosen]) < lowest:
            lowest = costs.flat[chosen], kept_sum.flat[chosen]
            _, row, column = np.unravel_index(chosen, costs.shape)
            other = int(column) if ranges > 1 else int(first[row, 0])
            best = int(first[row, 0]), other, int(counts.flat[chosen])
    if best is None:
        return None
    one, other, count = best
    if one == other:
        return LayerPlan(((patterns[one], layers),))
    # Layers that keep the most come last: their tensors are the first that the backward pass frees.
    used = sorted([(one, count), (other, layers - count)])
    return LayerPlan(tuple((patterns[number], count) for number, count in used if count))
