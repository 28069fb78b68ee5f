"""The first thing to run: a byte model learns the Python standard library on a laptop's CPU.

    python -m train

Hardware: any CPU; two cores take about a minute and a half.
Memory: TINYMEM
Loss: TINYLOSS
"""

from configs import base


def get_config():
    config = base.get_config()
    config.model.update(d_model=128, n_layers=4, n_heads=4, n_kv_heads=4, d_head=32, d_ff=384, max_seq_len=256)
    config.precision.preset = "fp32"
    config.remat.policy = "dots_no_batch"  # a CPU recomputes faster than it takes fresh pages
    config.data.seq_len = 128
    config.batch.micro = 16
    config.optimizer.update(learning_rate=3e-3, warmup_steps=50)
    config.train.update(steps=400, log_every=10, eval_every=200, checkpoint_every=200)
    return config
