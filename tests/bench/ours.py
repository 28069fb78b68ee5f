"""Our side of a benchmark: the program the trainer runs, compiled cold, with state and random tokens.

    python tests/bench/ours.py --config=char     # a child of throughput.py: one JSON line a turn

Imported by the benchmarks that compare our programs with each other.
"""

import argparse
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from interleave import (
    Turn,
    forget_peak,
    parse_config,
    peak_resident,
    random_tokens,
    serve,
    timed,
    versions,
)
from ml_collections import ConfigDict
from step_profile import seconds_by_kind

from bytescope.memory.devices.platform import MEMORY_FRACTION, choose_platform
from bytescope.memory.host.process_memory import release_free_memory
from bytescope.train.program.config_files import override
from bytescope.train.program.program import Program, build
from bytescope.train.run.feed import calls
from bytescope.train.run.metrics import model_flops_per_token
from bytescope.train.run.startup import peak_flops

WARM_UP = 2  # updates before the first that is timed


def start() -> None:
    """Settles the platform, with the pool of a GPU as the trainer's, and makes every compile a cold one."""
    choose_platform(fraction=MEMORY_FRACTION)
    jax.config.update("jax_enable_compilation_cache", False)


def variant(config: ConfigDict, values: Mapping[str, Any]) -> ConfigDict:
    """A copy of `config` with `values` (dotted key -> value)."""
    made = config.copy_and_resolve_references()
    for key, value in values.items():
        override(made, key, str(value))
    return made


def compiled_bytes(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Arguments, temporaries and outputs that alias no argument, bytes of one device."""
    stats = compiled.memory_analysis()
    return {
        "arguments": stats.argument_size_in_bytes,
        "temp": stats.temp_size_in_bytes,
        "outputs": stats.output_size_in_bytes - stats.alias_size_in_bytes,
    }


class Trainer:
    """The step of `config` compiled, its state, and what a turn of `take_turns` needs.

    Does what the trainer does, in its order: compile, give back what compiling freed, initialize.
    """

    def __init__(self, config: ConfigDict):
        self.program: Program = build(config)
        began = time.perf_counter()
        self.compiled = self.program.compile()
        self.compile_seconds = time.perf_counter() - began
        release_free_memory()
        self.state = jax.block_until_ready(self.program.init())
        release_free_memory()
        batch = self.program.batch
        self._tokens = random_tokens(batch.global_rows, batch.seq_len, config.model.vocab_size)
        self.loss: Any = None

    def update(self) -> Any:
        """One optimizer update, dispatched; its loss, perhaps still being computed."""
        tokens = next(self._tokens)
        host = {"inputs": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}
        for batch in calls(self.program, host):
            self.state, metrics = self.compiled(self.state, batch)
        self.loss = metrics["loss"]
        return self.loss

    def warm_up(self) -> "Trainer":
        for _ in range(WARM_UP):
            jax.block_until_ready(self.update())
        return self

    @property
    def turn(self) -> Turn:
        # On a CPU a step computes with the host's own cores: running ahead would gain nothing.
        each = jax.default_backend() == "cpu"
        return lambda steps: timed(self.update, jax.block_until_ready, steps, each=each)

    def peak_bytes(self) -> int:
        """Most bytes: of the device's allocator, or of this process where the device is its CPU."""
        stats = self.program.mesh.local_devices[0].memory_stats()
        return stats["peak_bytes_in_use"] if stats else peak_resident()


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--config", default="char", help="and --config.KEY=VALUE (default %(default)s)")
    flags.add_argument("--save", metavar="FILE", help="write the first parameters there (.npz)")
    asked, config, _ = parse_config(flags)
    start()
    trainer = Trainer(config)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(trainer.program.state.params))
    if asked.save:
        flat = jax.tree_util.tree_leaves_with_path(trainer.state.params)
        np.savez(
            asked.save,
            **{"/".join(str(key.key) for key in path): np.asarray(leaf).astype(np.float32) for path, leaf in flat},
        )
    trainer.warm_up()
    began = trainer.peak_bytes()
    forget_peak()
    batch, model = trainer.program.batch, trainer.program.model
    device = trainer.program.mesh.local_devices[0]

    def turn(steps: int) -> dict[str, Any]:
        began_cpu = time.process_time()
        seconds = trainer.turn(steps)
        return {
            "seconds": seconds,
            "cpu_s": (time.process_time() - began_cpu) / steps,
            "peak_bytes": max(began, trainer.peak_bytes()),
            "step_peak_bytes": trainer.peak_bytes(),
            "loss": float(trainer.loss),
        }

    serve(
        {
            "parameters": parameters,
            "compile_s": trainer.compile_seconds,
            "tokens": batch.tokens,
            "flops": model_flops_per_token(model, batch.seq_len) * batch.tokens,
            "peak_flops": peak_flops(trainer.program),
            "device": device.device_kind,
            "kernel": trainer.program.kernel[0],
            "bytes": compiled_bytes(trainer.compiled),
            "versions": versions(),
        },
        turn,
        lambda: seconds_by_kind(trainer.update),
    )


if __name__ == "__main__":
    main()
