"""What policies keep, to the byte: values that cross from forward to backward, residuals of the compiled step."""

import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

from bytescope.memory.analysis import report_of
from bytescope.memory.cost.named_tensors import excess_warnings, named_tensors
from bytescope.model.names import NAMES
from bytescope.model.remat.policies import (
    ADAPTER_MASKS,
    ADAPTERS,
    EXPERTS,
    LATENTS,
    MATMULS,
    OUTSIDE_CORE,
    QUANTIZED,
)
from bytescope.train.plan.block_description import trace_gradient
from support.crossing import INPUT, crossing, custom, gradient
from support.described import WIDE_GPU, compile_described
from support.exhaustive import exhaustive
from support.toy import small_program

B, L, MIB = 8, 32, 2**20
# What no backward pass reads: nothing follows the down projection but a sum. And what it does not read if the second
# is kept, which it was to make again.
UNREAD, BEHIND = {"mlp_out"}, {"q": "q_rot", "k": "k_rot", "attn_out": "mid"}


def made(keys):
    """The names that a block of this config makes."""
    absent = {"embed", "embed_mask", "final_norm", *QUANTIZED, *ADAPTERS, *ADAPTER_MASKS, *EXPERTS, *LATENTS}
    absent |= {name for name in NAMES if "mask" in name or "dropped" in name} if not keys["model.dropout"] else set()
    absent |= {"gate"} if keys["model.mlp"] == "gelu" else set()
    absent |= {"lse"} if keys["model.attention"] == "naive" else {"probs", "probs_mask", "probs_dropped"}
    return sorted(set(NAMES) - absent)


def asked(names):
    """Those of a policy's names that its backward pass reads, the input of the block among them."""
    others = {*UNREAD, *ADAPTERS, *ADAPTER_MASKS, *EXPERTS, *LATENTS}
    return {INPUT} | {
        name for name in names if name != "block_in" and name not in others and BEHIND.get(name) not in names
    }


def bytes_of(model, names, itemsize, rows=B, length=L, tensor=1):
    """Bytes of these names in one layer, from the letters of model/names.py."""
    H, G = model.n_heads // tensor, model.n_kv_heads // tensor
    sizes = {
        "B": rows,
        "L": length,
        "S": length,
        "D": model.d_model,
        "F": model.d_ff // tensor,
        "H": H,
        "G": G,
        "R": H // G,
        "K": model.d_head,
    }
    wide = {"lse": 4, **{name: 1 for name in NAMES if name.endswith("mask")}}
    letters = {name: "BLD" if name == INPUT else NAMES[name][0] for name in names}
    return {
        name: math.prod(sizes[letter] for letter in suffix) * wide.get(name, itemsize)
        for name, suffix in letters.items()
    }


@st.composite
def blocks(draw, scan):
    """(overrides, names): a small block of any kind and some of its names."""
    keys = {
        "model.attention": draw(st.sampled_from(["naive", "chunked"])),
        "model.attention_chunk": 8,
        "model.mlp": draw(st.sampled_from(["gelu", "swiglu"])),
        "model.norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "model.position": draw(st.sampled_from(["learned", "rope"])),
        "model.bias": draw(st.booleans()),
        "model.n_kv_heads": draw(st.sampled_from([1, 2, 4])),
        "model.scan": draw(scan),
        "model.n_layers": draw(st.integers(2, 4)),
        "precision.preset": draw(st.sampled_from(["bf16", "fp32"])),
    }
    keys["model.dropout"] = draw(st.sampled_from([0.0, 0.1])) if keys["model.attention"] == "naive" else 0.0
    return keys, draw(st.sets(st.sampled_from(made(keys)), min_size=1, max_size=7))


@settings(max_examples=4, deadline=None, derandomize=True)
@given(drawn=blocks(st.booleans()))
def test_what_crosses_is_what_the_policy_names(drawn):
    keys, names = drawn
    program = small_program(custom(keys, names))
    layer = bytes_of(program.model, asked(names), jnp.dtype(program.precision.compute).itemsize)
    assert crossing(gradient(program)) == {name: count * program.model.n_layers for name, count in layer.items()}


@settings(max_examples=4, deadline=None, derandomize=True)
@given(drawn=blocks(st.just(True)))
def test_more_than_none_only_by_what_autodiff_does_not_keep(drawn):
    keys, names = drawn
    program = small_program(custom(keys, names))
    none = trace_gradient(program)
    autodiff = {tensor.name for tensor in named_tensors(none) if tensor.autodiff}
    layer = bytes_of(program.model, asked(names), jnp.dtype(program.precision.compute).itemsize)
    beyond = {name for name in layer if (name if name != INPUT else "block_in") not in autodiff}
    # Not every value has its own name: what autodiff keeps of a norm or an activation is listed by its operation.
    assert {name for name in crossing(none) if not name.startswith("(")} <= autodiff
    assert beyond <= {"q", "k", "attn_out", "mid", INPUT}
    extra = sum(layer[name] for name in beyond) * program.model.n_layers
    assert sum(crossing(gradient(program)).values()) <= sum(crossing(none).values()) + extra


@pytest.mark.parametrize(
    ("policy", "names", "scores", "preset"),
    [
        ("full", (), 0, "fp32"),
        ("selective", OUTSIDE_CORE, 0, "fp32"),
        ("minimal", MATMULS, 0, "bf16"),
        ("offload", ("block_in",), 0, "fp32"),
        ("dots_no_batch", ("q", "k", "v", "attn_out", "gate", "up"), 0, "fp32"),
        ("dots", ("q", "k", "v", "attn_out", "gate", "up", "context"), 1, "bf16"),
    ],
)
def test_the_rows_keep_what_they_say(policy, names, scores, preset):
    """Policies of matrix products keep them before they get their names, `dots` the scores too."""
    program = small_program({"remat.policy": policy, "precision.preset": preset, "model.attention": "naive"})
    model, itemsize = program.model, jnp.dtype(program.precision.compute).itemsize
    names = set(names) - {"lse", "attn_out_mask", "mlp_out_mask"}
    layer = sum(bytes_of(model, asked(names), itemsize).values()) + scores * itemsize * B * model.n_heads * L * L
    assert sum(crossing(gradient(program)).values()) == layer * model.n_layers


COMPILED = [  # overrides, names that are kept, devices of the tensor axis
    ({"remat.policy": "selective", "mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}, OUTSIDE_CORE, 2),
    *exhaustive(
        ({"remat.policy": "minimal", "batch.mode": "scan", "batch.accumulation": 2}, MATMULS, 1),
        ({"remat.policy": "custom", "remat.save": "up,context", "batch.accumulation": 2}, ("up", "context"), 1),
    ),
]


@pytest.mark.parametrize(("overrides", "names", "tensor"), COMPILED, ids=lambda value: str(value)[:40])
def test_the_compiled_step_holds_just_that(overrides, names, tensor):
    program = small_program(
        {"model.n_layers": 6, "data.seq_len": 64, "model.attention": "naive", **overrides}, 8 if tensor > 1 else 1
    )
    report = report_of(program.compile_for_report())
    names = asked(set(names) - {"lse", "attn_out_mask", "mlp_out_mask"})
    wanted = {name: 6 * count for name, count in bytes_of(program.model, names, 4, B, 64, tensor).items()}
    found = {name: count for name, count in report.residuals_by_name.items() if not name.startswith("(embed")}
    assert found == wanted
    embedding = report.breakdown["residuals"] - sum(wanted.values())
    assert 0 <= embedding <= B * 64 * 32 * 4  # the tokens looked up, which are in no block


def test_unrolled_layers_hold_their_inputs():
    program = small_program({"data.seq_len": 64, "model.scan": False, "remat.policy": "full"})
    found = report_of(program.compile_for_report()).residuals_by_name
    layer = B * 64 * 32 * 4
    assert found["block_in"] == 2 * layer and found["(embed/gather)"] == layer  # the first starts from the embedding
    assert sum(found.values()) - 3 * layer <= 64  # the angles' frequencies


def test_a_name_wider_than_its_readers_is_told():
    def loss(w, x):
        wide = checkpoint_name(x * 2.0, "wide")
        exact = checkpoint_name(jnp.sin(wide.astype(jnp.bfloat16)), "exact")
        both = checkpoint_name(x * 3.0, "both")
        return jnp.sum((exact @ w).astype(jnp.float32)) + jnp.sum(both * both.astype(jnp.bfloat16))

    x, w = jnp.ones((1024, 256), jnp.float32), jnp.ones((256, 8), jnp.bfloat16)
    found = {tensor.name: tensor for tensor in named_tensors(jax.make_jaxpr(jax.grad(loss))(w, x))}
    assert {name: (tensor.read_as, tensor.excess) for name, tensor in found.items()} == {
        "wide": ("bfloat16", 1024 * 256 * 2),
        "exact": ("", 0),
        "both": ("", 0),
    }
    assert excess_warnings(found.values()) == (
        "wide is kept in float32 and read in bfloat16: 2 times the needed bytes, 512.00 KiB too much over all devices; "
        "call checkpoint_name after the cast",
    )


@pytest.mark.parametrize("preset", ["bf16", "fp32"])
@pytest.mark.parametrize("scan", [True, False])
def test_no_name_of_the_model_is_too_wide(preset, scan):
    """Every tensor is named in the dtype in which it is read; autodiff keeps the stream only where nothing casts it."""
    tensors = named_tensors(trace_gradient(small_program({"precision.preset": preset, "model.scan": scan})))
    assert excess_warnings(tensors) == ()
    kept = {tensor.name for tensor in tensors if tensor.autodiff}
    assert {"attn_norm", "q_rot", "k_rot", "v", "context", "mlp_norm", "up", "act"} <= kept
    assert {"mid", "block_in"} <= kept if preset == "fp32" else kept.isdisjoint({"mid", "block_in"})


@pytest.mark.exhaustive
def test_unrolled_layers_offload_as_scanned_ones():
    """All that is offloaded is on the host at once, and the device holds no more than under the loop."""
    keys = {**WIDE_GPU, "model.n_layers": 2, "remat.policy": "offload_dots"}
    stats = {scan: compile_described("h200", {**keys, "model.scan": scan}).stats for scan in (True, False)}
    widths = 4 * 512 + 2 * 1536
    assert stats[False].host_temp_bytes == stats[True].host_temp_bytes == 2 * 4 * 1024 * widths * 2
    assert stats[False].temp_bytes <= stats[True].temp_bytes
