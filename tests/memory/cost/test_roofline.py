"""The roofline: seconds by hand for each term, the rates of targets, and predictions that must rank as machines do."""

import dataclasses
import functools
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from bytescope import memory
from bytescope.memory.analysis import report_of, seconds_of_step
from bytescope.memory.compare import worker
from bytescope.memory.cost import roofline
from bytescope.memory.cost.flops import count
from bytescope.memory.cost.roofline import Figures, Prediction, seconds
from bytescope.memory.cost.step_work import by_phase
from bytescope.memory.devices import targets
from bytescope.memory.records import schedule_records
from bytescope.memory.records.report_record import Collective, Description, ReportRecord, Transfer
from bytescope.memory.records.schedule_records import ScheduledKernel
from bytescope.memory.report import report_page, report_text
from bytescope.memory.seconds import ranking, rates
from bytescope.memory.view import prediction_text as times
from bytescope.memory.view.console import DEFAULT_WIDTH
from bytescope.train.plan.config_factory import FACTORY
from bytescope.train.plan.config_grid import ConfigRow as Row
from bytescope.train.program.program import build
from support.described import described
from support.toy import small_config, small_program

# Rates at which every quotient is a round number.
FIGURES = Figures({"bf16": 100.0, "fp32": 10.0}, 8.0, 2.0, {"in_host": 4.0, "between_hosts": 1.0}, "by hand")


def phase(**more):
    return {
        "flops": {},
        "product_bytes": 0,
        "other_bytes": 0,
        "collective_bytes": {},
        "to_host_bytes": 0,
        "to_device_bytes": 0,
    } | more


@pytest.mark.parametrize(
    ("part", "total", "term"),
    [
        (phase(flops={"bf16": 500, "fp32": 20}), 7.0, "products"),
        (phase(flops={"bf16": 500}, product_bytes=48), 6.0, "products"),
        (phase(flops={"bf16": 500}, product_bytes=16), 5.0, "products"),
        (phase(other_bytes=24), 3.0, "memory"),
        (phase(collective_bytes={"in_host": 4, "between_hosts": 3}), 4.0, "collectives"),
        (phase(to_host_bytes=6, to_device_bytes=10), 5.0, "host_link"),
    ],
)
def test_each_term_alone(part, total, term):
    found = seconds({"forward": part}, FIGURES)
    assert (found.total, found.bound_by, found.source) == (total, term, "by hand")
    assert found.by_phase == {"forward": total, "recompute": 0, "backward": 0, "optimizer": 0}
    assert found.by_term == dict.fromkeys(roofline.TERMS, 0.0) | {term: total}


def test_on_the_device_terms_follow_each_other_and_what_runs_beside_is_waited_for_where_it_is_longer():
    part = phase(flops={"bf16": 200}, other_bytes=8, collective_bytes={"in_host": 4})
    assert seconds({"backward": part}, FIGURES).total == 2 + 1 + 1
    assert seconds({"backward": part | {"to_host_bytes": 8}}, FIGURES).total == 4
    waits = seconds({"backward": part | {"to_host_bytes": 8, "to_device_bytes": 20}}, FIGURES)
    assert waits.total == 10 and waits.by_term["host_link"] == 6
    hidden = part | {"hidden_collective_bytes": {"in_host": 4, "between_hosts": 6}, "to_host_bytes": 12}
    waits = seconds({"backward": hidden}, FIGURES)
    assert waits.total == 7 and waits.by_term == {"products": 2, "memory": 1, "collectives": 1 + 3, "host_link": 0}


def test_recompute_and_backward_share_a_window_and_the_other_phases_do_not():
    work = {
        "recompute": phase(other_bytes=32),
        "backward": phase(other_bytes=16, to_device_bytes=14),
        "optimizer": phase(other_bytes=8, to_host_bytes=4),
        "forward": phase(other_bytes=80),
    }
    found = seconds(work, FIGURES)
    assert found.by_phase == {"forward": 10, "recompute": 4, "backward": 2 + 1, "optimizer": 1 + 1}
    assert found.total == sum(found.by_phase.values()) == sum(found.by_term.values()) == 19
    assert Prediction(**json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("peaks", "dtype", "rate"),
    [
        ({"fp8": 8, "bf16": 4}, "fp8", 8),
        ({"bf16": 4}, "fp8", 4),
        ({"fp32": 1}, "bf16", 1),
        ({"fp32": 1}, "tf32", 1),
        ({"tf32": 2, "fp32": 1}, "fp16", 2),
        ({"tf32": 2, "fp32": 1}, "fp32", 1),
        ({"bf16": 6}, "tf32", 6),
        ({"bf16": 6}, "fp32", 1),
        ({"bf16": 6}, "fp16", 6),
    ],
)
def test_a_dtype_without_a_unit_is_computed_by_the_next_wider_one(peaks, dtype, rate):
    assert Figures(peaks, 1, 1, {"in_host": 1, "between_hosts": 1}).flops_per_s(dtype) == rate


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"hbm_bytes_per_s": 0}, "memory"),
        ({"peak_flops": {}}, "any dtype"),
        ({"peak_flops": {"bf16": 0}}, "bf16"),
        ({"interconnect_bytes_per_s": {"in_host": 1}}, "between_hosts"),
        ({"host_link_bytes_per_s": -1.0}, "host link"),
    ],
)
def test_figures_are_whole_or_none(changes, name):
    good = {
        "peak_flops": {"bf16": 1},
        "hbm_bytes_per_s": 1,
        "host_link_bytes_per_s": 1,
        "interconnect_bytes_per_s": {"in_host": 1, "between_hosts": 1},
    }
    assert Figures(**good)
    with pytest.raises(ValueError, match=name):
        Figures(**(good | changes))


def test_figures_of_targets():
    h200 = targets.parse("h200")
    found = roofline.figures(h200)
    assert found == roofline.figures(json.loads(json.dumps(h200.to_json()))) and found.source == "data-sheet rates"
    assert (found.peak_flops, found.hbm_bytes_per_s) == (h200.peak_flops, 4.8e12)
    assert roofline.figures({"platform": "rocm", "peak_flops": {}, "hbm_bytes_per_s": 0.0}) is None
    one, eight = (roofline.figures({"platform": "cpu", "n_devices": n}) for n in (1, 8))
    assert one.source == "rates measured here" and one.flops_per_s("bf16") == 8 * eight.flops_per_s("tf32") > 1e8
    assert one.hbm_bytes_per_s == 8 * eight.hbm_bytes_per_s == one.host_link_bytes_per_s > 1e8


# ---- the work of a program --------------------------------------------------------------------------


def test_work_by_phase():
    flops = {("forward", "bf16"): 10, ("backward", "bf16"): 15, ("backward", "tf32"): 5}
    collectives = (
        Collective("a", "all-gather", ("data",), 2, times=3, bytes=20, wire_bytes=10, phase="forward", hosts=2),
        Collective("b", "all-gather", ("tensor",), 2, times=2, wire_bytes=7, phase="recompute", asynchronous=True),
        Collective("c", "all-reduce", ("tensor",), 2, wire_bytes=5, phase="backward", asynchronous=True, overlapped=2),
    )
    transfers = (Transfer("", "to device", 11, 0.0), Transfer("optimizer", "to host", 13, 0.0))
    kernel_bytes = {"forward": {"product_bytes": 3, "other_bytes": 4}}
    found = by_phase(collectives, transfers, kernel_bytes, flops)
    none = {"in_host": 0, "between_hosts": 0}
    empty = phase(collective_bytes=none, hidden_collective_bytes=none)
    assert found == {
        "forward": empty
        | {
            "flops": {"bf16": 10},
            "product_bytes": 3,
            "other_bytes": 4,
            "to_device_bytes": 11,
            "collective_bytes": {"in_host": 0, "between_hosts": 30},
        },
        "recompute": empty | {"collective_bytes": {"in_host": 14, "between_hosts": 0}},
        "backward": empty
        | {"flops": {"bf16": 15, "tf32": 5}, "hidden_collective_bytes": {"in_host": 5, "between_hosts": 0}},
        "optimizer": empty | {"to_host_bytes": 13},
    }


@pytest.mark.parametrize(
    ("kind", "wire", "card"),
    [
        # Eight hosts of eight: 7/8 of the payload enter a host, through eight cards, a message to each.
        ("all-gather", 63, 7),
        ("reduce-scatter", 63, 7),
        ("all-reduce", 126, 14),
        ("all-to-all", 63, 56),
        ("collective-permute", 64, 64),
    ],
)
def test_cards_of_a_host_share_what_its_devices_send(kind, wire, card):
    item = Collective("a", kind, ("fsdp",), 64, bytes=64, wire_bytes=wire, hosts=8)
    found = by_phase((item,), (), {}, {})
    assert found["forward"]["collective_bytes"] == {"in_host": 0, "between_hosts": card}
    inside = by_phase((dataclasses.replace(item, hosts=1),), (), {}, {})
    assert inside["forward"]["collective_bytes"] == {"in_host": wire, "between_hosts": 0}


def test_replicated_attention_counts_in_full_on_every_device_but_for_what_its_mask_hides():
    mesh = Mesh(np.array(described("h100:2")), ("fsdp",))
    sharded, replicated = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    B, L, H, K = 4, 512, 2, 64

    def forward(x_BLHK):
        x_BLHK = jax.lax.with_sharding_constraint(x_BLHK, replicated)
        return jax.nn.dot_product_attention(x_BLHK, x_BLHK, x_BLHK, is_causal=True, implementation="cudnn")

    report = memory.analyze(jax.jit(forward).trace(jax.ShapeDtypeStruct((B, L, H, K), jnp.bfloat16, sharding=sharded)))
    assert report.work["forward"]["flops"] == {"bf16": 4 * B * L * L * H * K / 2}
    assert report.work["forward"]["flops"] == {
        "bf16": sum(times * kernel.flops for kernel, times in schedule_records.kernels(report.schedule))
    }


def test_flops_by_phase_and_dtype():
    """Forward a third, backward two thirds, what `full` repeats apart; Muon multiplies in the optimizer."""
    toy = {"loss.kind": "full", "model.attention": "naive"}

    def by(**more):
        program = small_program(toy | {key.replace("__", "."): value for key, value in more.items()})
        found = count(program.step.trace(program.state, program.batch_shapes).jaxpr)
        assert sum(found.by.values()) == found.total
        return found

    full = by(remat__policy="full")
    assert full.by == {
        ("forward", "tf32"): full.model_flops // 3,
        ("backward", "tf32"): full.model_flops // 3 * 2,
        ("recompute", "tf32"): full.recomputed,
    }
    assert {dtype for _, dtype in by(precision__preset="fp16").by} == {"fp16"}
    muon = by(remat__policy="none", optimizer__name="muon", precision__preset="bf16")
    assert {phase for phase, _ in muon.by} == {"forward", "backward", "optimizer"}
    assert muon.by["forward", "bf16"] == full.by["forward", "tf32"]


@pytest.mark.parametrize(
    ("dtypes", "precision", "unit"),
    [
        (("float32", "float32"), None, "tf32"),
        (("float32", "float32"), "high", "tf32"),
        (("float32", "float32"), "highest", "fp32"),
        (("float32", "float32"), "F32_F32_F32", "fp32"),
        (("float32", "float32"), "BF16_BF16_F32_X3", "bf16"),
        (("bfloat16", "bfloat16"), None, "bf16"),
        (("float16", "float16"), "highest", "fp16"),
        (("float8_e4m3fn", "float8_e5m2"), None, "fp8"),
        (("float8_e4m3fn", "bfloat16"), None, "bf16"),
        (("int32", "int32"), None, "tf32"),
    ],
)
def test_the_unit_of_a_product(dtypes, precision, unit):
    def product(a, b):
        return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision, jnp.float32)

    shapes = [jax.ShapeDtypeStruct((4, 4), dtype) for dtype in dtypes]
    assert count(jax.jit(product).trace(*shapes).jaxpr).by == {("forward", unit): 128}


def test_the_work_of_a_known_program(devices):
    """A sum over a tensor axis of 4, a product divided by 4 and one elementwise kernel, on devices of two hosts."""
    mesh = Mesh(np.array(devices[:4]), ("tensor",))

    def program(x_BF, w_FD):
        return jax.lax.with_sharding_constraint(x_BF @ w_FD, NamedSharding(mesh, P()))

    split = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((64, 128), P(None, "tensor")), ((128, 32), P("tensor")))
    ]
    report = memory.analyze(jax.jit(program).trace(*split))
    found = report.work["forward"]
    assert found["flops"] == {"tf32": 2 * 64 * 128 * 32 / 4}
    assert found["product_bytes"] == 4 * (64 * 32 + 32 * 32 + 64 * 32)
    assert found["collective_bytes"] == {"in_host": 2 * 3 / 4 * 4 * 64 * 32, "between_hosts": 0}


# ---- rows and reports -------------------------------------------------------------------------------


def test_a_row_has_the_least_seconds_of_an_update():
    work = {"forward": phase(other_bytes=int(4.8e12))}
    answer = {
        "status": "ok",
        "work": work,
        "calls_per_update": 3,
        "tokens_per_update": 96,
        "target": json.loads(json.dumps(targets.parse("h200").to_json())),
    }
    row = Row.from_answer({}, answer)
    assert row.least_seconds == pytest.approx(3.0) and row.tokens_per_update == 96
    assert row.predicted_seconds is row.predicted_mfu is None, "a bound is no prediction"
    assert Row.from_answer({}, {"least_seconds": 2.0}).least_seconds == 2.0  # of a comparison's JSON
    assert Row.from_answer({}, answer | {"work": {}}).least_seconds is None
    assert Row.from_answer({}, answer | {"target": {"platform": "rocm"}}).least_seconds is None


def test_the_worker_answers_with_work():

    small = {
        "model.n_layers": "2",
        "model.d_model": "32",
        "model.d_ff": "64",
        "data.seq_len": "16",
        "batch.micro": "2",
        "batch.accumulation": "3",
        "batch.mode": "multisteps",
    }
    answer = worker.answer_to({"overrides": {"config": "tiny", **small}, "target": "cpu:1", "measure": False}, FACTORY)
    assert (answer["calls_per_update"], answer["tokens_per_update"]) == (3, 3 * 2 * 16)
    assert sum(sum(part["flops"].values()) for part in answer["work"].values()) == answer["hardware_flops"]
    once = roofline.bound_of_answer(json.loads(json.dumps(answer)))
    row = Row.from_answer({}, answer)
    assert row.least_seconds == 3 * once.total > 0 and row.predicted_seconds > 0
    assert row.predicted_tokens_per_s == pytest.approx(96 / row.predicted_seconds)


def test_the_report_and_its_page_tell_it_in_a_line():
    found = seconds({"forward": phase(flops={"bf16": 150}, other_bytes=4)}, FIGURES)
    report = ReportRecord(8, 8, {}, roofline=found.to_json())
    line = "at least 2 s per call of the step, by by hand (products 1.5 s, memory 0.5 s)"
    console = Console(width=DEFAULT_WIDTH, file=io.StringIO())
    report_text.show(report, console)
    assert line in console.file.getvalue()
    assert line in report_page.render(report)
    of = dataclasses.replace(report, subject=Description(tokens=100, calls=5))
    assert times.at_least(of) == (
        "at least 10 s per update, at most 10 tokens/s, by by hand (products 7.5 s, memory 2.5 s)"
    )
    assert ReportRecord.from_json(json.loads(json.dumps(report.to_json()))).roofline == found.to_json()
    assert times.at_least(ReportRecord(8, 8, {})) == "" and "at least" not in report_page.render(ReportRecord(8, 8, {}))


# ---- described GPUs ---------------------------------------------------------------------------------

GPU = {
    "model.d_model": 256,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.d_head": 64,
    "model.d_ff": 1024,
    "model.n_layers": 8,
    "model.max_seq_len": 1024,
    "data.seq_len": 1024,
    "batch.micro": 4,
    "precision.preset": "bf16",
}


@functools.cache
def work_of(*pairs):
    """The work of a small program on a described H100, and the rates of one."""
    target = targets.parse("h100")
    program = build(small_config(GPU | dict(pairs)), described("h100"))
    return report_of(program.compile_for_report(), target=target).work, roofline.figures(target)


def predicted(*pairs, link=None):
    work, figures = work_of(*pairs)
    return seconds(work, dataclasses.replace(figures, host_link_bytes_per_s=link) if link else figures)


def test_offload_is_no_gain_and_waits_for_a_slow_link():
    """All but equal to `full` where transfers are hidden: a stack in host memory needs no zeros first."""
    full, offload = (predicted(("remat.policy", policy)) for policy in ("full", "offload"))
    # Copies over the host link read and write device memory beside the kernels, so their bytes are not in the sum.
    assert offload.total > 0.98 * full.total and offload.by_term["products"] == full.by_term["products"]
    slow = predicted(("remat.policy", "offload"), link=1e9)
    assert slow.by_term["host_link"] > 0 and slow.total > predicted(("remat.policy", "full"), link=1e9).total
    inputs = 2 * 8 * 4 * 1024 * 256  # bf16, one for each of 8 layers
    work, _ = work_of(("remat.policy", "offload"))
    assert work["forward"]["to_host_bytes"] == work["backward"]["to_device_bytes"] == inputs


def report_of_kernels(target):
    """The report of a kernel that reads and writes 64 GiB, and of two products."""
    schedule = (
        ScheduledKernel("memory", "optimizer", 2**36),
        ScheduledKernel("product", "forward", 2**28, 2**40, "bfloat16"),
        ScheduledKernel("product", "backward", 2**28, 2**40, "float32"),
    )
    flops, kernel_bytes = schedule_records.flops_by_phase(schedule), schedule_records.bytes_by_phase(schedule)
    work, known = by_phase((), (), kernel_bytes, flops), json.loads(json.dumps(targets.parse(target).to_json()))
    return ReportRecord(8, 8, {}, work=work, schedule=schedule, target=known, subject=Description(calls=2))


def with_seconds(report, measure=False):
    found = seconds_of_step(report.work, report.target, report.schedule, report.subject, measure)
    return dataclasses.replace(report, **vars(found))


@pytest.mark.quick
@pytest.mark.parametrize("target", ["cpu:1", "cpu:8", "h100", "v100", "v5e"])
def test_no_bound_is_above_the_prediction_by_the_same_or_by_lower_rates(target, monkeypatch):
    monkeypatch.setattr(roofline, "machine_rates", lambda: (1e12, 2e10))
    found = with_seconds(report_of_kernels(target), measure=True)
    assert 0 < 2 * found.roofline["total"] <= found.prediction["seconds"]
    assert found.roofline["by_term"]["memory"] > 0 < found.roofline["by_term"]["products"]


@pytest.mark.quick
def test_rates_that_exceed_the_data_sheet_are_named_and_leave_no_bound(tmp_path):
    report = report_of_kernels("h200")
    shipped = rates.select(report.target)
    fast = dataclasses.replace(shipped, memory=((1.0, 2 * 4.8e12),), source="measured by hand")
    (tmp_path / "rates.json").write_text(json.dumps(fast.to_json()))
    answer = {"work": report.work, "target": report.target, "calls_per_update": 2}
    answer |= {"schedule": schedule_records.to_json(report.schedule), "status": "ok"}
    assert "least_seconds" in ranking.fields(answer)
    rates.use(tmp_path / "rates.json")
    try:
        found, row = with_seconds(report), ranking.fields(answer)
    finally:
        rates.use(None)
    assert "least_seconds" not in row and row["predicted_seconds"] == found.prediction["seconds"]
    line = times.at_least(found)
    assert line.startswith("no lower bound: memory would take ") and "total" not in found.roofline
    assert "by data-sheet rates" in line and "the rates of the prediction (measured by hand) exceed" in line


@pytest.mark.quick
def test_a_cpu_is_measured_only_where_it_is_asked_for(monkeypatch, tmp_path):
    """The public functions and a watched loop spend no time on it, and say the same in each process."""
    work = {"forward": phase(other_bytes=int(4.8e12))}
    monkeypatch.setattr(roofline, "machine_rates", lambda: (1e12, 4.8e12))
    on_cpu = ReportRecord(8, 8, {}, work=work, target={"platform": "cpu", "name": "cpu:1", "n_devices": 1})
    assert with_seconds(on_cpu) == on_cpu
    assert with_seconds(on_cpu, measure=True).roofline["total"] == pytest.approx(1.0)
    (tmp_path / "rates.json").write_text(json.dumps(rates.select(on_cpu.target).to_json()))
    step = ScheduledKernel("product", "forward", 2**20, 2 * 1024**3, "float32", (1, 1024, 1024, 1024))
    monkeypatch.setattr(roofline, "machine_rates", None)  # what was measured once is known
    rates.use(tmp_path / "rates.json")
    found = with_seconds(dataclasses.replace(on_cpu, schedule=(step,), subject=Description(model_flops=2 * 1024**3)))
    rates.use(None)
    assert found.prediction["seconds"] >= 2 * 1024**3 / 1e12 and not found.roofline
    assert found.prediction["mfu"] == pytest.approx(2 * 1024**3 / 1e12 / found.prediction["seconds"])
    on_gpu = ReportRecord(8, 8, {}, work=work, target=json.loads(json.dumps(targets.parse("h200").to_json())))
    assert with_seconds(on_gpu).roofline["source"] == "data-sheet rates"
