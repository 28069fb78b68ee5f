"""Mixtral 8x7B (Jiang et al. 2024, arXiv 2401.04088) at 4096 tokens, experts sharded over the GPUs of a host.

    bytescope train mixtral_8x7b --config.data.source=SHARDS
    bytescope report mixtral_8x7b h100:8

46,702,792,704 parameters, 12,879,925,248 of them active for a token. Float32 masters and gradients and 8-bit moments
are 10 bytes per parameter. A device computes at most twice the mean number of pairs of a token and an expert; pairs
beyond this number are dropped and counted.
Hardware: 8 H100 of one host (described device; not yet measured on hardware).
Memory: peak 61.59 GiB, allocated 61.59 GiB, predicted in use 61.62 GiB per device, of 72.78 GiB available;
  jax 0.10.2, jaxlib 0.10.2, cuDNN 9.28, 2026-11-23.
Speed: predicted 35,700 tokens/s; 38,080 with the settings of `bytescope fit mixtral_8x7b h100:8` (64.26 GiB), 56,571
  on h100:2x8 (62.33 GiB). The experts' kernels have not been measured.
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
        vocab_size=32000,
        max_seq_len=32768,
        rope_theta=1e6,
        experts=8,
        experts_per_token=2,
        d_expert=14336,
        capacity_factor=2.0,
    )
    config.loss.update(balance=0.02, chunk=2048)
    config.optimizer.update(name="adamw_8bit", learning_rate=3e-4, warmup_steps=2000)
    config.remat.policy = "full"
    config.data.seq_len = 4096
    config.batch.micro = 1
    config.mesh.update(data=1, fsdp=-1, expert=8)
    config.train.update(steps=100_000, eval_every=1000, eval_sequences=512, checkpoint_every=1000)
    return config
