"""JAX programs for the tests of `memory`: a small training step, and everything a training step is not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HIDDEN, VOCAB, BATCH, LENGTH = 4, 64, 256, 128, 8, 64
HEADS = 4
NAMES = ("q", "attn_out", "up")
f32, i32 = jnp.float32, jnp.int32
spec = jax.ShapeDtypeStruct

POLICIES = {
    "none": lambda block: block,
    "full": lambda block: jax.checkpoint(block, prevent_cse=False),
    "named": lambda block: jax.checkpoint(
        block, prevent_cse=False, policy=jax.checkpoint_policies.save_only_these_names(*NAMES)
    ),
}


def parameters():
    """Float32 parameter specs, blocks stacked on the first axis."""
    blocks = {
        name: spec((LAYERS, *shape), f32)
        for name, shape in (
            ("w_q", (WIDTH, WIDTH)),
            ("w_v", (WIDTH, WIDTH)),
            ("w_o", (WIDTH, WIDTH)),
            ("w_up", (WIDTH, HIDDEN)),
            ("w_down", (HIDDEN, WIDTH)),
            ("scale", (WIDTH,)),
        )
    }
    return {"embed": spec((VOCAB, WIDTH), f32), "blocks": blocks, "head": spec((WIDTH, VOCAB), f32)}


def block(x_BLD, weights):
    """One transformer block in bfloat16 with three named tensors."""
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    with jax.named_scope("attention"):
        q_BLD = checkpoint_name(x_BLD @ weights["w_q"], "q")
        scores = jnp.einsum("bld,bmd->blm", q_BLD, x_BLD) / 8
        probs = jax.nn.softmax(scores.astype(f32)).astype(jnp.bfloat16)
        mixed = jnp.einsum("blm,bmd->bld", probs, x_BLD @ weights["w_v"])
        x_BLD = x_BLD + checkpoint_name(mixed @ weights["w_o"], "attn_out")
    with jax.named_scope("mlp"):
        up = checkpoint_name(x_BLD * weights["scale"][None, None] @ weights["w_up"], "up")
        return x_BLD + jax.nn.gelu(up) @ weights["w_down"]


def make_step(policy="named", optimizer=None, micro=1):
    """(step, optimizer): step(state, batch) -> (state, loss); `micro` micro-batches in a scan."""
    body = POLICIES[policy](block)
    optimizer = optimizer or optax.adamw(1e-3)

    def loss(params, batch):
        with jax.named_scope("embed"):
            x_BLD = params["embed"].astype(jnp.bfloat16)[batch["inputs"]]
        with jax.named_scope("blocks"):
            x_BLD, _ = jax.lax.scan(lambda x, w: (body(x, w), None), x_BLD, params["blocks"])
        with jax.named_scope("head"):
            logits = (x_BLD @ params["head"].astype(jnp.bfloat16)).astype(f32)
        with jax.named_scope("loss"):
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def gradients(params, batch):
        if micro == 1:
            return jax.value_and_grad(loss)(params, batch)

        def add(carry, part):
            value, grads = jax.value_and_grad(loss)(params, part)
            return (carry[0] + value, jax.tree.map(jnp.add, carry[1], grads)), None

        with jax.named_scope("accumulate"):
            split = jax.tree.map(lambda x: x.reshape(micro, -1, LENGTH), batch)
            zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
            return jax.lax.scan(add, zero, split)[0]

    def step(state, batch):
        value, grads = gradients(state["params"], batch)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
            params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, value

    return step, optimizer


def trace_step(devices, policy="named", *, shard_batch=True, shard_state=False, optimizer=None, micro=1):
    """The training step as a `jax.stages.Traced` for the devices."""
    step, optimizer = make_step(policy, optimizer, micro)
    mesh = Mesh(np.array(devices), ("data",))

    def place(leaf):
        sharded = shard_state and leaf.ndim >= 2
        axes = P(*[None] * (leaf.ndim - 1), "data") if sharded else P()
        return spec(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, axes))

    params = parameters()
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params), "step": spec((), i32)}
    tokens = spec((BATCH, LENGTH), i32, sharding=NamedSharding(mesh, P("data" if shard_batch else None)))
    jitted = jax.jit(step, donate_argnums=0)
    return jitted.trace(jax.tree.map(place, state), {"inputs": tokens, "targets": tokens})


def linen():
    """A Flax Linen MLP's gradient step."""
    from flax import linen as nn

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10)(nn.relu(nn.Dense(32)(x)))

    model = Mlp()
    variables = jax.eval_shape(model.init, jax.random.key(0), spec((4, 16), f32))

    def step(variables, x, y):
        grads = jax.grad(lambda v: ((model.apply(v, x) - y) ** 2).mean())(variables)
        return jax.tree.map(lambda v, g: v - 0.1 * g, variables, grads)

    return jax.jit(step).lower(variables, spec((4, 16), f32), spec((4, 10), f32))


def scan():
    """A plain scan."""
    return jax.jit(lambda w, x: jax.lax.scan(lambda c, a: (jnp.tanh(c @ a), c.sum()), x, w)).lower(
        spec((5, 32, 32), f32), spec((8, 32), f32)
    )


def convolution():
    """The gradient of a convolutional net."""

    def loss(params, x):
        for kernel in params:
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(x)
        return (x**2).mean()

    return jax.jit(jax.grad(loss)).lower([spec((3, 3, 3, 8), f32), spec((3, 3, 8, 8), f32)], spec((2, 16, 16, 3), f32))


def shard_map():
    """A matrix product by hand over all devices."""
    mesh = Mesh(np.array(jax.devices()), ("d",))
    product = jax.shard_map(
        lambda x, w: jax.lax.psum(x @ w, "d"), mesh=mesh, in_specs=(P(None, "d"), P("d", None)), out_specs=P()
    )
    return jax.jit(product).lower(
        spec((16, 64), f32, sharding=NamedSharding(mesh, P(None, "d"))),
        spec((64, 16), f32, sharding=NamedSharding(mesh, P("d", None))),
    )


def two_scans():
    """A scan within a scan, with its gradient."""

    def outer(carry, weights):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), carry, weights)[0], carry

    return jax.jit(jax.grad(lambda w, x: jax.lax.scan(outer, x, w)[0].sum())).lower(
        spec((3, 3, 16, 16), f32), spec((16, 16), f32)
    )


def lowered(function, *shapes, **options):
    """A program of a plain function, as a thunk."""
    return lambda: jax.jit(function, **options).lower(*shapes)


OTHERS = {
    "linen": linen,
    "scan": scan,
    "convolution": convolution,
    "shard_map": shard_map,
    "two_scans": two_scans,
    "no_parameters": lowered(lambda: jnp.arange(1000.0).reshape(10, 100).sum(0)),
    "donated": lowered(lambda a, b: (a + b, a * 2), spec((64, 64), f32), spec((64, 64), f32), donate_argnums=(0, 1)),
    "conditional": lowered(
        lambda p, x: jax.lax.cond(p > 0, lambda x: jnp.sin(x) @ x, lambda x: x + x.T, x),
        spec((), i32),
        spec((32, 32), f32),
    ),
    "switch": lowered(
        lambda p, x: jax.lax.switch(p, [lambda x: x @ x, jnp.exp, jnp.cos], x), spec((), i32), spec((32, 32), f32)
    ),
    "while": lowered(
        lambda x: jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.tanh(c[1] @ x)), (0, x)),
        spec((32, 32), f32),
    ),
    "fft": lowered(lambda x: jnp.fft.ifft2(jnp.fft.fft2(x) * 2), spec((16, 16), jnp.complex64)),
    "sort": lowered(lambda x: (jnp.sort(x), jnp.argsort(x)), spec((100,), f32)),
    "scalar": lowered(lambda x: x + 1, spec((), f32)),
    "identity": lowered(lambda x: x, spec((8,), f32)),
    "empty": lowered(lambda x: x[:0], spec((8,), f32)),
    "host_offload": lowered(lambda x: jax.device_put(x * 2, jax.memory.Space.Host), spec((64, 64), f32)),
}


def two_layers(devices, middle):
    """The gradient of a two-layer net over a data axis; its hidden activation is pinned to `middle` in between."""
    mesh = Mesh(np.array(devices).reshape(-1, 2), ("data", "model"))

    def loss(params, batch):
        with jax.named_scope("first"):
            h_BF = jnp.tanh(batch @ params["w_in"])
        h_BF = jax.lax.with_sharding_constraint(h_BF, NamedSharding(mesh, middle))
        with jax.named_scope("second"):
            h_BF = checkpoint_name(jnp.tanh(h_BF @ params["w_mid"]), "hidden")
            return (h_BF @ params["w_out"]).sum()

    def place(shape, axes):
        return spec(shape, f32, sharding=NamedSharding(mesh, axes))

    params = {"w_in": place((48, 96), P()), "w_mid": place((96, 80), P()), "w_out": place((80, 24), P())}
    return jax.jit(jax.grad(loss)).trace(params, place((64, 48), P("data", None)))


def sharded_scan(devices):
    """The gradient of a scan over layers whose weights are sharded over the data axis, as the batch is."""
    mesh = Mesh(np.array(devices), ("data",))

    def loss(w_LDD, x_BD):
        body = jax.checkpoint(lambda x_BD, w_DD: (jnp.tanh(x_BD @ w_DD), None), prevent_cse=False)
        return jax.lax.scan(body, x_BD, w_LDD)[0].sum()

    def place(shape, axes):
        return spec(shape, f32, sharding=NamedSharding(mesh, axes))

    return jax.jit(jax.grad(loss)).trace(place((LAYERS, 256, 256), P(None, None, "data")), place((64, 256), P("data")))


def talking(devices):
    """One of each collective by hand over a mesh of data 2 x model 4, inside loops of 3 and of 5."""
    mesh = Mesh(np.array(devices).reshape(2, 4), ("data", "model"))

    def body(x):
        def inner(c, _):
            return jax.lax.psum(c, "model") / 4, None

        def outer(c, _):
            c = jax.lax.scan(inner, c, length=5)[0]
            return jax.lax.ppermute(c, "data", [(0, 1), (1, 0)]), None

        x = jax.lax.scan(outer, x, length=3)[0]
        gathered = jax.lax.all_gather(x, "model", tiled=True)
        parts = jax.lax.all_to_all(gathered, "data", 0, 0, tiled=True)
        return jax.lax.psum_scatter(parts, ("data", "model"), tiled=True)

    run = jax.shard_map(body, mesh=mesh, in_specs=P(("data", "model")), out_specs=P(("data", "model")), check_vma=False)
    return jax.jit(run).trace(spec((256, 32), f32, sharding=NamedSharding(mesh, P(("data", "model")))))
