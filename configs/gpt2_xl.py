"""GPT-2 1.5B (Radford et al. 2019), fully recomputed, on token shards.

    python -m train --config=configs/gpt2_xl.py --config.data.source=SHARDS

Hardware: one H200 (described).
Memory: 32.23 GiB allocated of 128.17 GiB
  (`python -m memory report --config=gpt2_xl --target=h200`, jax 0.10.2, nothing measured on a card yet).
Loss: no run recorded yet.
"""

from configs import gpt2_small


def get_config():
    config = gpt2_small.get_config()
    config.model.update(d_model=1600, n_layers=48, n_heads=25, n_kv_heads=25, d_ff=6400)
    config.batch.update(micro=16, accumulation=32)
    config.remat.policy = "full"
    config.optimizer.learning_rate = 2e-4
    return config
