"""GPT-2 350M (Radford et al. 2019) on token shards of its vocabulary, 50257 padded to 50304.

    bytescope train gpt2_medium --config.data.source=SHARDS
    bytescope report gpt2_medium h200

Hardware: one H200 (described device; not yet measured on hardware).
Memory: peak 33.26 GiB, allocated 33.26 GiB, predicted in use 33.30 GiB per device, of 128.62 GiB available;
  jax 0.10.2, jaxlib 0.10.2, cuDNN 9.28, 2026-11-22.
Loss: not trained yet.
"""

from bytescope.configs import gpt2_small


def get_config():
    config = gpt2_small.get_config()
    config.model.update(d_model=1024, n_layers=24, n_heads=16, n_kv_heads=16, d_ff=4096)
    config.model.unroll = 24  # 2.67 s an update, predicted; looped with minimal: 3.03 s, with none: 3.77 s
    config.optimizer.learning_rate = 3e-4
    return config
