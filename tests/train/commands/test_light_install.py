"""The light install: an environment with the packages of `dependencies` alone runs every command that needs no trainer.

The environment is a virtual one. Its site-packages has links to the required distributions of this environment, and to
the source tree. `.ci/run` runs some commands in an environment in which pip installed the wheel, and
tests/end_to_end/test_kept.py checks that an install has all files.
"""

import json
import os
import re
import shutil
import subprocess
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from packaging.requirements import Requirement

from bytescope.memory.commands import trainer_packages
from bytescope.memory.commands.registry import COMMANDS
from bytescope.memory.devices.compiler import compile_lowered
from support.formats import gpu_space
from support.json_results import read_result, result_of

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALL = "needs the trainer's packages: run pip install -e '.[train]' in the checkout of bytescope"
PROGRAM = """
import jax, jax.numpy as jnp

def loss(weights, x):
    return jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, weights)[0].sum()

def arguments(width):
    return jax.ShapeDtypeStruct((2, width, width), jnp.float32), jax.ShapeDtypeStruct((4, width), jnp.float32)

def named(width=8):
    return loss, arguments(width)

def program(width=8):
    return lambda weights, x: weights - jax.grad(loss)(weights, x), arguments(width), {"donate_argnums": 0}
"""
SCRIPT = """
import jax, jax.numpy as jnp

@jax.jit
def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

w = step(jnp.zeros((8, 8)), jnp.ones((4, 8)))
"""
BUDGET = '[tool.bytescope.budgets]\nmlp = { program = "my.py:program", target = "cpu", budget = "1GiB" }\n'
# Command lines that need no package of the trainer, in the order in which they run. They may read the files of
# `folder`, and the files that earlier ones write.
WORKING = [
    "--help",
    "--version",
    "report my.py:program cpu --json=a.json --html=a.html --export=xprof --verbose",
    "report step.hlo.pb cpu --json=b.json",
    "explain job.log a.json --html=explained.html",
    "explain job.log my.py:program cpu --json=-",
    "explain job.log step.hlo.pb cpu",
    "compare my.py:program --grid=width=8,16 cpu --jobs=1 --no-cache --html=c.html --json=-",
    "report my.py:program cpu --verbose --json=-",
    "diff a.json b.json --json=-",
    "report --audit step.hlo.pb cpu --json=-",
    "report --names my.py:named cpu --json=-",
    "report --names my.py:named cpu --json=names.json",
    "check --pyproject=pyproject.toml --no-cache --json=check.json",
    "check --pyproject=pyproject.toml --no-cache --baseline=check.json",
    "report a.json --trace=card.xplane.pb --json=-",
    "report run --html=run.html",
    "prepare --source=my.py --out=shards",
    "list targets --json=-",
    "fit my.py:program cpu --budget=1GiB --json=-",
    "report script.py cpu",
    "mcp --skill",
    "--print-completion bash",
]
# Wrong command lines whose message must not be about the trainer: line -> part of the message.
REFUSED = {
    "report my.py:program cpu --formulas": "--formulas cannot be used with my.py:program",
    "calibrate --seconds=0": "is out of range",
    "report --seq-len=3": "unrecognized arguments: --seq-len",
    "fit": "no config",
    "mcp": "pip install -e '.[mcp]'",
    "report --names my.py:program cpu": "not yet differentiated",
    "report flaxy.py:program cpu": "flaxy.py cannot be imported: ModuleNotFoundError: No module named 'flax'",
}
# Command lines that read a config, a run or weights.
NEEDING_TRAINER = [
    "report llama_8b",
    "report tiny cpu --generate",
    "export run out --awq=text.txt",
    "explain job.log tiny",
    "compare tiny cpu --remat=none,full",
    "report tiny cpu --names",
    "report tiny cpu --audit",
    "fit tiny cpu",
    "estimate llama_8b",
    "estimate gpt:7e9",
    "fit tiny cpu --budgets=3",
    "compare tiny cpu --levers",
    "calibrate --runs=runs.csv",
    "train",
    "generate run --prompt=a",
    "generate run --score=my.py",
    "export run out",
    "list policies",
    "list configs",
    "list keys",
]
# Runs command lines, given as JSON in standard input; prints [[exit code, standard error, output], ...] as JSON.
RUNNER = """
import contextlib, io, json, sys
from bytescope.memory import cli

results = []
for line in json.load(sys.stdin):
    err, out = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(line.split())
    results.append((code, err.getvalue(), out.getvalue()))
print(json.dumps(results))
"""
# Imports every public name, and uses some of them.
LIBRARY = """
from bytescope import memory
for name in memory.__all__:
    getattr(memory, name)
import my
step, args, options = my.program()
report = memory.analyze(step, *args, target="cpu", **options)
memory.assert_fits(step, *args, target="cpu", **options)
report.save("saved.json")
report.to_html("saved.html")
assert memory.load("saved.json").peak_bytes == report.peak_bytes > 0
assert memory.explain("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes").recognized
assert memory.plan_remat(*my.named(), budget="1GiB", target="cpu").allocated_bytes > 0
"""


def required() -> set[str]:
    """Names of the distributions that `dependencies` of pyproject.toml requires, directly or indirectly."""
    names: set[str] = set()
    pending = list(PROJECT["dependencies"])
    while pending:
        requirement = Requirement(pending.pop())
        name = requirement.name.lower()
        if name in names or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        names.add(name)
        pending += metadata.requires(name) or []
    return names


def make_environment(folder: Path) -> tuple[Path, Path]:
    """Makes a virtual environment with the required distributions. Returns its Python and its site-packages."""
    venv.create(folder, symlinks=True)
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    for name in required():
        distribution = metadata.distribution(name)
        for part in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (packages / part).symlink_to(str(distribution.locate_file(part)))
    return folder / "bin" / "python", packages


def run(python: Path, folder: Path, code: str, stdin: str = "") -> str:
    """Runs code in `folder` and returns its standard output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XLA_", "JAX_"))}
    env |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([python, "-c", code], cwd=folder, env=env, input=stdin, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The user's folder: programs, a log, a dump, a trace and a run."""
    folder = tmp_path_factory.mktemp("light")
    (folder / "my.py").write_text(PROGRAM)
    (folder / "pyproject.toml").write_text(BUDGET)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "flaxy.py").write_text("import flax\n")
    (folder / "job.log").write_text("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123456789 bytes.\n")
    shapes = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32), jax.ShapeDtypeStruct((4, 16), jnp.float32)
    gradient = jax.grad(lambda w, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum())
    proto = compile_lowered(jax.jit(gradient).lower(*shapes)).proto
    (folder / "step.hlo.pb").write_bytes(proto)
    (folder / "card.xplane.pb").write_bytes(gpu_space(proto, {"dot": "-", "fusion": "-"}))
    shutil.unpack_archive(ROOT / "tests" / "support" / "kept" / "run.tar.gz", folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def linked(folder):
    """The Python of an environment in which `bytescope` is this tree."""
    python, packages = make_environment(folder / "linked")
    (packages / "bytescope").mkdir()
    for name in ("configs", "memory", "model", "train"):
        (packages / "bytescope" / name).symlink_to(ROOT / name)
    return python


@pytest.fixture(scope="module")
def results(linked, folder):
    """Command line -> (exit code, standard error, standard output) in the light install."""
    lines = [*WORKING, *REFUSED, *NEEDING_TRAINER]
    return dict(zip(lines, json.loads(run(linked, folder, RUNNER, json.dumps(lines)))))


def test_every_command_is_run():
    """A new command is added to WORKING or NEEDING_TRAINER."""
    lines = [*WORKING, *REFUSED, *NEEDING_TRAINER]
    assert {line.split()[0] for line in lines} >= {name for name, row in COMMANDS.items() if not row.part_of}
    flags = {word.partition("=")[0] for line in lines for word in line.split()}
    assert flags >= {row.flag for row in COMMANDS.values() if row.flag}


def test_commands_without_the_trainer_work(results, folder):
    assert not {line: results[line] for line in WORKING if results[line][0]}
    values = read_result(folder / "names.json")["values"]
    assert [(value["type"], value["copies"]) for value in values] == [("float32[4,8]", 2)]
    assert all((folder / name).is_file() for name in ("a.html", "c.html", "explained.html"))


@pytest.mark.parametrize("line", [line for line in WORKING if line.endswith("--json=-")])
def test_json_is_the_only_output(results, line):
    _, err, out = results[line]
    assert result_of(out) and not err


@pytest.mark.parametrize("line", REFUSED)
def test_other_mistakes_are_not_about_the_trainer(results, line):
    code, err, _ = results[line]
    assert code == 2 and REFUSED[line] in err and INSTALL not in err


@pytest.mark.parametrize("line", NEEDING_TRAINER)
def test_what_needs_the_trainer_says_so(results, line):
    code, err, _ = results[line]
    assert code == 2
    assert re.fullmatch(rf"error: bytescope [\w -]+?( with the config [\w:]+)? {re.escape(INSTALL)}\n", err)


def test_the_library_works(linked, folder):
    run(linked, folder, LIBRARY)


def test_the_packages_of_the_extra_are_known():
    names = {Requirement(text).name for text in PROJECT["optional-dependencies"]["train"]}
    modules = {"orbax" if name == "orbax-checkpoint" else name.replace("-", "_") for name in names}
    assert modules == set(trainer_packages.PACKAGES) and trainer_packages.are_installed()
    assert not names & required()
