"""Ranks programs by their predicted seconds, and decides which predictions are a tie.

The spread of a prediction is its error against one run. Programs of one model on one target share most of this error
(the rates, the clock, the libraries), so their difference is more precise: predictions within `TIE` are a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from bytescope.memory.cost import roofline
from bytescope.memory.seconds import rates as device_rates
from bytescope.memory.seconds import step_prediction
from bytescope.memory.seconds.rate_records import at

# Relative difference below which predictions are a tie, because equal runs differ by about as much. Of 13 pairs of
# runs on eight H100 that differ only in ZeRO 0 or 1, four of five differ by less than 3.7 % (Ultra-Scale Playbook,
# 2025).
TIE = 0.03
# Sizes at which a device reaches its maximum rates: the side of a cube (matrix product), and bytes that a kernel
# moves.
LARGE_SIDE, LARGE_BYTES = 8192, 2**28

Item = TypeVar("Item")


def fields(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Predicts the seconds, tokens/s and MFU of one compiled program. Returns them as keyword arguments for the row of
    a comparison table: field of `memory.compare.compare_rows.Row` -> value. Fields without a value are left out. If the
    seconds cannot be predicted, the field `unpredicted` has the reason.

    `answer`: the JSON that the process which compiled the program returned, with its schedule and target.
    """
    prediction = step_prediction.predict_answer(answer)
    bound = step_prediction.bound(answer, prediction)
    out: dict[str, Any] = {}
    if bound is not None:
        out["least_seconds"] = answer.get("calls_per_update", 1) * bound.total
    if prediction is not None:
        out |= {
            "predicted_seconds": prediction.seconds,
            "predicted_seconds_low": prediction.low,
            "predicted_seconds_high": prediction.high,
            "predicted_tokens_per_s": prediction.tokens_per_s,
            "predicted_mfu": prediction.mfu,
            "predicted_by_term": dict(prediction.by_term),
            "rates": prediction.rates,
        }
    elif answer.get("status") == "ok" and answer.get("target"):
        out["unpredicted"] = (
            step_prediction.missing(bool(answer.get("schedule")), answer["target"])
            or "nothing in this program takes time"
        )
    return out


def preferred(items: Iterable[Item], seconds: Callable[[Item], float], otherwise: Callable[[Item], Any]) -> Item | None:
    """Returns the item with the fewest seconds; None if there are no items. Items whose seconds are within the fraction
    `TIE` of the fewest are equally fast. Among them, the item with the smallest value of `otherwise` is returned.

    `seconds`, `otherwise`: functions from an item to its seconds and to a value that can be compared.
    """
    return min(ties(items, seconds), key=lambda item: (otherwise(item), seconds(item)), default=None)


def ties(items: Iterable[Item], seconds: Callable[[Item], float]) -> list[Item]:
    """Returns the items that are as fast as the fastest one, except for a difference of at most the fraction `TIE`, in
    their original order. `seconds`: function from an item to its seconds.
    """
    known = list(items)
    most = min(map(seconds, known), default=math.inf) * (1 + TIE)
    return [item for item in known if seconds(item) <= most]


def large(target: Any) -> roofline.Figures | None:
    """Returns the rates (FLOP/s and bytes per second) that the target's devices reach with large matrix products,
    copies and messages. They are lower than the peak rates of the data sheet. Returns None if the target has no rates.

    `target`: a `memory.devices.targets.Target` or its JSON.
    """
    rates, peaks = device_rates.select(target), roofline.figures(target)
    if rates is None or peaks is None:
        return None
    units = {unit: at(curve, LARGE_SIDE) for unit, curve in rates.products.items()}
    return roofline.Figures(
        units,
        at(rates.memory, LARGE_BYTES),
        rates.host_link_bytes_per_s,
        peaks.interconnect_bytes_per_s,
        rates.source,
    )
