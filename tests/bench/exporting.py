"""Host memory of `bytescope export`, beyond that of the process that begins it.

    python tests/bench/exporting.py --assert
    python tests/bench/exporting.py --devices=8 --dtype=bfloat16

Writes a run directory of Llama's shape with random parameters, saved by so many simulated devices, and exports it in a
process of its own: anonymous memory (tests/bench/loading.py) at its most, less that before. Pages of files are the
kernel's to drop. --assert: at most the largest parameter of the checkpoint, which is a stack of layers, and 1.2x of the
largest tensor written.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from loading import MOST, anonymous


def write(workdir: Path, layers: int, devices: int) -> int:
    """Writes the run; returns the bytes of its largest parameter."""
    import jax
    import jax.numpy as jnp

    from bytescope.train.checkpoints.checkpoint import Checkpoints, Position
    from bytescope.train.checkpoints.workdir import Identity
    from bytescope.train.program.config_files import load, override
    from bytescope.train.program.program import build

    config = load("tiny")
    keys = {
        "model.d_model": 2048,
        "model.d_ff": 8192,
        "model.n_heads": 16,
        "model.n_kv_heads": 8,
        "model.d_head": 128,
        "model.n_layers": layers,
        "model.vocab_size": 16384,
        "precision.preset": "fp32",
        "mesh.fsdp": devices,
        "mesh.strategy": "zero3",
        "batch.micro": 1,
        "batch.accumulation": 1,
    }
    for key, value in keys.items():
        override(config, key, str(value))
    program = build(config, jax.devices()[:devices])
    shapes, tree = jax.tree.flatten(program.state.params)
    params = [
        jax.jit(
            lambda number, leaf=leaf: jax.random.normal(jax.random.key(number), leaf.shape, leaf.dtype),
            out_shardings=leaf.sharding,
        )(number)
        for number, leaf in enumerate(shapes)
    ]
    # Moments would be as large again, twice; nothing reads them.
    state = dataclasses.replace(
        program.state,
        params=jax.tree.unflatten(tree, params),
        step=jnp.int32(1),
        opt_state=(),
        tally=None,
        loss_scale=None,
    )
    checkpointer = Checkpoints(workdir, keep=1)
    checkpointer.save(state, Position(1, 1))
    checkpointer.close()
    identity = Identity.from_config(config, program.batch.global_rows, "data")
    (workdir / "config.json").write_text(json.dumps(dataclasses.asdict(identity)))
    return max(leaf.nbytes for leaf in params)


def measure(workdir: str, out: str, dtype: str) -> dict[str, float]:
    """Exports the run, in this process: bytes and seconds."""
    import jax

    import bytescope.train.export.tensors  # noqa: F401
    from bytescope.memory import cli

    jax.block_until_ready(jax.numpy.zeros(1))
    before, most, ended = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            most[0] = max(most[0], anonymous())

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.perf_counter()
    code = cli.main(["export", workdir, out, f"--dtype={dtype}"])
    seconds = time.perf_counter() - began
    ended.set()
    watching.join()
    if code:
        raise SystemExit(code)
    return {"beyond": most[0] - before, "seconds": seconds}


def largest_tensor(out: Path) -> tuple[int, int]:
    """Bytes of the tensors of a folder, and those of its largest."""
    from bytescope.train.weights.folder import Folder

    sizes = [tensor.nbytes for tensor in Folder.open(out).tensors.values()]
    return sum(sizes), max(sizes)


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--layers", type=int, default=6, help="default %(default)s: 1.7 GiB in float32")
    flags.add_argument("--devices", type=int, default=1, help="that saved the checkpoint (default %(default)s)")
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default %(default)s")
    flags.add_argument("--folder", help="where it is written, new (default: the system's, then removed)")
    flags.add_argument("--assert", dest="check", action="store_true", help="exit 1 above the bound")
    flags.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    asked = flags.parse_args()
    if asked.part:
        workdir, *out = asked.part
        print(
            json.dumps(
                measure(workdir, *out, asked.dtype)
                if out
                else {"largest": write(Path(workdir), asked.layers, asked.devices)}
            )
        )
        return 0
    with tempfile.TemporaryDirectory(prefix="bytescope-exporting-", dir=asked.folder) as folder:
        run, out = os.path.join(folder, "run"), os.path.join(folder, "out")
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={asked.devices}",
        }
        found = {}
        for part in ([run], [run, out]):
            done = subprocess.run(
                [sys.executable, *sys.argv, "--part", *part], env=env, check=True, stdout=subprocess.PIPE, text=True
            )
            found |= json.loads(done.stdout.splitlines()[-1])
        total, tensor = largest_tensor(Path(out))
    print(
        f"{total / 2**30:.2f} GiB written ({asked.dtype}), saved by {asked.devices} devices; largest parameter "
        f"{found['largest'] / 2**20:.0f} MiB, largest tensor {tensor / 2**20:.0f} MiB; export held "
        f"{found['beyond'] / 2**20:.0f} MiB beyond, {found['seconds']:.1f} s"
    )
    return int(asked.check and found["beyond"] > found["largest"] + MOST * tensor)


if __name__ == "__main__":
    sys.exit(main())
