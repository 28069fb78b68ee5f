"""GPT-3 175B (Brown et al. 2020, arXiv 2005.14165) at 2048 tokens, fully sharded and recomputed.

    bytescope train gpt3_175b --config.data.source=SHARDS
    bytescope report gpt3_175b a100-80g:16x8

Hardware: 128 A100 80 GB on 16 hosts (described device; not yet measured on hardware).
Memory: peak 29.59 GiB, allocated 29.83 GiB, predicted in use 29.83 GiB per device, of 72.82 GiB available;
  jax 0.10.2, jaxlib 0.10.2, cuDNN 9.28, 2026-11-27.
Loss: not trained yet.
"""

from bytescope.configs import gpt2_small


def get_config():
    config = gpt2_small.get_config()
    config.model.update(
        d_model=12288, n_layers=96, n_heads=96, n_kv_heads=96, d_head=128, d_ff=49152, max_seq_len=2048, unroll=1
    )
    config.data.seq_len = 2048
    config.batch.update(micro=1, accumulation=1)
    config.remat.policy = "full"
    config.loss.chunk = 2048
    config.optimizer.update(learning_rate=6e-5, warmup_steps=375)
    config.mesh.update(data=1, fsdp=-1)
    return config
