"""The pool of jax's allocator on the GPU of this machine, and what the GPU holds outside of it, as JSON in one line.

    python tests/gpu/card.py                                          # jax's defaults
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 python tests/gpu/card.py

Runs one small product, so that cuBLAS is loaded. Sizes are bytes: of the allocator (`stats`), of the whole GPU by NVML
before jax starts and after (`used_before`, `used`, `total`), and of this process (`of_process`).
"""

import json
import os

import pynvml


def of_gpu() -> dict[str, int]:
    """Used and total bytes of the first GPU, and those of this process where the driver tells."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    own = [
        each.usedGpuMemory for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if each.pid == os.getpid()
    ]
    return {"used": memory.used, "total": memory.total, "of_process": own[0] if own else 0}


def main() -> None:
    pynvml.nvmlInit()
    before = of_gpu()["used"]
    import jax
    import jax.numpy as jnp

    device = jax.local_devices()[0]
    started = of_gpu()["used"]
    jax.block_until_ready(jax.jit(lambda x: x @ x)(jnp.ones((512, 512), jnp.bfloat16)))
    settings = {name: value for name, value in os.environ.items() if name.startswith("XLA_")}
    print(
        json.dumps(
            {
                "kind": device.device_kind,
                "jax": jax.__version__,
                "driver": pynvml.nvmlSystemGetDriverVersion(),
                "settings": settings,
                "stats": device.memory_stats(),
                "used_before": before,
                "used_started": started,
                **of_gpu(),
            }
        )
    )


if __name__ == "__main__":
    main()
