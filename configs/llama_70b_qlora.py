"""Llama 3.1 70B with LoRA adapters over weights in NF4 (QLoRA, Dettmers et al. 2023, arXiv 2305.14314), on one H200.

    bytescope train llama_70b_qlora --config.data.source=SHARDS
    bytescope report llama_70b_qlora h200

With init.folder, a Hugging Face folder with config.json and weights, training starts from its weights, which are
quantized while they are loaded.

Hardware: one H200 (described device; not yet measured on hardware).
Memory: peak 47.94 GiB, allocated 47.94 GiB, predicted in use 47.98 GiB per device, of 128.62 GiB available;
  jax 0.10.2, jaxlib 0.10.2, cuDNN 9.28, 2026-11-27.
Loss: not trained yet.
"""

from bytescope.configs import llama_8b_qlora


def get_config():
    config = llama_8b_qlora.get_config()
    config.model.update(d_model=8192, n_layers=80, n_heads=64, d_ff=28672)
    config.optimizer.learning_rate = 1e-4
    return config
