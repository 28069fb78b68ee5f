"""Llama 3.1 70B (Grattafiori et al. 2024, arXiv 2407.21783) at 8192 tokens, fully sharded and recomputed.

    bytescope train llama_70b --config.data.source=SHARDS
    bytescope report llama_70b h100:8x8

Hardware: 64 H100 on 8 hosts (described device; not yet measured on hardware).
Memory: peak 30.19 GiB, allocated 30.19 GiB, predicted in use 30.22 GiB per device, of 72.78 GiB available;
  jax 0.10.2, jaxlib 0.10.2, cuDNN 9.28, 2026-11-27.
Loss: not trained yet.
"""

from bytescope.configs import llama_8b


def get_config():
    config = llama_8b.get_config()
    config.model.update(d_model=8192, n_layers=80, n_heads=64, d_ff=28672)
    config.optimizer.learning_rate = 1.5e-4
    return config
