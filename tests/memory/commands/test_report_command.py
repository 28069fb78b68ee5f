"""The command, the diff, the guard and the terminal view: what a user sees, and the exit codes."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bytescope import memory
from bytescope.memory import __main__ as command
from bytescope.memory.allocators.program_events import ProgramCall
from bytescope.memory.analysis import judge
from bytescope.memory.commands import arguments as command_arguments
from bytescope.memory.compare.prepared_program import PreparedProgram
from bytescope.memory.devices import limits
from bytescope.memory.program.compilation import compiled_for
from bytescope.memory.pytest_guard import assert_fits  # noqa: F401 - a fixture
from bytescope.memory.records import report_diff
from bytescope.memory.records.report_record import POOL, Buffer, ReportRecord, RuntimeOverhead
from bytescope.memory.report import report_text
from bytescope.memory.units import parse_bytes
from bytescope.memory.view.console import DEFAULT_WIDTH
from bytescope.train.plan import config_factory, run_memory
from support import programs
from support.json_results import read_result
from support.oracles import require


@pytest.fixture(scope="module")
def step(training_step, tmp_path_factory):
    """(path of the proto, path of the JSON, report) of the training step."""
    folder = tmp_path_factory.mktemp("step")
    proto = training_step[1].proto
    (folder / "step.hlo.pb").write_bytes(proto)
    report = memory.analyze(proto)
    report.save(folder / "step.json")
    return folder / "step.hlo.pb", folder / "step.json", report


def run(capsys, *arguments):
    """(exit code, standard output, standard error) of the command."""
    code = command.main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_report_of_a_proto(step, capsys, tmp_path):
    proto, _, report = step
    json_file, page, folder = tmp_path / "r.json", tmp_path / "r.html", tmp_path / "x"
    code, out, err = run(capsys, "report", str(proto), f"--json={json_file}", f"--html={page}", f"--export={folder}")
    assert (code, err) == (0, "")
    assert report_text.human(report.peak_bytes) in out and "params" in out and "FITS" in out
    written = read_result(json_file)
    assert written["breakdown"] == report.to_json()["breakdown"]
    assert written["fits"] is True and written["verdict"] == "fits" and written["limit_bytes"] > 0
    assert "<html" in page.read_text() and (folder / "m.hlo_proto.pb").read_bytes() == proto.read_bytes()


STEPS = """
import jax, jax.numpy as jnp

def step(state, batch, *, scale):
    loss, grad = jax.value_and_grad(lambda w: jnp.tanh(batch @ w).sum() * scale)(state["w"])
    return {"w": state["w"] - grad}, loss

def program():
    return step, (shapes(64), jnp.ones((8, 64))), {"donate_argnums": 0, "kwargs": {"scale": 2.0},
                                                   "roles": [("state", "optimizer")]}

def mistaken():
    return step, (shapes(63), jnp.ones((8, 64))), {"kwargs": {"scale": 2.0}}

def bare():
    return jax.jit(lambda: jnp.arange(8.0)), ()

def described():
    return jax.jit(step, donate_argnums=0).trace(shapes(256), jnp.ones((8, 256)), scale=1.0)

def sums(x):
    for _ in range(3):
        x, stack = jax.lax.scan(lambda carry, one: (carry + one, carry + one), x, jnp.ones(len(x)))
        x += jnp.sum(stack, axis=-1)
    return x

def copies():
    return sums, (jax.ShapeDtypeStruct((20000,), jnp.float32),)

def shapes(width):
    return {"w": jax.ShapeDtypeStruct((width, width), jnp.float32)}
"""


@pytest.fixture
def their_folder(tmp_path, monkeypatch):
    """A folder with somebody's module, which is where the command runs."""
    (tmp_path / "their_steps.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    yield tmp_path
    sys.modules.pop("their_steps", None)


def test_report_of_a_step_of_somebodys_repository(their_folder, capsys):
    files = ("--json=r.json", "--html=r.html", "--export=x", "--github")
    node = ("--host-memory=1GiB", "--processes-per-node=4")
    code, out, err = run(capsys, "report", "their_steps:program", *files, *node)
    assert (code, err) == (0, "") and out.startswith("jit_step on local (cpu)") and "FITS" in out
    report = memory.load("r.json")
    assert report.breakdown["optimizer"] >= 4 * 64 * 64 and report.xla.alias_bytes == 4 * 64 * 64, "roles, donation"
    assert report.roofline["total"] > 0 and report.fits
    host = report.host_memory
    assert (host.processes, host.node_bytes, host.node_source) == (4, 2**30, "--host-memory")
    assert host.phases() == ("start", "trace", "compile", "train") and host.verdict == "exceeds"
    arrays = next(term for term in host.terms_of("train") if "arrays" in term.name)
    assert arrays.bytes == 2 * report.predicted_bytes, "of two of the eight devices"
    assert report.findings[0].kind == "node_memory" and "the 4 processes of a node need" in out
    assert "<html" in Path("r.html").read_text() and Path("x", "m.hlo_proto.pb").stat().st_size
    assert "### Device memory: jit_step on local" in Path("summary.md").read_text()
    code, out, err = run(capsys, "report", "their_steps.py:bare")
    assert (code, err) == (0, "") and "outputs" in out
    code, out, err = run(capsys, "report", "their_steps:mistaken")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "their_steps:mistaken: the step cannot be compiled: TypeError: dot_general" in err
    assert "(their_steps.py:5)" in err


def test_the_remedies_of_a_step_are_compiled_on_request(their_folder, capsys):
    require("cuda")
    code, out, err = run(capsys, "report", "their_steps:copies", "h100", "--try-remedies", "--json=r.json")
    report = memory.load("r.json")
    assert (code, err) == (0, "")
    if report.peak_bytes < 2 * 4 * 20000**2:  # XLA of jaxlib 0.12 makes no such copies
        assert "compiling with" not in out
        return
    assert "compiling with xla_disable_hlo_passes=copy_fusion" in out
    (found,) = [finding for finding in report.findings if finding.kind == "fused_copies"]
    assert found.tried_bytes <= report.allocated_bytes - found.bytes // 2
    assert "compiled with this: " in out and f"{report_text.human(found.tried_bytes)} allocated instead of" in out


HOSTILE = """
import os, signal, subprocess, time

def ends():
    os._exit(0)

def crashes():
    os.kill(os.getpid(), signal.SIGKILL)

def forks():
    if os.fork():
        time.sleep(600)

def writes():
    import multiprocessing
    import their_steps
    os.write(1, b"not JSON")
    os.system("echo not JSON")
    subprocess.Popen(["sleep", "86399"], start_new_session=True)
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
    return their_steps.program()
"""


def run_process(function):
    """(exit code, standard output, standard error) of a report in a process of its own."""
    (Path("hostile.py")).write_text(HOSTILE)
    words = ["-m", "bytescope.memory", "report", f"hostile.py:{function}", "cpu", "--json=-"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process find what code left behind")
@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("ends", 2, "the user's code ended the process before the command was done, with exit code 0"),
        ("crashes", 137, "by SIGKILL, probably for lack of host memory"),
        ("forks", 2, "hostile.py:forks() fails: the code calls os.fork, and the copy of the process goes on"),
    ],
)
def test_code_that_ends_or_copies_the_process_is_one_line(their_folder, function, code, words):
    found, out, err = run_process(function)
    assert (found, out) == (code, "") and err.startswith("error: ") and words in err and err.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process find what code left behind")
def test_code_that_writes_to_the_pipe_and_leaves_children_with_it(their_folder):
    code, out, err = run_process("writes")
    assert code == 0 and json.loads(out)["command"] == "report"
    assert "ended what the user's code left running: " in err and "sleep" in err.splitlines()[-1]
    assert subprocess.run(["pgrep", "-f", "sleep 86399"], stdout=subprocess.DEVNULL).returncode == 1


def test_a_program_finds_as_many_devices_as_its_target_has(their_folder, capsys, monkeypatch):
    """Simulated ones, where there is no accelerator: the mesh that it makes is moved to the target."""
    from bytescope.memory.devices import platform

    asked = []
    monkeypatch.setattr(platform, "simulate_devices", asked.append)
    for target, simulated in (("h100:2x8", ["cpu:16"]), ("cpu:4", ["cpu:4"]), ("local", ["local"])):
        assert run(capsys, "report", "their_steps:missing", target)[0] == 2
        assert asked[-1] == simulated
    monkeypatch.setattr(platform, "choose_platform", lambda fraction: "cuda")
    assert run(capsys, "report", "their_steps:missing", "h100:4")[0] == 2 and asked[-1] == ["h100:4"]


def test_a_step_that_exceeds_its_target_has_ways_out(their_folder, capsys, tiny_limit):
    require("cuda")
    words = ["their_steps:described", "h100", "--github", "--json=r.json", "--html=r.html", "--allocators"]
    code, out, err = run(capsys, "report", *words)
    assert (code, err) == (3, "") and "h100 (NVIDIA H100" in out and "EXCEEDS" in out
    verdicts = {row["allocator"]: row["verdict"] for row in read_result(Path("r.json"))["allocators"]}
    assert verdicts == {"bfc": "exceeds", "bfc, growing": "exceeds", "cuda_async": "fits", "platform": "fits"}
    page = Path("r.html").read_text()
    assert 'id="allocators"' in page and "bfc: jit_step requests " in page
    assert all(f'<th scope="row">{name}</th>' in page for name in verdicts)
    assert "bfc: jit_step requests " in out and "replayed: 3 x jit_step; outside the pool: context 616.00 MiB" in out
    ways = out[out.index("does not fit: ") :]
    assert "reduce the batch" in ways
    assert "\n::error file=their_steps.py,line=5,title=does not fit::jit_step on h100 is predicted to take " in out
    assert memory.load("r.json").target["name"] == "h100"


def test_report_of_a_config(capsys, tmp_path):
    small = ["--config.model.n_layers=2", "--config.model.d_model=32", "--config.data.seq_len=32"]
    code, _, err = run(
        capsys,
        "report",
        "tiny",
        *small,
        "--config.mesh.data=-1",
        "--config.mesh.fsdp=1",
        "cpu:8",
        f"--json={tmp_path / 'r.json'}",
    )
    assert (code, err) == (0, "")
    written = read_result(tmp_path / "r.json")
    assert written["config"]["model.d_model"] == 32 and written["target"]["name"] == "cpu:8"
    subject = written["subject"]
    assert subject["name"] == "tiny" and f"--config.{subject['changes'][1]}" == small[1]
    assert subject["policy"] == written["config"]["remat.policy"] and subject["batch"] == written["batch"]
    config = written["config"]
    assert subject["tokens"] == 8 * config["batch.micro"] * config["batch.accumulation"] * config["data.seq_len"]
    kept = [sum(part["flops"].values()) for phase, part in written["work"].items() if phase != "recompute"]
    assert 0.8 * 8 * sum(kept) < subject["model_flops"] <= 8 * sum(kept), "what a kernel recomputes is not the model's"
    assert written["breakdown"]["unattributed"] < 0.02 * written["peak_bytes"]
    for mistake in ("--config.model.d_modle=3", "--config.remat.policy=ful", "--config.model.n_layers=x"):
        code, out, err = run(capsys, "report", "tiny", mistake)
        assert (code, out, err.count("\n")) == (2, "", 1)


def test_one_screen(step):
    console = Console(width=DEFAULT_WIDTH, record=True, file=io.StringIO())
    report_text.show(step[2], console)
    lines = console.export_text().splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 100


def test_unwritable_output(step, capsys, tmp_path):
    code, _, err = run(capsys, "report", str(step[0]), f"--json={tmp_path}/no/such/folder.json")
    assert code == 2 and "cannot write" in err and err.count("\n") == 1


def test_diff_fails_above(step, capsys, tmp_path):
    before = step[1]
    grown = json.loads(before.read_text())
    grown["peak_bytes"] += grown["peak_bytes"] // 20
    grown["breakdown"]["workspace"] += 4096
    after = tmp_path / "after.json"
    after.write_text(json.dumps(grown))
    assert run(capsys, "diff", before, before, "--fail-above=0")[0] == 0
    assert run(capsys, "diff", before, after)[0] == 0
    assert run(capsys, "diff", before, after, "--fail-above=6")[0] == 0
    code, out, _ = run(capsys, "diff", before, after, "--fail-above=2%")
    assert code == 1 and "peak_bytes grew" in out and "workspace" in out
    assert run(capsys, "diff", after, before, "--fail-above=2")[0] == 0


def test_diff_names_what_grew():
    def report(size, dtype):
        buffers = (
            Buffer(
                f"fusion.{size}",
                size,
                (4,),
                dtype,
                "residuals",
                "forward",
                module="mlp",
                op_name="jit(f)/mlp/dot",
                checkpoint_name="up",
                at_peak=True,
            ),
        )
        return ReportRecord(
            size, size, {"residuals": size}, buffers=buffers, residuals_by_name={"up": size}, versions={"jax": dtype}
        )

    changes = report_diff.diff(report(100, "a"), report(150, "b"))
    assert [(c.kind, c.name, c.growth) for c in changes] == [
        ("total", "peak_bytes", 50),
        ("total", "allocated_bytes", 50),
        ("total", "host_bytes", 0),
        ("category", "residuals", 50),
        ("residual", "up", 50),
        ("buffer", "residuals/forward/mlp/up b[4]", 150),
        ("buffer", "residuals/forward/mlp/up a[4]", -100),
    ]
    assert report_diff.version_changes(report(1, "a"), report(1, "b")) == (("jax", "a", "b"),)
    # The compiler's own names do not matter.
    assert all(not c.growth for c in report_diff.diff(report(100, "a"), report(100, "a")))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("72GiB", 72 * 2**30),
        ("1.5 gib", 3 * 2**29),
        ("512MB", 512 * 10**6),
        ("17B", 17),
        (2**40, 2**40),
        ("0b", 0),
        ("1048576", 2**20),
        (2**20, 2**20),
        ("0", 0),
        ("0.5 MiB", 2**19),
    ],
)
def test_sizes(size, expected):
    assert parse_bytes(size) == expected


@pytest.mark.quick
@pytest.mark.parametrize(
    ("read", "flag"),
    [
        (lambda size: parse_bytes(size), ""),
        (lambda size: limits.budget_of(str(size), 2**40, "--budget"), "--budget: "),
        (lambda size: memory.assert_fits(abs, 1, budget=size), ""),
        (lambda size: memory.watch(abs, budget=size), ""),
        (lambda size: memory.plan_remat(abs, (), budget=size), "budget: "),
    ],
)
@pytest.mark.parametrize("size", [72, "72", " 72 ", 2**20 - 1])
def test_a_small_number_without_a_unit_is_refused_before_anything_is_compiled(read, flag, size):
    number = str(size).strip()
    with pytest.raises(memory.ReportError) as caught:
        read(size)
    assert str(caught.value) == (
        f"{flag}{number} without a unit is {int(number):,} bytes: write {number}GiB or "
        f"{number}MiB, or {number}B for bytes"
    )


@pytest.mark.parametrize("size", ["", "GiB", "72 gigs", "-1", -1, None, True, "1e400GiB", 1.5])
def test_sizes_that_are_none(size):
    with pytest.raises(memory.ReportError, match="is not a valid size"):
        parse_bytes(size)


def test_guard(step, assert_fits):  # noqa: F811
    report = step[2]
    assert assert_fits(step[0], report.predicted_bytes) == report
    with pytest.raises(AssertionError, match="more than") as caught:
        assert_fits(report, report.predicted_bytes - 1)
    assert "optimizer" in str(caught.value)
    with pytest.raises(memory.ReportError, match="no budget and no target is given"):
        memory.assert_fits(report)
    assert memory.assert_fits(programs.scan()).fits


def test_the_guard_judges_as_the_verdict_does():
    """The guard compares the predicted bytes: a runtime overhead in the pool can exceed the limit."""
    pool = RuntimeOverhead("cuBLAS workspace", 30, POOL, "by hand")
    report = ReportRecord(90, 100, {"params": 90, "fragmentation": 10}, runtime_overheads=(pool,))
    assert judge(report, 120).verdict == "exceeds"
    with pytest.raises(memory.GuardError, match="takes 130 B, 10 B more than 120 B.*cuBLAS workspace 30 B"):
        memory.assert_fits(report, "120B")
    with pytest.raises(memory.GuardError, match="more than 120 B"):
        memory.assert_fits(judge(report, 120))
    assert memory.assert_fits(report, "130B") == memory.assert_fits(report, budget="130B") == report


def test_the_guard_takes_a_step_with_its_arguments():
    number = programs.spec((4,), programs.f32)
    report = memory.assert_fits(lambda x, factor: x * factor, number, 2, target="cpu:1", static_argnums=1)
    assert report.target["name"] == "cpu:1" and report.fits
    with pytest.raises(memory.GuardError, match="more than 16 B"):
        memory.assert_fits(report, budget="16B")
    for size in ("72GiB", "72"):
        with pytest.raises(memory.ReportError, match=f"as a keyword, budget='{size}'"):
            memory.assert_fits(abs, number, size)


# ---- what does not fit ------------------------------------------------------------------------------


@pytest.fixture
def tiny_limit(monkeypatch):
    """Next to nothing of a described GPU is available: some 80 KB."""
    monkeypatch.setattr(limits, "POOL_UNIT_BYTES", 1)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.000001")


def test_what_exceeds_exits_with_3_after_the_files_are_written(step, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "free_host_bytes", lambda *_: 80_000)
    files = [f"--json={tmp_path / 'r.json'}", f"--html={tmp_path / 'r.html'}", f"--export={tmp_path / 'x'}"]
    code, out, err = run(capsys, "report", str(step[0]), "cpu:1", *files)
    assert (code, err) == (command_arguments.DOES_NOT_FIT, "") and command_arguments.DOES_NOT_FIT == 3
    assert "EXCEEDS" in out and "too much" in out and "bytescope fit" not in out  # there is no config to fit
    assert read_result(tmp_path / "r.json")["fits"] is False
    assert "<html" in (tmp_path / "r.html").read_text() and (tmp_path / "x" / "m.hlo_proto.pb").exists()


def test_a_config_that_exceeds_names_its_levers_and_the_fit_to_copy(step, capsys, tiny_limit, monkeypatch):
    def precompiled(program, target, config):
        return PreparedProgram(
            lambda: (compiled_for(step[0])[0], target),
            config=config,
            batch="1 micro-batch",
            policy="none",
            choices="attention [/b] (why)",
        )

    monkeypatch.setattr(config_factory, "build_program", lambda name, overrides, target: None)
    monkeypatch.setattr(config_factory, "prepare_program", precompiled)
    others = [ProgramCall("init", results=(400,), makes_state=True), ProgramCall("evaluation", temp=500)]
    monkeypatch.setattr(run_memory, "other_programs", lambda program: others)
    monkeypatch.setattr(run_memory, "peaks", lambda program, calls: {call.name: call.temp for call in calls})
    words = ["report", "tiny", "h100:2", "--verbose", "--config.data.seq_len=64", "--run", "--allocators"]
    assert command.main(words) == 3
    out = capsys.readouterr().out
    unwrapped = " ".join(out.split())
    assert "evaluation 500 B; the largest peak is step" in unwrapped
    assert "replayed: init, 3 x step, 2 x evaluation, step; outside the pool" in unwrapped
    assert out.startswith("tiny on h100:2 (NVIDIA H100 80GB HBM3)  remat none\n") and "changed: data.seq_len=64" in out
    assert "attention [/b] (why)" in out and "EXCEEDS" in out
    below = out[out.index("does not fit: ") :]
    assert "--config.remat.policy=" in below
    fit = " ".join(below.partition("bytescope fit ")[2].replace("\\\n", " ").split())
    assert fit.startswith("tiny h100:2 --budget=") and "--config.data.seq_len=64" in fit
