"""Every view on terminals of 80, 100 and 120 columns: nothing too wide, no figure cut or lost, no name obeyed."""

import dataclasses
import io
import itertools
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from bytescope.memory.commands import trace_command
from bytescope.memory.compare import compare_rows, compare_text, fit_view
from bytescope.memory.compare.fit_search import Step
from bytescope.memory.formulas import reconcile
from bytescope.memory.formulas.memory_estimate import Question, estimate, shape_for
from bytescope.memory.profile import trace_document
from bytescope.memory.profile.breakdown import Breakdown, HostWork, Instructions
from bytescope.memory.profile.op_scopes import OpScope
from bytescope.memory.records import report_diff
from bytescope.memory.records.report_record import (
    ROWS,
    Buffer,
    Collective,
    Communication,
    Description,
    Finding,
    LedgerRow,
    ReportRecord,
    RuntimeOverhead,
    TimelinePoint,
    Transfer,
    XlaStats,
    ZeroRow,
)
from bytescope.memory.records.result import plain
from bytescope.memory.report import difference, report_text
from bytescope.memory.seconds.step_prediction import StepPrediction
from bytescope.memory.view import draw_terminal
from bytescope.memory.view.console import make_console, put
from bytescope.train.commands import estimate_command, list_command, names_config
from bytescope.train.plan import frontier, frontier_view, levers, levers_view
from bytescope.train.plan.frontier import Fixed, Point
from support.rows import row

pytestmark = pytest.mark.quick

GIB, MIB = 2**30, 2**20
PLAIN = "blocks/attention/the_context"
LONG = "transformer/blocks/of_a_very_long_name/attention/the_context_of_all_heads"
HOSTILE = ("[/b]", "[red]none[/red]", "[link=file:///]", ":warning:", "\x1b[2J\x1b[31m", "lone \ud800", "a\tb\nc")


# What a target's JSON says of a GPU that is described, beside its name.
GPU = {
    "platform": "cuda",
    "limit_bytes": 72 * GIB,
    "device_memory_bytes": 79 * GIB,
    "memory_fraction": 0.92,
    "memory_fraction_source": "the trainer's default",
}


# ---- a record of each kind, with a name in every place where a program may put one --------------------


def report(name=PLAIN, size=12_345_678_901):
    """A report with every part."""
    share = {row: (number + 1) * size // 100 for number, row in enumerate(ROWS)}
    return ReportRecord(
        size,
        size + 7,
        share,
        tuple(TimelinePoint(i, i * GIB, "forward", name) for i in range(200)),
        tuple(
            Buffer(
                f"{name}{at}",
                size // (at + 1),
                (8, 4),
                "bf16",
                "residuals",
                "backward",
                "mlp",
                name,
                name,
                at_peak=True,
            )
            for at in range(3)
        ),
        ledger=(
            LedgerRow("params", "float32", 9, 9, 4.0),
            LedgerRow("optimizer", "float32", 9, 9, 8.0),
            LedgerRow("gradients", name, 9, 9, 4.0),
            LedgerRow("total", "", 9, 9, 16.0),
        ),
        findings=(
            Finding(
                "x",
                1,
                f"{name} holds 3.25 GiB of logits",
                f"chunk the loss of {name}: 1.75 GiB",
                "--config.loss.kind=chunked --config.remat.policy=minimal",
            ),
        ),
        communication=tuple(
            Communication(
                f"collective-{name}",
                (name, "fsdp"),
                64,
                1234,
                size // 3,
                size // 4,
                size // 5,
                size // 6,
                f"gradients of {name}",
            )
            for _ in range(2)
        ),
        collectives=(
            Collective(
                name,
                "all-gather",
                (name,),
                8,
                "bf16",
                32,
                size,
                size // 7,
                "forward",
                name,
                asynchronous=True,
                overlapped=3,
                overlapped_flops=1234567890123,
                in_flight_bytes=size // 9,
            ),
        ),
        zero=(ZeroRow("params", 0.25, 0.5, f"masters of {name} in float32"), ZeroRow("total", 2.0, 2.19)),
        transfers=(Transfer(name, "to host", size // 11, 0.0123),),
        runtime_overheads=(
            RuntimeOverhead(name, 35 * MIB, "pool", ""),
            RuntimeOverhead("context", 500 * MIB, "card", ""),
        ),
        work={"forward": {"flops": {"bf16": 10**15}}},
        residuals_by_name={name: size // 13, f"{name}.2": size // 17},
        workspace_by_scope={f"backward/{name}": size // 19},
        limit_bytes=72 * GIB,
        fits=True,
        verdict="fits",
        roofline={"total": 0.698, "by_term": {"products": 0.617, "memory": 0.0805}, "source": "data-sheet rates"},
        prediction={
            "seconds": 0.9231,
            "seconds_low": 0.8212,
            "seconds_high": 1.0491,
            "by_phase": {"forward": 0.9231},
            "by_term": {"products": 0.8, "collectives": 0.1231},
            "bound_by": "products",
            "rates": f"of {name}",
            "tokens_per_s": 70_995.6,
            "mfu": 0.4512,
        },
        xla=XlaStats(size // 2, size // 3, size // 4, size // 5, None, None, 3 * MIB),
        host_bytes=2 * GIB,
        target={"name": name, "kind": name, "n_devices": 8, **GPU},
        versions={"jax": "0.10.2"},
        notes=(f"of {name}",),
        subject=Description(
            name, (f"model.x={name}",), "8 sequences of 8,192 = 65,536 tokens per update", name, 65536, 1
        ),
        method="schedule",
        program=name,
    )


def show_report(console, name):
    report_text.show(report(name), console, f"attention {name} (auto)\nmatmuls wide")


def show_compare(console, name):
    measured = {"step_seconds": 1.23456, "tokens_per_s": 123456.0, "peak_bytes": 5.5 * GIB}
    found = [
        row(policy, 10 + at, at / 10, 72, measured=measured, keys={"data.seq_len": 1024, "config": f"{name}{at}"})
        for at, policy in enumerate(("none", "full", "dots_no_batch"))
    ]
    broken = compare_rows.Row({"remat.policy": name, "config": name}, status=f"remat.policy={name}: choose another")
    compare_text.show(
        compare_rows.mark_pareto([*found, broken]),
        {"name": name, **GPU},
        {"jax": "new"},
        cached=2,
        missing=3,
        console=console,
    )


def show_levers(console, name):
    def level(stage, gib):
        size = int(gib * GIB)
        figures = dataclasses.replace(row("none", gib, 0.25, 72), to_host_bytes=size, to_device_bytes=size)
        return levers.Level(
            stage, {"model.attention": "auto"}, {}, f"--config.here={stage} --config.there=x", name, figures
        )

    levels = [level("fp32", 600.25), level("bf16", 200.5), level("full", 90.75)]
    staircase = levers.to_json(levels, {name: f"no {name}"}, {"name": name, **GPU}, {"jax": "new"}, interrupted=True)
    put(levers_view.render_text(staircase), console)


def show_front(console, name):
    full = Fixed(name, "--config.remat.policy=full", row("none", 20.25, 0.25))
    points = [
        Point(
            20 * GIB,
            f"2 x {name}, 30 x v",
            "--config.remat.policy=full --config.x=y " * 3,
            row("none", 19.5, 0.1),
            full,
            3,
        )
    ]
    about = frontier.to_json(
        points,
        [full],
        cost="time",
        offload=False,
        programs=9,
        compiled=4,
        missing=1,
        interrupted=False,
        target={"name": name, **GPU},
        versions={"jax": "new"},
    )
    put(frontier_view.render_text(about), console)


def predicted(seconds):
    return StepPrediction(seconds, 0.9 * seconds, 1.1 * seconds, {}, {}, "products", "rates")


def show_fit(console, name):
    target = SimpleNamespace(name=name, to_json=lambda: {"name": name, **GPU})
    lines = fit_view.Lines(None, console)
    lines.show_head(target, 72 * GIB, ["4,096 tokens per update;", "levers: micro, remat"], [name])
    answer = {"status": "ok", "allocated_bytes": 30 * GIB + MIB, "host_bytes": 7 * GIB, "recompute_flops_fraction": 0.1}
    lines.show(
        Step("baseline", f"zero3 fsdp 8, 1 x 16, {name}", {}, answer, True, "fits, fastest so far", predicted(0.6983))
    )
    lines.show(Step("mesh", f"tensor 2, {name}", {}, answer, False, "1.25 GiB too much", predicted(0.5)))
    lines.show(Step("mesh", f"zero2 {name}", {}, {"status": name}, False, f"no {name}"))
    out = {
        "programs": 14,
        "seconds": 12.3,
        "stopped": name,
        "budget_bytes": 72 * GIB,
        "config": "llama_8b",
        "rates": name,
        "target": {"n_devices": 8},
        "ties": [name, "one more", "and another", "and the last"],
        "certificate": None,
        "best": {
            "what": name,
            "keys": {},
            "recompute_flops_fraction": 0.25,
            "predicted_seconds": 0.6983,
            "host_bytes": GIB,
            "predicted_seconds_low": 0.63,
            "predicted_seconds_high": 0.78,
            "predicted_mfu": 0.512,
            "predicted_tokens_per_s": 5866.0,
            "least_seconds": 0.5,
            "allocated_bytes": 44 * GIB,
            "flags": "--config.remat.policy=full " * 5,
        },
    }
    put(fit_view.render_text(out), console)
    lacking = {
        "what": name,
        "allocated_bytes": 90 * GIB,
        "missing_bytes": 18 * GIB,
        "host_missing_bytes": GIB,
        "flags": "--config.x=y",
        "breakdown": {"params": 60 * GIB, "residuals": 29 * GIB},
    }
    put(fit_view.render_text({**out, "best": None, "certificate": lacking}), console)
    fit_view.show_measured(
        [
            (
                Step("mesh", name, {}, answer, True, "fits", predicted(0.7)),
                {"step_seconds": 0.75, "tokens_per_s": 123456.0},
            )
        ],
        console,
    )


FORMULA = reconcile.Formula(10.0 * GIB, 11.0 * GIB, 20.0 * GIB, 0.0, 5.0 * GIB, 0.0, 50.0 * GIB, 6e9, 8e9)


def show_formulas(console, name):
    formula = dataclasses.replace(FORMULA, notes=(f"total: {name}",))
    lines = reconcile.lines(
        formula,
        60 * GIB,
        dict.fromkeys(ROWS, 0) | {"params": 11 * GIB, "residuals": 6 * GIB},
        {"model_flops": 6e9, "hardware_flops": 9e9},
    )
    compare_text.show_formulas(formula, lines, console)
    compare_text.show_row_formulas(
        [row(name, 60, 0.1, formula=dataclasses.asdict(formula)), row("full", 30, 0.2, keys={"config": name})], console
    )


def show_diff(console, name):
    before, after = report(name), dataclasses.replace(report(f"{name}'", 23_456_789_012), versions={"jax": name})
    draw_terminal.show(difference.document(before, after, report_diff.diff(before, after)), console)


def show_trace(console, name):
    cells = {
        (phase, part): 10**11 * at
        for at, (phase, part) in enumerate(
            ((phase, part) for phase in ("forward", "recompute", "backward", "optimizer") for part in ("mlp", name)), 3
        )
    }
    found = Breakdown(
        name,
        (3, 4),
        8,
        10**13,
        cells,
        tuple(Instructions(f"{name}.{at}", OpScope("backward", "mlp", name), 10**11, 16) for at in range(3)),
        (HostWork(name, 10**12, 10**11, 7),),
        {name: 10**11},
    )
    predicted = {
        "seconds": 0.698,
        "low": 0.612,
        "high": 0.811,
        "rates": f"rates of {name}",
        "at_least": 0.44,
        "bound": "data-sheet rates",
    }
    shown = trace_document.document(
        plain(trace_command.make_result(found, None, None)), trace_document.prediction(found, predicted)
    )
    draw_terminal.show(shown, console)


def show_names(console, name):
    tensor = names_config.NamedTensorRow(
        name, (8, 4096, 14336), "bf16", 2, 32, 123_400 * 10**9, "", 0, False, f"('{name}',)", 128 * MIB, 4 * GIB
    )
    draw_terminal.show(names_config.document([tensor]), console)


def show_listing(console, name):
    list_command.show(("key", "GiB", "meaning"), [(name, "79.1", f"{name} " * 5), ("b", "139.8", "short")], console)


def show_estimate(console, name):
    found = estimate(Question(7e9, shape_for(7e9, 50304)))
    estimate_command.show(dataclasses.replace(found, notes=(f"of {name}",)), console)


VIEWS = {
    view.__name__.removeprefix("show_"): view
    for view in (
        show_report,
        show_compare,
        show_levers,
        show_front,
        show_fit,
        show_formulas,
        show_diff,
        show_trace,
        show_names,
        show_listing,
        show_estimate,
    )
}


@pytest.fixture(autouse=True)
def no_time_passes(monkeypatch):
    """A walk tells its seconds: what is printed twice is compared to the letter."""
    monkeypatch.setattr(fit_view, "time", SimpleNamespace(monotonic=lambda: 0.0))


def lines_of(view, width, name=PLAIN):
    """What a view prints at a width."""
    file = io.StringIO()
    VIEWS[view](make_console(file=file, width=width), name)
    return file.getvalue().splitlines()


# ---- what holds of each --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [PLAIN, LONG], ids=["plain", "long"])
@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_too_wide_and_no_two_lines_are_blank(view, width, name):
    lines = lines_of(view, width, name)
    assert max(map(len, lines)) <= width, max(lines, key=len)
    assert all(any(pair) for pair in itertools.pairwise(lines)) and lines[-1]
    assert not [line for line in lines if line != line.rstrip()]


# A number with its unit; a bare one, its sign and per cent with it.
BYTES, NUMBER = re.compile(r"[\d,.]+ (?:[KMGT]i)?B\b"), re.compile(r"[+-]?\d[\d,]*\.\d+%?")


@pytest.mark.parametrize("name", [PLAIN, LONG], ids=["plain", "long"])
@pytest.mark.parametrize("view", VIEWS)
def test_every_figure_at_120_columns_stands_at_80_too_and_none_is_cut(view, name):
    wide, narrow = ("\n".join(lines_of(view, width, name)) for width in (120, 80))
    assert sorted(BYTES.findall(wide)) == sorted(BYTES.findall(narrow))
    assert sorted(NUMBER.findall(wide)) == sorted(NUMBER.findall(narrow)) != []
    assert not re.search(r"\d(…|\.\.\.)|\d\n *[KMGT]i?B\b", narrow)


@pytest.mark.parametrize(
    ("view", "before"),
    [
        ("report", "limit:"),
        ("compare", ", limit 72.00 GiB,"),
        ("levers", ", limit 72.00 GiB,"),
        ("front", ", limit 72.00 GiB,"),
        ("fit", "within 72.00 GiB per device,"),
    ],
)
def test_a_limit_is_printed_once_with_the_share_of_the_gpus_memory_that_it_is(view, before):
    text = " ".join(" ".join(lines_of(view, 80)).split())
    assert f"{before} 92 % of the GPU's memory (the trainer's default)" in text and "limit 72.00 GiB:" not in text


@pytest.mark.parametrize("view", VIEWS)
def test_no_color_is_respected(view, monkeypatch):
    colour = re.compile(r"\x1b\[[\d;]*?(?:3[0-8]|4[0-8]|9\d|10\d)[;m]")

    def printed():
        file = io.StringIO()
        VIEWS[view](make_console(file=file, width=100, force_terminal=True, color_system="truecolor"), PLAIN)
        return file.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    in_colour = printed()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(printed())
    if view in ("report", "compare", "levers", "front", "fit", "diff", "trace"):
        assert colour.search(in_colour)


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
@pytest.mark.parametrize("view", VIEWS)
def test_a_hostile_name_is_printed_as_it_is_and_moves_nothing(view, name):
    """Also on a console with markup, which is what a caller may bring."""
    consoles = [make_console(file=io.StringIO(), width=120), Console(file=io.StringIO(), width=120)]
    for console in consoles:
        VIEWS[view](console, name)
        text = console.file.getvalue()
        assert not set(text) & set("\x1b\x07\t")
        if name.isprintable():
            assert name in text
    assert "\ud800" not in consoles[0].file.getvalue()
    consoles[0].file.getvalue().encode()
