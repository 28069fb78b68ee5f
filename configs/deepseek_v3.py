"""DeepSeek-V3 671B (DeepSeek-AI 2024, arXiv 2412.19437) at 4096 tokens: latent attention, 256 experts and a shared one.

    bytescope train deepseek_v3 --config.data.source=SHARDS
    bytescope report deepseek_v3 h100:256x8

Hardware: 2048 H100 on 256 hosts (described device; not yet measured on hardware).
Memory: peak 24.95 GiB, allocated 25.07 GiB, predicted in use 25.11 GiB per device, of 72.78 GiB available;
  jax 0.10.2, jaxlib 0.10.2, cuDNN 9.28, 2026-11-27.
Loss: not trained yet.

Sizes, routing, optimizer settings and initial values are those of the paper (sections 4.2 and 2.1.2). Its layout and
precision (sections 3.2 and 3.3) compare with this config as follows:

                     the paper                                      this config
    devices          2048 H800                                      2048 H100, described
    pipeline         16 stages, DualPipe                            none: every device has all 61 layers
    experts          over 64 devices of 8 hosts                     over 64 devices
    optimizer state  ZeRO-1 over data-parallel ranks                ZeRO-3 over 512, 4 replicas
    tensor parallel  none                                           none
    recomputed       RMSNorms, up-projections of latent attention   the whole block
    matmuls          FP8, block-scaled                              bfloat16
    state dtypes     masters, gradients float32; moments bf16       the same, the second moment in float32
    dropped tokens   none                                           those above 1.25 times the mean of an expert

Not included: multi-token prediction, YaRN (the first training stage has sequences of 4096 tokens without it), the
schedules of batch size and learning rate, and the limit of 4 hosts per token other than by `router_groups`.
"""

from bytescope.configs import base


def get_config():
    config = base.get_config()
    config.model.update(
        d_model=7168,
        n_layers=61,
        n_heads=128,
        n_kv_heads=128,
        d_head=128,
        d_ff=18432,
        vocab_size=129280,
        max_seq_len=4096,
        norm_eps=1e-6,
        init_std=0.006,
        attention_kind="mla",
        mla_q_rank=1536,
        mla_kv_rank=512,
        mla_d_rope=64,
        mla_d_value=128,
        experts=256,
        experts_per_token=8,
        d_expert=2048,
        shared_experts=1,
        dense_layers=3,
        router="sigmoid",
        router_bias=True,
        router_groups=8,
        router_top_groups=4,
        router_scale=2.5,
        moe_kernel="capacity",
        capacity_factor=1.25,
    )
    config.loss.update(balance=1e-4)
    config.data.update(seq_len=4096, dtype="uint32")
    config.batch.update(micro=1)
    config.optimizer.update(name="adamw_bf16", learning_rate=2.2e-4, warmup_steps=2000)
    config.remat.update(policy="full")
    config.mesh.update(data=-1, fsdp=8, expert=64)
    return config
