"""GPT-2 1.5B (Radford et al. 2019) on token shards.

    bytescope train --config=configs/gpt2_xl.py --config.data.source=SHARDS

Hardware: one H200 (described).
Memory: 53.65 GiB allocated of 128.17 GiB
  (`bytescope report --config=gpt2_xl --target=h200`, jax 0.10.2, nothing measured on a card yet).
Loss: no run recorded yet.
"""

from bytescope.configs import gpt2_small


def get_config():
    config = gpt2_small.get_config()
    config.model.update(d_model=1600, n_layers=48, n_heads=25, n_kv_heads=25, d_ff=6400)
    config.batch.update(micro=16, accumulation=32)
    # 8.5 s an update by the roofline; full: 9.2 s. Unrolled with selective 7.4 s, in 69 GiB, at six times the compile:
    # --config.model.unroll=48 --config.remat.policy=selective, as tests/bench/sizes.py has it.
    config.model.unroll = 1
    config.remat.policy = "minimal"
    config.optimizer.learning_rate = 2e-4
    return config
