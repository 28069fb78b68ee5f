"""XLA's memory limit: the formula in cases, and beside the line that XLA itself logs."""

import contextlib
import dataclasses
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from bytescope.memory.analysis import report_of
from bytescope.memory.devices import compiler, compiler_log, targets
from bytescope.memory.devices.compiler import MemorySettings
from bytescope.memory.devices.compiler_log import RematLog
from bytescope.memory.peak import xla_passes
from bytescope.memory.records.report_record import XlaBudget, XlaStats
from bytescope.train.parallel.xla_options import xla_remat_pass

REMAT = "jax_compiler_enable_remat_pass"
STATS = XlaStats(argument_bytes=30, output_bytes=12, alias_bytes=2)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (MemorySettings(140), XlaBudget(140, 40, 95, 95)),
        (MemorySettings(141, slop_percent=50), XlaBudget(141, 40, 50, 50)),
        (MemorySettings(40), XlaBudget(40, 40, 95, 0)),
        (MemorySettings(39), XlaBudget(39, 40, 95, 0)),
        (MemorySettings(), XlaBudget(67_954_383_257, 40, 95, 64_556_664_056)),  # 80 % of an H100
        (None, XlaBudget()),
    ],
)
def test_the_limit_in_integer_arithmetic(settings, expected):
    assert xla_passes.find_budget(STATS, targets.parse("h100"), settings) == expected


@pytest.mark.quick
def test_the_margin_is_against_the_limit_and_the_results():
    """Without XLA's own count it is temporaries and results; with it, XLA's count."""
    stats = dataclasses.replace(STATS, temp_bytes=80)
    budget = xla_passes.find_budget(stats, targets.parse("h100"), MemorySettings(140, disabled_passes=("a",)), None, 7)
    assert (budget.need_bytes, budget.margin_bytes, budget.scheduler_bytes) == (92, 15, 7)
    assert budget.margin_share == 15 / 107 and budget.disabled_passes == ("a",) and budget.unreduced_bytes is None
    log = RematLog(limit_bytes=107, reduced_bytes=110, original_bytes=130)
    budget = xla_passes.find_budget(stats, targets.parse("h100"), MemorySettings(140), log)
    assert (budget.need_bytes, budget.margin_bytes, budget.unreduced_bytes) == (110, -3, 130)


@pytest.mark.quick
def test_the_log_line_is_read():
    line = (
        b"W1126 15:00:00.000000   12 hlo_rematerialization.cc:3021] Can't reduce memory use below 9.70MiB (10171187 "
        b"bytes) by rematerialization; only reduced to 24.00MiB (25165824 bytes), down from 32.00MiB (33554432 bytes) "
        b"originally\n"
    )
    assert compiler_log.read_remat_log([b"another line\n", line]) == RematLog(10171187, 25165824, 33554432)
    assert compiler_log.read_remat_log([b"another line\n"]) is None


@pytest.mark.quick
def test_only_nvidia_gpus_have_a_limit():
    for target in (None, targets.parse("v5e"), targets.parse("cpu")):
        assert xla_passes.find_budget(STATS, target, MemorySettings(140)) == XlaBudget()
    assert xla_passes.find_budget(XlaStats(), targets.parse("h100"), MemorySettings(140)) == XlaBudget()


def step(x_DD, w_DD):
    """Keeps four activations until the end, which XLA's rematerialization cannot shorten."""
    activations, h_DD = [], x_DD
    for _ in range(4):
        h_DD = jnp.sin(h_DD @ w_DD)
        activations.append(h_DD)
    for h_DD in reversed(activations):
        x_DD = jnp.tanh((x_DD * h_DD) @ w_DD)
    return x_DD


@pytest.mark.oracle("cuda")
@pytest.mark.parametrize(("donated", "slop", "fraction"), [(False, 95, 0.00021), (True, 50, 0.0004)])
def test_the_limit_is_the_one_that_xla_logs(capfd, donated, slop, fraction):
    """XLA logs the limit of its rematerialization pass, to which the results are added. Without the pool as the
    device's memory it would be 80 % of the GPU, and nothing would be logged."""
    target = targets.parse(f"h100@{fraction}")
    place = jax.sharding.SingleDeviceSharding(target.devices()[0])
    array = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=place)
    lowered = jax.jit(step, donate_argnums=(0,) if donated else ()).lower(array, array)
    with compiler_log.REDIRECTING:  # the log is not held back while this lock is taken
        compilation = compiler.compile_lowered(
            lowered, options={compiler.SLOP: slop}, device_memory_bytes=target.pool_bytes
        )
    report = report_of(compilation, target=target)
    logged = re.search(r"Can't reduce memory use below \S+ \((\d+) bytes\)", capfd.readouterr().err)
    assert logged and int(logged[1]) == report.xla_budget.limit_bytes + report.xla.output_bytes
    budget = report.xla_budget
    assert (budget.base_bytes, budget.io_bytes) == (target.pool_bytes, (2 if donated else 3) * 2**22)
    assert (budget.slop_percent, budget.limit_bytes) == (slop, report.to_json()["xla_limit_bytes"])
    assert report.limit_bytes == target.pool_bytes


@pytest.mark.quick
def test_only_the_thread_that_asks_compiles_with_another_size():
    """Two requests that overlap in two threads leave nothing behind, and a compile without a request is unchanged."""
    from jax._src import compiler as jax_compiler

    def settings_of(size, started, may_end):
        with compiler._memory_settings(size) as read:
            jax_compiler.get_compile_options(num_replicas=1, num_partitions=1)
            started.set()
            assert may_end.wait(30)
            return read().device_memory_bytes

    first, second, end_first, end_second = (threading.Event() for _ in range(4))
    with ThreadPoolExecutor() as pool:
        running = pool.submit(settings_of, 2**30, first, end_first), pool.submit(settings_of, 2**31, second, end_second)
        assert first.wait(30) and second.wait(30)
        plain = jax_compiler.get_compile_options(num_replicas=1, num_partitions=1).SerializeAsString()
        end_first.set()
        assert running[0].result() == 2**30
        end_second.set()
        assert running[1].result() == 2**31
    assert jax_compiler.get_compile_options(num_replicas=1, num_partitions=1).SerializeAsString() == plain
    with compiler._memory_settings(2**30):
        assert jax_compiler.get_compile_options(num_replicas=1, num_partitions=1).SerializeAsString() != plain


@pytest.mark.quick
def test_only_the_thread_that_asks_compiles_without_xlas_rematerialization():
    """A program that begins to compile while another one compiles, and ends later, leaves jax's setting as it was."""
    first, other = contextlib.ExitStack(), contextlib.ExitStack()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(first.enter_context, xla_remat_pass(False)).result()
        assert getattr(jax.config, REMAT)
        other.enter_context(compiler.trial_options({REMAT: "False"}))
        thread.submit(first.close).result()
        assert not getattr(jax.config, REMAT)
        other.close()
    assert getattr(jax.config, REMAT)
