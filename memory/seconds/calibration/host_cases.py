"""Small programs whose host memory `bytescope calibrate --host` measures, each in a process of its own.

    JAX_PLATFORMS=cpu python -m bytescope.memory.seconds.calibration.host_cases imports

prints a JSON object of bytes and counts. A process of its own is needed because memory that a process once allocated
stays in it: the second compile of a process needs less new memory than the first one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.host.process_memory import host_phase, phase_peaks, resident
from bytescope.memory.jaxprs import bodies
from bytescope.memory.units import MIB

# Layers of the three compiled programs, and the arrays of the saved state.
LAYERS = (2, 16, 48)
ARRAYS, ARRAY_BYTES = 8, 32 * MIB


def imports() -> dict[str, int]:
    """Measures the resident bytes of a process: `jax` after jax and its CPU device, `trainer` after the libraries of
    the trainer too. Libraries that are not installed are left out."""
    from bytescope.memory.devices.platform import choose_platform

    choose_platform()
    import jax

    jax.devices()
    sizes = {"jax": _resident()}
    try:
        import flax.nnx
        import optax
        import orbax.checkpoint
    except ImportError:
        return sizes
    del flax, optax, orbax
    sizes["trainer"] = _resident()
    return sizes


def plugin(target: str) -> dict[str, int]:
    """Measures the resident `bytes` that the described devices of a target, such as "h100", add to a process that has
    jax and its CPU device: jax's plugin for these devices with its libraries."""
    from bytescope.memory.devices import targets
    from bytescope.memory.devices.platform import choose_platform

    choose_platform()
    import jax

    jax.devices()
    before = _resident()
    targets.parse(target).devices()
    return {"bytes": max(_resident() - before, 0)}


def compiler(layers: int, target: str) -> dict[str, int]:
    """Compiles the gradient of a program with unrolled layers. Returns the number of its `equations`, and the `bytes`
    by which the resident memory of the process grows at most while XLA compiles it.

    layers: number of layers. target: a name of `devices.targets`, such as "cpu" or "h100".
    """
    from bytescope.memory.devices import targets
    from bytescope.memory.devices.compiler import compile_lowered
    from bytescope.memory.devices.platform import choose_platform

    choose_platform()
    import jax
    import jax.numpy as jnp

    place = jax.sharding.SingleDeviceSharding(targets.parse(target).devices()[0])

    def loss(weights: Any, x_BD: Any) -> Any:
        for up_DF, down_FD in weights:
            scaled_BD = x_BD * jax.lax.rsqrt(jnp.mean(x_BD * x_BD, -1, keepdims=True) + 1e-6)
            x_BD = x_BD + jax.nn.silu(scaled_BD @ up_DF) @ down_FD
        return jnp.mean(x_BD * x_BD)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)

    weights = [(array(256, 512), array(512, 256)) for _ in range(layers)]
    traced = jax.jit(jax.grad(loss)).trace(weights, array(128, 256))
    lowered = traced.lower()
    before = _resident()
    with host_phase("compile"):
        compile_lowered(lowered)
    return {"equations": count_equations(traced.jaxpr.jaxpr), "bytes": max(phase_peaks()["compile"] - before, 0)}


def count_equations(jaxpr: Any) -> int:
    """Returns the number of equations of a Jaxpr, with the equations of the jaxprs inside them."""
    return sum(1 + sum(count_equations(body) for body in bodies(equation)) for equation in jaxpr.eqns)


def checkpoint() -> dict[str, int]:
    """Saves arrays with Orbax and restores them. Returns the `bytes` of the arrays, and the bytes by which the resident
    memory of the process grows at most in `save` and in `restore`, which includes the restored arrays."""
    from bytescope.memory.devices.platform import choose_platform

    choose_platform()
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    state = {f"array{at}": jnp.arange(ARRAY_BYTES // 4, dtype=jnp.float32) + at for at in range(ARRAYS)}
    jax.block_until_ready(state)
    described = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    sizes = {"bytes": ARRAYS * ARRAY_BYTES}
    with tempfile.TemporaryDirectory(prefix="bytescope-host-") as folder, ocp.StandardCheckpointer() as checkpointer:
        before = _resident()
        with host_phase("save"):
            checkpointer.save(Path(folder) / "state", state)
            checkpointer.wait_until_finished()
        sizes["save"] = max(phase_peaks()["save"] - before, 0)
        del state
        before = _resident()
        with host_phase("restore"):
            jax.block_until_ready(checkpointer.restore(Path(folder) / "state", described))
        sizes["restore"] = max(phase_peaks()["restore"] - before, 0)
    return sizes


def _resident() -> int:
    return resident()[0] or 0


CASES: Mapping[str, Callable[..., dict[str, int]]] = {
    "imports": imports,
    "plugin": plugin,
    "compiler": lambda layers, target: compiler(int(layers), target),
    "checkpoint": checkpoint,
}


if __name__ == "__main__":
    print(json.dumps(CASES[sys.argv[1]](*sys.argv[2:])))
