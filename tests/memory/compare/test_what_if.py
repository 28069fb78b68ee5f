"""compare --what-if: one program under other options of XLA."""

import json
import re

import pytest

from bytescope.memory import __main__ as command
from bytescope.memory.compare import compare_rows, what_if, worker, worker_pool
from bytescope.memory.compare.compare_rows import Row
from bytescope.memory.compare.program_factory import FunctionFactory, load_factory
from bytescope.memory.devices import targets, xla_flags
from bytescope.memory.seconds import ranking
from bytescope.train.plan.config_factory import FACTORY
from support.browser import Page
from support.json_results import read_result
from support.same_process import SameProcess

GIB = 2**30
# Keys of a config that compiles fast.
SMALL = (
    "--config.model.n_layers=2",
    "--config.model.d_model=64",
    "--config.model.d_ff=128",
    "--config.data.seq_len=128",
    "--config.batch.micro=2",
)
SLOP, GEMM = "xla_gpu_memory_limit_slop_factor", "xla_gpu_enable_triton_gemm"
STEP = """
import jax, jax.numpy as jnp

traces = []

def program(size=256):
    def step(x):
        traces.append(size)
        return jnp.tanh(x @ x) @ x
    return step, (jax.ShapeDtypeStruct((size, size), jnp.bfloat16),)
"""


def answers_of(jobs, **more):
    """What workers would say: the scheduler frees workspace at a cost, a loop takes less than no loop, and levels are
    faster alike."""
    out = {}
    for job in jobs:
        workspace, seconds, status = 4, 1.0, "ok"
        keys = job.chosen
        if keys.get("xla.latency_hiding") == "off":
            workspace, seconds = 3, 1.2
        if keys.get("model.scan") == "false":
            workspace, seconds = 80, 0.5
        if keys.get("xla.optimization_level"):
            workspace, seconds = 5, 0.9
        if keys.get("xla.memory_slop") == "50":  # less than 0.2 % is no change
            workspace, seconds = 4 - 2**-10, 1.0005
        if "multi_output_fusion" in keys.get("xla.flags", ""):
            status = "XLA failed"
        size = int((10 + workspace) * GIB)
        out[job.name] = {
            "status": status,
            **dict.fromkeys(("peak_bytes", "allocated_bytes"), size),
            "breakdown": {"params": 10 * GIB, "workspace": int(workspace * GIB)},
            "fits": size < 80 * GIB,
            "limit_bytes": 80 * GIB,
            "predicted": seconds,
            "target": {"name": "h100:8", "limit_bytes": 80 * GIB},
            "versions": {"jax": "9"},
        }
    return out, False


@pytest.mark.quick
def test_variants_of_a_config_are_ranked_and_told_in_words(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(worker_pool, "run", answers_of)
    monkeypatch.setattr(
        ranking, "fields", lambda answer: {"predicted_seconds": answer["predicted"]} if "predicted" in answer else {}
    )
    files = [f"--json={tmp_path / 'w.json'}", f"--html={tmp_path / 'w.html'}"]
    assert command.main(["compare", "tiny", "h100:8", "--what-if", *files]) == 0
    out = read_result(tmp_path / "w.json")
    assert [(row["change"], row["effect"]) for row in out["rows"]] == [
        ("optimization level O1", "workspace +1.00 GiB, 10.0% faster"),
        ("as given", ""),
        ("scheduler off", "workspace -1.00 GiB, 20.0% slower"),
        ("scan off", "workspace +76.00 GiB, 50.0% faster"),
    ]
    assert out["best"]["flags"] == "--config.xla.optimization_level=O1"
    assert {"memory slop 50 %", "memory slop 125 %", "copy fusion off"} <= set(out["unchanged"])
    assert out["left_out"]["optimization level O3"] == "the same program as optimization level O1"
    assert out["left_out"]["multi-output fusion off"] == "XLA failed"
    assert ("barriers from 64 MiB" in out["left_out"]) == ("barriers from 64 MiB" not in out["unchanged"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "no change of 0.2% or more: " in printed and "left out: multi-output fusion off: XLA failed" in printed
    page = Page((tmp_path / "w.html").read_text())
    assert [key for key, _ in page.data["keys"]] == ["change", "effect"]
    assert page.data["rows"][2]["command"].endswith("--config.xla.latency_hiding=off")
    assert len({row["task"] for row in page.data["rows"]}) == 1  # they compute the same, so that they compete


@pytest.mark.quick
def test_a_program_that_is_no_gpus_has_only_its_scan():
    variants = FACTORY.what_if({"config": "tiny"}, "cpu")
    assert [one.change for one in variants if not one.refused] == ["scan off", what_if.AS_GIVEN]
    assert "the target is a CPU" in variants[-1].refused
    for variant in FACTORY.what_if({"config": "tiny", "xla.flags": "xla_gpu_x=1"}, "cuda"):
        if "xla.flags" in variant.keys:
            assert variant.keys["xla.flags"].startswith("xla_gpu_x=1 xla_disable_hlo_passes=")


@pytest.mark.quick
def test_overrides_are_split_into_what_is_traced_and_how_it_is_compiled(tmp_path):
    h100 = targets.parse("h100")
    asked = {"config": "tiny", "xla.memory_slop": "50", "model.n_layers": "2"}
    assert FACTORY.split_options(asked, h100) == ({"config": "tiny", "model.n_layers": "2"}, {SLOP: 50})
    assert FACTORY.split_options({"config": "tiny"}, h100) == ({"config": "tiny"}, None)
    file = tmp_path / "split_step.py"
    file.write_text(STEP)
    factory = load_factory(f"{file}:program")
    assert isinstance(factory, FunctionFactory)
    asked = {"size": "64", SLOP: "50", GEMM: "false", "optimization_level": "O1"}
    options = {SLOP: 50, GEMM: False, "optimization_level": 19}
    assert factory.split_options(asked, h100) == ({"size": "64"}, options)
    assert factory.resolve(asked) == {"size": 64, **options}
    assert factory.row.flag(GEMM, False) == f"--xla={GEMM}=false" and factory.row.is_how(GEMM)


@pytest.mark.quick
def test_failed_rows_come_last_and_have_no_effect():
    given = Row({}, peak_bytes=5, allocated_bytes=5, fits=True, predicted_seconds=1.0)
    failed = Row({}, status="no")
    assert what_if.ranked([failed, given]) == [given, failed] and what_if.effect(failed, given) == ""
    more = Row({}, peak_bytes=6, allocated_bytes=7, predicted_seconds=1.0)
    assert what_if.effect(more, given) == "allocated +2 B"
    assert compare_rows.varying([given, more]) == []


@pytest.mark.oracle("cuda")
def test_a_users_program_is_traced_once_and_compiled_with_each_option(tmp_path, monkeypatch, capsys):
    file = tmp_path / "traced_step.py"
    file.write_text(STEP)
    programs, factories = worker.HeldProgram(), {}

    class OneWorker(SameProcess):
        def ask(self, message):
            job = json.loads(message)
            factory = factories.setdefault(job["factory"], load_factory(job["factory"]))
            return worker.answer_to(job, factory, programs)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(worker_pool, "Worker", OneWorker)
    tried = ("memory slop 50 %", "cuBLAS, no Triton products", "barriers from 64 MiB")
    monkeypatch.setattr(what_if, "VARIANTS", {name: what_if.VARIANTS[name] for name in tried})
    files, words = [f"--json={tmp_path / 'w.json'}"], ["compare", f"{file}:program", "h100", "--jobs=1"]
    assert command.main([*words, "--what-if", *files]) == 0
    out = read_result(tmp_path / "w.json")
    rows = {row["change"]: row for row in out["rows"]}
    assert set(rows) == {what_if.AS_GIVEN, "cuBLAS, no Triton products"} and "memory slop 50 %" in out["unchanged"]
    assert rows["cuBLAS, no Triton products"]["effect"] and rows[what_if.AS_GIVEN]["predicted_seconds"] > 0
    assert len(next(iter(factories.values()))._function.module.traces) == 1
    # The flags are keys of a grid, too, and one that XLA does not know is refused.
    assert command.main([*words, f"--grid={SLOP}=50,95", f"--xla={GEMM}=false", *files]) == 0
    out = read_result(tmp_path / "w.json")
    assert [row["overrides"] for row in out["rows"]] == [{SLOP: 50}, {SLOP: 95}]
    assert out["given"] == f"--xla={GEMM}=false" and out["best"]["flags"].startswith(f"--xla={SLOP}=")
    capsys.readouterr()
    assert command.main([*words, "--xla=xla_gpu_memory_slop=50", "--grid=size=64"]) == 2
    assert "xla_gpu_memory_slop is not an option of XLA" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.oracle("cuda")
def test_what_if_of_a_config(tmp_path, monkeypatch, capsys):
    """Every variant is compiled: XLA knows its option. Of options with several values, one value is compiled."""
    monkeypatch.setattr(worker_pool, "Worker", SameProcess)
    repeated = ("optimization level O3", "memory slop 75 %", "memory slop 125 %")
    variants = {change: options for change, options in what_if.VARIANTS.items() if change not in repeated}
    monkeypatch.setattr(what_if, "VARIANTS", variants)
    words = ["tiny", "h100", *SMALL, "--jobs=1", "--no-cache", "--what-if", f"--json={tmp_path / 'w.json'}"]
    assert command.main(["compare", *words]) == 0
    out = read_result(tmp_path / "w.json")
    told = {row["change"] for row in out["rows"]} | set(out["unchanged"]) | set(out["left_out"])
    assert all(why.startswith("the same program as ") or "needs jaxlib" in why for why in out["left_out"].values())
    assert set(what_if.VARIANTS) - {what_if.REMAT} < told and {"scan off", what_if.AS_GIVEN} <= told
    assert all(row["effect"] for row in out["rows"] if row["change"] != what_if.AS_GIVEN)
    seconds = [row["predicted_seconds"] for row in out["rows"][1:]]
    assert seconds == sorted(seconds) and re.search("best that fits", capsys.readouterr().out)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny", "h100", "--what-if", "--grid=data.seq_len=1,2"], "--grid cannot be used with --what-if"),
        (["tiny", "h100", "--what-if", "--remat=full"], "--remat cannot be used with --what-if"),
        (["tiny", "h100", "--xla=memory_slop=50"], "--xla=memory_slop=50 does not set a flag of XLA"),
        (["tiny", "h100", "--xla=xla_dump_to=/tmp"], "bytescope sets this flag itself: leave it out"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert command.main(["compare", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.quick
def test_flags_that_xla_refuses_are_one_line():
    missing = xla_flags.refusal(RuntimeError("INVALID_ARGUMENT: No such compile option: 'xla_gpu_memory_slop'"))
    assert "xla_gpu_memory_slop is not an option of XLA" in str(missing)
    wrong = xla_flags.refusal(RuntimeError(f"While setting option {SLOP}, 'abc' is not a valid int32 value."))
    assert str(wrong) == f"{SLOP}=abc is not valid for XLA: give a whole number"
    assert xla_flags.refusal(RuntimeError("out of memory")) is None
    with pytest.raises(ValueError, match="optimization_level=fast is not an optimization level: give O0"):
        xla_flags.parse_flags(["optimization_level=fast"])
