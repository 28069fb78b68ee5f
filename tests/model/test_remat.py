"""Each policy proved: the gradients of `none`, the exact residuals, the exact bytes and recomputed FLOPs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytescope.memory.analysis import report_of
from bytescope.memory.cost import flops
from bytescope.model.names import NAMES
from bytescope.model.remat.policies import (
    MATMULS,
    OUTSIDE_CORE,
    POLICIES,
    LayerPolicies,
)
from bytescope.train.program.program import build
from support.crossing import INPUT
from support.exhaustive import exhaustive
from support.toy import block_residuals, first_state, fixed_batches, run_losses, small_config, small_program

NAMED = sorted(set(POLICIES) - {"custom"})


def gradients(overrides, devices=1):
    """Loss and gradients of one batch."""
    program = small_program({"model.n_layers": 4, **overrides}, devices)
    host = next(fixed_batches(8, 32, 64, 1))
    batch = {name: jnp.asarray(array) for name, array in host.items()}
    keys = jax.random.split(jax.random.key(0), 8)
    return jax.jit(jax.value_and_grad(program.parts.objective))(first_state(program).params, batch, keys)


@pytest.fixture(scope="module")
def kept():
    """What `none` gives, by the overrides that change the arithmetic."""
    known = {}

    def of(**overrides):
        key = tuple(sorted(overrides.items()))
        if key not in known:
            known[key] = gradients(overrides)
        return known[key]

    return of


def assert_same(found, wanted):
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6 * largest)


ARITHMETIC = {
    "scan": {},
    "unrolled": {"model.scan": False},
    "chunked": {"model.attention": "chunked", "model.attention_chunk": 8},
    "dropout": {"model.dropout": 0.1},
}
# Each policy once; EVERYWHERE below has each policy in another arithmetic.
EACH = {
    "full": "scan",
    "minimal": "chunked",
    "selective": "dropout",
    "megatron": "dropout",
    "dots": "unrolled",
    "dots_no_batch": "chunked",
    "sqrt": "scan",
    "offload": "scan",
    "offload_dots": "dropout",
}
FIRST = ("full", "minimal", "selective", "dots")  # each arithmetic once


@pytest.mark.parametrize(
    ("policy", "arithmetic"),
    [
        *((policy, EACH[policy]) for policy in FIRST),
        *exhaustive(*((policy, arithmetic) for policy, arithmetic in EACH.items() if policy not in FIRST)),
        *exhaustive(("sqrt", "dropout")),
    ],
)
def test_gradients_equal_none(policy, arithmetic, kept):
    keys = ARITHMETIC[arithmetic]
    assert_same(gradients({**keys, "remat.policy": policy}), kept(**keys))


@pytest.mark.parametrize(
    "overrides",
    [
        {"remat.policy": "full", "remat.granularity": "parts"},
        {"remat.policy": "full", "remat.layers": "0-1:none,2-4:dots"},
        {"remat.policy": "custom", "remat.offload": "block_in,mid"},
        *exhaustive(
            {"remat.policy": "sqrt", "remat.layers": "3-4:none"},
            {"remat.layers": "0-2:sqrt", "model.scan": False},
        ),
    ],
    ids=str,
)
def test_ranges_granularity_and_custom_equal_none(overrides, kept):
    arithmetic = {key: value for key, value in overrides.items() if not key.startswith("remat.")}
    assert_same(gradients(overrides), kept(**arithmetic))


ONE, FSDP, TENSOR = {}, {"mesh.data": 2, "mesh.fsdp": 4}, {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
# Every pair of (scanned or not, accumulation, mesh, kernel) is in some row: policy, scan, mode, mesh, kernel.
EVERYWHERE = [
    ("selective", False, "multisteps", TENSOR, "naive"),
    ("custom", True, "scan", TENSOR, "chunked"),
    ("sqrt", True, "multisteps", FSDP, "chunked"),
    ("offload", False, "scan", FSDP, "naive"),
    ("dots_no_batch", False, "scan", ONE, "chunked"),
    ("offload_dots", True, "multisteps", ONE, "naive"),
]


def updates(policy, scan, mode, mesh, kernel):
    """Losses of two updates of two micro-batches each, the same sequences on every mesh."""
    ranks = mesh.get("mesh.data", 1) * mesh.get("mesh.fsdp", 1)
    names = {"remat.save": "up,context,k_rot"} if policy == "custom" else {}
    return run_losses(
        small_program(
            {
                "remat.policy": policy,
                **names,
                "model.scan": scan,
                "model.n_layers": 4,
                "batch.mode": mode,
                "batch.accumulation": 2,
                "batch.micro": 8 // ranks,
                "model.attention": kernel,
                "model.attention_chunk": 8,
                **mesh,
            },
            8 if mesh else 1,
        ),
        steps=2,
    )


@pytest.fixture(scope="module")
def plain():
    return updates("none", True, "multisteps", ONE, "naive")


@pytest.mark.parametrize(
    ("policy", "scan", "mode", "mesh", "kernel"),
    [*EVERYWHERE[:2], *exhaustive(*EVERYWHERE[2:])],
    ids=lambda value: str(value)[:24],
)
def test_every_policy_everywhere(policy, scan, mode, mesh, kernel, plain):
    np.testing.assert_allclose(updates(policy, scan, mode, mesh, kernel), plain, rtol=1e-5)


def of_tokens(found):
    """Those [2, 16, ...], an element or more a token: not the angles of positions."""
    return [one for one in found if one[1][:2] == (2, 16)]


def names_of(found):
    return {name for name, _, _ in found}


SELECTIVE = {"x", "attn_norm", "q_rot", "k_rot", "v", "context", "mid", "mlp_norm", "gate", "up", "act"}


@pytest.mark.parametrize(
    ("policy", "names", "fields"),
    [
        ("full", {"x"}, {}),
        ("selective", SELECTIVE, {}),
        ("minimal", {"x", "q", "k", "v", "context", "attn_out", "gate", "up"}, {}),
        ("selective", SELECTIVE | {"q", "k"}, {"model.qk_norm": True}),
        ("selective", SELECTIVE | {"attn_out", "mlp_out"}, {"model.post_norms": True}),
    ],
)
def test_exactly_the_named_tensors_are_kept(capsys, policy, names, fields):
    assert names_of(of_tokens(block_residuals(capsys, **{"remat.policy": policy, **fields}))) == names


def test_none_keeps_more_than_any_and_full_the_least(capsys):
    sizes = {
        policy: sum(
            math.prod(shape) * itemsize
            for _, shape, itemsize in of_tokens(block_residuals(capsys, **{"remat.policy": policy}))
        )
        for policy in ("none", "selective", "minimal", "dots_no_batch", "full")
    }
    assert sizes["none"] > sizes["selective"] > sizes["minimal"] >= sizes["dots_no_batch"] > sizes["full"]
    assert sizes["full"] == 2 * 16 * 32 * 4


def test_selective_keeps_megatrons_34_sbh(capsys):
    """Korthikanti et al. 2022, equation 4: 34 bytes a position and width in 16-bit floats, masks at one byte."""
    gpt = {
        "model.norm": "layernorm",
        "model.mlp": "gelu",
        "model.position": "learned",
        "model.bias": True,
        "model.n_kv_heads": 4,
        "model.d_ff": 128,
        "model.dropout": 0.1,
        "precision.preset": "bf16",
    }
    found = of_tokens(block_residuals(capsys, **gpt, **{"remat.policy": "selective"}))
    size = sum(math.prod(shape) * itemsize for _, shape, itemsize in found)
    assert size == 34 * (2 * 16 * 32)


def counted(**overrides):
    program = small_program({"model.n_layers": 4, **overrides})
    return program, flops.count(program.step.trace(program.state, program.batch_shapes).jaxpr)


def test_recomputed_flops_are_exact():
    program, none = counted(**{"remat.policy": "none"})
    assert none.recomputed == 0
    model, tokens = program.model, program.batch.tokens
    D, F, H, G, K, S = model.d_model, model.d_ff, model.n_heads, model.n_kv_heads, model.d_head, program.batch.seq_len
    core, qkv, out, up = 4 * H * K * S, 2 * D * K * (H + 2 * G), 2 * D * H * K, 2 * 2 * D * F
    # The down projection is never needed again: nothing reads its output but the residual stream.
    again = {
        "full": qkv + core + out + up,
        "selective": 2 * H * K * S,
        "minimal": 2 * H * K * S,
        "dots_no_batch": core,
        "dots": 0,
    }
    for policy, per_token in again.items():
        found = counted(**{"remat.policy": policy})[1]
        assert found.recomputed == model.n_layers * tokens * per_token, policy
        assert found.total - found.recomputed == none.total
    nested = counted(**{"remat.policy": "sqrt"})[1].recomputed
    assert nested > model.n_layers * tokens * again["full"]


def test_square_root_checkpointing_keeps_a_third_of_full_at_64_layers():
    reports = {
        policy: report_of(small_program({"model.n_layers": 64, "remat.policy": policy}).compile_for_report())
        for policy in ("full", "sqrt")
    }
    layer = 8 * 32 * 32 * 4  # groups and blocks keep 8 + 8 inputs
    assert {policy: report.residuals_by_name[INPUT] for policy, report in reports.items()} == {
        "full": 64 * layer,
        "sqrt": 16 * layer,
    }
    assert reports["sqrt"].breakdown["residuals"] <= reports["full"].breakdown["residuals"] / 3
    assert reports["sqrt"].peak_bytes < reports["full"].peak_bytes


def test_groups_are_the_divisor_nearest_the_root():
    for layers, groups in ((64, 8), (32, 4), (48, 6), (13, 1), (12, 3)):
        assert LayerPolicies("sqrt").segments(layers)[0].groups in (groups, layers // groups), layers
    assert LayerPolicies("full").segments(64)[0].groups == 1


def test_ranges_cover_all_layers_in_order():
    found = [(s.start, s.stop, s.name) for s in LayerPolicies("full", layers=("8-10:dots", "0-2:none")).segments(12)]
    assert found == [(0, 2, "none"), (2, 8, "full"), (8, 10, "dots"), (10, 12, "full")]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"remat.policy": "ful"}, "choose one of none, full"),
        ({"remat.save": "up"}, "belong to remat.policy=custom"),
        ({"remat.policy": "custom"}, "at least one checkpoint name"),
        ({"remat.policy": "custom", "remat.save": "upp"}, "remat.save='upp': did you mean up?"),
        ({"remat.policy": "custom", "remat.save": "up", "remat.offload": "up"}, "both contain 'up'"),
        ({"remat.layers": "0-9:none"}, "extends past the 3 layers"),
        ({"remat.layers": "0-2:none,1-3:full"}, "overlaps"),
        ({"remat.layers": "2:none"}, "FIRST-END:POLICY"),
        ({"remat.granularity": "layer"}, "block, parts"),
        (
            {"remat.policy": "custom", "remat.save": "probs", "model.attention": "chunked"},
            "'probs' does not occur in this program: choose from act, attn_norm",
        ),
    ],
)
def test_mistakes_name_what_exists(overrides, message):
    with pytest.raises(ValueError, match=message):
        build(small_config(overrides), jax.devices()[:1])


def test_names_on_the_command_line_are_two_names():
    assert small_config({"remat.save": "up,gate"}).remat.save == ("up", "gate")
    assert set(OUTSIDE_CORE) | set(MATMULS) <= set(NAMES)
