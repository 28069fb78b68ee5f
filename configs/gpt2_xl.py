"""GPT-2 1.5B (Radford et al. 2019) on token shards of its vocabulary, 50257 padded to 50304.

    bytescope train gpt2_xl --config.data.source=SHARDS
    bytescope report gpt2_xl h200

Hardware: one H200 (described device; not yet measured on hardware).
Memory: peak 53.65 GiB, allocated 53.65 GiB, predicted in use 53.78 GiB per device, of 128.62 GiB available;
  jax 0.10.2, jaxlib 0.10.2, cuDNN 9.28, 2026-11-27.
Loss: not trained yet.
"""

from bytescope.configs import gpt2_small


def get_config():
    config = gpt2_small.get_config()
    config.model.update(d_model=1600, n_layers=48, n_heads=25, n_kv_heads=25, d_ff=6400)
    config.batch.update(micro=16, accumulation=32)
    # Predicted: 12.6 s per update; with full 14.1 s. Unrolled with selective 11.3 s, in 69 GiB, but six times the
    # compile time: --config.model.unroll=48 --config.remat.policy=selective, as in tests/bench/sizes.py.
    config.model.unroll = 1
    config.remat.policy = "minimal"
    config.optimizer.learning_rate = 2e-4
    return config
