"""The recipes for other trainers: each reports the compiler's own sizes, and the guide names each with valid keys."""

import ast
import dataclasses
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bytescope import memory
from bytescope.memory.program.user_program import load_function

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "memory" / "examples" / "recipes"
GUIDE = ROOT / "memory" / "guides" / "other_trainers.md"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe with parameters that compile in seconds.

    Fields:
        module: a module that only the recipe's project has. install: how to get the module.
        remat: the value of `remat` that recomputes most.
    """

    module: str
    install: str
    small: Mapping[str, Any]
    remat: str = "full"


RECIPES = {
    "equinox_gpt": Recipe(
        "equinox",
        "pip install -e '.[test]'",
        {"batch": 8, "length": 64, "width": 32, "layers": 2, "heads": 2, "vocab": 64},
    ),
    "keras_gpt": Recipe(
        "keras",
        "pip install -e '.[test]'",
        {"batch": 8, "length": 64, "width": 32, "layers": 2, "heads": 2, "vocab": 64},
    ),
    "levanter_llama": Recipe(
        "levanter",
        "uv pip install --prerelease=allow levanter gitpython chex",
        {"batch": 8, "length": 64, "width": 32, "mlp": 64, "layers": 2, "heads": 2, "kv_heads": 2, "vocab": 64},
        "true",
    ),
}
FIRST = "equinox_gpt"
NAMES = [pytest.param(name, marks=() if name == FIRST else pytest.mark.exhaustive) for name in RECIPES]
# The projects use what newer versions of jax and Python warn about.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Returns the program of a recipe with its small parameters and others, or skips if the project is missing."""
    monkeypatch.chdir(tmp_path)

    def program(name, **values):
        recipe = RECIPES[name]
        if importlib.util.find_spec(recipe.module) is None:
            pytest.skip(f"{recipe.module} is not importable: {recipe.install}")
        return load_function(f"bytescope.memory.examples.recipes.{name}:program").make({**recipe.small, **values})

    with jax.numpy_rank_promotion("allow"):  # other projects add arrays of different ranks
        yield program


def report_of(program):
    return memory.analyze(program.program, *program.args, target="cpu:8", **program.options)


def memory_analysis(program):
    """The compiler's sizes of a program that is compiled without this package; its arguments are real arrays."""

    def allocate(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)

    compiled = program.program.lower(*jax.tree.map(allocate, program.args)).compile()
    return getattr(compiled, "compiled", compiled).memory_analysis()  # Equinox wraps jax's object


@pytest.mark.oracle("equinox", "keras")
@pytest.mark.parametrize("name", NAMES)
def test_a_report_has_the_sizes_of_the_projects_own_compilation(make, name):
    program = make(name)
    report, sizes = report_of(program), memory_analysis(program)
    own_bytes = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    # The report compiles the traced program again, which may be scheduled differently.
    assert report.allocated_bytes == pytest.approx(own_bytes + sizes.temp_size_in_bytes, rel=0.005)
    assert sum(report.breakdown.values()) == report.allocated_bytes
    assert report.breakdown["optimizer"] == pytest.approx(2 * report.breakdown["params"], rel=0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RECIPES)
def test_remat_leaves_fewer_residuals(make, name):
    none = {"levanter_llama": "false"}.get(name, "none")
    kept, recomputed = (report_of(make(name, remat=value)) for value in (none, RECIPES[name].remat))
    assert recomputed.breakdown["residuals"] < kept.breakdown["residuals"]


@pytest.mark.quick
def test_every_recipe_is_in_the_guide_and_is_tested():
    files = sorted(path.stem for path in FOLDER.glob("*.py"))
    assert files == sorted(RECIPES)
    assert sorted(set(re.findall(r"examples/recipes/(\w+)\.py", GUIDE.read_text()))) == files


@pytest.mark.quick
@pytest.mark.parametrize("name", RECIPES)
def test_the_commands_of_a_recipe_use_its_parameters(name):
    syntax = ast.parse((FOLDER / f"{name}.py").read_text())
    (function,) = [node for node in syntax.body if isinstance(node, ast.FunctionDef) and node.name == "program"]
    parameters = {argument.arg for argument in function.args.args}
    assert len(function.args.defaults) == len(parameters), "report calls program() without arguments"
    assert set(RECIPES[name].small) <= parameters
    commands = [line for line in ast.get_docstring(syntax).splitlines() if line.startswith("    bytescope ")]
    commands += re.findall(rf"^bytescope .*recipes\.{name}:program.*$", GUIDE.read_text(), flags=re.M)
    assert any(line.split()[1] == "report" for line in commands) and any("compare" in line for line in commands)
    for line in commands:
        assert set(re.findall(r"--grid=(\w+)=", line)) <= parameters, line
