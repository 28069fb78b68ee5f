"""Table 2 of Korthikanti et al. 2022 (arXiv 2205.05198), and the trainer's step at the same sizes."""

from bytescope.memory.analysis import report_of
from bytescope.memory.devices import targets
from bytescope.train.program.config_files import load, override
from bytescope.train.program.program import build

TENSOR = 8
SEQ_LEN = 2048


# model -> attention heads a, width h, sequences of a micro-batch b (the paper's Table 3)
MODELS = {"22B": (64, 6144, 4), "175B": (96, 12288, 1), "530B": (128, 20480, 1), "1T": (160, 25600, 1)}


# No other dimension has this length, so it marks what is kept of every layer, wherever XLA puts that dimension. Depth
# costs a scanned program nothing; from about 30 layers on the peak lies where the forward pass ends, all of it alive.
LAYERS = 37


def core(heads: int, width: int) -> float:
    """Softmax, its dropout mask and its result, in units of s b h bytes: 5 a s / (h t)."""
    return 5 * heads * SEQ_LEN / (width * TENSOR)


# The formulas of Table 2, and one that is not in it: full recomputation with sequence parallelism.
# (policy, sequence parallel) -> units of s b h bytes a layer and device, from heads and width
ROWS = {
    ("megatron", False): lambda a, h: 10 + 24 / TENSOR + core(a, h),
    ("megatron", True): lambda a, h: 34 / TENSOR + core(a, h),
    ("selective", False): lambda a, h: 10 + 24 / TENSOR,
    ("selective", True): lambda a, h: 34 / TENSOR,
    ("full", False): lambda a, h: 2,
    ("full", True): lambda a, h: 2 / TENSOR,
}


def kept(model: str, policy: str, sequence_parallel: bool, **overrides: object) -> list:
    """The stacked residuals alive at the peak of the trainer's step on 8 described H100, as report buffers."""
    heads, width, micro = MODELS[model]
    config = load("gpt3_175b")
    for key, value in {
        "model.d_model": width,
        "model.n_heads": heads,
        "model.n_kv_heads": heads,
        "model.d_head": width // heads,
        "model.d_ff": 4 * width,
        "model.vocab_size": 51200,
        "model.dropout": 0.1,
        "model.attention": "naive",
        "model.n_layers": LAYERS,
        "batch.micro": micro,
        "mesh.data": 1,
        "mesh.fsdp": 1,
        "mesh.tensor": TENSOR,
        "mesh.sequence_parallel": sequence_parallel,
        "remat.policy": policy,
        **overrides,
    }.items():
        override(config, key, str(value))
    report = report_of(build(config, targets.parse(f"h100:{TENSOR}").devices()).compile_for_report())
    return [
        buffer
        for buffer in report.buffers
        if buffer.category == "residuals" and buffer.at_peak and LAYERS in buffer.shape
    ]


def units(model: str, buffers: list) -> float:
    """Bytes of stacked buffers, one layer's, in units of s b h."""
    _, width, micro = MODELS[model]
    return sum(buffer.bytes for buffer in buffers) / (LAYERS * SEQ_LEN * micro * width)
