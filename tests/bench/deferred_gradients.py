"""Reproduces openxla/xla#45753 for described GPUs: XLA's latency-hiding scheduler defers weight gradients.

    python tests/bench/deferred_gradients.py            # Llama 3 8B, 32 layers: about 5 minutes on two cores
    python tests/bench/deferred_gradients.py --small    # 12 narrow layers: about 1 minute
    python tests/bench/deferred_gradients.py --layers=8 --target=h100:8
    bytescope report tests/bench/deferred_gradients.py:unrolled h200:8     # also unscheduled, scanned

The step trains Llama 3 8B as the issue describes it: 131,072 tokens per sequence, sharded over 8 GPUs (context
parallelism), so that every GPU gathers keys and values; weights and AdamW's moments sharded over the same GPUs; each
layer recomputed. It is compiled three times: layers unrolled, the same without the scheduler, and layers in a loop
(`jax.lax.scan`). The issue does not print its batch, its remat policy or its XLA flags. Here they are MaxText's
defaults of one sequence per GPU and full recomputation, the flags of `OPTIONS` (JAX-Toolbox's and MaxText's lists for
GPUs), and a loss in parts, without which the float32 logits of 131,072 tokens per GPU would need 67 GB.

The script prints the temporary bytes beside the published ones, and the buffers that are alive at the peak of the
unrolled program. Exit code 1 if the unrolled program needs less than three times the bytes of the scanned one (half of
that with other sizes than the issue's).
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bytescope import memory

GB = 1e9
AXIS = "context"
# Temporary bytes of the issue, in GB.
PUBLISHED = {"unrolled": 290, "unscheduled": 65, "scanned": 62}
# Options of XLA, as in JAX-Toolbox's and MaxText's lists for GPUs.
OPTIONS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_gather_combine_threshold_bytes": 8 * 2**30,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 8 * 2**30,
    "xla_gpu_all_reduce_combine_threshold_bytes": 8 * 2**30,
    "xla_disable_hlo_passes": "rematerialization",
}
# xla_gpu_enable_latency_hiding_scheduler=false would leave the scheduler on for Hopper and Blackwell (jaxlib 0.10.2).
NO_SCHEDULER = {"xla_disable_hlo_passes": "rematerialization,latency-hiding-scheduler"}
# Latencies from XLA's table instead of its analytical model. The analytical model finds no overlap worth a deferred
# gradient in a program as narrow as SMALL.
FIXED_LATENCIES = {"xla_gpu_enable_analytical_sol_latency_estimator": False}


@dataclasses.dataclass(frozen=True)
class Size:
    """Dimensions of the decoder and of its batch. Heads have 128 dimensions."""

    layers: int = 32
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256
    tokens: int = 131072  # of a sequence
    batch: int = 8  # sequences

    @property
    def head(self) -> int:
        """Dimensions of a head."""
        return 128


SMALL = Size(layers=12, width=1024, hidden=3584, heads=8, kv_heads=2, vocab=1024, batch=2)


def _normalize(x_BSD: jax.Array, scale_D: jax.Array) -> jax.Array:
    wide = x_BSD.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return wide.astype(x_BSD.dtype) * scale_D.astype(x_BSD.dtype)


def _attend(mesh: jax.sharding.Mesh) -> Callable[..., jax.Array]:
    """Returns attention of queries [B, S, H, K] that are sharded along S; each GPU gathers all keys and values.
    The causal mask is left out, because cuDNN's masks know no offset: it would change no size."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jax.lax.all_gather(x, AXIS, axis=1, tiled=True) for x in (k, v))
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

    spec = P(None, AXIS, None, None)
    return jax.shard_map(attend, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)


def _layer(size: Size, mesh: jax.sharding.Mesh) -> Callable[[jax.Array, dict[str, jax.Array]], jax.Array]:
    attend = _attend(mesh)

    def layer(x_BSD: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        w = {name: weight.astype(jnp.bfloat16) for name, weight in weights.items()}
        heads = (*x_BSD.shape[:2], -1, size.head)
        h_BSD = _normalize(x_BSD, w["attention_norm"])
        q, k, v = ((h_BSD @ w[name]).reshape(heads) for name in ("query", "key", "value"))
        x_BSD += attend(q, k, v).reshape(x_BSD.shape) @ w["out"]
        h_BSD = _normalize(x_BSD, w["mlp_norm"])
        return x_BSD + (jax.nn.silu(h_BSD @ w["gate"]) * (h_BSD @ w["up"])) @ w["down"]

    return jax.checkpoint(layer)


def _mean_loss(x_BSD: jax.Array, head_DV: jax.Array, targets_BS: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
    """Returns the mean cross-entropy. The logits of at most 4,096 tokens of each GPU exist at a time."""
    B, S, _ = x_BSD.shape
    ways = mesh.shape[AXIS]
    parts = max(B * S // ways // 4096, 1)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x.reshape(B, ways, parts, S // ways // parts, *x.shape[2:]), 2, 0)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, None, AXIS)))

    @jax.checkpoint
    def add(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x, targets = part
        logits = jnp.einsum("...d,dv->...v", x, head_DV.astype(x.dtype), preferred_element_type=jnp.float32)
        label = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return total + jnp.sum(jax.nn.logsumexp(logits, -1) - label), None

    total, _ = jax.lax.scan(add, jnp.float32(0), (split(x_BSD), split(targets_BS)))
    return total / targets_BS.size


def _train_step(size: Size, mesh: jax.sharding.Mesh, scan: bool) -> Callable[..., Any]:
    layer = _layer(size, mesh)

    def loss(params: Any, tokens_BS: jax.Array, targets_BS: jax.Array) -> jax.Array:
        x_BSD = params["embed"].astype(jnp.bfloat16)[tokens_BS]
        x_BSD = jax.lax.with_sharding_constraint(x_BSD, NamedSharding(mesh, P(None, AXIS, None)))
        if scan:
            x_BSD, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x_BSD, params["layers"])
        else:
            for weights in params["layers"]:
                x_BSD = layer(x_BSD, weights)
        return _mean_loss(_normalize(x_BSD, params["norm"]), params["head"], targets_BS, mesh)

    def train_step(params: Any, mean: Any, square: Any, tokens_BS: jax.Array, targets_BS: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens_BS, targets_BS)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
        square = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, square, grads)
        params = jax.tree.map(lambda p, m, v: p - 3e-4 * m / (jnp.sqrt(v) + 1e-8), params, mean, square)
        return params, mean, square, value

    return train_step


def trace(variant: str, size: Size, target: memory.Target, options: Mapping[str, Any]) -> jax.stages.Traced:
    """Returns the traced step.

    Args:
      variant: a key of PUBLISHED.
      size: dimensions of the decoder and of its batch.
      target: the GPUs to compile for.
      options: options of XLA besides OPTIONS.
    """
    mesh = target.mesh(**{AXIS: target.n_devices})
    scan = variant == "scanned"

    def array(*shape: int, spec: P, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def layers(*shape: int) -> jax.ShapeDtypeStruct:
        spec = (AXIS, None) if len(shape) == 2 else (None,)
        return array(size.layers, *shape, spec=P(None, *spec)) if scan else array(*shape, spec=P(*spec))

    D, F, Q, K = size.width, size.hidden, size.heads * size.head, size.kv_heads * size.head
    shapes = {
        "query": (D, Q),
        "key": (D, K),
        "value": (D, K),
        "out": (Q, D),
        "gate": (D, F),
        "up": (D, F),
        "down": (F, D),
    }
    shapes |= {"attention_norm": (D,), "mlp_norm": (D,)}
    weights = {name: layers(*shape) for name, shape in shapes.items()}
    params = {
        "embed": array(size.vocab, D, spec=P(None, AXIS)),
        "head": array(D, size.vocab, spec=P(AXIS, None)),
        "norm": array(D, spec=P(None)),
        "layers": weights if scan else [weights] * size.layers,
    }
    ids = array(size.batch, size.tokens, spec=P(None, AXIS), dtype=jnp.int32)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    step = jax.jit(
        _train_step(size, mesh, scan),
        donate_argnums=(0, 1, 2),
        out_shardings=(shardings, shardings, shardings, None),
        compiler_options={**OPTIONS, **options, **(NO_SCHEDULER if variant == "unscheduled" else {})},
    )
    return step.trace(params, params, params, ids, ids)


def unrolled() -> jax.stages.Traced:
    """Program for `bytescope report`: layers unrolled, XLA's scheduler on."""
    return trace("unrolled", Size(), memory.target("h200:8"), {})


def unscheduled() -> jax.stages.Traced:
    """Program for `bytescope report`: layers unrolled, XLA's scheduler off."""
    return trace("unscheduled", Size(), memory.target("h200:8"), {})


def scanned() -> jax.stages.Traced:
    """Program for `bytescope report`: layers in a loop, XLA's scheduler on."""
    return trace("scanned", Size(), memory.target("h200:8"), {})


def _print_peak(report: memory.Report) -> None:
    groups: dict[tuple[str, str, str, str], list[memory.Buffer]] = defaultdict(list)
    for buffer in report.buffers:
        if buffer.at_peak and buffer.memory == "device" and buffer.phase not in ("argument", "output"):
            shape = f"{buffer.dtype}{list(buffer.shape)}"
            groups[buffer.phase, buffer.category, shape, buffer.source].append(buffer)
    print("\nalive at the peak, by source line, GB:")
    for key, group in sorted(groups.items(), key=lambda item: -sum(b.bytes for b in item[1]))[:10]:
        print(f"  {sum(b.bytes for b in group) / GB:7.2f}  {len(group):3} x {'  '.join(key)}  such as {group[0].name}")
    for finding in report.findings:
        print(f"finding {finding.kind}: {finding.message}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="12 narrow layers instead of Llama 3 8B")
    parser.add_argument("--layers", type=int, help="number of layers (default 32; 12 with --small)")
    parser.add_argument("--batch", type=int, help="number of sequences (default 8; 2 with --small)")
    parser.add_argument("--xla", nargs="+", default=[], metavar="NAME=VALUE", help="more options of XLA")
    parser.add_argument("--target", default="h200:8", help="GPUs to compile for (default h200:8)")
    parser.add_argument("--variants", nargs="+", choices=PUBLISHED, default=list(PUBLISHED), help="default: all three")
    parser.add_argument("--peak", action="store_true", help="also print the buffers at the peak of the first variant")
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in ("layers", "batch") if getattr(args, name)}
    size = dataclasses.replace(SMALL if args.small else Size(), **given)
    target = memory.target(args.target)
    options = dict(FIXED_LATENCIES) if args.small else {}
    for pair in args.xla:
        name, _, value = pair.partition("=")
        options[name] = json.loads(value) if value in ("true", "false") or value.isdigit() else value
    print(f"jax {jax.__version__}, {target.name}, {size}, {OPTIONS | options}")
    print(f"{'':12}{'published GB':>14}{'temp GB':>10}{'peak GB':>10}{'compiled in s':>15}", flush=True)
    temp = {}
    for variant in args.variants:
        start = time.perf_counter()
        traced = trace(variant, size, target, options)
        stats = traced.lower().compile().memory_analysis()
        seconds = time.perf_counter() - start
        temp[variant] = stats.temp_size_in_bytes / GB
        published = PUBLISHED[variant] if size == Size() else ""
        print(
            f"{variant:12}{published:>14}{temp[variant]:10.2f}{stats.peak_memory_in_bytes / GB:10.2f}{seconds:15.0f}",
            flush=True,
        )
        if args.peak and variant == args.variants[0]:
            _print_peak(memory.analyze(traced))
    if not {"unrolled", "scanned"} <= temp.keys():
        return
    ratio = temp["unrolled"] / temp["scanned"]
    print(f"unrolled / scanned: {ratio:.2f}" + (f", published {290 / 62:.2f}" if size == Size() else ""))
    if ratio < (3 if size == Size() else 1.5):
        sys.exit(1)


if __name__ == "__main__":
    main()
