"""Llama 3.2 1B: the 8B architecture scaled down, with tied embeddings, at 8192 tokens.

    bytescope train llama_1b --config.data.source=SHARDS
    bytescope report llama_1b h200

Hardware: one H200 (described device; not yet measured on hardware).
Memory: peak 20.91 GiB, allocated 20.94 GiB, predicted in use 20.97 GiB per device, of 128.62 GiB available;
  jax 0.10.2, jaxlib 0.10.2, cuDNN 9.28, 2026-11-27.
Loss: not trained yet.
"""

from bytescope.configs import llama_8b


def get_config():
    config = llama_8b.get_config()
    config.model.update(
        d_model=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        d_head=64,
        d_ff=8192,
        tie_embeddings=True,
        rope_scaling=(32.0, 1.0, 4.0, 8192.0),
    )
    config.batch.micro = 2
    return config
