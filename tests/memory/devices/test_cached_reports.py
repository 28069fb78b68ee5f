"""A program out of jax's persistent compilation cache has the report that it had fresh."""

import contextlib

import jax
import numpy as np
import pytest

from bytescope.memory.analysis import report_of
from bytescope.memory.devices import compiler
from bytescope.memory.devices.compiler import compile_lowered
from support import programs


def test_a_report_is_the_same_fresh_and_cached(folder):
    """Of the cached executable alone only the schedule is known: its peak is another, by 1 KB."""

    def reports(*turns):
        """Their reports, and when the entry was written."""
        for exact in turns:
            report = report_of(compile_lowered(programs.linen(), exact=exact))
            [entry] = folder.glob("jit_step-*-cache")
            yield report, entry.stat().st_mtime_ns

    (fresh, written), *cached = reports(True, False, True)
    assert fresh.method == "heap_trace" and cached == [(fresh, written)] * 2, "the same, and nothing compiled again"
    [beside] = folder.glob("jit_step-*.buffers.gz")
    beside.write_bytes(beside.read_bytes()[:200])  # damaged
    (derived, same), (exact, later), *cached = reports(False, True, True, False)
    assert (derived.method, same) == ("schedule", written) and derived.peak_bytes != fresh.peak_bytes
    assert exact.breakdown == fresh.breakdown and later > written, "compiled again"
    assert cached == [(exact, later)] * 2, "once"


def test_a_program_with_other_names_has_its_own_report(folder):
    """jax gives the executable of one for the other: only the names in its source tell them apart."""

    def step(scope, exact=True):
        def body(x):
            with jax.named_scope(scope):
                return jax.numpy.tanh(x @ x) @ x

        return report_of(compile_lowered(jax.jit(body).lower(jax.ShapeDtypeStruct((64, 64), np.float32)), exact=exact))

    def scopes(report):
        return {scope for scope in ("first", "second", "third") for b in report.buffers if scope in b.op_name}

    names = ("first", "second", "first")
    assert [scopes(step(name)) for name in names] == [{name} for name in names]
    assert len(list(folder.glob("*-cache"))) == 1 and len(list(folder.glob("*.buffers.gz"))) == 2
    quick = step("third", exact=False)  # the start of a run compiles nothing again
    assert quick.method == "heap_trace" and "third" not in scopes(quick) and "names and source lines" in quick.notes[0]


@pytest.mark.parametrize("cached", [True, False])
def test_compiles_without_the_cache_that_overlap_leave_it_as_it_was(folder, cached):
    """As two threads that compile for described devices: the first one ends before the second."""
    jax.config.update("jax_enable_compilation_cache", cached)
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    try:
        for compiles in (first, second):
            compiles.enter_context(compiler._disabled_compilation_cache())
        first.close()
        assert not jax.config.jax_enable_compilation_cache, "the second one still compiles"
        second.close()
        assert jax.config.jax_enable_compilation_cache == cached
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
