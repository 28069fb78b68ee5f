"""GPT-3 175B (Brown et al. 2020, arXiv 2005.14165), fully sharded and recomputed.

    bytescope train --config=configs/gpt3_175b.py --config.data.source=SHARDS

Hardware: 128 A100 80 GB on 16 hosts (described).
Memory: 31.93 GiB a device, allocated, of 72.37 GiB
  (`bytescope report --config=gpt3_175b --target=a100-80g:16x8`, jax 0.10.2, nothing measured on a card yet).
Loss: no run recorded yet.
"""

from bytescope.configs import gpt2_small


def get_config():
    config = gpt2_small.get_config()
    config.model.update(d_model=12288, n_layers=96, n_heads=96, n_kv_heads=96, d_head=128, d_ff=49152,
                        max_seq_len=2048, unroll=1)
    config.data.seq_len = 2048
    config.batch.update(micro=1, accumulation=1)
    config.remat.policy = "full"
    config.loss.chunk = 2048
    config.optimizer.update(learning_rate=6e-5, warmup_steps=375)
    config.mesh.update(data=1, fsdp=-1)
    return config
