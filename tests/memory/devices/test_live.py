"""Live memory: what a device tells, and the line that compares it with the prediction."""

import sys
import types

import jax
import jax.numpy as jnp
import pytest

from bytescope.memory.devices import live
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import MIB, human
from support.described import described

GIB = 2**30
STATS = {
    "bytes_in_use": 6 * GIB,
    "peak_bytes_in_use": 10 * GIB,
    "bytes_limit": 16 * GIB,
    "largest_free_block_bytes": 4 * GIB,
    "pool_bytes": 14 * GIB,
}


class Card:
    """A GPU as jax shows it, with `stats` for statistics."""

    platform, device_kind, process_index, local_hardware_id = "gpu", "NVIDIA H200", 0, 0

    def __init__(self, stats):
        self.client = types.SimpleNamespace(process_index=lambda: 0, local_devices=lambda: [self])
        self.stats = stats

    def memory_stats(self):
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats


def _nvml(monkeypatch, **functions):
    live._nvml_handle.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(**functions))


def _report(allocated):
    return ReportRecord(peak_bytes=allocated, allocated_bytes=allocated, breakdown={})


def test_the_allocators_figures_and_the_card(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-beef")
    asked = []
    _nvml(
        monkeypatch,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda n: asked.append(n) or n,
        nvmlMemory_v2=2,
        nvmlDeviceGetMemoryInfo=lambda handle, version: types.SimpleNamespace(used=15 * GIB, total=140 * GIB),
    )
    seen = live.sample(Card(STATS))
    assert asked == [3]
    assert (seen.in_use_bytes, seen.peak_bytes, seen.limit_bytes) == (6 * GIB, 10 * GIB, 16 * GIB)
    assert seen.fragmentation == pytest.approx(0.5)  # 8 GiB of the pool are free, 4 in one piece
    assert (seen.card_used_bytes, seen.card_total_bytes) == (15 * GIB, 140 * GIB)
    assert seen.metrics()["memory/peak_bytes"] == 10 * GIB


@pytest.mark.parametrize("stats", [{}, None, {"bytes_in_use": 1}, {**STATS, "pool_bytes": 0}])
def test_what_is_missing_is_none_and_nothing_is_raised(monkeypatch, stats):
    def broken():
        raise OSError("no driver")

    _nvml(monkeypatch, nvmlInit=broken)
    seen = live.sample(Card(stats))
    assert seen.card_used_bytes is None and seen.host_rss_bytes > 0
    assert seen.fragmentation is None or 0 <= seen.fragmentation <= 1


def test_a_device_that_cannot_be_asked_gives_none():
    assert live.sample(Card(RuntimeError("compile only"))) is None
    assert live.sample(object()) is None


def test_a_compile_only_device_gives_none():
    assert live.sample(described("h200")[0]) is None


def test_the_cpu_shows_the_process_and_how_many_devices_share_it():
    seen = live.sample(jax.local_devices(backend="cpu")[0])
    assert seen.source == "host" and seen.sharing == len(jax.local_devices(backend="cpu"))
    assert 0 < seen.host_rss_bytes <= seen.host_peak_rss_bytes <= seen.limit_bytes
    assert f"on {seen.sharing} CPU devices" in live.predicted_against_measured(_report(GIB), seen)


@pytest.mark.quick
def test_the_hosts_limit_is_read_where_it_is_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(live, "free_host_bytes", lambda: asked.append(1) or GIB)
    device = jax.local_devices(backend="cpu")[0]
    seen = live.sample(device, host_limit=False)
    assert seen.limit_bytes is None and 0 < seen.host_rss_bytes <= seen.host_peak_rss_bytes and not asked
    assert live.sample(device).limit_bytes > GIB and asked


def test_what_a_sample_is_compared_with():
    """On the CPU the process is measured: it held something before, and its devices share it."""
    host = live.LiveMemory("cpu", "host", sharing=2, in_use_bytes=3 * GIB)
    assert live.predicted_in_use(_report(GIB), host) == 5 * GIB
    card = live.LiveMemory("NVIDIA H200", "allocator", in_use_bytes=3 * GIB)
    assert live.predicted_in_use(_report(GIB), card) == live.predicted_in_use(_report(GIB), None) == GIB


def test_cpu_devices_are_measured_without_the_rest_of_the_process():
    """A program whose argument has 64 MiB and whose temporaries have about as much."""
    argument = jax.block_until_ready(jnp.ones(16 * MIB, jnp.float32))
    program = jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, y: y * 0.5 + x, x)[-1])
    jax.block_until_ready(program(argument))
    arrays = live.array_bytes()
    assert arrays >= 64 * MIB
    temporaries = program.lower(argument).compile().memory_analysis().temp_size_in_bytes
    _, peak = live.measure_call(lambda argument=argument: jax.block_until_ready(program(argument)))
    assert peak - arrays == pytest.approx(temporaries, rel=0.15) and temporaries >= 64 * MIB
    seen = live.on_cpu_devices(live.sample(jax.local_devices(backend="cpu")[0]), peak)
    assert seen.in_use_bytes < 2 * arrays and seen.peak_bytes == peak < seen.host_peak_rss_bytes
    assert live.predicted_in_use(_report(GIB), seen) == seen.sharing * GIB
    line = live.predicted_against_measured(_report(GIB), seen, seen)
    assert f"XLA's buffers on {seen.sharing} CPU devices, measured {human(peak)} of arrays and temporaries (" in line
    del argument
    assert live.array_bytes() <= arrays - 63 * MIB


@pytest.mark.quick
def test_temporaries_below_what_the_growth_of_the_process_resolves_have_no_per_cent(monkeypatch):
    """The C library serves small requests from resident memory: 8.6 MiB of temporaries grew a process by 0.6 to 9.4."""
    monkeypatch.setattr(live, "array_bytes", lambda: 12 * MIB)
    assert not live.resolves_temporaries(25 * MIB, 1) and live.resolves_temporaries(44 * MIB, 1)
    assert not live.resolves_temporaries(37 * MIB, 2) and live.resolves_temporaries(38 * MIB, 2)
    seen = live.on_cpu_devices(live.LiveMemory("cpu", "host", host_peak_rss_bytes=400 * MIB), None)
    line = live.predicted_against_measured(_report(25 * MIB), seen)
    assert line.startswith(
        "predicted 25.00 MiB of XLA's buffers on 1 CPU device, 12.00 MiB of arrays measured; the temp"
    )
    assert "below 32.00 MiB per device" in line and "the whole process peaked at 400.00 MiB" in line and "%" not in line
    assert "not measured, because" in live.predicted_against_measured(_report(GIB), seen)


def test_the_line_gives_the_error_in_per_cent():
    seen = live.LiveMemory(
        "NVIDIA H200",
        "allocator",
        peak_bytes=10 * GIB,
        limit_bytes=16 * GIB,
        card_used_bytes=15 * GIB,
        card_total_bytes=140 * GIB,
    )
    line = live.predicted_against_measured(_report(11 * GIB), seen)
    assert line == (
        "predicted 11.00 GiB, measured 10.00 GiB on NVIDIA H200 (prediction +10.0 %), "
        "limit 16.00 GiB, 15.00 GiB of the GPU's 140.00 GiB in use"
    )
    assert "not measured" in live.predicted_against_measured(_report(GIB), None)
