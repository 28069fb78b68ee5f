"""MaxText's training step beside ours, compiled for the same described GPUs.

    python tests/bench/peers.py                           # in an environment with MaxText, many hours
    python tests/bench/peers.py --only=llama2-7b          # rows whose name contains a text
    python tests/bench/peers.py --show --html=peers.html  # compiles nothing, shows the finished cells
    python tests/bench/peers.py --again                   # compiles failed cells again

Each row of ROWS is one task: model, sequence length, sequences per device, devices, remat policy, and layers in a loop
(scanned) or unrolled. It has up to four cells: MaxText with its defaults; MaxText with `param_scan_axis=0`, which
applies to scanned layers only; our step matched (logits in bfloat16 and a loss over all logits, as in MaxText); and
our step with the loss of our shipped config. All cells of a row have the same batch, compute dtype, mesh (FSDP over all
devices), optimizer (AdamW in float32) and remat policy. MaxText's better setting is chosen for each figure of each row.
Rows are never removed: a row that cannot be compiled shows its error.

Each cell is compiled in a process of its own, and is then appended to the file of --cells, so that an interrupted run
loses one cell at most, and the next run continues after it. A cell that is not finished after --limit minutes is
recorded as such. To compile the rows of a newer version, name a new file. The same code compiles both trainers and
reads their figures. Machine code is not generated, and jax's compilation cache is off. Kernels that one cell emitted
are reused, so the first cell with a kernel takes longer. The share of recomputation is of all FLOPs of a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "upstream"))

from bytescope.memory.units import GIB
from bytescope.memory.view.frame import environment
from bytescope.memory.view.table_model import TERMINAL, ColumnView, TableView
from bytescope.memory.view.table_views import page_table

# Model -> (tokens of a sequence, our config, our keys that make it the same model).
MODELS: Mapping[str, tuple[int, str, Mapping[str, str]]] = {
    "llama2-7b": (
        4096,
        "llama_8b",
        {
            "model.n_kv_heads": "32",
            "model.d_ff": "11008",
            "model.vocab_size": "32000",
            "model.rope_theta": "10000.0",
            "model.rope_scaling": "()",
        },
    ),
    "llama3-8b": (8192, "llama_8b", {"model.rope_scaling": "()"}),
    "llama3-70b": (8192, "llama_70b", {"model.rope_scaling": "()"}),
    "mixtral-8x7b": (
        4096,
        "mixtral_8x7b",
        {"optimizer.name": "adamw", "model.capacity_factor": "0.0", "mesh.expert": "1", "loss.balance": "0.0"},
    ),
}
# Remat policy of MaxText -> the tensors that our policy saves; None for our policy of the same name. MaxText's
# `minimal` also names the output of the MLP, which no gradient of a dense layer reads. In a layer with experts it keeps
# one of the two products (`mlpwi_0`).
_PROJECTIONS = ("q_rot", "k_rot", "v")
POLICIES: Mapping[str, tuple[str, ...] | None] = {
    "full": None,
    "save_qkv_proj": _PROJECTIONS,
    "minimal": (*_PROJECTIONS, "attn_out", "gate", "up"),
    "minimal_with_context": (*_PROJECTIONS, "attn_out", "gate", "up", "context"),
    "none": None,
}
MINIMAL_WITH_EXPERTS = (*_PROJECTIONS, "attn_out", "expert_gate")


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row's difference from the usual settings: MaxText's keys, and our keys for the same."""

    maxtext: Mapping[str, str]
    ours: Mapping[str, str]


VARIANTS: Mapping[str, Variant] = {
    "": Variant({}, {}),
    "naive attention": Variant({"attention": "dot_product"}, {"model.attention": "naive"}),
    # MaxText computes the loss in 8 parts, our chunked loss in chunks of as many tokens.
    "loss in 8 parts": Variant({"num_vocab_tiling": "8"}, {"loss.kind": "chunked"}),
    # Each expert computes at most 1.25 times the mean number of rows; the others are dropped.
    "capacity 1.25": Variant(
        {"sparse_matmul": "false", "megablox": "false", "capacity_factor": "1.25"},
        {"model.moe_kernel": "capacity", "model.capacity_factor": "1.25"},
    ),
    # On a GPU, MaxText interprets its Pallas kernel (maxtext/layers/moe.py, megablox_interpret): a loop over tiles. The
    # number of turns depends on the routing, so FLOPs and seconds count one turn. Here both call jax.lax.ragged_dot.
    "ragged_dot": Variant({"megablox": "false"}, {"model.moe_kernel": "ragged"}),
}


@dataclasses.dataclass(frozen=True)
class PeerRow:
    """One task that both trainers compile.

    Fields:
        model: MaxText's name of the model, a key of MODELS.
        target: the devices, such as "h100:8".
        policy: MaxText's remat policy, a key of POLICIES.
        scan: whether the layers run in a loop.
        sequences: sequences per device.
        variant: a key of VARIANTS.
    """

    model: str
    target: str
    policy: str
    scan: bool = True
    sequences: int = 1
    variant: str = ""


# Fixed before any figure of this script was seen. The rows that take hours come last.
ROWS: tuple[PeerRow, ...] = (
    *(
        PeerRow("llama2-7b", "h100:8", policy)
        for policy in ("full", "save_qkv_proj", "minimal", "minimal_with_context", "none")
    ),
    PeerRow("llama2-7b", "h100:8", "full", variant="naive attention"),
    *(PeerRow("llama2-7b", "h100:8", policy, scan=False) for policy in ("full", "minimal_with_context")),
    *itertools.chain.from_iterable(
        (
            PeerRow("llama3-8b", "h100:8", "full", sequences=sequences),
            PeerRow("llama3-8b", "h100:8", "minimal_with_context", sequences=sequences),
            PeerRow("llama3-8b", "h100:8", "full", sequences=sequences, variant="loss in 8 parts"),
            PeerRow("llama3-8b", "h100:8", "full", scan=False, sequences=sequences),
        )
        for sequences in (1, 2)
    ),
    PeerRow("llama3-70b", "h100:8x8", "full"),
    PeerRow("mixtral-8x7b", "h100:2x8", "full"),
    PeerRow("mixtral-8x7b", "h100:2x8", "minimal"),
    PeerRow("mixtral-8x7b", "h100:2x8", "full", variant="capacity 1.25"),
    PeerRow("mixtral-8x7b", "h100:2x8", "full", scan=False),
    PeerRow("mixtral-8x7b", "h100:2x8", "minimal", scan=False),
    PeerRow("llama3-70b", "h100:8x8", "full", scan=False),
    # Added later, because the seconds of the other rows of Mixtral without a capacity cannot be compared.
    PeerRow("mixtral-8x7b", "h100:2x8", "full", variant="ragged_dot"),
    PeerRow("mixtral-8x7b", "h100:2x8", "minimal", variant="ragged_dot"),
)

# ---- Cells -----------------------------------------------------------------------------------------------------------

# Cells that were compiled for RESULTS.md.
CELLS = Path(__file__).with_suffix(".jsonl")
DEFAULTS, BY_LAYER, MATCHED, CONFIG_LOSS = "MaxText", "MaxText by layer", "ours matched", "ours"


def settings_of(row: PeerRow) -> tuple[str, ...]:
    """Returns the names of a row's cells."""
    return (MATCHED, DEFAULTS, *((BY_LAYER,) if row.scan else ()), CONFIG_LOSS)


def name_of(row: PeerRow) -> str:
    """Returns the name of a row, such as "llama3-8b full, unrolled, 2 sequences"."""
    words = [f"{row.model} {row.policy}"]
    if not row.scan:
        words.append("unrolled")
    if row.sequences > 1:
        words.append(f"{row.sequences} sequences")
    return ", ".join((*words, *filter(None, (row.variant,))))


def maxtext_keys(row: PeerRow, setting: str) -> dict[str, str]:
    """Returns MaxText's keys for a cell. The state is sharded over all devices, also over several hosts."""
    hosts = row.target.partition(":")[2].partition("x")
    keys = {
        "config": f"maxtext:{row.model}",
        "max_target_length": str(MODELS[row.model][0]),
        "per_device_batch_size": str(row.sequences),
        "remat_policy": row.policy,
        "scan_layers": str(row.scan).lower(),
        "attention": "cudnn_flash_jax",
    }
    if hosts[2]:
        keys |= {"dcn_fsdp_parallelism": hosts[0], "dcn_data_parallelism": "1"}
    if setting == BY_LAYER:
        keys["param_scan_axis"] = "0"
    return keys | VARIANTS[row.variant].maxtext


def our_keys(row: PeerRow, setting: str) -> dict[str, str]:
    """Returns the keys of our config for a cell."""
    tokens, config, same_model = MODELS[row.model]
    names = POLICIES[row.policy]
    if row.policy == "minimal" and row.model.startswith("mixtral"):
        names = MINIMAL_WITH_EXPERTS
    keys = {
        "config": config,
        "data.seq_len": str(tokens),
        "batch.micro": str(row.sequences),
        "model.scan": str(row.scan),
        "model.attention": "cudnn",
        "remat.policy": row.policy if names is None else "custom",
        **same_model,
    }
    if names is not None:
        keys["remat.save"] = f"({','.join(names)})"
    if setting == MATCHED:
        keys |= {"precision.logits": "bfloat16", "loss.kind": "full"}
    keys |= VARIANTS[row.variant].ours
    if row.variant == "loss in 8 parts":
        keys["loss.chunk"] = str(row.sequences * tokens // 8)
    return keys


@dataclasses.dataclass(frozen=True)
class Cell:
    """A compiled step, or the reason why there is none. All figures are for one device and one step.

    Fields:
        row, setting: the name of the row, and the name of the cell in this row.
        error: the reason why the step was not compiled; "" if it was. All figures are then 0.
        allocated_bytes, temp_bytes: bytes of all buffers; of the temporary buffers.
        flops, recomputed: FLOPs; the share of recomputation (0 to 1).
        sent: kind of collective -> bytes that a device sends.
        seconds: predicted seconds of a step.
        compile_seconds: seconds to trace and compile the step.
        versions: package -> version.
    """

    row: str
    setting: str
    error: str = ""
    allocated_bytes: int = 0
    temp_bytes: int = 0
    flops: float = 0
    recomputed: float = 0
    sent: Mapping[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0
    compile_seconds: float = 0
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)


def compile_cell(row: PeerRow, setting: str, report_file: str) -> Cell:
    """Compiles the step of a cell in this process. Its report is saved as JSON if `report_file` is not empty."""
    from measure_maxtext import compile_report, recomputed_share

    from bytescope.memory.adapters import maxtext
    from bytescope.train.plan import config_factory

    if setting in (DEFAULTS, BY_LAYER):
        step = compile_report(maxtext.FACTORY, maxtext_keys(row, setting), row.target)
    else:
        step = compile_report(config_factory.FACTORY, our_keys(row, setting), row.target)
    report = step.report
    if report_file:
        report.save(report_file)
    sent: dict[str, int] = {}
    for collective in report.collectives:
        sent[collective.kind] = sent.get(collective.kind, 0) + collective.times * collective.wire_bytes
    return Cell(
        name_of(row),
        setting,
        allocated_bytes=report.allocated_bytes,
        temp_bytes=report.xla.temp_bytes or 0,
        flops=sum(sum(work.get("flops", {}).values()) for work in report.work.values()),
        recomputed=recomputed_share(report),
        sent=sent,
        seconds=report.prediction["seconds"],
        compile_seconds=step.seconds,
        versions=report.versions,
    )


def run_cell(row: PeerRow, setting: str, report_file: str, limit: float) -> Cell:
    """Compiles a cell in a process of its own, for at most `limit` minutes."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "cell.json")
        # -P: tests/bench/maxtext.py must not hide the package maxtext.
        command = [sys.executable, "-P", __file__, "--cell", str(ROWS.index(row)), setting, report_file, str(result)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        try:
            done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=60 * limit)
        except subprocess.TimeoutExpired:
            return Cell(name_of(row), setting, f"not compiled after {limit:g} minutes")
        if not result.exists():
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return Cell(name_of(row), setting, lines[-1][:300])
        return Cell(**json.loads(result.read_text()))


def read_cells(path: Path) -> dict[tuple[str, str], Cell]:
    """Reads a file of cells, (row, setting) -> cell. The last line of a cell counts. A partial last line, from an
    interrupted run, is ignored."""
    cells: dict[tuple[str, str], Cell] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            cell = Cell(**json.loads(line))
        except json.JSONDecodeError:
            continue
        cells[cell.row, cell.setting] = cell
    return cells


def missing_cells(
    rows: Sequence[PeerRow], finished: Mapping[tuple[str, str], Cell], again: bool = False
) -> Iterator[tuple[PeerRow, str]]:
    """Yields (row, setting) of the cells to compile, in the order of the rows. again: also the failed cells."""
    for row in rows:
        for setting in settings_of(row):
            cell = finished.get((name_of(row), setting))
            if cell is None or (again and cell.error):
                yield row, setting


def compile_missing(rows: Sequence[PeerRow], path: Path, reports: Path | None, limit: float, again: bool) -> None:
    """Compiles the missing cells of rows, one after the other, and appends each to the file."""
    if path.exists() and not path.read_text().endswith("\n"):
        with path.open("a") as file:
            file.write("\n")  # ends the partial line of an interrupted run
    for row, setting in list(missing_cells(rows, read_cells(path), again)):
        report_file = str(reports / f"{name_of(row)}, {setting}.json".replace(" ", "_")) if reports else ""
        began = time.perf_counter()
        cell = run_cell(row, setting, report_file, limit)
        with path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(cell)) + "\n")
        figures = cell.error or f"{cell.allocated_bytes / GIB:.2f} GiB, {cell.seconds:.3f} s"
        print(f"{cell.row}, {setting}: {figures} ({time.perf_counter() - began:.0f} s)", flush=True)


# ---- Table and page --------------------------------------------------------------------------------------------------

# Aims of a row against MaxText's better setting, and of the median of all rows against its defaults.
MAX_BYTES, MAX_SECONDS, MAX_MEDIAN_OF_DEFAULTS = 1.0, 1.02, 0.9
FIGURES: Mapping[str, str] = {"allocated_bytes": "allocated bytes", "seconds": "predicted seconds"}
_KINDS = (
    *(("all-gather", "gather"), ("reduce-scatter", "scatter"), ("all-reduce", "reduce")),
    *(("all-to-all", "to all"), ("ragged-all-to-all", "ragged to all"), ("collective-permute", "permute")),
)
# The Markdown table has bytes in GiB, without a unit in the cells. On the page each value has its own unit.
COLUMNS = (
    ColumnView("row", "row"),
    ColumnView("setting", "step"),
    ColumnView("allocated_bytes", "allocated", "bytes", short="allocated GiB", skip_zero=True),
    ColumnView("temp_bytes", "temp", "bytes", short="temp GiB", skip_zero=True),
    ColumnView("flops", "TFLOP", "ratio", digits=1, read=lambda cell: cell.flops / 1e12 or None),
    ColumnView("recomputed", "recomputed", "share", read=lambda cell: None if cell.error else cell.recomputed),
    ColumnView("all", "sent", "bytes", short="sent GiB", read=lambda cell: sum(cell.sent.values()) or None),
    *(
        ColumnView(kind, title, "bytes", short=f"{title} GiB", path=f"sent.{kind}", skip_zero=True)
        for kind, title in _KINDS
    ),
    ColumnView("seconds", "predicted s", "ratio", skip_zero=True),
    ColumnView("compile_seconds", "compile s", "ratio", digits=0, skip_zero=True),
    ColumnView("error", "error"),
)
RATIOS = (
    ColumnView("row", "row"),
    ColumnView("setting", "step"),
    ColumnView("bytes", "allocated bytes by the better", "ratio", path="better.allocated_bytes"),
    ColumnView("time", "predicted seconds by the better", "ratio", path="better.seconds"),
    ColumnView("bytes_of_defaults", "allocated bytes by the defaults", "ratio", path="defaults.allocated_bytes"),
    ColumnView("time_of_defaults", "predicted seconds by the defaults", "ratio", path="defaults.seconds"),
    ColumnView("missed", "misses an aim", read=lambda ratios: ", ".join(ratios.missed)),
)
# The page uses the styles and the script of documents: tables that can be sorted, and no chart.
PAGE_NAME = "document"
TEMPLATE = """{% extends "frame.html" %}
{% import "elements.html" as ui %}
{% block body %}
{% call ui.card("Summary") %}<ul>{% for line in summary %}<li>{{ line }}</li>{% endfor %}</ul>{% endcall %}
{% call ui.card("Ours divided by MaxText", "The better of MaxText's settings is chosen for each figure of each row.") %}
{{ ui.table(ratios, "ratios", "sortable") }}
{% endcall %}
{% call ui.card("Cells", "Figures of one device and one step. Bytes sent are by kind of collective.") %}
{{ ui.table(cells, "cells", "sortable") }}
{% endcall %}
{% endblock %}
"""


@dataclasses.dataclass(frozen=True)
class Ratios:
    """One of our steps in a row, divided by MaxText's.

    Fields:
        row, setting: the name of the row, and MATCHED or CONFIG_LOSS.
        better: figure -> our value divided by MaxText's better setting for this figure.
        defaults: figure -> our value divided by MaxText's defaults; {} if these were not compiled.
    """

    row: str
    setting: str
    better: Mapping[str, float]
    defaults: Mapping[str, float]

    @property
    def missed(self) -> list[str]:
        """Returns the figures that miss their aims."""
        limits = {"allocated_bytes": MAX_BYTES, "seconds": MAX_SECONDS}
        return [FIGURES[figure] for figure, limit in limits.items() if self.better[figure] > limit]


def ratios_of(rows: Sequence[PeerRow], cells: Mapping[tuple[str, str], Cell]) -> list[Ratios]:
    """Compares our steps with MaxText's, in the order of the rows. Left out are steps that were not compiled, and rows
    in which MaxText has no compiled step."""
    ratios = []
    for row in rows:
        compiled = {setting: cells.get((name_of(row), setting)) for setting in settings_of(row)}
        compiled = {setting: cell for setting, cell in compiled.items() if cell is not None and not cell.error}
        theirs = [compiled[setting] for setting in (DEFAULTS, BY_LAYER) if setting in compiled]
        for setting in (MATCHED, CONFIG_LOSS):
            if setting not in compiled or not theirs:
                continue
            better, defaults = {}, {}
            for figure in FIGURES:
                value = getattr(compiled[setting], figure)
                better[figure] = value / min(getattr(cell, figure) for cell in theirs)
                if DEFAULTS in compiled:
                    defaults[figure] = value / getattr(compiled[DEFAULTS], figure)
            ratios.append(Ratios(name_of(row), setting, better, defaults))
    return ratios


def summary_of(rows: Sequence[PeerRow], cells: Mapping[tuple[str, str], Cell]) -> list[str]:
    """Returns sentences about all rows: numbers of cells, medians and ranges of the ratios, and missed aims."""
    ratios = ratios_of(rows, cells)
    missing = sum(1 for _ in missing_cells(rows, cells))
    failed = sum(bool(cell.error) for cell in cells.values())
    lines = [f"{len(cells) - failed} cells are compiled, {failed} failed, {missing} are missing"]
    for setting in (MATCHED, CONFIG_LOSS):
        own = [each for each in ratios if each.setting == setting]
        for figure, title in FIGURES.items():
            for name, key in (("better setting", "better"), ("defaults", "defaults")):
                values = [getattr(each, key)[figure] for each in own if getattr(each, key)]
                if values:
                    spread = f"median {statistics.median(values):.3f}, {min(values):.3f} to {max(values):.3f}"
                    lines.append(f"{setting}, {title} by MaxText's {name}: {spread} ({len(values)} rows)")
        medians = [each.defaults["allocated_bytes"] for each in own if each.defaults]
        if medians:
            held = statistics.median(medians) <= MAX_MEDIAN_OF_DEFAULTS
            aim = f"median of allocated bytes at most {MAX_MEDIAN_OF_DEFAULTS} of MaxText's defaults"
            lines.append(f"{setting}, aim: {aim}: {'met' if held else 'missed'} ({len(medians)} of {len(rows)} rows)")
    for each in ratios:
        if each.missed:
            figures = " and ".join(each.missed)
            values = f"bytes {each.better['allocated_bytes']:.3f}, seconds {each.better['seconds']:.3f}"
            lines.append(f"misses the aim in {figures}: {each.row}, {each.setting} ({values})")
    return lines


def cells_in_order(rows: Sequence[PeerRow], cells: Mapping[tuple[str, str], Cell]) -> list[Cell]:
    """Returns a cell for each setting of each row; cells that were not compiled yet say so."""
    return [
        cells.get((name_of(row), setting)) or Cell(name_of(row), setting, "not compiled yet")
        for row in rows
        for setting in settings_of(row)
    ]


def markdown(columns: Sequence[ColumnView], rows: Sequence[Any]) -> str:
    """Returns a Markdown table, with bytes in GiB. Columns that are empty in all rows are left out."""
    used = [column for column in columns if any(column.text(row, TERMINAL, GIB) for row in rows)]
    lines = [
        " | ".join(column.heading for column in used),
        " | ".join("---" if column.kind == "name" else "---:" for column in used),
        *(" | ".join(column.text(row, TERMINAL, GIB).replace("|", "/") for column in used) for row in rows),
    ]
    return "\n".join(f"| {line} |" for line in lines)


def versions_of(cells: Mapping[tuple[str, str], Cell]) -> str:
    """Returns the versions that the cells were compiled with, such as "compiled with: python 3.12.3, jax 0.12.0.1"."""
    found = {f"{name} {number}": None for cell in cells.values() for name, number in cell.versions.items()}
    return f"compiled with: {', '.join(found)}" if found else ""


def render_page(rows: Sequence[PeerRow], cells: Mapping[tuple[str, str], Cell]) -> str:
    """Returns the HTML page with the summary, the ratios and all cells."""
    return (
        environment()
        .from_string(TEMPLATE)
        .render(
            page=PAGE_NAME,
            title="Beside MaxText",
            data={},
            where="tests/bench/peers.py",
            heading="Our training step beside MaxText's",
            versions=versions_of(cells),
            figures=[],
            summary=summary_of(rows, cells),
            ratios=page_table(TableView(RATIOS, ratios_of(rows, cells))),
            cells=page_table(TableView(COLUMNS, cells_in_order(rows, cells))),
        )
    )


def main() -> int:
    if sys.argv[1:2] == ["--cell"]:
        number, setting, report_file, result = sys.argv[2:]
        cell = compile_cell(ROWS[int(number)], setting, report_file)
        Path(result).write_text(json.dumps(dataclasses.asdict(cell)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains a text (default: all)")
    parser.add_argument(
        "--cells",
        type=Path,
        default=CELLS,
        metavar="FILE",
        help="finished cells (default: beside the script)",
    )
    parser.add_argument("--reports", type=Path, metavar="DIR", help="save each cell's report for bytescope diff")
    parser.add_argument("--limit", type=float, default=25, metavar="MINUTES", help="minutes per cell (default 25)")
    parser.add_argument("--again", action="store_true", help="compile failed cells again")
    parser.add_argument("--show", action="store_true", help="compile nothing, show the finished cells")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the table as a page")
    args = parser.parse_args()
    rows = [row for row in ROWS if args.only in name_of(row)]
    if not args.show:
        compile_missing(rows, args.cells, args.reports, args.limit, args.again)
    wanted = {name_of(row) for row in rows}
    cells = {key: cell for key, cell in read_cells(args.cells).items() if key[0] in wanted}
    print(markdown(COLUMNS, cells_in_order(rows, cells)), end="\n\n")
    print(markdown(RATIOS, ratios_of(rows, cells)), end="\n\n")
    print("\n".join(f"- {line}" for line in summary_of(rows, cells)))
    print(versions_of(cells))
    if args.html:
        args.html.write_text(render_page(rows, cells), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
