"""GPT-2 124M (Radford et al. 2019) on token shards of its vocabulary, 50257 padded to 50304.

    bytescope train --config=configs/gpt2_small.py --config.data.source=SHARDS

Hardware: one H200 (described).
Memory: 13.63 GiB allocated of 128.17 GiB
  (`bytescope report --config=gpt2_small --target=h200`, jax 0.10.2, nothing measured on a card yet).
Loss: no run recorded yet.
"""

from bytescope.configs import base


def get_config():
    config = base.get_config()
    config.model.update(base.GPT2)
    config.model.update(d_model=768, n_layers=12, n_heads=12, n_kv_heads=12, d_head=64, d_ff=3072,
                        vocab_size=50304, max_seq_len=1024)
    # By the roofline 0.71 s an update of 16 calls; layers looped and nothing recomputed: 1.08 s, since a loop writes
    # every residual into a stack; looped with minimal: 0.83 s. Chunks of 8192 tokens read and write the head's
    # gradient a quarter as often.
    config.model.unroll = 12
    config.remat.policy = "selective"
    config.loss.chunk = 8192
    config.data.seq_len = 1024
    config.batch.update(micro=32, accumulation=16)
    config.optimizer.update(learning_rate=6e-4, warmup_steps=2000)
    config.train.update(steps=600_000, eval_every=2000, eval_sequences=3200, checkpoint_every=2000)
    return config
