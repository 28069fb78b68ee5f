"""The document of `bytescope calibrate`: the measured rate of each kernel and its share of the data sheet's
rate."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from bytescope.memory.cost.collectives import WIRE
from bytescope.memory.devices.targets import Target
from bytescope.memory.seconds.calibration.cases import (
    ATTENTION,
    COLLECTIVES,
    FLOOR,
    HOST_LINK,
    MEMORY,
    PARTS,
    PRODUCTS,
    SHORT,
    TO_DEVICE,
    TO_HOST,
)
from bytescope.memory.seconds.calibration.host_measure import HostSample
from bytescope.memory.seconds.calibration.measure import Calibration, Sample
from bytescope.memory.units import human, list_names
from bytescope.memory.view.document import Card, Paragraph, ResultDocument, Rows
from bytescope.memory.view.table_model import ColumnView, TableView

_T, _G = 1e12, 1e9
# A median spread above this fraction means that other programs ran on the devices or the host.
_BUSY = 0.2


RATE_COLUMNS = (
    ColumnView("kernel", "kernel", min_width=17),
    ColumnView("size", "size", min_width=12),
    ColumnView("seconds", "time", "number", read=lambda row: _time(row["seconds"])),
    ColumnView("spread", "spread", "share", digits=0),
    ColumnView("rate", "rate", "number"),
    ColumnView("sheet", "sheet", "number"),
    ColumnView("share", "share", "share", digits=0),
)
HOST_COLUMNS = (
    ColumnView("words", "host memory", min_width=17),
    ColumnView("bytes", "measured", "bytes"),
    ColumnView("reference", "shipped", "bytes"),
    ColumnView("ratio", "ratio", "ratio", digits=2, read=lambda sample: sample.bytes / sample.reference),
)


def document(calibration: Calibration, target: Target) -> ResultDocument:
    """Returns the measured rates of a device as a table, followed by notes on what was not measured and why.

    A measured rate is work (FLOPs or bytes) divided by seconds, including the fixed cost of starting a kernel. Rates
    from the data sheet are for one device.

    target: the measured device, whose data sheet rates are shown if they are known.
    """
    rows = []
    for sample in sorted(calibration.samples, key=_sort_key):
        name, size = _NAMES[sample.part](sample)
        row = {"kernel": name, "size": size, "seconds": sample.seconds, "spread": sample.spread}
        rate, sheet = _measured_rate(sample), _sheet(sample, target)
        if rate:
            row["rate"] = _rate_text(rate, sample)
        if rate and sheet:
            row |= {"sheet": _rate_text(sheet, sample).partition(" ")[0], "share": rate / sheet}
        rows.append(row)
    title = Paragraph(f"measured rates of one device: {calibration.rates.source}", "strong")
    return ResultDocument([Card("", [title, Rows(TableView(RATE_COLUMNS, rows)), *_notes(calibration)])])


def host_document(samples: Sequence[HostSample], left_out: Mapping[str, str]) -> ResultDocument:
    """Returns measured sizes of host memory beside the sizes that the shipped constants stand for.

    samples: the measured sizes. left_out: what was not measured -> reason.
    """
    notes = [Paragraph(f"not measured: {name}: {reason}", "tight") for name, reason in left_out.items()]
    return ResultDocument([Card("Host memory", [Rows(TableView(HOST_COLUMNS, samples)), *notes])])


def _sort_key(sample: Sample) -> tuple:
    return (
        PARTS.index(sample.part),
        tuple((str(part), 0) if isinstance(part, str) else ("", part) for part in sample.key),
        sample.size,
    )


def _notes(calibration: Calibration) -> Iterator[Paragraph]:
    yield Paragraph(
        "spread: interquartile range / median; sheet: rate of the data sheet, in the unit of the measured rate", "dim"
    )
    spreads = [sample.spread for sample in calibration.samples if sample.spread is not None]
    if spreads and (middle := statistics.median(spreads)) > _BUSY:
        yield Paragraph(
            f"half of the spreads are above {middle:.0%}: other programs ran on this machine; measure without them",
            "tight",
        )
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, why in calibration.left_out.items():
        reasons[why].append(name)
    for why, names in reasons.items():
        yield Paragraph(f"not measured: {list_names(names)}: {why}", "tight")


def _measured_rate(sample: Sample) -> float:
    # Samples so small measure latency.
    if not sample.work or (sample.part in (COLLECTIVES, HOST_LINK) and sample.size <= SHORT):
        return 0.0
    # The rate of a collective is the bytes/s that one device sends.
    share = WIRE[sample.key[0]](sample.key[1]) if sample.part == COLLECTIVES else 1.0
    return share * sample.work / sample.seconds


# Part -> the data sheet's rate, 0 if it has none. Attention runs in bfloat16 on devices with bfloat16 units.
_SHEET: Mapping[str, Callable[[Sample, Target], float]] = {
    PRODUCTS: lambda sample, target: target.peak_flops.get(sample.key[0], 0.0),
    ATTENTION: lambda sample, target: target.peak_flops.get("bf16", 0.0),
    MEMORY: lambda sample, target: target.hbm_bytes_per_s,
    COLLECTIVES: lambda sample, target: target.interconnect_bytes_per_s.get("in_host", 0.0),
    HOST_LINK: lambda sample, target: target.host_link_bytes_per_s,
}


def _sheet(sample: Sample, target: Target) -> float:
    return _SHEET[sample.part](sample, target) if sample.part in _SHEET else 0.0


def _rate_text(rate: float, sample: Sample) -> str:
    unit = "FLOP/s" if sample.part in (PRODUCTS, ATTENTION) else "B/s"
    if sample.part in (COLLECTIVES, HOST_LINK) or rate < _T:
        return f"{rate / _G:,.3g} G{unit}"
    return f"{rate / _T:,.4g} T{unit}"


def _time(value: float) -> str:
    return f"{value * 1e3:,.4g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


_WAYS = {"forward": "attention fwd", "backward": "attention bwd"}
_COPIES = {TO_HOST: "device to host", TO_DEVICE: "host to device"}
_NAMES: Mapping[str, Callable[[Sample], tuple[str, str]]] = {
    PRODUCTS: lambda s: (f"product, {s.key[0]}", f"{s.size} cubed"),
    ATTENTION: lambda s: (
        _WAYS[s.key[0].removesuffix("_causal")],
        f"{s.size}x{s.key[1]} causal" if s.key[0].endswith("_causal") else f"{s.size}x{s.key[1]}",
    ),
    MEMORY: lambda s: (f"memory, {s.key[0]}", human(s.size)),
    FLOOR: lambda s: ("chained kernel", ""),
    COLLECTIVES: lambda s: (f"{s.key[0].removeprefix('collective-')} x{s.key[1]}", human(s.size)),
    HOST_LINK: lambda s: (_COPIES[s.key[0]], human(s.size)),
}
