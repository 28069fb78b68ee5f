"""`model.unroll`, and what the group `xla` tells the compiler: the same results, and an option that is really taken."""

import re

import jax
import numpy as np
import pytest

from bytescope import memory
from bytescope.memory.devices import compiler, targets
from bytescope.memory.report import report_text
from bytescope.memory.view.console import plain_text
from bytescope.train.parallel.xla_options import TABLE, compiler_options
from bytescope.train.program.program import build
from support.described import SMALL_GPU
from support.exhaustive import exhaustive
from support.toy import made_state, run_losses, small_config, small_program

LAYERS = {"model.n_layers": 4}
# Ways to walk through the layers, with the unroll that is tried.
WALKS = {
    "remat": ({"remat.policy": "full"}, 2),
    "no loop": ({"remat.policy": "minimal", "remat.granularity": "parts"}, 4),
    "ranges": ({"remat.policy": "full", "remat.layers": "0-2:none"}, 2),
    "sqrt": ({"remat.policy": "sqrt"}, 2),
    "fused": ({"optimizer.fused_backward": True, "optimizer.clip": "layer", "remat.policy": "full"}, 4),
}


def losses(**overrides):
    program = small_program({**LAYERS, **overrides})
    return run_losses(program, 2, state=made_state(program))


@pytest.fixture(scope="module")
def plain():
    """Losses of a loop of one layer a turn, by the way gradients are clipped."""
    return {clip: losses(**{"optimizer.clip": clip}) for clip in ("global", "layer")}


@pytest.mark.parametrize("walk", ["fused", *exhaustive("remat", "no loop", "ranges", "sqrt")])
def test_turns_of_several_layers_train_alike(walk, plain):
    keys, unroll = WALKS[walk]
    found = losses(**keys, **{"model.unroll": unroll})
    np.testing.assert_allclose(found, plain[keys.get("optimizer.clip", "global")], rtol=2e-6)


def recomputed(**keys):
    """Matrix products of the compiled step that are recomputed, a loop's counted once."""
    program = small_program({**LAYERS, **{key.replace("__", "."): value for key, value in keys.items()}})
    lines = program.compile().as_text().splitlines()
    return sum(bool(re.search(r" dot\(|__onednn\$matmul", line)) and "rematted_computation" in line for line in lines)


def test_what_is_recomputed_stays_recomputed():
    """A loop of one turn has both passes in one computation, where XLA would merge what is equal."""
    layer = recomputed(remat__policy="full")
    for unroll in (2, 4):
        assert recomputed(remat__policy="full", model__unroll=unroll) == unroll * layer
    groups = recomputed(remat__policy="sqrt")  # of 2 layers, whose loop is gone then; the last needs no first recompute
    assert recomputed(remat__policy="sqrt", model__unroll=2) == groups + layer


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model.unroll": 3}, "model.unroll=3 does not divide the 4 layers .*: use 2, which does"),
        (
            {"model.unroll": 2, "remat.layers": "0-3:full"},
            "does not divide the 3 layers .*remat.policy=full.*: use 1, which does",
        ),
        ({"model.unroll": 0}, "model.unroll=0 is too small: give 1 or more"),
        (
            {"model.unroll": 2, "model.scan": False},
            "model.unroll=2 cannot be combined with model.scan=false, which has no loop",
        ),
        ({"xla.gemm": "cutlass"}, "did you mean cublas. Else choose one of cublas, triton, or leave it empty"),
        ({"xla.memory_slop": "0"}, "xla.memory_slop=0 is not a percentage: give a whole number from 1 to 200"),
        ({"xla.memory_slop": "50"}, "xla.memory_slop=50 is for XLA's GPU compiler, but the platform is cpu"),
        ({"xla.memory_fence": "many"}, "xla.memory_fence"),
        ({"xla.flags": "slop=50"}, "xla.flags=slop=50 does not set a flag of XLA"),
        ({"xla.command_buffers": "off"}, "xla.command_buffers=off is for XLA's GPU compiler, but the platform is cpu"),
    ],
)
def test_mistakes_in_one_line(overrides, message):
    with pytest.raises(ValueError, match=message):
        small_program({**LAYERS, **overrides})


described = pytest.mark.oracle("cuda")
ROWS = [(key, value) for key, rows in TABLE.items() for value in rows]


def settings(options, folder):
    """Lines of the compiler's settings, as it wrote them beside a small program for a described GPU."""
    device = targets.parse("h200").devices()[0]
    x = jax.ShapeDtypeStruct((64, 64), np.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    lowered = jax.jit(lambda x: x @ x).lower(x)
    lowered.compile(compiler_options={**options, "xla_dump_to": str(folder), "xla_dump_hlo_as_proto": True})
    text = "\n".join(path.read_text() for path in folder.glob("*config.pbtxt"))
    assert "xla_gpu_enable_command_buffer" in text or "command_buffer" in str(options)
    return [line.strip() for line in text.splitlines()]


# What each row leaves in the settings: present lines, and the start of lines that are absent.
TAKEN = {
    ("optimization_level", "O0"): ["optimization_level: EFFORT_O0"],
    ("optimization_level", "O1"): ["optimization_level: EFFORT_O1"],
    ("optimization_level", "O2"): ["optimization_level: EFFORT_O2"],
    ("optimization_level", "O3"): ["optimization_level: EFFORT_O3"],
    ("latency_hiding", "on"): ["xla_gpu_enable_latency_hiding_scheduler: true"],
    ("latency_hiding", "off"): [
        "xla_gpu_enable_latency_hiding_scheduler: false",
        'xla_disable_hlo_passes: "latency-hiding-scheduler"',
    ],
    ("command_buffers", "off"): [],
    ("command_buffers", "kernels"): ["xla_gpu_enable_command_buffer: FUSION"],
    ("command_buffers", "loops"): [
        f"xla_gpu_enable_command_buffer: {kind}"
        for kind in (
            "CONDITIONAL",
            "CUBLAS",
            "CUBLASLT",
            "CUDNN",
            "CUSTOM_CALL",
            "DYNAMIC_SLICE_FUSION",
            "FUSION",
            "WHILE",
        )
    ],
    ("gemm", "cublas"): ["xla_gpu_enable_triton_gemm: false"],
    ("gemm", "triton"): ["xla_gpu_cublas_fallback: false", "xla_gpu_triton_gemm_any: true"],
    **{("autotune_level", str(level)): [f"xla_gpu_autotune_level: {level}"] for level in range(1, 5)},
    ("autotune_level", "0"): ["xla_gpu_autotune_level: 0"],
}


@pytest.mark.exhaustive
@described
def test_the_compiler_takes_every_option(tmp_path):
    """XLA's own settings, written by the compiler, hold what each row says; command buffers hold nothing else."""
    assert set(TAKEN) == set(ROWS)
    for key, value in ROWS:
        folder = tmp_path / f"{key}-{value}"
        folder.mkdir()
        lines = settings(TABLE[key][value], folder)
        assert not set(TAKEN[key, value]) - set(lines), (key, value)
        if key == "command_buffers":
            assert sorted(x for x in lines if x.startswith("xla_gpu_enable_command_buffer:")) == TAKEN[key, value]


@described
def test_training_and_reports_compile_with_the_options(monkeypatch):
    """Both ways to the executable carry them, beside those of mesh.prefetch."""
    keys = {"xla.gemm": "cublas", "xla.optimization_level": "O1", "mesh.prefetch": 2}
    program = build(small_config({**SMALL_GPU, **keys}), targets.parse("h200").devices())
    wanted = {"xla_gpu_enable_triton_gemm": False, "optimization_level": 19}
    assert wanted.items() <= program.compiler_options.items() and len(program.compiler_options) == 5
    seen = []

    class Recorder:
        def compile(self, compiler_options):
            seen.append(compiler_options)
            raise InterruptedError

    object.__setattr__(program, "lower", Recorder)
    with pytest.raises(InterruptedError):
        program.compile()
    monkeypatch.setattr(compiler, "_compile", lambda lowered, options: Recorder().compile(options))
    with pytest.raises(InterruptedError):
        program.compile_for_report()
    # A compile for a described GPU is repeated with these options alone if it fails (memory/devices/machine_code.py).
    assert seen[0] == seen[-1] == program.compiler_options
    assert len(seen) == 3 and program.compiler_options.items() <= seen[1].items()


@described
def test_products_without_triton_are_calls_of_cublas():
    texts = [
        build(small_config({**SMALL_GPU, "xla.gemm": gemm}), targets.parse("h200").devices()).compile().as_text()
        for gemm in ("", "cublas")
    ]
    assert ["__cublas" in text for text in texts] == [False, True]


@pytest.mark.quick
def test_memory_keys_are_options_and_passes_that_are_off_add_up():
    xla = dict(small_config().xla) | {"memory_slop": "50", "latency_hiding": "off", "gemm": "cublas"}
    found = compiler_options(xla, 0, "cuda", xla_pass=False)
    assert found["xla_gpu_memory_limit_slop_factor"] == 50
    assert found["xla_disable_hlo_passes"] == "latency-hiding-scheduler,rematerialization"
    flags = "xla_gpu_enable_triton_gemm=true xla_disable_hlo_passes=multi_output_fusion"
    found = compiler_options(xla | {"flags": flags}, 0, "cuda", xla_pass=False)
    assert found["xla_gpu_enable_triton_gemm"] is True  # the last word
    passes = "latency-hiding-scheduler,multi_output_fusion,rematerialization"
    assert found["xla_disable_hlo_passes"] == passes
    assert compiler_options(dict(small_config().xla) | {"flags": "xla_cpu_x=a,b"}, 0, "cpu") == {"xla_cpu_x": "a,b"}


@described
def test_options_of_a_program_reach_its_report_and_unknown_ones_are_refused():
    x = jax.ShapeDtypeStruct((64, 64), np.float32)
    slop = "xla_gpu_memory_limit_slop_factor"
    half = memory.analyze(lambda x: x @ x, x, target="h200", compiler_options={slop: 50})
    assert half.compiler_options == {slop: 50} and half.to_json()["compiler_options"] == {slop: 50}
    base, budget = half.xla_budget.base_bytes - half.xla_budget.io_bytes, half.xla_budget
    assert (budget.slop_percent, budget.limit_bytes) == (50, base // 2)
    assert f"compiled with {slop}=50" in plain_text(report_text.render(half), 100)
    with pytest.raises(memory.ReportError, match="xla_gpu_memory_slop is not an option of XLA"):
        memory.analyze(lambda x: x @ x, x, target="h200", compiler_options={"xla_gpu_memory_slop": 50})
    with pytest.raises(memory.ReportError, match=f"{slop}=much is not valid for XLA: give a whole number"):
        memory.analyze(lambda x: x @ x, x, target="h200", compiler_options={slop: "much"})
    compiled = jax.jit(lambda x: x @ x).lower(x).compile()
    with pytest.raises(memory.ReportError, match=f"compiled already, so the compiler option {slop} cannot be set"):
        memory.analyze(compiled, compiler_options={slop: 50})


def test_empty_keys_tell_the_compiler_nothing():
    xla = small_config().xla
    assert compiler_options(xla, 0, "cuda") == compiler_options(xla, 0, "cpu") == {}


def test_without_the_scheduler_the_remat_pass_stays_as_it_is():
    """The option that names passes replaces the one of jax, which switches the pass off for remat.xla_pass=false."""
    xla = small_config({"xla.latency_hiding": "off"}).xla
    passes = [compiler_options(xla, 0, "cuda", xla_pass=on)["xla_disable_hlo_passes"] for on in (True, False)]
    assert passes == ["latency-hiding-scheduler", "latency-hiding-scheduler,rematerialization"]


@described
def test_what_xla_aborts_on_is_refused():
    """Chunked attention over several devices at O1 and up; nothing is compiled."""
    keys = {"xla.optimization_level": "O1", "model.attention": "chunked"}
    with pytest.raises(ValueError, match="optimization_level=O1 cannot be used here: at this level XLA aborts"):
        build(small_config(keys), targets.parse("h100:2").devices())
    build(small_config(keys), targets.parse("h100").devices())
    build(small_config({**keys, "xla.optimization_level": "O0"}), targets.parse("h100:2").devices())
