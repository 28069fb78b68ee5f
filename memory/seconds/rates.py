"""Selects the rates for a prediction: of a target's chip, of this machine, or of a measured rates file.

The rates come from the table of `achieved` for the chip of a target, from this machine for a CPU, or from a file that
`bytescope calibrate` wrote. The roofline bound uses the peaks of data sheets instead (cost.roofline).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.cost import roofline
from bytescope.memory.errors import ReportError, check_readable, in_one_line
from bytescope.memory.host.host_terms import use_host_rates
from bytescope.memory.records.result import is_count, parse
from bytescope.memory.records.result_envelope import unwrap
from bytescope.memory.seconds import chip_rates
from bytescope.memory.seconds.rate_records import WAYS, DeviceRates, from_json

if TYPE_CHECKING:
    from bytescope.memory.devices.targets import Target

# Seconds that XLA's CPU runtime takes to start a kernel on one thread (a call through its table of thunks).
_CPU_FLOOR_SECONDS = 1e-6


def load(path: str | Path) -> DeviceRates:
    """Returns the rates in a file that `bytescope calibrate` wrote. Raises ReportError if the file does not exist or
    is damaged.
    """
    try:
        check_readable(path)
        return from_json(unwrap(parse(Path(path).read_bytes()), "calibrate"))
    except OSError as error:
        raise ReportError(
            f"cannot read {path}: {error.strerror}: give the file that bytescope calibrate wrote"
        ) from error
    except ReportError as error:
        raise ReportError(f"{path}: {error}") from error
    except ValueError as error:
        raise ReportError(
            f"{path} is not JSON ({in_one_line(str(error)):.60}): write it again with bytescope calibrate"
        ) from error


# The measured rates file (--rates=FILE) and its rates; None for the built-in table of chips.
_CHOSEN: ContextVar[tuple[Path, DeviceRates] | None] = ContextVar("rates file", default=None)


def use(path: str | Path | None) -> DeviceRates | None:
    """Sets the measured rates file that the current context uses for predictions, and returns its rates. If the file
    has constants of the host ledger, the ledger uses them. None restores the built-in table of chips and the shipped
    constants.

    Raises ReportError if the file does not contain rates.
    """
    rates = load(path) if path is not None else None
    _CHOSEN.set((Path(path).absolute(), rates) if path is not None and rates is not None else None)
    use_host_rates(rates.host if rates is not None else None)
    return rates


def chosen() -> Path | None:
    """Returns the absolute path of the rates file that `use` set, for passing it to other processes; None if there is
    none.
    """
    given = _CHOSEN.get()
    return given[0] if given is not None else None


def digest() -> str:
    """Returns a hex digest of the rates that `use` set, for the key of a cache that depends on them; "" if there are
    none.
    """
    given = _CHOSEN.get()
    if given is None:
        return ""
    return hashlib.sha256(json.dumps(given[1].to_json(), sort_keys=True).encode()).hexdigest()


def select(target: Target | Mapping[str, Any]) -> DeviceRates | None:
    """Returns the compute and transfer rates for a target or its JSON; None for an accelerator without known rates.

    The rates come from the file that `use` set, or else from the built-in table of chips. Without a file, the rates of
    a CPU are measured on this machine. Collectives that a file lacks are taken from the table.

    Raises ReportError if the target is damaged, or if the file was measured on another kind of device.
    """
    known = target if isinstance(target, Mapping) else target.to_json()
    given = _CHOSEN.get()
    if given is not None:
        return for_target(given[1], known)
    if known.get("platform") == "cpu":
        return _measure_cpu_rates(known)
    return chip_rates.rates_of_kind(str(known.get("kind")))


def for_target(rates: DeviceRates, known: Mapping[str, Any]) -> DeviceRates:
    """Returns measured rates for the devices of a target: CPU devices share the rates of the CPU, and collectives that
    were not measured are taken from the table of chips.

    Args:
        rates: the content of a rates file.
        known: the JSON of the target.

    Raises ReportError if the rates were measured on another kind of device.
    """
    refuse(rates, known)
    if known.get("platform") == "cpu":
        return rates.shared(_count(known, "n_devices"))
    listed = chip_rates.rates_of_kind(str(known.get("kind")))
    hosts = _count(known, "n_devices") / _count(known, "devices_per_host")
    return rates.completed(listed, math.ceil(hosts)) if listed is not None else rates


def refuse(rates: DeviceRates, known: Mapping[str, Any]) -> None:
    """Checks that the rates were measured on the same kind of device (jax's device_kind) as the target has. Raises
    ReportError if not.

    `known`: the JSON of the target.
    """
    device = rates.measured.get("device", known.get("kind"))
    if device != known.get("kind"):
        raise ReportError(
            f"the rates were measured on {device}, but {known.get('name')} is {known.get('kind')}: leave --rates "
            f"out, or give the file that bytescope calibrate writes on {known.get('kind')}"
        )


def _measure_cpu_rates(known: Mapping[str, Any]) -> DeviceRates:
    # The rates of one of the simulated devices, which share the cores. A collective between them is a copy in memory.
    flops, copied = (rate / _count(known, "n_devices") for rate in roofline.machine_rates())
    product, moved = ((1.0, flops),), ((1.0, copied),)
    return DeviceRates(
        source=roofline.MEASURED,
        peak_flops={"fp32": flops},
        products={"fp32": product},
        attention={way: {128: product} for way in WAYS},
        memory=moved,
        floor_seconds=_CPU_FLOOR_SECONDS,
        host_link_bytes_per_s=copied,
        memory_slowdown=1.0,  # constants.MEMORY describes the caches of GPUs; the roofline has these rates too
    )


def _count(known: Mapping[str, Any], field: str) -> int:
    count = known.get(field, 1)
    if not is_count(count):
        raise ReportError(f"the report is damaged (target.{field} is {count!r:.40}): write it again")
    return max(count, 1)
