"""Llama 3.1 8B with LoRA adapters over weights in NF4 (QLoRA, Dettmers et al. 2023, arXiv 2305.14314), on one RTX 4090.

    bytescope train llama_8b_qlora --config.data.source=SHARDS
    bytescope report llama_8b_qlora rtx4090

With init.folder, a Hugging Face folder with config.json and weights, training starts from its weights, which are
quantized while they are loaded.

Hardware: one RTX 4090 (described device; not yet measured on hardware).
Memory: peak 8.02 GiB, allocated 8.02 GiB, predicted in use 8.03 GiB per device, of 21.64 GiB available;
  jax 0.10.2, jaxlib 0.10.2, cuDNN 9.28, 2026-11-27.
Loss: not trained yet.
"""

from bytescope.configs import llama_8b


def get_config():
    config = llama_8b.get_config()
    config.lora.update(rank=16, alpha=16.0, base="nf4")
    config.data.seq_len = 4096
    config.optimizer.update(learning_rate=2e-4, warmup_steps=100, weight_decay=0.0)
    config.train.update(steps=1000, eval_every=250, checkpoint_every=250)
    return config
