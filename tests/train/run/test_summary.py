"""What a run says at its start, on the way and at its end: nothing is cut at any width, commands can be copied."""

import dataclasses
import io
import shlex
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from bytescope.memory.devices.live import LiveMemory
from bytescope.memory.records.report_record import Description, ReportRecord, load
from bytescope.memory.units import GIB, MIB
from bytescope.memory.view.console import make_console
from bytescope.train.commands.train_command import parse, settle_config
from bytescope.train.data.tokenizer import ByteTokenizer, IdTokenizer
from bytescope.train.launch.failures import too_big
from bytescope.train.program.run_command import Command
from bytescope.train.run import startup, summary
from bytescope.train.run.display import Display, describe
from bytescope.train.run.loop import next_commands
from support.toy import small_config, small_program

pytestmark = pytest.mark.quick

WIDTHS = (80, 100, 120)
REPORT = ReportRecord(
    20 * GIB,
    20 * GIB,
    {},
    limit_bytes=80 * GIB,
    fits=True,
    verdict="fits",
    host_bytes=3 * GIB,
    roofline={"total": 0.5, "by_term": {"products": 0.5}, "source": "data-sheet rates"},
    subject=Description(tokens=1_000_000, calls=2),
    prediction={
        "seconds": 1.4326,
        "seconds_low": 1.3114,
        "seconds_high": 1.6382,
        "by_phase": {},
        "by_term": {"products": 1.4326},
        "bound_by": "products",
        "rates": "measured on an H100",
        "tokens_per_s": 698_031.2,
        "mfu": 0.5234,
    },
)
ROW = {
    "step": 1200,
    "loss": 2.92631,
    "lr": 3e-4,
    "grad_norm": 2.691,
    "tokens_per_s": 412_925.0,
    "mfu": 0.4123,
    "hfu": 0.5123,
    "data_wait_s": 0.1,
    "step_time_s": 1.0,
    "memory": {"in_use_bytes": 61.8 * GIB, "peak_bytes": 62.4 * GIB},
}


def said(show, width, **options):
    """The lines that `show(console)` prints on a console of a width."""
    file = io.StringIO()
    show(make_console(file=file, width=width, **options))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_start_is_whole_at_every_width(width):
    rows = [
        ("model", f"{summary.count(8_030_261_248)} parameters: width 4,096, layers 32, heads 32"),
        ("memory", summary.memory(REPORT)),
        ("remat", ""),
        ("speed", summary.speed(REPORT)),
        ("report", "runs/x/memory.html"),
    ]
    lines = said(lambda console: summary.show(console, rows), width)
    text = " ".join(" ".join(lines).split())
    for whole in (
        "8.03 billion (8,030,261,248) parameters",
        "20.00 GiB of 80.00 GiB (25.0%)",
        "60.00 GiB free",
        "3.00 GiB in host memory",
        "predicted 1.43 s per update (1.3 to 1.6)",
        "698,000 tokens/s",
        "MFU 52%",
        "rates: measured on an H100",
        "at least 1 s per update, by data-sheet",
        "runs/x/memory.html",
    ):
        assert whole in text
    assert max(map(cell_len, lines)) <= width and "…" not in text and "remat" not in text
    assert not any(line.endswith(("20.00", "80.00", "60.00", "3.00")) for line in lines)  # a figure without its unit
    assert all(line.startswith((" " * summary.TITLE, "model ", "memory ", "speed ", "report ")) for line in lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_program_is_told_in_a_few_lines(width):
    program = small_program({"batch.accumulation": 2, "batch.mode": "scan", "mesh.data": 2}, 8)
    lines = said(lambda console: startup.show_program(console, program, "some texts"), width)
    text = " ".join(" ".join(lines).split())
    for whole in (
        "parameters: width 32, layers 3, heads 4, vocabulary 64",
        "tokens per update",
        "8 x cpu, mesh data 2 x fsdp 4, zero3",
        "fp32 precision, remat dots_no_batch, attention naive",
    ):
        assert whole in text
    assert max(map(cell_len, lines)) <= width and len(lines) <= 7 and "some texts" not in text
    assert startup.passes(program, 896) == "896 sequences to train on, 20 updates read each 2.9 times"
    assert startup.passes(program, 5120) == "5,120 sequences to train on, 20 updates read 50 % of them"
    every = said(lambda console: startup.show_program(console, program, "[/b] texts", verbose=True), width)
    assert "[/b] texts" in " ".join(every) and "attention" in " ".join(every)


@pytest.mark.parametrize(
    ("overrides", "trained"),
    [
        ({"lora.rank": 16, "lora.base": "nf4"}, "26,624 trained (LoRA rank 16 on q k v o gate up down over nf4)"),
        ({"lora.rank": 4, "lora.targets": "q,v"}, "1,792 trained (LoRA rank 4 on q v)"),
        ({"optimizer.freeze": "w_token"}, "trained (optimizer.freeze)"),
        ({}, ""),
    ],
)
def test_the_start_says_what_of_the_model_is_trained(overrides, trained):
    shape = {"model.d_model": 64, "model.d_head": 16, "model.d_ff": 64, "model.n_layers": 2}
    program = small_program({**shape, **overrides})
    lines = said(lambda console: startup.show_program(console, program, ""), 80)
    text = " ".join(" ".join(lines).split())
    assert trained in text and ("trained" in text) == bool(overrides) and max(map(cell_len, lines)) <= 80


def test_the_report_lies_in_the_run_directory_as_json_and_as_a_page(tmp_path):
    page = startup.write_report(REPORT, tmp_path)
    assert page == tmp_path / "memory.html" and "20.00" in page.read_text()
    assert load(tmp_path / "memory.json").to_json() == REPORT.to_json()


def test_no_speed_without_rates_and_no_limit_where_none_is_known():
    assert summary.speed(ReportRecord(1, 1, {})) == ""
    bound = summary.speed(dataclasses.replace(REPORT, prediction={}))
    assert bound.startswith("at least 1 s per update, at most 1,000,000 tokens/s, by data-sheet rates")
    assert "limit is unknown" in str(summary.memory(ReportRecord(1, 1, {})))
    exceeds = summary.memory(ReportRecord(3 * GIB, 3 * GIB, {}, limit_bytes=2 * GIB, fits=False, verdict="exceeds"))
    on_cpu = dataclasses.replace(REPORT, target={"platform": "cpu"})
    assert str(summary.memory(on_cpu)).endswith("; XLA's buffers, without Python, jax and its compiler (host)")
    assert "XLA" not in str(summary.memory(REPORT))
    assert "1.00 GiB TOO MUCH" in str(exceeds) and str(exceeds).startswith("█" * summary.BAR)


def test_the_share_of_the_gpu_is_printed_with_the_verdict_of_a_run():
    fraction = {"memory_fraction": 0.75, "memory_fraction_source": "jax's default"}
    target = {"platform": "cuda", "limit_bytes": 2 * GIB, **fraction}
    exceeds = dataclasses.replace(REPORT, limit_bytes=2 * GIB, target=target)
    for text in (str(summary.memory(exceeds)), too_big(exceeds)):
        assert "75 % of the GPU's memory (jax's default)" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_fit_the_terminal_and_lose_whole_figures_only(width):
    text = describe(ROW, width)
    assert len(text) <= width
    whole = describe(ROW).split("  ")
    assert all(part in whole or part == "mem 62.40 GiB" for part in text.split("  "))
    assert "loss 2.9263" in text and "412,925 tok/s" in text and "MFU 41.2 %" in text
    assert width < 120 or text == describe(ROW)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_scroll_above_the_bar(width):
    file = io.StringIO()
    console = make_console(file=file, width=width, force_terminal=True, color_system=None)
    with Display(console, 40, 0) as display:
        for step in (10, 20):
            display.show({**ROW, "step": step, "loss": float(step)})
        with display.doing("evaluating"):
            display._progress.refresh()
        display.note("[/b] a note")
    out = file.getvalue()
    rows = [line for line in out.replace("\r", "\n").split("\n") if "loss" in line]
    assert [line.split("loss ")[1].split()[0] for line in rows] == ["10.0000", "20.0000"]
    assert all("━" not in line for line in rows)  # of its own line, not the bar's
    assert "evaluating 20/40" in out and "[/b] a note\n" in out and "…" not in out
    bars = [line for line in out.replace("\r", "\n").split("\n") if "━" in line]
    plain = [line[line.rindex("\x1b[2K") + 4 :] if "\x1b[2K" in line else line for line in bars]
    assert plain and max(map(cell_len, plain)) <= width


def test_no_color(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    lines = said(lambda console: summary.show(console, [("memory", summary.memory(REPORT))]), 80, force_terminal=True)
    assert "\x1b[3" not in "".join(lines) and "█" in lines[0]


def test_without_a_terminal_a_row_is_a_line():
    def show(console):
        with Display(console, 4000, 0) as display:
            display.show(ROW)
            display.show({"step": 1200, "eval_loss": 2.5, "eval_tokens": 1000})

    rows = said(show, 100)
    assert len(rows) == 2 and rows[0].startswith("step   1200/4000  loss 2.9263  lr 3.00e-04  grad 2.69")
    assert "HFU 51.2 %" in rows[0] and rows[0].endswith("left") and "held-out loss 2.5000 (1,000 tokens)" in rows[1]


def end(**fields):
    live = LiveMemory("cpu", "host", 1, 600 * MIB, 700 * MIB)
    values = {
        "first": 11,
        "last": 20,
        "steps": 20,
        "seconds": 3723.4,
        "evaluated": (20, 2.5),
        "tokens_per_s": 1234.0,
        "report": ReportRecord(90 * MIB, 90 * MIB, {}),
        "before": LiveMemory("cpu", "host", 1, 600 * MIB, 650 * MIB),
        "live": live,
        "checkpoint": None,
    }
    return dict(summary.end_rows(**{**values, **fields}))


def test_the_end_says_what_was_reached_and_what_was_there_before():
    rows = end()
    assert (
        rows["done"] == "held-out loss 2.5000 (perplexity 12.18 per token), updates 11 to 20 of 20 in 1:02:03, "
        "1,234 tokens/s"
    )
    assert rows["memory"].startswith(
        "predicted 90.00 MiB of XLA's buffers on 1 CPU device; the process grew by 100.00 MiB"
    )
    assert "from 600.00 MiB" in rows["memory"] and "to 700.00 MiB" in rows["memory"] and rows["checkpoint"] == "none"
    assert end(evaluated=None, tokens_per_s=0.0)["done"] == "updates 11 to 20 of 20 in 1:02:03"


def test_a_run_that_was_stopped_says_when_it_was_evaluated():
    rows = end(last=15, evaluated=(12, 2.5))
    assert rows["stopped"].startswith("held-out loss 2.5000 after update 12 (perplexity")
    assert "updates 11 to 15 of 20" in rows["stopped"]
    assert end(last=10, evaluated=None, tokens_per_s=0.0)["stopped"] == "no update of 20 in 1:02:03"


def test_the_time_left_is_that_of_the_pace_after_the_first_row(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    display = Display(make_console(file=io.StringIO()), 100, 0)
    now[0] = 100.0  # the first step compiled
    display.show({**ROW, "step": 1})
    now[0] = 110.0
    assert display.left(11) == "0:01:29 left"


def test_memory_on_an_accelerator_is_compared_with_the_allocators():
    live = LiveMemory("H200", "allocator", peak_bytes=10 * GIB, limit_bytes=130 * GIB)
    before = LiveMemory("H200", "allocator", in_use_bytes=GIB)
    text = end(report=ReportRecord(9 * GIB, 9 * GIB, {}), before=before, live=live)["memory"]
    assert text == (
        "predicted 9.00 GiB, measured 10.00 GiB on H200 (prediction -10.0 %), 1.00 GiB of it in use before "
        "the first step, limit 130.00 GiB"
    )
    assert "not measured" in end(live=None)["memory"]
    assert "including Python and its libraries" in end(before=None)["memory"]


def test_the_command_that_goes_on_names_the_directory_and_flags_but_no_key(tmp_path):
    words = [
        "my config.py",
        "--workdir",
        "old",
        "--config.train.steps=20",
        "--config.data.source",
        "my texts",
        "--profile=3",
        "--verbose",
        "--rates=my rates.json",
        "--host-memory=64 GiB",
        "--processes=2",
        "--process=0",
        "--coordinator=a:1",
    ]
    before = parse(words)
    settle_config(before)
    command = Command.from_args(before)
    resumed = shlex.split(command.resume(tmp_path / "my run"))
    assert resumed[:2] == ["bytescope", "train"] and command.verbose
    again = parse(resumed[2:])
    assert not again.named and not again.overrides and command.given == ("train.steps", "data.source")
    for name in ("rates", "host_memory", "process", "processes", "coordinator"):
        assert getattr(again, name) == getattr(before, name)
    assert again.workdir == tmp_path / "my run" and not again.extend
    longer = parse(shlex.split(command.extend(tmp_path, 40))[2:])
    assert longer.extend and longer.overrides == [("train.steps", "40")]


@pytest.mark.parametrize(
    ("keys", "tokenizer", "commands"),
    [
        (
            {},
            ByteTokenizer(),
            ["generate {run} --prompt=TEXT", "export {run} {run}/model", "report {run} --html=run.html"],
        ),
        (
            {"data.format": "chat"},
            ByteTokenizer(),
            ["generate {run} --chat --prompt=TEXT", "export {run} {run}/model", "report {run} --html=run.html"],
        ),
        (
            {"model.position": "none"},
            IdTokenizer(9),
            ["report {run} --html=run.html"],
        ),  # neither text nor a model of transformers
    ],
)
def test_a_finished_run_names_the_commands_that_its_model_allows(tmp_path, keys, tokenizer, commands):
    config, run = small_config(keys), tmp_path / "my run"
    first, *others = next_commands(config, SimpleNamespace(tokenizer=tokenizer), run, Command()).values()
    assert first == f"bytescope train '--workdir={run}' --config.train.steps=40 --extend"
    assert others == [f"bytescope {text}".format(run=f"'{run}'").replace("'/model", "/model'") for text in commands]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_shell_reads_the_printed_command(width, tmp_path):
    text = Command().resume(tmp_path, {"train.sample_prompt": "[/b] it's", "data.source": "x" * 70})
    lines = said(lambda console: summary.show_commands(console, {"to resume": text}), width)
    assert lines[0] == "to resume" and shlex.split("\n".join(lines[1:]).replace("\\\n", "")) == shlex.split(text)
