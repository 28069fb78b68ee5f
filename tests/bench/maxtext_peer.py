"""MaxText's own training step on a CPU: a child of cpu_peers.py that answers one JSON line a turn.

    python tests/bench/maxtext_peer.py --d-model=384 ... remat_policy=minimal scan_layers=False

State, step and compile come from the functions that MaxText's `train_loop` calls (checked with 0.2.5). Keys of MaxText
follow the flags. The batch is ours: MaxText's synthetic batch with other tokens.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core.spmd import logical_axis_rules
from interleave import forget_peak, peak_resident, random_tokens, serve, timed, versions
from step_profile import seconds_by_kind

# This folder has a maxtext.py of its own.
sys.path = [folder for folder in sys.path if Path(folder).resolve() != Path(__file__).resolve().parent]

WARM_UP = 2  # updates before the first that is timed, as on our side
# Parameter of a layer of ours -> the same one of MaxText.
LAYERS = {
    "attention/w_q": ("self_attention", "query"),
    "attention/w_k": ("self_attention", "key"),
    "attention/w_v": ("self_attention", "value"),
    "attention/w_o": ("self_attention", "out"),
    "mlp/w_gate": ("mlp", "wi_0"),
    "mlp/w_up": ("mlp", "wi_1"),
    "mlp/w_down": ("mlp", "wo"),
}


def keys_of(asked: argparse.Namespace, folder: str) -> dict[str, Any]:
    """MaxText's keys for the model and the batch of cpu_peers.py."""
    return {
        **{"run_name": "bench", "hardware": "cpu", "base_output_directory": folder, "enable_checkpointing": False},
        **{"dataset_type": "synthetic", "log_config": False, "skip_jax_distributed_system": True},
        **{"decoder_block": "llama2", "base_emb_dim": asked.d_model, "base_num_decoder_layers": asked.n_layers},
        **{"base_num_query_heads": asked.n_heads, "base_num_kv_heads": asked.n_heads, "head_dim": 64},
        **{"base_mlp_dim": asked.d_ff, "mlp_activations": "['silu','linear']", "vocab_size": asked.vocab_size},
        **{"logits_via_embedding": True, "normalize_embedding_logits": False, "attention": "dot_product"},
        **{"normalization_layer_epsilon": 1e-5, "rope_max_timescale": 10_000, "enable_dropout": False},
        **{"dtype": "float32", "weight_dtype": "float32", "max_target_length": asked.seq_len},
        **{"per_device_batch_size": asked.rows, "learning_rate": asked.learning_rate, "warmup_steps_fraction": 0.0},
        **{"learning_rate_schedule_steps": 10_000_000, "steps": 1000, "adam_b2": 0.95, "adam_weight_decay": 0.0},
        **dict(word.split("=", 1) for word in asked.keys),
    }


class Trainer:
    """MaxText's state, step and batches; `update` is one optimizer update."""

    def __init__(self, asked: argparse.Namespace, folder: str):
        from maxtext.configs import pyconfig
        from maxtext.trainers.pre_train import train
        from maxtext.utils import sharding, train_utils

        base = str(Path(pyconfig.__file__).parent / "base.yml")
        words = [f"{key}={value}" for key, value in keys_of(asked, folder).items()]
        self.config = config = pyconfig.initialize(["", base, *words])
        _, _, shardings, _, self.mesh, _, _, loader, rampup, _, state = train_utils.setup_train_loop(config, None)
        if asked.load:
            load_ours(state.model, dict(np.load(asked.load)))
        graph, self.state = nnx.split(state)
        params, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
        jitted = train_utils.jit_train_and_eval_step(
            config, graph, self.mesh, self.state, shardings, train.train_step, train.eval_step, None, params
        )
        self.step = jitted[0]
        self.batch = dict(loader.load_next_batch(rampup_manager=rampup))
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(state.model, nnx.Param)))
        self.tokens = random_tokens(asked.rows, asked.seq_len, asked.vocab_size)
        self.loss: Any = None

    def update(self) -> Any:
        """One optimizer update, dispatched; its loss, perhaps still being computed."""
        tokens = next(self.tokens)
        place = self.batch["inputs"].sharding
        batch = self.batch | jax.device_put({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}, place)
        with jax.set_mesh(self.mesh), logical_axis_rules(self.config.logical_axis_rules):
            self.state, metrics = self.step(self.state, batch)
        self.loss = metrics["scalar"]["learning/loss"]
        return self.loss


def load_ours(model: Any, ours: dict[str, np.ndarray]) -> None:
    """Sets MaxText's parameters to those that `ours.py --save` wrote of a scanned model. Ours have the layers first,
    MaxText's scanned ones second (param_scan_axis=1). The scales of the norms are 1 on both sides."""
    decoder = model.decoder
    model.token_embedder.embedding.value = jax.numpy.asarray(ours["w_token"])
    for name, (module, part) in LAYERS.items():
        value = ours[f"blocks/{name}"]
        if part == "query":  # MaxText divides its initial query weights instead of its queries
            value = value / np.sqrt(value.shape[-1])
        if hasattr(decoder, "layers") and hasattr(decoder.layers, module):
            getattr(getattr(decoder.layers, module), part).kernel.value = jax.numpy.asarray(np.moveaxis(value, 0, 1))
            continue
        for number, layer in enumerate(value):
            block = getattr(decoder, f"layers_{number}")
            getattr(getattr(block, module), part).kernel.value = jax.numpy.asarray(layer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("d-model", "n-layers", "n-heads", "d-ff", "vocab-size", "seq-len", "rows"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--load", metavar="FILE", help="start from the parameters that ours.py --save wrote")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="keys of MaxText")
    asked = parser.parse_args()
    out = os.dup(1)
    os.dup2(2, 1)  # MaxText prints to standard output, where the answers go
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(asked, folder)
    warm = []
    for _ in range(WARM_UP):
        began = time.perf_counter()
        jax.block_until_ready(trainer.update())
        warm.append(time.perf_counter() - began)
    sys.stdout.flush()
    os.dup2(out, 1)
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
