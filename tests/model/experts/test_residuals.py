"""What a block with experts keeps under each policy, and that every policy gives the gradients of `none`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytescope.model.remat.policies import POLICIES
from support.exhaustive import exhaustive
from support.toy import block_residuals, first_state, fixed_batches, small_program

MIXTURE = {
    "model.experts": 8,
    "model.experts_per_token": 2,
    "model.d_expert": 16,
    "model.shared_experts": 1,
    "model.n_layers": 2,
    "loss.router_z": 1e-3,
}
ATTENTION = {"attn_norm", "q_rot", "k_rot", "v", "context", "mid", "mlp_norm"}
SHARED = {"gate", "up", "act"}


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        ("full", {"x"}),
        (
            "minimal",
            {"x", "q", "k", "v", "context", "attn_out", "gate", "up", "router_logits", "expert_gate", "expert_up"},
        ),
        (
            "selective",
            {"x", *ATTENTION, *SHARED, "router_logits", "dispatched", "expert_gate", "expert_up", "expert_act"},
        ),
        ("router_logits,expert_gate", {"x", "router_logits", "expert_gate"}),
    ],
)
def test_exactly_the_named_tensors_are_kept(capsys, policy, names):
    plan = {"remat.policy": policy} if policy in POLICIES else {"remat.policy": "custom", "remat.save": policy}
    assert {name for name, _, _ in block_residuals(capsys, **MIXTURE, **plan)} == names


@pytest.mark.parametrize("preset", ["bf16", "fp32"])
def test_none_keeps_no_gathered_or_cast_weight(capsys, preset):
    fields = {**MIXTURE, "model.d_model": 48, "precision.preset": preset, "remat.policy": "none"}
    blocks = small_program(fields).state.params["blocks"]
    weights = {leaf.shape[1:] for leaf in jax.tree.leaves(blocks) if leaf.ndim > 2}
    kept = {shape for _, shape, _ in block_residuals(capsys, **fields)}
    assert kept and not kept & weights


def gradients(policy):
    program = small_program({**MIXTURE, "remat.policy": policy, "model.scan": policy != "offload"})
    batch = {name: jnp.asarray(x) for name, x in next(fixed_batches(4, 16, 64, 1)).items()}
    loss, grads = jax.jit(jax.value_and_grad(program.parts.objective))(first_state(program).params, batch, None)
    blocks = grads["blocks"]
    if policy == "offload":  # unrolled: layers beside each other
        blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(blocks[layer] for layer in sorted(blocks)))
    return loss, {**grads, "blocks": blocks}


@pytest.fixture(scope="module")
def none():
    return gradients("none")


# Names, groups of layers, products without names, and unrolled layers; the other policies are made like one of these.
@pytest.mark.parametrize("policy", ["selective", *exhaustive("sqrt", "dots", "offload")])
def test_every_policy_has_the_gradients_of_none(policy, none):
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(none))
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6 * largest),
        gradients(policy),
        none,
    )
