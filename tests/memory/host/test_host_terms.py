"""The host memory of start, trace, compile and analyze: the model on recorded rows, and one measured compile."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from bytescope.memory.devices import cuda_plugins
from bytescope.memory.devices.compiler import compile_lowered
from bytescope.memory.host import host_ledger, host_terms, process_memory
from bytescope.memory.host.host_terms import (
    HostRates,
    ProgramSize,
    compile_terms,
    dump_terms,
    program_size,
    shared_terms,
)
from bytescope.memory.host.process_memory import host_phase, phase_peaks
from bytescope.memory.records.host_record import HostMemory
from bytescope.memory.records.result import read

MIB = 2**20
# Size of a program, its platform, whether the trainer's libraries were imported, and the measured VmHWM in MiB of
# `bytescope report` in the phases "trace" and "compile" (November 2026, jax 0.10.2). The last three set no constants.
ROWS = {
    "plain_jax.py:rnn h100": (ProgramSize(30, 101), "gpu", False, 295, 426),
    "linen_models.py:gpt h100": (ProgramSize(221, 1115), "gpu", True, 337, 608),
    "gpt2_small h200": (ProgramSize(223, 4583, True), "gpu", True, 408, 796),
    "llama_8b h100:8": (ProgramSize(227, 1046, True), "gpu", True, 405, 649),
    "tiny_moe h100:8": (ProgramSize(318, 1789), "gpu", True, 375, 726),
    "tiny cpu": (ProgramSize(194, 887), "cpu", True, 269, 502),
    "tiny_moe cpu": (ProgramSize(291, 1706), "cpu", True, 279, 621),
    "gpt2_small cpu": (ProgramSize(255, 8517), "cpu", True, 276, 739),
    "llama_405b h100:64x8": (ProgramSize(227, 1046, True), "gpu", True, 407, 651),
    "mixtral_8x7b h100:2x8": (ProgramSize(495, 5580, True), "gpu", True, 444, 874),
    "deepseek_v3 h100:256x8": (ProgramSize(667, 4724), "gpu", True, 383, 1030),
}
# The same for GPUs that are not present, without machine code, on 2026-11-27. Only the first four set constants.
WITHOUT_CODE = {
    "plain_jax.py:rnn h100": (ProgramSize(30, 101), "cuda", False, 275, 396),
    "gpt2_small h200": (ProgramSize(223, 4524, True), "cuda", True, 372, 717),
    "llama_8b h100:8": (ProgramSize(239, 1081, True), "cuda", True, 369, 584),
    "tiny_moe h100:8": (ProgramSize(327, 1814), "cuda", True, 340, 660),
    "llama_405b h100:64x8": (ProgramSize(239, 1081, True), "cuda", True, 372, 591),
    "deepseek_v3 h100:256x8": (ProgramSize(688, 4814), "cuda", True, 349, 907),
}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("row", "options"),
    [
        *((row, {}) for row in ROWS.values()),
        *((row, {"orbax": False, "without_code": True}) for row in WITHOUT_CODE.values()),
    ],
    ids=[*ROWS, *(f"{name} without code" for name in WITHOUT_CODE)],
)
def test_the_model_is_within_15_percent_of_recorded_reports(row, options):
    size, platform, trainer, traced, compiled = row
    host = HostMemory(shared_terms(size, platform, trainer=trainer, **options))
    for phase, measured in (("trace", traced), ("compile", compiled)):
        assert 0.9 < host.predicted(phase) / (measured * MIB) < 1.15, phase
    assert host.peak_phase == "compile" or host.predicted("compile") > 0.95 * host.predicted("analyze")
    if options and size.total < 2000:  # few kernels are repeated
        with_code = HostMemory(shared_terms(size, platform, trainer=trainer, orbax=False))
        assert host.predicted("compile") < with_code.predicted("compile")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("size", "imports_jax", "measured"), [(475_848, False, 58), (2_400_341, False, 80), (2_400_341, True, 211)]
)
def test_the_model_is_within_15_percent_of_recorded_reports_on_dumps(size, imports_jax, measured):
    """VmHWM in MiB of `bytescope report FILE.hlo.pb`, with and without a target, in the phase "analyze"."""
    assert 0.9 < HostMemory(dump_terms(size, imports_jax)).predicted("analyze") / (measured * MIB) < 1.15


@pytest.mark.quick
def test_the_size_of_a_program_counts_equations_as_xla_compiles_them():
    def block(x_BD, w_DD):
        return jnp.sin(x_BD @ w_DD), None

    def layers(x_BD, w_LDD, unroll):
        return jax.lax.scan(block, x_BD, w_LDD, unroll=unroll)[0]

    arrays = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((6, 8, 8), jnp.float32)
    once, unrolled = (program_size(jax.make_jaxpr(layers, static_argnums=2)(*arrays, unroll)) for unroll in (1, 6))
    assert once == ProgramSize(3, 3)  # the loop, the product and the sine
    assert unrolled == ProgramSize(3, 13)
    twice = program_size(jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x) + jax.jit(jnp.sin)(x))(jnp.ones(3)))
    assert (twice.distinct, twice.total) == (2, 5)


@pytest.mark.quick
def test_what_a_process_loads_and_keeps_is_in_each_later_phase():
    size, rates = ProgramSize(300, 1000, True), HostRates()
    host = HostMemory(shared_terms(size, "cuda", ("train",), gpu_present=True))
    alone = HostMemory(shared_terms(size, "cuda", trainer=False))
    assert host.predicted("start") - alone.predicted("start") == rates.trainer + rates.gpu_libraries
    assert {term.name for term in host.terms_of("train")} > {term.name for term in host.terms_of("trace")}
    assert host.predicted("start") < host.predicted("trace") < host.predicted("train") < host.predicted("compile")
    plain = sum(term.bytes for term in compile_terms(size, "cpu"))
    host_terms.use_host_rates({"traced": 2 * rates.traced})
    doubled = sum(term.bytes for term in compile_terms(size, "cpu"))
    host_terms.use_host_rates(None)
    assert doubled - plain == 3 * rates.traced


def test_a_compile_is_announced_before_it_is_measured(monkeypatch):
    """A process that has compiled before has XLA's code in memory already, so the growth has an upper bound only."""
    monkeypatch.setattr(process_memory, "_RECORDER", process_memory._Recorder())
    monkeypatch.setattr(host_ledger, "_EXPECTED", {})
    with host_phase("trace"):
        traced = jax.jit(lambda x: jnp.tanh(x @ x).sum()).trace(jnp.ones((8, 8)))
        lowered = traced.lower()
    before = process_memory.resident()[0]
    compile_lowered(lowered, jaxpr=traced.jaxpr)
    host = host_ledger.ledger()
    assert host.measured == phase_peaks()
    compiler = next(term.bytes for term in host.terms_of("compile") if term.name == "XLA's compiler")
    assert -compiler < host.measured["compile"] - before < 1.15 * compiler
    assert host.predicted("other")


# Prints the ledger of a process that compiles for a CPU, and the names of the libraries that it has loaded.
_FRESH = """
import json
from bytescope.memory.devices.platform import choose_platform
choose_platform()
import jax, jax.numpy as jnp
from bytescope.memory.devices.compiler import compile_lowered
from bytescope.memory.host.host_ledger import ledger
from bytescope.memory.records.result import plain
jax.devices()
def layer(x, w):
    return jnp.tanh(x @ w) * jax.nn.softmax(x), None
array = jax.ShapeDtypeStruct
step = jax.jit(jax.grad(lambda w, x: jax.lax.scan(layer, x, w)[0].sum()))
traced = step.trace(array((4, 64, 64), "float32"), array((8, 64), "float32"))
compile_lowered(traced.lower(), jaxpr=traced.jaxpr)
print(json.dumps([plain(ledger()), open("/proc/self/maps").read()]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_fresh_process_holds_what_its_ledger_predicts_and_no_library_of_nvidia():
    own = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}  # no cache
    run = subprocess.run([sys.executable, "-c", _FRESH], capture_output=True, text=True, check=True, env=own)
    host, maps = json.loads(run.stdout)
    host = read(HostMemory, host)
    for phase in ("start", "compile"):
        assert 0.75 < host.predicted(phase) / host.measured[phase] < 1.3, phase
    assert "libjax_common" in maps
    assert "xla_cuda_plugin" not in maps and "libcublasLt" not in maps


@pytest.mark.quick
def test_a_deferred_plugin_is_not_importable_until_a_target_needs_it(monkeypatch):
    name = "jax_plugins.xla_cuda12"
    monkeypatch.delitem(sys.modules, name, raising=False)
    cuda_plugins.defer()
    assert sys.modules[name] is None
    cuda_plugins.make_importable()
    assert name not in sys.modules
