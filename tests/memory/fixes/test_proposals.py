"""Proposed changes of a program's source files for the rows of its audit."""

import subprocess

import jax
import pytest

from bytescope import memory
from bytescope.memory.fixes.proposals import propose
from bytescope.memory.fixes.source_edits import unified_diff
from bytescope.memory.jaxprs import checkpoint_names_in
from bytescope.memory.program import user_program
from bytescope.memory.records.audit_record import AuditRow
from bytescope.memory.records.report_record import ReportRecord

# A step that offloads a value. {policy}: the arguments of the policy.
STEP = """
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

NAMES = ["up_outt"]

def program():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        {policy}, offload_src="device", offload_dst="pinned_host"
    )

    def layer(x, w):
        h = jnp.tanh(checkpoint_name(x @ w, "up_out"))
        return checkpoint_name(h @ w.T, "up_out2"), None

    def step(weights, x):
        def loss(weights):
            return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, weights)[0].sum()

        return jax.grad(loss)(weights)

    spec = jax.ShapeDtypeStruct
    return step, (spec((2, 16, 16), jnp.float32), spec((8, 16), jnp.float32))
"""


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        (
            'names_which_can_be_saved=[], names_which_can_be_offloaded=["up_outt"]',
            '+        names_which_can_be_saved=[], names_which_can_be_offloaded=["up_out"], offload_src',
        ),
        # The most similar name is in the other list, so the next one is taken.
        (
            'names_which_can_be_saved=["up_out"], names_which_can_be_offloaded=["up_outt"]',
            '+        names_which_can_be_saved=["up_out"], names_which_can_be_offloaded=["up_out2"], offload_src',
        ),
        ("names_which_can_be_saved=[], names_which_can_be_offloaded=NAMES", ""),
    ],
)
def test_a_misspelt_name_of_an_offload(tmp_path, policy, line):
    file = tmp_path / "steps.py"
    file.write_text(STEP.format(policy=policy))
    function = user_program.load_function(f"{file}:program")
    made = function.make(target=None)
    traced = jax.jit(made.program).trace(*made.args)
    proposals = propose(
        memory.analyze(traced, target="cpu:1"), function, made.program, checkpoint_names_in(traced.jaxpr)
    )
    (proposal,) = [each for each in proposals if each.kind == "name"]
    assert proposal.words.startswith("replace the name up_outt by up_out") and proposal.place
    patch = unified_diff(proposal.changed, tmp_path)
    if not line:
        assert not proposal.changed and not patch  # to change by hand
        return
    assert [text for text in patch.splitlines() if text.startswith(line)]
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, check=True, input=patch.encode())
    assert file.read_text() == proposal.changed[file]


def test_a_name_whose_offload_frees_nothing_is_saved(tmp_path):
    file = tmp_path / "steps.py"
    file.write_text(STEP.format(policy='names_which_can_be_saved=[], names_which_can_be_offloaded=["up_out"]'))
    row = AuditRow("offload", "up_out", f"{file}:14", "offload", "kept", undone_by="scheduler", message="frees nothing")
    function = user_program.load_function(f"{file}:program")
    (proposal,) = propose(ReportRecord(8, 8, {}, audit=(row,)), function, None, ())
    assert proposal.words == "save the name up_out in device memory"
    saved = 'names_which_can_be_saved=["up_out"], names_which_can_be_offloaded=[]'
    assert proposal.changed == {file: STEP.format(policy=saved)}
