"""Memory left over while FLOPs are recomputed: what should fit by a figure, and nothing said without one."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from bytescope.configs import llama_8b
from bytescope.memory.cost.flops import count
from bytescope.memory.findings.spare_memory import recomputed_products, spare_memory
from bytescope.memory.hlo.buffers import HloProgram
from bytescope.memory.hlo.mesh import ArgumentLayout
from bytescope.memory.hlo.module import Module
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import ROWS, ReportRecord
from bytescope.memory.units import GIB
from bytescope.train.program.config_files import flatten, override
from support.facts import NOTHING, finding

pytestmark = pytest.mark.quick


def report(config=None, limit=72 * GIB, recomputed=1.0e14, free=52 * GIB, residuals=2 * GIB, **fields):
    """A step on a described GPU that recomputes some of its 5e14 model FLOPs."""
    size = limit - free
    rows = dict.fromkeys(ROWS, 0) | {"residuals": residuals, "params": size - residuals}
    work = {
        phase: {"flops": {"bf16": flops}}
        for phase, flops in (("forward", 2e14), ("recompute", recomputed), ("backward", 3e14))
    }
    return ReportRecord(
        size,
        size,
        rows,
        limit_bytes=limit,
        fits=True,
        verdict="fits",
        work=work,
        config=config or {},
        **{"target": {"platform": "cuda", "n_devices": 8}, **fields},
    )


def config(module=llama_8b, **keys):
    found = module.get_config()
    for key, text in keys.items():
        override(found, key, text)
    return flatten(found)


def test_the_search_that_compiles_is_named_for_a_config():
    found = finding(report(config()), "spare_memory")
    assert found.flags == "--config.remat.policy=auto" and found.bytes == 52 * GIB
    assert found.message == "52.00 GiB free and 20% of the model's FLOPs recomputed"


def test_names_that_a_config_keeps_are_cleared():
    keys = {"remat.policy": "custom", "remat.save": "q_rot,v", "remat.layers": "0-1:full"}
    found = finding(report(config(**keys)), "spare_memory")
    assert found.flags == "--config.remat.policy=auto --config.remat.layers= --config.remat.save="


@pytest.mark.parametrize(
    "change",
    [
        {"recomputed": 0.0},
        {"recomputed": 2e13},  # a twentieth of the model's FLOPs
        {"free": 6 * GIB},
        {"fits": False},
        {"limit_bytes": None},
        {"target": {"platform": "cpu", "n_devices": 8}},
        {"config": config(**{"remat.policy": "auto"})},
    ],
)
def test_nothing_to_say(change):
    """Nothing recomputed, nothing free, no limit, or a budget that somebody chose."""
    made = {key: change[key] for key in ("recomputed", "free") if key in change}
    known = dataclasses.replace(report(config(), **made), **{k: v for k, v in change.items() if k not in made})
    assert finding(known, "spare_memory") is None


def test_a_toy_recomputes_as_it_likes():
    toy = dataclasses.replace(
        report(config()), work={"forward": {"flops": {"bf16": 2e9}}, "recompute": {"flops": {"bf16": 1e9}}}
    )
    assert finding(toy, "spare_memory") is None


# ---- a program of anyone's -----------------------------------------------------------------------------------------

WIDTH, ROWS_OF_X, LAYERS = 64, 32, 3


def layer(x, w):
    x = jnp.tanh(x @ w["up"])
    return jnp.tanh(jnp.einsum("bij,bjk->bik", x.reshape(8, -1, WIDTH), w["mix"]).reshape(x.shape))


def traced(policy=None):
    """The gradient of three checkpointed layers, each a product with a weight and one with a batch dimension."""
    body = jax.checkpoint(layer, policy=policy)

    def loss(w, x):
        return jax.lax.scan(lambda x, w: (body(x, w), None), x, w)[0].sum()

    shapes = {"up": (LAYERS, WIDTH, WIDTH), "mix": (LAYERS, 8, WIDTH, WIDTH)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return jax.jit(jax.grad(loss)).trace(weights, jax.ShapeDtypeStruct((ROWS_OF_X, WIDTH), jnp.float32)).jaxpr


def test_what_is_recomputed_is_what_the_flop_counter_says():
    products = recomputed_products(traced())
    assert sum(product.flops for product in products) == count(traced()).recomputed > 0
    assert [product.batched for product in products] == [False, True]
    assert {product.bytes for product in products} == {LAYERS * 4 * ROWS_OF_X * WIDTH}
    # A policy that keeps them spares them: what the remedy promises.
    assert recomputed_products(traced(jax.checkpoint_policies.dots_saveable)) == ()
    (left,) = recomputed_products(traced(jax.checkpoint_policies.dots_with_no_batch_dims_saveable))
    assert left.batched


@pytest.mark.parametrize(
    ("scale", "saveable", "said"),
    [
        (1, True, "policy=jax.checkpoint_policies.dots_saveable in jax.checkpoint should fit"),
        (10**6, True, "policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable in jax.checkpoint should fit"),
        (1, False, "save some of the results of its matrix products, named with jax.ad_checkpoint.checkpoint_name"),
        (10**7, True, "or let memory.plan_remat choose them"),
    ],
)
def test_the_policy_of_another_program(monkeypatch, scale, saveable, said):
    """`scale`: the products' results are so many times larger than they are, the batched ones three times that."""
    from bytescope.memory.findings import spare_memory as module

    free = 52 * GIB
    larger = tuple(
        product._replace(flops=10**14, bytes=product.bytes * scale * (1 + 2 * product.batched), saveable=saveable)
        for product in recomputed_products(traced())
    )
    monkeypatch.setattr(module, "recomputed_products", lambda jaxpr: larger)
    program = PlacedProgram(HloProgram(Module()), jaxpr=object())
    found = spare_memory(report(free=free), program)
    assert said in found.remedy
    assert found.bytes <= 0.85 * free or "should" not in found.remedy


def test_bytes_of_one_device_are_those_of_its_part_of_the_batch():
    tokens = ArgumentLayout((64, 32), (8, 32), "int32", (("data",), ()))
    from bytescope.memory.findings import spare_memory as module

    program = PlacedProgram(HloProgram(Module(devices=16)), (("data", 8), ("model", 2)), {0: tokens})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "batch", lambda report, program: {0: None})
        assert module._activation_shards(report(), program) == 8
    assert module._activation_shards(report(), NOTHING) == 1
