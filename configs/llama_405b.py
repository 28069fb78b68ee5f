"""Llama 3.1 405B (Grattafiori et al. 2024, arXiv 2407.21783), fully sharded and recomputed.

    bytescope train --config=configs/llama_405b.py --config.data.source=SHARDS

Hardware: 512 H100 on 64 hosts (described).
Memory: 54.72 GiB a device, allocated, of 72.32 GiB
  (`bytescope report --config=llama_405b --target=h100:64x8`, jax 0.10.2, nothing measured on a card yet).
Loss: no run recorded yet.
"""

from bytescope.configs import llama_8b


def get_config():
    config = llama_8b.get_config()
    config.model.update(d_model=16384, n_layers=126, n_heads=128, d_ff=53248)
    config.optimizer.update(learning_rate=8e-5, warmup_steps=8000)
    return config
