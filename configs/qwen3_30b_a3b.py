"""Qwen3-30B-A3B (Qwen team 2025, arXiv 2505.09388) at 4096 tokens, 128 experts sharded over the GPUs of a host.

    bytescope train qwen3_30b_a3b --config.data.source=SHARDS
    bytescope report qwen3_30b_a3b h100:8

30,532,122,624 parameters, 3,353,032,704 of them active for a token. A device computes at most twice the mean number of
pairs of a token and an expert; pairs beyond this number are dropped and counted.
Hardware: 8 H100 of one host (described device; not yet measured on hardware).
Memory: peak 51.98 GiB, allocated 51.98 GiB, predicted in use 52.01 GiB per device, of 72.78 GiB available;
  jax 0.10.2, jaxlib 0.10.2, cuDNN 9.28, 2026-11-27.
Speed: predicted 61,700 tokens/s; 64,973 with the settings of `bytescope fit qwen3_30b_a3b h100:8` (66.78 GiB). The
  experts' kernels have not been measured.
Loss: not trained yet.
"""

from bytescope.configs import base


def get_config():
    config = base.get_config()
    config.model.update(base.LLAMA)
    config.model.update(
        d_model=2048,
        n_layers=48,
        n_heads=32,
        n_kv_heads=4,
        d_head=128,
        d_ff=6144,
        vocab_size=151936,
        max_seq_len=40960,
        rope_theta=1e6,
        norm_eps=1e-6,
        qk_norm=True,
        experts=128,
        experts_per_token=8,
        d_expert=768,
        capacity_factor=2.0,
    )
    config.loss.update(balance=0.008, chunk=1024)
    config.optimizer.update(name="adamw_bf16", learning_rate=3e-4, warmup_steps=2000)
    config.remat.policy = "full"
    config.data.seq_len = 4096
    config.batch.micro = 1
    config.mesh.update(data=1, fsdp=-1, expert=8)
    config.train.update(steps=100_000, eval_every=1000, eval_sequences=512, checkpoint_every=1000)
    return config
