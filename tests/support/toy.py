"""A small training program on fixed tokens, for tests: built from the shipped tiny config."""

import functools
import math
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bytescope.model import ModelConfig
from bytescope.model.fp8 import TILE
from bytescope.model.runs import BLOCKS, DENSE, layers_of
from bytescope.train.data.batch_algebra import IGNORE
from bytescope.train.pipeline.stages import reorder
from bytescope.train.program.config_files import as_text, flatten, load, override
from bytescope.train.program.program import Program, build, state_around
from bytescope.train.run.feed import calls
from bytescope.train.step.state import TrainState

SMALL = {
    "model.d_model": 32,
    "model.n_layers": 3,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.d_head": 8,
    "model.d_ff": 48,
    "model.vocab_size": 64,
    "model.vocab_multiple": 1,
    "model.max_seq_len": 64,
    "data.seq_len": 32,
    "batch.micro": 8,
    "precision.preset": "fp32",
    "loss.chunk": 64,
    "optimizer.warmup_steps": 2,
    "optimizer.learning_rate": 1e-2,
    "train.steps": 20,
}


def small_config(overrides: Mapping[str, Any] = {}, base: str = "tiny"):
    """`base` shrunk to SMALL, with `overrides` (dotted key -> value)."""
    config = load(base)
    for key, value in {**SMALL, **overrides}.items():
        override(config, key, str(value))
    return config


def small_program(overrides: Mapping[str, Any] = {}, devices: int = 1) -> Program:
    """The program of `small_config` on the first `devices` CPU devices."""
    return build(small_config(overrides), jax.devices()[:devices])


def fixed_batches(rows: int, length: int, vocab: int, steps: int, masked: float = 0.3):
    """The same host batches for every layout; masked tokens fall unevenly on rows."""
    rng = np.random.default_rng(7)
    for _ in range(steps):
        tokens = (np.cumsum(rng.integers(0, 3, (rows, length + 1)), axis=1) % vocab).astype(np.int32)
        share = np.linspace(0, 2 * masked, rows)[:, None]
        hidden = rng.random((rows, length)) < share
        yield {"inputs": tokens[:, :-1], "targets": np.where(hidden, IGNORE, tokens[:, 1:]).astype(np.int32)}


def compiled_once(monkeypatch) -> None:
    """Lets the runs of a test share the executable of the first: of programs that differ in nothing that it shows."""
    from bytescope.train.run import startup  # with all that reports are made of

    real, made = startup.compile_step, []
    monkeypatch.setattr(startup, "compile_step", lambda *args: made[0] if made else made.append(real(*args)) or made[0])


def first_state(program: Program) -> TrainState:
    """A state like that of `program.init()`, which takes longer to compile than the step: only the random numbers of
    its matrices are others.

    They are the same on every mesh, for looped and unrolled layers, in every precision, and with a padded vocabulary.
    """
    if program.config.lora.base != "bf16":
        return _first_quantized_state(program)
    draw = functools.partial(_first_value, program.model)
    params = jax.tree_util.tree_map_with_path(draw, program.state.params)
    frozen = jax.tree_util.tree_map_with_path(draw, program.state.frozen)
    parts = program.parts
    values = state_around(params, parts.optimizer, parts.scaling, frozen, routed=parts.routed)
    return _placed(jax.device_get(values), program)


def _placed(values: TrainState, program: Program) -> TrainState:
    """Values whose layers are in their own order on the devices of a program."""
    assert jax.tree.structure(values) == jax.tree.structure(program.state)
    values = reorder(values, {}, program.order)
    return jax.tree.map(lambda value, leaf: jax.device_put(value, leaf.sharding), values, program.state)


def _first_value(model: ModelConfig, path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    """The value of a parameter of all its layers, in their own order."""
    stack, *names = [str(getattr(key, "key", getattr(key, "idx", None))) for key in path]
    if stack not in (BLOCKS, DENSE):
        return _first_array(model, stack, [*names, stack][0], leaf.shape, leaf.dtype)
    if not model.scan:
        return _first_array(model, ".".join(names), names[-1], leaf.shape, leaf.dtype)
    layers = (f"{layer}.{'.'.join(names)}" for layer in layers_of(model, stack))
    return np.stack([_first_array(model, name, names[-1], leaf.shape[1:], leaf.dtype) for name in layers])


def _first_array(model: ModelConfig, name: str, last: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The value of one parameter: of matrices numbers that depend on `name`, zeros in the padding of the vocabulary."""
    if last == "scale":
        return np.full(shape, 0 if model.norm == "rmsnorm_offset" else 1, dtype)
    value = np.zeros(shape, dtype)
    if last.startswith("w_"):
        used = {"w_token": (model.vocab_size, *shape[1:]), "w_head": (*shape[:1], model.vocab_size)}.get(last, shape)
        drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(used)
        std = model.init_std / math.sqrt(2 * model.n_layers) if last in ("w_o", "w_down") else model.init_std
        value[tuple(map(slice, used))] = std * drawn
    return value


# What decides the values of a first state: of these groups all keys, of the others none.
_DECIDING = ("seed", "model.", "lora.", "optimizer.", "precision.", "batch.accumulation", "batch.mode", "train.steps")


def _first_quantized_state(program: Program) -> TrainState:
    """`program.init()`, whose values are the same on every mesh (test_quantized_base.py), compiled once for all
    programs that differ in their layout, remat or loss alone."""
    keys = {
        key: value
        for key, value in flatten(program.config).items()
        if key.startswith(_DECIDING) and key not in ("model.attention", "model.attention_chunk", "model.mlp_chunk")
    }
    return _placed(_first_values(tuple(sorted((key, as_text(value)) for key, value in keys.items()))), program)


@functools.lru_cache(maxsize=64)
def _first_values(keys: tuple[tuple[str, str], ...]) -> TrainState:
    """The values of a first state of a config with these keys, on the host."""
    return jax.device_get(build(small_config(dict(keys)), jax.devices()[:1]).init())


def made_state(program: Program) -> TrainState:
    """A first state without a compile: small numbers for matrices, ones for norms, zeros for all else."""
    rng = np.random.default_rng(3)

    def one(path, leaf):
        value = np.zeros(leaf.shape, leaf.dtype)
        if path[0].name in ("params", "frozen"):
            value += 0.1 * rng.standard_normal(leaf.shape) if path[-1].key.startswith("w_") else path[-1].key == "scale"
        return jax.device_put(value, leaf.sharding)

    return jax.tree_util.tree_map_with_path(one, program.state)


def unfused_step(program: Program) -> Callable:
    """The program's step, compiled with XLA's fusion pass off: where XLA fuses operations it rounds otherwise, and
    which it fuses depends on jaxlib and the processor. XLA of 0.10 is wrong there without its emitters, which
    conftest.py leaves out: losses differ in the second digit."""
    emitters = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
    return program.lower().compile(compiler_options={"xla_disable_hlo_passes": "fusion", **emitters})


def run_losses(
    program: Program,
    steps: int = 20,
    masked: float = 0.3,
    state: TrainState | None = None,
    step: Callable | None = None,
) -> np.ndarray:
    """Loss of each of `steps` updates on `fixed_batches` from `state`, or a fresh one; float64 [steps].

    `step`: the program's step, compiled otherwise than it compiles it.
    """
    state, step, losses = state or first_state(program), step or program.step, []
    batches = fixed_batches(program.batch.global_rows, program.batch.seq_len, program.model.vocab_size, steps, masked)
    for host in batches:
        for batch in calls(program, host):
            state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert int(state.step) == steps
    return np.asarray(losses)


FP8_INPUTS = ("attn_norm", "context", "mlp_norm", "act")  # of products in fp8, as wide tensors are named


def fp8_expected(overrides, tokens):
    """Bytes that fp8 keeps of the inputs of products in one layer, by hand: (elements, scales of 4 bytes) by name."""
    model = small_program(overrides).model
    widths = dict(zip(FP8_INPUTS, (model.d_model, model.n_heads * model.d_head, model.d_model, model.d_ff)))
    return {name: (tokens * width, 4 * tokens * -(-width // TILE)) for name, width in widths.items()}


ITEMSIZE = {"f32": 4, "bf16": 2, "bool": 1, "i32": 4, "u32": 4}  # bytes, by JAX's short names


def block_residuals(capsys, **overrides):
    """[(name or "", shape, bytes an element)] of what the first block keeps of 2 x 16 tokens besides its parameters and
    keys; "x" is its input."""
    program = small_program(overrides)
    transformer = program.transformer(nnx.Rngs(params=0))
    graph, state = nnx.split(transformer.blocks)
    block = transformer._block(transformer.runs[0], graph)
    layer = jax.tree.map(lambda leaf: leaf[0], state)
    x = jnp.ones((2, 16, program.model.d_model), program.precision.compute)
    keys = jax.random.split(jax.random.key(0), 2) if program.model.dropout else None
    jax.ad_checkpoint.print_saved_residuals(lambda x, layer: block(x, layer, 0, keys, None), x, layer)
    found = []
    for line in capsys.readouterr().out.splitlines():
        kind, shape = re.match(r"([\w<>]+)\[([\d,]*)\]", line).groups()
        if "argument layer" in line or "key<" in line:
            continue
        name = re.search(r"named '(\w+)'", line)
        shape = tuple(int(size) for size in shape.split(",") if size)
        found.append((name[1] if name else "x" if "argument x" in line else "", shape, ITEMSIZE[kind]))
    return found
