"""Llama 3.1 8B (Grattafiori et al. 2024, arXiv 2407.21783) at 8192 tokens, fully sharded and recomputed.

    bytescope train llama_8b --config.data.source=SHARDS
    bytescope report llama_8b h100:8

Hardware: 8 H100 of one host (described device; not yet measured on hardware).
Memory: peak 18.60 GiB, allocated 18.60 GiB, predicted in use 18.73 GiB per device, of 72.78 GiB available;
  jax 0.10.2, jaxlib 0.10.2, cuDNN 9.28, 2026-11-27.
Loss: not trained yet.
"""

from bytescope.configs import base


def get_config():
    config = base.get_config()
    config.model.update(base.LLAMA)
    config.model.update(
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        d_head=128,
        d_ff=14336,
        vocab_size=128256,
        max_seq_len=131072,
        rope_theta=500_000.0,
        rope_scaling=(8.0, 1.0, 4.0, 8192.0),
    )
    config.loss.chunk = 1024  # 0.5 GiB of float32 logits at this vocabulary
    config.remat.policy = "full"
    config.data.seq_len = 8192
    config.batch.micro = 1
    config.optimizer.update(learning_rate=3e-4, warmup_steps=2000)
    config.mesh.update(data=1, fsdp=-1)
    config.train.update(steps=100_000, eval_every=1000, eval_sequences=512, checkpoint_every=1000)
    return config
