"""A block as a graph: what it says of any choice of names is what `jax.checkpoint` then does, to the FLOP and byte."""

import dataclasses
import json
import random

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from bytescope.memory import ReportError
from bytescope.memory.analysis import report_of
from bytescope.memory.cost import flops
from bytescope.memory.remat.layer_graph import GraphStep, LayerGraph
from bytescope.memory.remat.named_block import named_block
from bytescope.memory.remat.remat_problem import RecomputeRates
from bytescope.memory.remat.remat_solver import pattern_keeping, pattern_keeping_all
from bytescope.train.plan.block_description import describe_block, fixed_policies
from bytescope.train.program.config_files import load, override
from bytescope.train.program.program import build
from support.crossing import INPUT, crossing, custom, gradient
from support.described import LAYERS, WIDE_GPU, compile_described, described
from support.exhaustive import exhaustive
from support.toy import small_program

RATES = RecomputeRates(dict.fromkeys(("fp8", "bf16", "fp16", "tf32", "fp32"), 1e12), 1e11)
CHUNKED = {"model.attention": "chunked", "model.attention_chunk": 8}
GPT = {
    "model.attention": "naive",
    "model.mlp": "gelu",
    "model.norm": "layernorm",
    "model.position": "learned",
    "model.bias": True,
    "model.n_kv_heads": 4,
    "model.tie_embeddings": True,
}
KINDS = {  # what is made, sets of names drawn
    "naive": ({"model.attention": "naive"}, 4),
    "chunked": ({**CHUNKED, "precision.preset": "bf16"}, 4),
    "gpt": ({**GPT, "model.dropout": 0.1}, 3),
    "fp8": (
        {
            "model.attention": "naive",
            "precision.preset": "fp8",
            "model.d_model": 128,
            "model.d_ff": 128,
            "model.d_head": 32,
        },
        2,
    ),
    "tiled": ({**CHUNKED, "model.mlp_chunk": 8}, 2),
}
MESHES = {  # what is made, names that are kept
    "sequence": (
        {"model.attention": "naive", "mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "mesh.sequence_parallel": True},
        ("v", "mid", "act"),
    ),
    "ring": ({**CHUNKED, "mesh.data": 2, "mesh.context": 4}, ("context", "k_rot", "up")),
}


def kept_bytes(block, names):
    """Bytes by name that all blocks keep under these names, the input of the block as INPUT."""
    alone = {name: pattern_keeping(block, RATES, "", (name,)) for name in names}
    return {
        INPUT: block.layers * block.carry_bytes,
        **{name: block.layers * (one.bytes - block.carry_bytes) for name, one in alone.items()},
    }


def drawn(names, kind, count):
    """Sets of names; the first keeps all but what the loop of a kernel makes beside its result."""
    chance = random.Random(kind)
    return [set(names) - {"lse"}, *(set(chance.sample(names, chance.randint(1, len(names)))) for _ in range(count))]


@pytest.mark.parametrize("kind", ["chunked", *exhaustive(*(kind for kind in KINDS if kind != "chunked"))])
def test_what_is_kept_and_made_again_is_as_predicted(kind):
    keys, count = KINDS[kind]
    plain = small_program({**keys, "remat.policy": "none"})
    block, none = describe_block(plain), gradient(plain)
    always = flops.count(none).recomputed  # tiles of an MLP are made again under any policy
    assert block.layers == plain.model.n_layers
    assert sum(crossing(none).values()) == pattern_keeping_all(block, RATES, "none").bytes * block.layers
    for names in drawn(block.names, kind, count):
        pattern, traced = pattern_keeping(block, RATES, "", names), gradient(small_program(custom(keys, names)))
        kept = crossing(traced)
        assert kept == kept_bytes(block, pattern.save), names
        assert sum(kept.values()) == pattern.bytes * block.layers
        assert flops.count(traced).recomputed - always == pattern.flops * block.layers, names


def test_policies_are_as_predicted():
    keys = KINDS["naive"][0]
    block = describe_block(small_program(keys))
    named = {policy: names for policy, names in fixed_policies().items() if names}
    for policy, names in {"full": (), **named}.items():
        traced = gradient(small_program({**keys, "remat.policy": policy}))
        pattern = pattern_keeping(block, RATES, policy, names)
        assert sum(crossing(traced).values()) == pattern.bytes * block.layers, policy
        assert flops.count(traced).recomputed == pattern.flops * block.layers, policy


@pytest.mark.parametrize("mesh", ["sequence", *exhaustive("ring")])
def test_bytes_are_one_devices_and_flops_of_all(mesh):
    """Each tensor is divided as the compiler has it; products of all shards are counted."""
    keys, names = MESHES[mesh]
    keys = {"model.n_kv_heads": 4, **keys}
    block = describe_block(small_program(keys, 8))
    compilation = small_program(custom(keys, names), 8).compile_for_report()
    wanted, found = kept_bytes(block, names), report_of(compilation).residuals_by_name
    pattern = pattern_keeping(block, RATES, "", names)
    assert {name: found[name] for name in (INPUT, *names)} == wanted and set(pattern.save) == set(names)
    assert flops.count(compilation.jaxpr).recomputed == pattern.flops * block.layers


def test_a_block_crosses_as_json():
    block = dataclasses.replace(describe_block(small_program(KINDS["chunked"][0])), bound={"context": ("q_rot", "v")})
    back = LayerGraph.from_json(json.loads(json.dumps(dataclasses.asdict(block))))
    assert back == block and hash(back.steps) == hash(block.steps)


def test_a_loop_that_makes_two_things_shares_their_flops():
    """`a` needs one product of each turn, `b` that one and another; kept `a` leaves both for `b`."""
    D, trips = 8, 3

    def two(x, w):
        def turn(carry, _):
            a, b = carry
            a = a @ w
            return (a, b + a @ w), None

        a, b = jax.lax.scan(turn, (x, x), None, length=trips)[0]
        return checkpoint_name(a, "a"), checkpoint_name(b, "b")

    def block(x, w, policy):
        def run(x):
            a, b = two(checkpoint_name(x, "block_in"), w)
            return jnp.sin(a) * jnp.cos(b)

        return (jax.checkpoint(run, policy=policy) if policy else run)(x)

    def loss(ws, x, policy=None):
        return jnp.sum(jax.lax.scan(lambda x, w: (block(x, w, policy), None), x, ws)[0])

    ws, x = jax.ShapeDtypeStruct((4, D, D), "float32"), jax.ShapeDtypeStruct((D, D), "float32")
    one = 2 * D**3 * trips

    def trace(policy):
        return jax.make_jaxpr(jax.grad(lambda ws, x: loss(ws, x, policy)))(ws, x)

    read = named_block(jax.make_jaxpr(loss)(ws, x), [True, False], lambda name: 1)
    steps = [step for step in read.steps if step.all_flops]
    assert [step.all_flops for step in steps] == [2 * one] and sorted(steps[0].flops)[-1] == 2 * one
    wanted = {names: pattern_keeping(read, RATES, "", names).flops for names in ((), ("b",), ("a",), ("a", "b"))}
    for names, count in wanted.items():
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        assert flops.count(trace(policy)).recomputed == 4 * count, names


def test_more_results_than_are_told_apart_are_made_together():
    steps = (
        GraphStep((0, 1), (), "", (6, 4), 7, "bf16", (8, 8), (((0, 1), 3),)),
        GraphStep((2,), (0,), "a", bytes=(8,)),
        GraphStep((3,), (1,), "b", bytes=(8,)),
    )
    block = LayerGraph(1, steps, (2, 3), 8, 16)
    assert [pattern_keeping(block, RATES, "", names).flops for names in ((), "a", "b", "ab")] == [7, 4, 6, 0]


def test_no_loop_is_told():
    with pytest.raises(ReportError, match=r"set model\.scan=true"):
        named_block(jax.make_jaxpr(lambda x: checkpoint_name(x, "a"))(1.0), [True], lambda name: 1)


CUDNN = {**WIDE_GPU, "model.attention": "cudnn"}


def test_a_kernel_outside_of_the_checkpoint_keeps_its_operands():
    """cuDNN's: with `context` go `q_rot`, `k_rot`, `v` and its row sums, and the kernel is not run again."""
    config = load("tiny")
    for key, value in CUDNN.items():
        override(config, key, str(value))
    block = describe_block(build(config, described("h100")))
    full, kept = (pattern_keeping(block, RATES, "", names) for names in ((), ("context", "attn_out")))
    assert kept.save == ("v", "q_rot", "k_rot", "context", "attn_out") and pattern_keeping(
        block, RATES, "", ("attn_norm", "q_rot")
    ).save == ("attn_norm", "q_rot")
    compilation = compile_described("h100", custom(CUDNN, ("context", "attn_out")))
    found, tokens, width = report_of(compilation).residuals_by_name, 4 * 1024, 512
    # The kernel's own result and its float32 row sums lie beside each other.
    kernel = LAYERS * tokens * (width * 2 + 8 * 4)
    tensor = LAYERS * tokens * width * 2
    # From 0.11 on the values' stack, made by one product with the queries, is told by the queries' name.
    values = "v" if jax.__version_info__ < (0, 11) else "q"
    assert found == {
        "(attention/dot_product_attention_fwd)": kernel,
        INPUT: tensor,
        "attn_out": tensor,
        "q_rot": tensor,
        "k_rot": tensor,
        values: tensor,
    }
    assert sum(found.values()) == kept.bytes * LAYERS
    count = flops.count(compilation.jaxpr)
    assert count.recomputed == kept.flops * LAYERS
    # Projections, the kernel and the output are not made again.
    spared = tokens * (2 * width * width * 4 + 4 * width * 1024)
    assert full.flops - kept.flops == spared
