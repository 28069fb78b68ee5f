"""Peaks that XLA's own passes raise: each finding on a program that has the fault, with its remedy compiled, and no
finding on a program without the fault."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bytescope import memory
from bytescope.memory.analysis import report_of
from bytescope.memory.devices import compiler, targets
from bytescope.memory.findings.compiler_findings import scheduler_peak
from bytescope.memory.records.report_record import ROWS as ROWS_OF_PEAK
from bytescope.memory.records.report_record import Finding, ReportRecord
from bytescope.memory.report import report_page, report_text
from bytescope.memory.report.tried_remedies import options_of, tried_text, try_remedies
from bytescope.memory.units import GIB, MIB
from bytescope.memory.view.console import plain_text
from bytescope.train.plan.advice import parse_flags
from bytescope.train.plan.report_remedies import with_remedies
from bytescope.train.program.config_files import flatten
from support.oracles import require
from support.toy import small_config

LAYERS, WIDTH, ROWS = 8, 8192, 131072


def report_with(lowered, target, options=None):
    with compiler.trial_options(options or {}):
        compilation = compiler.compile_lowered(lowered, device_memory_bytes=target.pool_bytes)
    return report_of(compilation, target=target)


def kinds(report):
    return {finding.kind for finding in report.findings}


def finding_of(report, kind):
    return next(finding for finding in report.findings if finding.kind == kind)


def layer(x_BD, weights):
    up_DF, down_FD = weights
    return x_BD + jax.nn.relu(x_BD @ up_DF) @ down_FD


def train(weights, x_BD, scan):
    """One step of SGD. The weights of every layer are gathered before use, and each gradient is scattered."""

    def loss(weights):
        h_BD = x_BD
        if scan:
            h_BD = jax.lax.scan(lambda h_BD, w: (jax.checkpoint(layer)(h_BD, w), None), h_BD, weights)[0]
        else:
            for pair in weights:
                h_BD = jax.checkpoint(layer)(h_BD, pair)
        return jnp.sum(h_BD.astype(jnp.float32) ** 2)

    gradients = jax.grad(loss)(weights)
    return jax.tree.map(lambda w, gradient: w - 0.01 * gradient, weights, gradients)


def lower_layers(scan):
    """The case of openxla/xla#45753 in small: the latency-hiding scheduler has gathers and scatters to hide."""
    require("cuda")
    mesh = Mesh(np.array(targets.parse("h100:8").devices()), ("data",))
    stack = (LAYERS,) if scan else ()
    rows = NamedSharding(mesh, P(*(None for _ in stack), "data", None))
    weight = jax.ShapeDtypeStruct((*stack, WIDTH, WIDTH), jnp.bfloat16, sharding=rows)
    weights = (weight, weight) if scan else [(weight, weight) for _ in range(LAYERS)]
    x_BD = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, P("data", None)))
    return jax.jit(train, donate_argnums=0, static_argnums=2).lower(weights, x_BD, scan)


@pytest.fixture(scope="module")
def unrolled():
    """(the lowered step with unrolled layers, its report, the report after the remedies were tried)."""
    target, lowered = targets.parse("h100:8"), lower_layers(scan=False)
    report = report_with(lowered, target)
    tried = try_remedies(
        report, lambda finding: report_with(lowered, target, options_of(finding)) if finding.options else None
    )
    return report, tried


@pytest.mark.oracle("cuda")
def test_deferred_weight_gradients_are_named(unrolled):
    report, _ = unrolled
    found = finding_of(report, "scheduler_peak")
    assert "weight gradients past the peak, of weights[" in found.message
    assert found.bytes == report.xla_budget.scheduler_bytes > GIB
    operands = [held for held in report.scheduler_held if held.weight_gradient]
    assert sum(held.bytes for held in operands) >= found.bytes
    assert all(held.shape == (ROWS // 8, WIDTH) and held.dtype == "bfloat16" for held in operands)
    assert all("test_compiler_findings.py" in held.source for held in operands)
    assert memory.Report.from_json(report.to_json()).scheduler_held == report.scheduler_held


@pytest.mark.oracle("cuda")
def test_the_estimate_is_what_the_compiled_remedy_frees(unrolled):
    report, tried = unrolled
    found = finding_of(tried, "scheduler_peak")
    freed = report.allocated_bytes - found.tried_bytes
    assert freed == pytest.approx(found.bytes, rel=0.05)
    assert f"{freed / GIB:.2f} GiB less" in tried_text(tried, found)
    text = plain_text(report_text.render(tried), 120)
    assert "compiled with this" in text and "held by the schedule" in text and "an order of least memory" in text
    page = report_page.render(tried)
    assert "Held by the schedule" in page and "compiled with this" in page


@pytest.mark.oracle("cuda")
def test_a_scan_and_a_switched_off_scheduler_have_no_finding(unrolled):
    report, _ = unrolled
    assert "unrolled_layers" in kinds(report)
    target = targets.parse("h100:8")
    scanned = report_with(lower_layers(scan=True), target)
    assert not kinds(scanned) & {"scheduler_peak", "unrolled_layers"}
    budget = dataclasses.replace(report.xla_budget, disabled_passes=(compiler.SCHEDULER_PASS,))
    assert scheduler_peak(dataclasses.replace(report, xla_budget=budget), None) is None


@pytest.mark.exhaustive
@pytest.mark.oracle("cuda")
def test_a_program_that_was_compiled_before_has_the_finding_too(unrolled):
    report, _ = unrolled
    lowered = lower_layers(scan=False)
    found = memory.analyze(lowered.compile(), target="h100:8")
    assert finding_of(found, "scheduler_peak").bytes == pytest.approx(report.xla_budget.scheduler_bytes, rel=0.1)
    assert found.xla_budget.limit_bytes is None
    off = lowered.compile(compiler_options={compiler.DISABLED_PASSES: compiler.SCHEDULER_PASS})
    assert "scheduler_peak" not in kinds(memory.analyze(off, target="h100:8")), "nothing is deferred"


def sums(x_D):
    """The case of openxla/xla#27322: the zeros of every loop's stack are computed by one kernel."""
    for _ in range(4):
        x_D, stack_DD = jax.lax.scan(lambda carry, one: (carry + one, carry + one), x_D, jnp.ones(len(x_D)))
        x_D += jnp.sum(stack_DD, axis=-1)
    return x_D


@pytest.mark.oracle("cuda")
def test_fused_copies_and_their_remedy():
    require("cuda")
    target = targets.parse("h100")
    place = jax.sharding.SingleDeviceSharding(target.devices()[0])
    lowered = jax.jit(sums).lower(jax.ShapeDtypeStruct((40000,), jnp.float32, sharding=place))
    report = report_with(lowered, target)
    if report.peak_bytes < 2 * 4 * 40000**2:  # XLA of jaxlib 0.12 makes no such copies
        assert "fused_copies" not in kinds(report)
        return
    found = finding_of(report, "fused_copies")
    assert found.bytes == 3 * 4 * 40000**2 and "3 copies" in found.message
    tried = report_with(lowered, target, options_of(found))
    assert report.allocated_bytes - tried.allocated_bytes >= found.bytes // 2
    assert "fused_copies" not in kinds(tried) and tried.xla_budget.disabled_passes == (compiler.COPY_FUSION_PASS,)


def chain(x_DD, w_DD):
    """Keeps four activations until the end."""
    activations, h_DD = [], x_DD
    for _ in range(4):
        h_DD = jnp.sin(h_DD @ w_DD)
        activations.append(h_DD)
    for h_DD in reversed(activations):
        x_DD = jnp.tanh((x_DD * h_DD) @ w_DD)
    return x_DD


@pytest.mark.oracle("cuda")
@pytest.mark.parametrize(
    ("fraction", "enabled", "expected"),
    [
        (0.5, True, set()),
        (0.00035, True, {"xla_remat"}),
        (0.00021, True, {"xla_remat_falls_short"}),
        (0.00021, False, {"xla_remat_off"}),
        (0.0001, True, {"xla_remat", "arguments_above_limit"}),
    ],
)
def test_programs_around_the_limit(fraction, enabled, expected):
    """A pool of 40 GiB, and pools around the 20 MiB that the program needs in addition to 8 MiB of arguments."""
    target = targets.parse(f"h100@{fraction}")
    place = jax.sharding.SingleDeviceSharding(target.devices()[0])
    array = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=place)
    lowered = jax.jit(chain).lower(array, array)
    report = report_with(lowered, target, {"jax_compiler_enable_remat_pass": str(enabled)})
    assert jax.config.jax_compiler_enable_remat_pass
    assert kinds(report) == expected
    assert report.beyond_xla_limit == bool(expected)
    product = 2 * 1024**3
    for value in report.xla_recomputed:
        assert value.bytes == 4 * MIB and value.flops in (0, product) and value.op_name.startswith("jit(chain)/")
        assert "test_compiler_findings.py" in value.source
    text = plain_text(report_text.render(report), 120)
    assert (
        ("recomputed by XLA" in text) == bool(report.xla_recomputed) == ("Recomputed by" in report_page.render(report))
    )
    assert ("below the limit" in text) == (report.xla_budget.margin_bytes >= 0)
    if "xla_remat_off" in expected:
        tried = report_with(lowered, target, options_of(finding_of(report, "xla_remat_off")))
        assert tried.xla_recomputed


@pytest.mark.quick
@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("scheduler_peak", {}, "--config.xla.latency_hiding=off"),
        ("scheduler_peak", {"model.scan": False}, "--config.model.scan=true"),
        ("unrolled_layers", {"model.unroll": 2}, "--config.model.unroll=1"),
        ("unrolled_layers", {}, ""),
        ("xla_remat_off", {}, "--config.remat.xla_pass=true"),
        ("fused_copies", {}, ""),
    ],
)
def test_remedies_of_configs_are_flags(kind, changes, expected):
    """A config that has no such key keeps the remedy in JAX's words, and the compiler options."""
    report = report_with_findings(kind, changes)
    (found,) = with_remedies(report).findings
    assert found.flags == expected and found.options == "a=b"
    assert found.remedy == "words" if not expected else found.remedy != "words"
    assert [f"--config.{key}={text}" for key, text in parse_flags(found.flags)] == found.flags.split()


@pytest.mark.quick
def test_equal_remedies_are_compiled_once_and_refused_ones_stay_untried():
    report = report_with_findings("fused_copies", {})
    first = report.findings[0]
    other, none = dataclasses.replace(first, options="c=d"), dataclasses.replace(first, options="")
    report = dataclasses.replace(report, findings=(first, first, other, none))
    asked = []

    def compile_with(finding):
        asked.append(options_of(finding))
        return dataclasses.replace(report, allocated_bytes=7) if finding is first else None

    tried = try_remedies(report, compile_with)
    assert asked == [{"a": "b"}, {"c": "d"}]
    assert [finding.tried_bytes for finding in tried.findings] == [7, 7, None, None]
    assert "3 B less" in tried_text(tried, tried.findings[0]) and tried_text(tried, tried.findings[3]) == ""


def report_with_findings(kind, changes):
    """The report of a config with one finding, made by hand."""
    config = {**flatten(small_config(changes)), **changes}
    finding = Finding(kind, 1, "message", "words", options="a=b")
    target = {"name": "h100", "platform": "cuda", "n_devices": 1}
    return ReportRecord(10, 10, dict.fromkeys(ROWS_OF_PEAK, 0), findings=(finding,), config=config, target=target)
