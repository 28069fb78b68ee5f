"""Small programs whose host memory `bytescope calibrate --host` measures, each in a process of its own.

    JAX_PLATFORMS=cpu python -m bytescope.memory.seconds.calibration.host_cases imports

prints a JSON object: name of a measured size -> bytes of host memory. A process of its own is needed because a process
keeps memory that it once allocated, so the second compile in a process needs less new memory than the first one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from bytescope.memory.host.process_memory import host_phase, phase_peaks, resident

# Layers of the three compiled programs, and of the three that are only traced. A traced layer takes 69 kB, so only a
# program of many layers takes clearly more than the free memory that a process has left from its start.
LAYERS = (4, 16, 48)
TRACED_LAYERS = (16, 96, 256)


def imports() -> dict[str, int]:
    """Imports libraries in this process. Returns the resident bytes of the process: "jax" after jax has started its CPU
    device, and "trainer" after flax, optax and Orbax are imported too. If one of these three libraries is not
    installed, "trainer" is missing."""
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
    """Returns "bytes": the growth of this process's resident memory when jax, which has already started its CPU device,
    loads the plugin for the devices of a target, such as "h100". The devices need not be present."""
    from bytescope.memory.devices import targets
    from bytescope.memory.devices.platform import choose_platform

    choose_platform()
    import jax

    jax.devices()
    before = _resident()
    targets.parse(target).devices()
    return {"bytes": max(_resident() - before, 0)}


def tracing(layers: int) -> dict[str, int]:
    """Traces and lowers the gradient of a program with unrolled layers. Returns "traced": the growth of this process's
    resident memory, in bytes.

    layers: number of layers.
    """
    lower = _program(layers, "cpu")
    start = _resident()
    lowered = lower()
    traced = _resident() - start
    del lowered
    return {"traced": traced}


def compiler(layers: int, target: str) -> dict[str, int]:
    """Compiles the gradient of a program with unrolled layers. Returns "peak": the maximum of this process's resident
    memory while XLA compiles, minus the resident memory just before XLA compiles, in bytes. For GPUs, XLA emits the
    machine code of all kernels, as on a machine with the GPU; the constants in `HostRates` are for such a compile.

    layers: number of layers. target: the devices to compile for, such as "cpu" or "h100"; they need not be present.
    """
    from bytescope.memory.devices import machine_code
    from bytescope.memory.devices.compiler import compile_lowered

    lowered = _program(layers, target)()
    # A report leaves machine code out, unless the user has chosen a CUDA folder. XLA itself has read the flags before.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{machine_code.CUDA_FOLDER}=default".strip()
    before = _resident()
    with host_phase("compile"):
        compile_lowered(lowered)
    return {"peak": phase_peaks()["compile"] - before}


def _program(layers: int, target: str) -> Callable[[], Any]:
    """Returns a function that traces and lowers the gradient of `layers` layers for `target`."""
    from bytescope.memory.devices import targets
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
    return lambda: jax.jit(jax.grad(loss)).trace(weights, array(128, 256)).lower()


def _resident() -> int:
    return resident()[0] or 0


CASES: Mapping[str, Callable[..., dict[str, int]]] = {
    "imports": imports,
    "plugin": plugin,
    "tracing": lambda layers: tracing(int(layers)),
    "compiler": lambda layers, target: compiler(int(layers), target),
}


if __name__ == "__main__":
    print(json.dumps(CASES[sys.argv[1]](*sys.argv[2:])))
