"""Compiling: what XLA fails at is compiled with the flag that avoids it, and its log stays off the terminal."""

import os

import jax
import jax.numpy as jnp
import pytest

from bytescope import memory
from bytescope.memory.devices import compiler
from support.described import described

FLAG = "xla_gpu_enable_triton_gemm"


class Lowered:
    """A lowered program whose compiler fails, with its log, unless an option is set."""

    def __init__(self, error, flag=None):
        self.error, self.flag, self.calls = error, flag, []

    def compile(self, compiler_options):
        self.calls.append({name: value for name, value in compiler_options.items() if "dump" not in name})
        os.write(2, b"E1122 12:26:09.004250   31247 tiling.cc:968] log line\n")
        if self.flag not in self.calls[-1]:
            raise RuntimeError(self.error)
        return self

    def memory_analysis(self):
        return None


@pytest.mark.quick
def test_a_known_failure_is_compiled_again_with_its_flag(capfd):
    lowered = Lowered("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.9", FLAG)
    made = compiler._compile_or_load(lowered, {"xla_other": 1}, exact=False)
    assert lowered.calls == [{"xla_other": 1}, {"xla_other": 1, FLAG: False}]
    assert [FLAG in note for note in made.notes] == [True]
    capfd.readouterr()
    with pytest.raises(memory.ReportError, match="does not contain its HLO module"):  # the fake has compiled
        compiler.compile_lowered(lowered, exact=False)
    assert len(lowered.calls) == 4 and capfd.readouterr().err == ""


@pytest.mark.quick
@pytest.mark.parametrize(("error", "options"), [("out of memory", {}), ("find output tile sizes", {FLAG: True})])
def test_other_failures_are_raised(error, options):
    lowered = Lowered(error)
    with pytest.raises(RuntimeError, match=error):
        compiler._compile_or_load(lowered, options, exact=False)
    assert len(lowered.calls) == 1


@pytest.mark.quick
@pytest.mark.parametrize(
    "error",
    [
        "INVALID_ARGUMENT: Invalid dimension size -4, is_dynamic=false",
        "INVALID_ARGUMENT: overflow in static extent product: dimensions=[4, 9]",
    ],
)
def test_sizes_that_overflow_in_xla_are_one_line(error):
    """A GPU's compiler raises what the CPU's aborts at."""
    with pytest.raises(memory.ReportError, match="XLA cannot compile arrays of these sizes .*: give smaller sizes"):
        compiler._compile_or_load(Lowered(error), {}, exact=False)


def test_attention_of_length_196_compiles_for_a_gpu(capfd):
    """jax 0.10 fails at its output projection: 2 x 196 rows have no tile that divides them."""
    described("h200")

    def attention(q, k, v, w_o):
        probs = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
        return jnp.einsum("bqhd,hdm->bqm", jnp.einsum("bhqk,bkhd->bqhd", probs, v), w_o)

    x = jax.ShapeDtypeStruct((2, 196, 1, 64), jnp.bfloat16)
    report = memory.analyze(attention, x, x, x, jax.ShapeDtypeStruct((1, 64, 64), jnp.bfloat16), target="h200")
    assert report.peak_bytes > 4 * x.size * 2 and report.xla.peak_bytes == report.peak_bytes
    assert any(FLAG in note for note in report.notes) == (jax.__version_info__ < (0, 11))
    assert capfd.readouterr().err == ""
