"""`bytescope fit --program`: the printed policy, put into the source of the program, gives the promised bytes."""

import importlib
import itertools
import json
import re
import sys
from pathlib import Path

import jax
import pytest

from bytescope import memory
from bytescope.memory.cost import flops
from bytescope.train import cli
from support.exhaustive import exhaustive
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
    code = cli.main(["fit", f"--program={folder / name}.py:program", "cpu", f"--json={out}", *flags])
    return code, json.loads(out.read_text())


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
    traced = (step if hasattr(step, "trace") else jax.jit(step)).trace(*args) if not hasattr(step, "_fn") else None
    return report.allocated_bytes, traced and flops.count(traced.jaxpr).recomputed


# The budgets are between the bytes of jax's own policies.
@pytest.mark.parametrize(
    "name, flags, what",
    [
        ("fit_plain", ("--budget=2900KiB",), "keeps "),
        *exhaustive(
            ("fit_plain", ("--budget=60MiB",), "dots_saveable"),
            ("fit_linen", ("--only-names", "--budget=2900KiB"), "keeps "),
            ("fit_equinox", ("--only-names", "--budget=2300KiB"), "keeps "),
        ),
    ],
)
def test_the_printed_policy_in_the_source_gives_the_promised_bytes(name, flags, what, tmp_path, monkeypatch, capsys):
    source = (MODELS / f"{name}.py").read_text()
    (tmp_path / f"{name}.py").write_text(source)
    code, out = fit(tmp_path, name, *flags)
    best = out["best"]
    assert code == 0 and best["what"].startswith(what) and best["allocated_bytes"] <= out["budget_bytes"]
    first = next(row for row in out["walk"] if row["what"] == "nothing_saveable")
    assert best["recomputed_flops"] < first["recomputed_flops"]
    shown = capsys.readouterr().out
    assert all(line in shown for line in best["code"])
    (tmp_path / f"{name}_edited.py").write_text(edited(source, name, best["code"]))
    promised, recomputed = compiled(tmp_path / f"{name}_edited.py", monkeypatch)
    assert promised == best["allocated_bytes"]
    assert recomputed in (None, best["recomputed_flops"])
