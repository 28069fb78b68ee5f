r"""GPT-2 124M (Radford et al. 2019) on token shards of its vocabulary, 50257 padded to 50304.

    bytescope train gpt2_small --config.data.source=SHARDS
    bytescope report gpt2_small h200

Hardware: one H200 (described device; not yet measured on hardware).
Memory: peak 13.54 GiB, allocated 13.63 GiB, predicted in use 13.66 GiB per device, of 128.62 GiB available;
  jax 0.10.2, jaxlib 0.10.2, cuDNN 9.28, 2026-11-22.
Loss: not trained at this size yet. Shrunk to two layers of width 128 on bytes: 1.95 nats per byte on 409,600 held-out
  bytes of Python 3.11's library after 400 updates of 2,048 tokens; two CPU cores, 2 min 25 s while other programs ran,
  compile and evaluation included; jax 0.10.2, 2026-11-22.

    bytescope train gpt2_small --config.model.n_layers=2 --config.model.d_model=128 \
        --config.model.n_heads=4 --config.model.n_kv_heads=4 --config.model.d_head=32 --config.model.d_ff=512 \
        --config.model.vocab_size=256 --config.data.seq_len=128 --config.batch.micro=16 \
        --config.batch.accumulation=1 --config.loss.chunk=2048 --config.optimizer.learning_rate=3e-3 \
        --config.optimizer.warmup_steps=50 --config.train.steps=400
"""

from bytescope.configs import base


def get_config():
    config = base.get_config()
    config.model.update(base.GPT2)
    config.model.update(
        d_model=768, n_layers=12, n_heads=12, n_kv_heads=12, d_head=64, d_ff=3072, vocab_size=50304, max_seq_len=1024
    )
    # Predicted: 1.11 s per update of 16 calls. With looped layers and no recomputation 1.53 s, because a loop writes
    # every residual into a stack; looped with minimal 1.26 s. Chunks of 8192 tokens read and write the head's gradient
    # a quarter as often as chunks of 2048.
    config.model.unroll = 12
    config.remat.policy = "selective"
    config.loss.chunk = 8192
    config.data.seq_len = 1024
    config.batch.update(micro=32, accumulation=16)
    config.optimizer.update(learning_rate=6e-4, warmup_steps=2000)
    config.train.update(steps=600_000, eval_every=2000, eval_sequences=3200, checkpoint_every=2000)
    return config
