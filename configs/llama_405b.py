"""Llama 3.1 405B (Grattafiori et al. 2024, arXiv 2407.21783) at 8192 tokens, fully sharded and recomputed.

    bytescope train llama_405b --config.data.source=SHARDS
    bytescope report llama_405b h100:64x8

Hardware: 512 H100 on 64 hosts (described device; not yet measured on hardware).
Memory: peak 53.63 GiB, allocated 53.63 GiB, predicted in use 53.66 GiB per device, of 72.78 GiB available;
  jax 0.10.2, jaxlib 0.10.2, cuDNN 9.28, 2026-11-27.
Loss: not trained yet.
"""

from bytescope.configs import llama_8b


def get_config():
    config = llama_8b.get_config()
    config.model.update(d_model=16384, n_layers=126, n_heads=128, d_ff=53248)
    config.optimizer.update(learning_rate=8e-5, warmup_steps=8000)
    return config
