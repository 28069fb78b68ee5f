"""`bytescope fit MODULE:FUNCTION`: the printed policy, put into the source of the program, gives the promised bytes."""

import importlib
import itertools
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from bytescope import memory
from bytescope.memory import cli
from bytescope.memory.adapters import trainers
from bytescope.memory.commands.fit_program import code_of
from bytescope.memory.cost import flops
from bytescope.memory.devices import targets
from bytescope.memory.remat.layer_discovery import find_layers
from bytescope.memory.remat.recognition import Value
from bytescope.memory.view.progress_bar import ProgressBar
from support import toy_trainer
from support.exhaustive import exhaustive
from support.json_results import read_result
from support.models import plain

MODELS = Path(plain.__file__).parent
# Program -> (its checkpoint, the checkpoint with a policy).
CHECKPOINTS = {
    "fit_plain": ("jax.checkpoint(block)", "jax.checkpoint(block, policy=policy)"),
    "fit_linen": ("nn.remat(Block,", "nn.remat(Block, policy=policy,"),
    "fit_equinox": ("eqx.filter_checkpoint(run_block)", "eqx.filter_checkpoint(run_block, policy=policy)"),
}


def fit(folder, name, *flags):
    """(exit code, JSON) of the command for a program in a folder."""
    out = folder / "fit.json"
    code = cli.main(["fit", f"{folder / name}.py:program", "cpu", f"--json={out}", *flags])
    return code, read_result(out)


def edited(source, name, code):
    """The source with the policy of its checkpoint, and with the names that the code asks for."""
    lines = source.splitlines()
    for comment, naming in itertools.pairwise(code):
        if naming.startswith("x = checkpoint_name("):
            number = int(comment.rpartition(":")[2]) - 1
            value, _, _ = lines[number].strip().partition(" = ")
            indent = re.match(" *", lines[number])[0]
            named = naming.replace("x = checkpoint_name(x", f"{value} = checkpoint_name({value}")
            lines[number] += f"\n{indent}{named}"
    body = "\n".join(lines)
    old, new = CHECKPOINTS[name]
    assert old in body
    head = [line for line in code if line.startswith(("policy = ", "from jax"))]
    docstring, rest = body.split('"""\n', 1)
    imports, last, functions = rest.partition("\n\n\n")
    extra = "\n".join(["import jax", *head[:-1], head[-1]])
    return f'{docstring}"""\n{imports}\n{extra}{last}{functions.replace(old, new)}\n'


def compiled(path, monkeypatch):
    """(bytes, recomputed FLOPs) of the step of a file."""
    monkeypatch.syspath_prepend(path.parent)
    sys.modules.pop(path.stem, None)
    importlib.invalidate_caches()
    step, args, *options = importlib.import_module(path.stem).program()
    report = memory.analyze(step, *args, target="cpu", **(options[0] if options else {}))
    if hasattr(step, "lower") and not hasattr(step, "trace"):  # equinox's jit
        return report.allocated_bytes, None
    traced = (step if hasattr(step, "trace") else jax.jit(step)).trace(*args)
    return report.allocated_bytes, flops.count(traced.jaxpr).recomputed


# The budgets are between the bytes of jax's own policies.
@pytest.mark.parametrize(
    "name, flags, what",
    [
        ("fit_plain", ("--budget=2900KiB",), "keeps "),
        *exhaustive(
            ("fit_plain", ("--budget=60MiB",), "dots_saveable"),
            ("fit_linen", ("--only-names", "--budget=2900KiB"), "keeps "),
            ("fit_equinox", ("--only-names", "--budget=5MiB"), "dots_saveable"),
        ),
    ],
)
def test_the_printed_policy_in_the_source_gives_the_promised_bytes(name, flags, what, tmp_path, monkeypatch, capsys):
    source = (MODELS / f"{name}.py").read_text()
    (tmp_path / f"{name}.py").write_text(source)
    told = []
    monkeypatch.setattr(ProgressBar, "__call__", lambda bar, labels, done: told.append((*labels, done)))
    code, out = fit(tmp_path, name, *flags)
    best = out["best"]
    assert told == [(row["what"], done) for done, row in enumerate(out["walk"])], "each program before it is compiled"
    assert code == 0 and best["what"].startswith(what) and best["allocated_bytes"] <= out["budget_bytes"]
    first = next(row for row in out["walk"] if row["what"] == "nothing_saveable")
    assert best["recomputed_flops"] < first["recomputed_flops"]
    shown = capsys.readouterr().out
    assert all(line in shown for line in best["code"])
    (tmp_path / f"{name}_edited.py").write_text(edited(source, name, best["code"]))
    promised, recomputed = compiled(tmp_path / f"{name}_edited.py", monkeypatch)
    assert promised == best["allocated_bytes"]
    assert recomputed in (None, best["recomputed_flops"])


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(trainers.ADAPTERS, "toy", "support.toy_trainer")
    return toy_trainer.FACTORY


def test_the_answer_for_an_adapter_is_its_keys(toy, tmp_path, capsys):
    out = tmp_path / "fit.json"
    words = ["fit", "toy:named", "cpu", "--budget=700KiB", f"--json={out}", f"--html={tmp_path / 'fit.html'}"]
    assert cli.main(words) == 0
    found = read_result(out)
    best, walk = found["best"], found["walk"]
    assert best["fits"] and best["allocated_bytes"] <= found["budget_bytes"] == 700 * 1024
    assert {row["keys"]["batch"] for row in walk} >= {"1", "2"} and walk[-1]["keys"]["scan"] == "false"
    assert any(row["keys"].get("context") == "device" for row in walk) and walk[0]["keys"]["policy"] == "full"
    shown = " ".join(capsys.readouterr().out.split())
    assert best["flags"] in shown.replace("\\ ", "") and "bytescope report toy:named cpu:1" in shown
    assert best["flags"] in (tmp_path / "fit.html").read_text()
    keys = trainers.overrides_of("toy:named", best["flags"].split())
    target = targets.parse("cpu")
    compilation, _ = toy(keys, target).compile()
    assert memory.analyze(compilation, target=target).allocated_bytes == best["allocated_bytes"]


def test_what_does_not_fit_exits_with_3_and_names_the_smallest(toy, tmp_path, capsys):
    out = tmp_path / "fit.json"
    words = ["fit", "toy:named", "cpu", "batch=4", "scan=true", "--budget=100KiB", f"--json={out}"]
    assert cli.main(words) == 3
    found = read_result(out)
    (only,) = found["walk"]
    assert found["best"] is None and found["certificate"]["what"] == only["what"] == "policy=full"
    assert found["certificate"]["missing_bytes"] == only["allocated_bytes"] - 100 * 1024
    assert "tightest: policy=full" in capsys.readouterr().out


@pytest.mark.parametrize(
    "limit, reason",
    [
        ("--max-compiles=1", "the limit on compiles (1) was reached"),
        ("--max-seconds=0.001", "the time limit (0.001 s) was reached"),
    ],
)
def test_a_limit_ends_the_search_with_the_best_program_so_far(toy, limit, reason, tmp_path, capsys):
    out = tmp_path / "fit.json"
    assert cli.main(["fit", "toy:named", "cpu", "--budget=700KiB", limit, f"--json={out}"]) == 0
    found = read_result(out)
    assert found["programs"] == 1 and found["best"]["flags"] == "batch=1 policy=full"
    assert found["stopped"] == reason
    assert f"stopped early: {reason}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.quick
@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["x.py:program", "cpu", "--vary=remat"],
            "--vary cannot be used with x.py:program, because it searches the keys of a config",
        ),
        (["toy:named", "cpu", "policy=full"], "policy=full cannot be given to fit, which searches it"),
        (["toy:named", "cpu", "--measure"], "--measure cannot be used with toy:named"),
        (["toy:named", "cpu", "--max-compiles=0"], "--max-compiles=0 is too small: give 1 or more"),
        (["toy:named", "cpu", "depth=3"], "the toy has no key depth"),
    ],
)
def test_mistakes_are_one_line(words, message, toy, capsys):
    assert cli.main(["fit", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.quick
def test_a_kernel_with_several_results_is_kept_by_its_primitive():
    kernel = Value("core", (0,), "", "dot_product_attention_fwd_wrapper bf16[2]", 0, "bf16[2]", 1, 8, "model.py:3")
    named = Value("up", (0,), "up", "", -1, "bf16[2]", 1, 8, "model.py:4")
    layer = find_layers(jax.make_jaxpr(plain.loss_of("named"))(*plain.arguments()), [True] * 10)[0]
    text, code = code_of("", [kernel, named], layer)
    policy = eval(text)
    assert code[-1] == "jax.checkpoint(named, policy=policy)" and f"policy = {text}" in code
    assert policy(SimpleNamespace(name="dot_product_attention_fwd_wrapper")) is True
    assert not policy(SimpleNamespace(name="dot_general")) and not any("checkpoint_name(x" in line for line in code)


NO_LAYERS = """
import jax

def program():
    step = lambda w, x: jax.grad(lambda w: ((x @ w) ** 2).sum())(w)
    return step, (jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((8, 8), "float32"))
"""


def test_a_step_without_layers_says_how_to_wrap_a_block(tmp_path, capsys):
    (tmp_path / "no_layers.py").write_text(NO_LAYERS)
    assert cli.main(["fit", f"{tmp_path / 'no_layers.py'}:program", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "block = jax.checkpoint(block)" in error
