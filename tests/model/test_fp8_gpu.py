"""precision.preset=fp8 on GPUs that are not here: native kernels, what a report shows, and which device has them."""

import functools
import re

import jax
import pytest

from bytescope.memory.analysis import report_of
from bytescope.model.fp8 import choose_matmul
from bytescope.model.names import NAMES
from bytescope.model.precision import PRECISIONS
from bytescope.train.program.program import build
from support.described import described
from support.toy import fp8_expected, small_config

GPU = {
    "model.d_model": 256,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.d_head": 64,
    "model.d_ff": 512,
    "model.n_layers": 4,
    "model.vocab_size": 640,
    "model.max_seq_len": 1024,
    "data.seq_len": 1024,
    "batch.micro": 2,
}
# jax announces from 0.11 on that Pallas will drop the backend of model/fp8.py; it works still.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
    pytest.mark.usefixtures("assembler"),
]


@functools.cache
def compiled(preset):
    config = small_config({**GPU, "precision.preset": preset, "remat.policy": "selective"})
    program = build(config, described("h100"))
    return program, program.compile_for_report()


@pytest.mark.exhaustive
def test_native_products_on_a_described_h100():
    """Every product of a block is a kernel that reads 8-bit floats; those of bf16 are left to embedding, core, head."""
    program, compilation = compiled("fp8")
    assert program.matmul == ("fp8_native", "NVIDIA H100 80GB HBM3 has fp8 units")
    text = compilation.compiled.as_text()
    kernels = re.findall(
        r"(bf16\[\S+?\])\S* custom-call\(.*?__gpu\$xla\.gpu\.triton.*?operand_layout_constraints="
        r"\{(f8e4m3fn\[\S+?\])\S*?, (f8e4m3fn\[\S+?\])",
        text,
    )
    assert len(kernels) == 3 * 7  # forward, and both gradients
    assert ("bf16[2048,512]", "f8e4m3fn[2048,256]", "f8e4m3fn[512,256]") in kernels  # gate and up
    assert ("bf16[256,512]", "f8e4m3fn[256,2048]", "f8e4m3fn[512,2048]") in kernels  # the gradient of their weights
    wide = re.findall(r"= (\S+?)\{\S* dot\(", text)
    assert not [shape for shape in wide if "512,256]" in shape or "256,512]" in shape or "2048,256]" in shape]


@pytest.mark.exhaustive
def test_the_report_shows_what_is_saved():
    reports = {preset: report_of(compiled(preset)[1], names=NAMES) for preset in ("fp8", "bf16")}
    ours, wide = (reports[preset].residuals_by_name for preset in ("fp8", "bf16"))
    for name, (values, scales) in fp8_expected(GPU, 2048).items():
        if name != "context":
            assert (ours[f"{name}_fp8"], ours[f"{name}_scale"]) == (4 * values, 4 * scales)
            assert wide[name] == 2 * 4 * values and ours[f"{name}_fp8"] + ours[f"{name}_scale"] <= 0.53 * wide[name]
    assert reports["fp8"].peak_bytes < reports["bf16"].peak_bytes


class Card:
    """A GPU by what the choice looks at."""

    platform, device_kind = "gpu", "card"

    def __init__(self, capability):
        self.compute_capability = capability


def test_the_choice_and_its_reason():
    fp8 = PRECISIONS["fp8"]
    assert choose_matmul(fp8, Card("9.0"))[0] == choose_matmul(fp8, Card("8.9"))[0] == "fp8_native"
    for older in ("8.0", "gfx942"):
        assert choose_matmul(fp8, Card(older)) == (
            "fp8_emulated",
            "same quantization, multiplied in float32: card is not known to have fp8 units",
        )
    assert choose_matmul(fp8, jax.devices()[0])[0] == "fp8_emulated"
    assert choose_matmul(PRECISIONS["bf16"], Card("9.0")) == ("wide", "in bfloat16")
