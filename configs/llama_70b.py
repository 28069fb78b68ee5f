"""Llama 3.1 70B (Grattafiori et al. 2024, arXiv 2407.21783), fully sharded and recomputed.

    bytescope train --config=configs/llama_70b.py --config.data.source=SHARDS

Hardware: 64 H100 on 8 hosts (described).
Memory: 31.63 GiB a device, allocated, of 72.32 GiB
  (`bytescope report --config=llama_70b --target=h100:8x8`, jax 0.10.2, nothing measured on a card yet).
Loss: no run recorded yet.
"""

from bytescope.configs import llama_8b


def get_config():
    config = llama_8b.get_config()
    config.model.update(d_model=8192, n_layers=80, n_heads=64, d_ff=28672)
    config.optimizer.learning_rate = 1.5e-4
    return config
