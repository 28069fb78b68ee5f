"""nanodo's own training step on a CPU: a child of cpu_peers.py that answers one JSON line a turn.

    python tests/bench/nanodo_peer.py --source=FOLDER --d-model=384 ...

FOLDER holds a checkout of github.com/google-deepmind/nanodo, which is imported as it is. Its model has LayerNorm, GELU
and learned positions; its MLP is 1.5 times as wide as ours, so that two matrices have the parameters of our three.
"""

import argparse
import sys
import time
from typing import Any

import jax
import ml_collections
from interleave import forget_peak, peak_resident, random_tokens, serve, timed, versions
from jax.experimental import mesh_utils
from jax.sharding import Mesh
from step_profile import seconds_by_kind

WARM_UP = 2  # updates before the first that is timed, as on our side


class Trainer:
    """nanodo's state, step and batches; `update` is one optimizer update."""

    def __init__(self, asked: argparse.Namespace):
        from nanodo import model_factory, train
        from nanodo.configs import default

        config = default.get_config()
        config.model.update(D=asked.d_model, H=asked.n_heads, N=asked.n_layers, L=asked.seq_len)
        config.model.update(F=asked.d_ff * 3 // 2, dtype="float32")
        rate = asked.learning_rate
        config.opt.update(peak_learning_rate=rate, init_learning_rate=rate, final_learning_rate=rate)
        config.opt.update(weight_decay=0.0, clip_by_global_norm=1.0)
        # Without the statistics of every layer, which the other sides do not compute.
        config.update(batch_size=asked.rows, log_internal_metrics=False)
        mesh = Mesh(mesh_utils.create_device_mesh((jax.device_count(),)), ("data",))
        model, loss = model_factory.get_model_and_loss(ml_collections.FrozenConfigDict(config), asked.vocab_size)
        shardings, state = train._init_train_state(config, model, rng=jax.random.PRNGKey(0), mesh=mesh)
        self.trainer = train.Trainer(c=config, state=state, mesh=mesh, shardings=shardings, get_loss_fn=loss)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        # nanodo shifts the tokens inside its step: a row has as many tokens as the model has positions.
        self.tokens = random_tokens(asked.rows, asked.seq_len - 1, asked.vocab_size)
        self.number, self.loss = 0, None

    def update(self) -> Any:
        """One optimizer update, dispatched; its loss, perhaps still being computed."""
        metrics = self.trainer.do_step(self.number, next(self.tokens))
        self.number, self.loss = self.number + 1, metrics["train_loss"]
        return self.loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("d-model", "n-layers", "n-heads", "d-ff", "vocab-size", "seq-len", "rows"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--source", required=True, help="folder of the checkout")
    asked = parser.parse_args()
    sys.path.insert(0, asked.source)
    trainer = Trainer(asked)
    warm = []
    for _ in range(WARM_UP):
        began = time.perf_counter()
        jax.block_until_ready(trainer.update())
        warm.append(time.perf_counter() - began)
    began_bytes = peak_resident()
    forget_peak()

    def turn(steps: int) -> dict[str, Any]:
        began_cpu = time.process_time()
        seconds = timed(trainer.update, jax.block_until_ready, steps, each=True)
        cpu = (time.process_time() - began_cpu) / steps
        peak = peak_resident()
        found = {"seconds": seconds, "cpu_s": cpu, "peak_bytes": max(began_bytes, peak), "step_peak_bytes": peak}
        return found | {"loss": float(trainer.loss)}

    ready = {"parameters": trainer.parameters, "compile_s": warm[0] - warm[-1], "device": "cpu"}
    serve(ready | {"versions": versions()}, turn, lambda: seconds_by_kind(trainer.update))


if __name__ == "__main__":
    main()
