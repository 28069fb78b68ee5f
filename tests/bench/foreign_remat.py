"""Remat policies planned for models of other libraries: bytes and FLOPs at three budgets beside jax's own policies.

    python tests/bench/foreign_remat.py linen                      # a GPT of Flax Linen: nn.scan over nn.remat
    python tests/bench/foreign_remat.py equinox                    # one of Equinox, its blocks called one by one
    python tests/bench/foreign_remat.py maxtext                    # MaxText's decoder; its wheel, 0.2.5
    python tests/bench/foreign_remat.py linen --target=h100 --equal

The budgets lie one, three and eight eighths of the way from what nothing_saveable allocates to what dots_saveable does:
too little for jax's policies of products, enough for all but the scores of the attention, and enough for these.
Asserted at each: the plan fits as compiled, it recomputes at most the FLOPs of the best entry of
`jax.checkpoint_policies` that fits, the library's own program with the policy given to it recomputes what was promised,
and whatever would recompute less is known not to fit. `--equal` runs a small one in float32 on the CPU instead: losses
and gradients with a policy and with nothing recomputed.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import jax.numpy as jnp
import numpy as np

from bytescope.memory.cost import flops
from bytescope.memory.remat.layer_discovery import find_layers
from bytescope.memory.remat.layer_values import find_values
from bytescope.memory.remat.recognition import RematPolicy
from bytescope.memory.remat.remat_problem import CompiledPlan
from bytescope.memory.remat.remat_search import RematSearch
from bytescope.memory.remat.step_loss import Loss
from bytescope.memory.report.remat_plan import PolicyFigures, RematPlan
from bytescope.memory.report.remat_planning import BUILT_IN, PolicyCompiler, make_plan, policy_name
from bytescope.memory.units import human


@dataclasses.dataclass(frozen=True)
class Model:
    """loss(policy) is a loss(params, tokens) with that policy in its checkpoints; its arguments are ShapeDtypeStructs.
    It is traced under `mesh` where there is one."""

    loss: Callable[[Any], Callable[[Any, Any], Any]]
    args: tuple[Any, Any]
    mesh: Any = None


@dataclasses.dataclass(frozen=True)
class Size:
    """A decoder's dimensions; `vocab` tokens, batches of `batch` sequences."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocab: int
    length: int
    batch: int
    dtype: Any = jnp.bfloat16


LARGE, SMALL = Size(24, 2048, 16, 8192, 32768, 2048, 4), Size(3, 64, 4, 128, 256, 32, 2, jnp.float32)


def next_token(logits: Any, tokens: Any) -> Any:
    """Cross-entropy of the next token."""
    scores = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()


def linen(size: Size) -> Model:
    """A pre-norm GPT: nn.scan over an nn.remat block with nn.MultiHeadDotProductAttention."""
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x_BLD: Any, mask: Any) -> tuple[Any, None]:
            h_BLD = nn.LayerNorm(dtype=size.dtype)(x_BLD)
            x_BLD = x_BLD + nn.MultiHeadDotProductAttention(size.heads, dtype=size.dtype)(h_BLD, h_BLD, mask=mask)
            h_BLD = nn.Dense(size.hidden, dtype=size.dtype)(nn.LayerNorm(dtype=size.dtype)(x_BLD))
            return x_BLD + nn.Dense(size.width, dtype=size.dtype)(nn.gelu(h_BLD)), None

    class GPT(nn.Module):
        policy: Any = None

        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            x_BLD = nn.Embed(size.vocab, size.width, dtype=size.dtype)(tokens)
            block = nn.remat(Block, prevent_cse=False, policy=self.policy)
            stack = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=size.layers,
            )
            x_BLD, _ = stack()(x_BLD, nn.make_causal_mask(tokens))
            return nn.Dense(size.vocab, dtype=size.dtype)(nn.LayerNorm(dtype=size.dtype)(x_BLD))

    tokens = jax.ShapeDtypeStruct((size.batch, size.length), jnp.int32)
    params = jax.eval_shape(GPT().init, jax.random.key(0), tokens)
    return Model(
        lambda policy: lambda params, tokens: next_token(GPT(policy).apply(params, tokens), tokens), (params, tokens)
    )


def equinox(size: Size) -> Model:
    """A pre-norm transformer of eqx.nn modules; blocks under jax.checkpoint, called in a Python loop."""
    import equinox as eqx

    class Block(eqx.Module):
        first: eqx.nn.LayerNorm
        second: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 3)
            self.first, self.second = eqx.nn.LayerNorm(size.width), eqx.nn.LayerNorm(size.width)
            self.attention = eqx.nn.MultiheadAttention(size.heads, size.width, key=keys[0])
            self.up = eqx.nn.Linear(size.width, size.hidden, key=keys[1])
            self.down = eqx.nn.Linear(size.hidden, size.width, key=keys[2])

        def __call__(self, x_LD: Any) -> Any:
            mask = jnp.tril(jnp.ones((len(x_LD), len(x_LD)), bool))
            h_LD = jax.vmap(self.first)(x_LD)
            x_LD = x_LD + self.attention(h_LD, h_LD, h_LD, mask=mask)
            return x_LD + jax.vmap(lambda h: self.down(jax.nn.gelu(self.up(self.second(h)))))(x_LD)

    class GPT(eqx.Module):
        embed: eqx.nn.Embedding
        blocks: list[Block]
        head: eqx.nn.Linear

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, size.layers + 2)
            self.embed = eqx.nn.Embedding(size.vocab, size.width, key=keys[0])
            self.blocks = [Block(key) for key in keys[2:]]
            self.head = eqx.nn.Linear(size.width, size.vocab, key=keys[1])

        def __call__(self, tokens: Any, policy: Any) -> Any:
            x_LD = jax.vmap(self.embed)(tokens)
            for block in self.blocks:
                x_LD = eqx.filter_checkpoint(lambda block, x: block(x), policy=policy)(block, x_LD)
            return jax.vmap(self.head)(x_LD)

    whole = eqx.filter_eval_shape(GPT, jax.random.key(0))
    params, static = eqx.partition(whole, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, size.dtype), params)

    def loss(policy: Any) -> Callable[[Any, Any], Any]:
        def of(params: Any, tokens: Any) -> Any:
            model = eqx.combine(params, static)
            return next_token(jax.vmap(lambda row: model(row, policy))(tokens), tokens)

        return of

    return Model(loss, (params, jax.ShapeDtypeStruct((size.batch, size.length), jnp.int32)))


def maxtext(size: Size) -> Model:
    """MaxText's Llama decoder, layers scanned; the policy takes the place of its `remat_policy`."""
    from maxtext.configs import pyconfig
    from maxtext.layers import nnx_decoders
    from maxtext.models import models
    from maxtext.utils import maxtext_utils

    base = Path(pyconfig.__file__).parent / "base.yml"
    keys = {
        "run_name": "x",
        "base_emb_dim": size.width,
        "base_num_query_heads": size.heads,
        "base_num_kv_heads": size.heads // 2,
        "base_mlp_dim": size.hidden,
        "base_num_decoder_layers": size.layers,
        "head_dim": size.width // size.heads,
        "max_target_length": size.length,
        "per_device_batch_size": size.batch,
        "vocab_size": size.vocab,
        "dtype": jnp.dtype(size.dtype).name,
        "attention": "dot_product",
        "remat_policy": "full",
        "hardware": "cpu",
        "enable_checkpointing": False,
        "skip_jax_distributed_system": True,
        "enable_goodput_recording": False,
        "log_config": False,
    }
    config = pyconfig.initialize(["", str(base), *(f"{key}={value}" for key, value in keys.items())])
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config, jax.devices()[:1]), config.mesh_axes)
    model = models.transformer_as_linen(config, mesh=mesh, quant=None, model_mode="train")
    tokens = jax.ShapeDtypeStruct((size.batch, size.length), jnp.int32)

    def init(key: Any, tokens: Any) -> Any:
        keys = dict.fromkeys(("params", "dropout", "aqt"), key)
        return model.init(keys, tokens, tokens, decoder_segment_ids=tokens, enable_dropout=False)

    def loss(policy: Any) -> Callable[[Any, Any], Any]:
        def of(params: Any, tokens: Any) -> Any:
            nnx_decoders.NNXDecoder.get_remat_policy = lambda self: policy
            places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            logits = model.apply(
                params, tokens, places, decoder_segment_ids=jnp.ones_like(tokens), enable_dropout=False
            )
            return next_token(logits, tokens)

        return of

    with jax.set_mesh(mesh):
        return Model(loss, (jax.eval_shape(init, jax.random.key(0), tokens), tokens), mesh)


MODELS = {"linen": linen, "equinox": equinox, "maxtext": maxtext}
# Budgets, in eighths of the way from nothing_saveable to dots_saveable.
EIGHTHS = (1, 3, 8)


def plans_of(model: Model, target: str) -> list[RematPlan]:
    """Plans for three budgets between nothing_saveable and dots_saveable; what they promise is asserted."""
    began = time.monotonic()

    def tell(tried: CompiledPlan) -> None:
        print(
            f"  {time.monotonic() - began:5.0f} s  {human(tried.compiled.allocated_bytes)}  {tried.plan}",
            file=sys.stderr,
        )

    compiler = PolicyCompiler(Loss(model.loss(None), model.args, {}), target, None, ())
    search = RematSearch(compiler.problem(), compiler, tell)
    sizes = {
        BUILT_IN[policy_name(tried.plan)]: tried.compiled.allocated_bytes for tried in search.compile(search.fixed)
    }
    least, most = sizes["nothing_saveable"], sizes["dots_saveable"]
    budgets = [least + (most - least) * eighths // 8 for eighths in EIGHTHS]
    plans = [make_plan(compiler, search, outcome, budget) for outcome, budget in zip(search.run_all(budgets), budgets)]
    assert len({plan.recomputed_flops for plan in plans}) == len(plans)
    for plan in plans:
        assert plan.allocated_bytes <= plan.budget_bytes
        assert_the_least(search, plan)
        assert plan.recomputed_flops <= best_built_in(plan).recomputed_flops
        own = jax.jit(jax.value_and_grad(model.loss(plan.policy))).trace(*model.args)
        assert flops.count(own.jaxpr).recomputed == plan.recomputed_flops, "the library's own program differs"
        plan.check()
    return plans


def assert_the_least(search: RematSearch, plan: RematPlan) -> None:
    """That whatever recomputes less than a plan takes more than its budget: as compiled, else as predicted."""
    better = [pattern for pattern in search.patterns if pattern.flops < plan.recomputed_flops]
    for pattern in sorted(better):
        tried = search.tried.get(str(search.whole(pattern)))
        size = tried.compiled.allocated_bytes if tried else search.predict(search.whole(pattern))
        assert size > plan.budget_bytes, (pattern.text(), size)
    if better:
        kept = sum(value.bytes for value in plan.kept)
        more = min(pattern.bytes for pattern in better) - search.problem.graph.carry_bytes - kept
        print(
            f"  {human(plan.budget_bytes)}: the next plan that recomputes less keeps {human(more)} more",
            file=sys.stderr,
        )


def best_built_in(plan: RematPlan) -> PolicyFigures:
    """The entry of `jax.checkpoint_policies` that fits and recomputes least."""
    fitting = [row for row in plan.built_in if row.status == "ok" and row.allocated_bytes <= plan.budget_bytes]
    return min(fitting, key=lambda row: row.recomputed_flops)


def table(name: str, target: str, plans: list[RematPlan]) -> str:
    """The plans as rows of a Markdown table."""
    lines = [
        f"| {name} on {target}: budget | allocated | recomputed | best of jax's that fits | recomputed | kept |",
        "|---|---|---|---|---|---|",
    ]
    for plan in plans:
        best = best_built_in(plan)
        shares = [f"{row.recomputed_flops / plan.model_flops:.1%}" for row in (plan, best)]
        kept = plan.name or ", ".join(value.label for value in plan.kept)
        lines.append(
            f"| {human(plan.budget_bytes)} | {human(plan.allocated_bytes)} | {shares[0]} | {best.name}, "
            f"{human(best.allocated_bytes)} | {shares[1]} | {kept} |"
        )
    return "\n".join(lines)


def assert_equal(model: Model) -> float:
    """Runs a model on the CPU with a policy that keeps every second value, and with none; the largest difference of two
    gradients, as a share of the largest entry."""
    chance = np.random.default_rng(0)

    def array(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(chance.integers(0, 100, leaf.shape), leaf.dtype)
        return jnp.asarray(chance.normal(size=leaf.shape) / 8, leaf.dtype)

    args = jax.tree.map(array, model.args)
    compiled = Loss(model.loss(None), model.args, {})
    values = find_values(find_layers(compiled.jaxpr, compiled.active))
    policy = RematPolicy(values.wanted(list(values.values)[::2]))
    keep = jax.checkpoint_policies.everything_saveable
    wanted, got = (jax.jit(jax.value_and_grad(model.loss(each)))(*args) for each in (keep, policy))
    policy.check()
    assert abs(float(wanted[0]) / float(got[0]) - 1) < 1e-6, (wanted[0], got[0])
    pairs = [
        (np.asarray(a, np.float32), np.asarray(b, np.float32))
        for a, b in zip(jax.tree.leaves(wanted[1]), jax.tree.leaves(got[1]))
    ]
    # Some are zero but for rounding, such as that of an attention's key bias.
    worst = max(float(np.abs(a - b).max()) for a, b in pairs) / max(float(np.abs(a).max()) for a, _ in pairs)
    assert worst < 1e-4, worst
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--layers", type=int, default=LARGE.layers)
    parser.add_argument("--equal", action="store_true", help="run a small model on the CPU instead")
    args = parser.parse_args()
    size = SMALL if args.equal else dataclasses.replace(LARGE, layers=args.layers)
    model = MODELS[args.model](size)
    with jax.set_mesh(model.mesh) if model.mesh else contextlib.nullcontext():
        if args.equal:
            worst = assert_equal(model)
            print(f"{args.model}: losses within 1e-6, gradients within {worst:.1e} of the largest entry")
            return
        plans = plans_of(model, args.target)
    print(table(f"{args.model}, {size.layers} layers", args.target, plans))
    for plan in plans:
        print(plan)


if __name__ == "__main__":
    main()
