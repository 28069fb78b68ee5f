"""Warnings about settings that are allowed but probably a mistake. A run shows them before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bytescope.train.data.tokenizer import ByteTokenizer
from bytescope.train.program.program_settings import Settings

if TYPE_CHECKING:  # importing this module imports grain, which takes time
    from bytescope.train.data.batches import Data

# Maximum number of passes over the data without a warning: repeated tokens lose most of their value within about 16
# passes (Muennighoff et al. 2023, arXiv 2305.16264).
MAX_PASSES = 16


def doubtful_settings(settings: Settings, platform: str) -> list[str]:
    """Returns warnings about settings that are probably mistakes on devices of `platform`, one line each."""
    lines, optimizer, steps = [], settings.optimizer, settings.steps
    if optimizer.warmup_steps > steps:
        lines.append(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is more than train.steps={steps}: the learning rate "
            f"never reaches {optimizer.learning_rate:g}; lower warmup_steps or raise train.steps"
        )
    if not optimizer.learning_rate:
        lines.append("optimizer.learning_rate=0: no parameter will change; give a learning rate above 0")
    if platform == "cpu":
        for name, is_asked in (("optimizer", settings.offload.optimizer), ("params", settings.offload.params)):
            if is_asked:
                lines.append(
                    f"offload.{name}=true on a CPU, whose memory is the host's: it saves no memory; set it to false"
                )
    return lines


def doubtful_data(settings: Settings, data: Data, read: int) -> list[str]:
    """Returns warnings about settings that are probably mistakes for this training data, one line each.

    `read`: number of sequences that the whole run reads.
    """
    lines, steps, vocabulary = [], settings.steps, settings.model.vocab_size
    passes = read / len(data.train)
    if passes > MAX_PASSES:
        lines.append(
            f"train.steps={steps} reads each sequence {passes:,.0f} times, and after {MAX_PASSES} passes a model only "
            f"memorizes the data: set train.steps={max(int(steps * MAX_PASSES / passes), 1)}, or give more data"
        )
    if data.tokenizer.name == ByteTokenizer.name and vocabulary != data.vocab_size:
        lines.append(
            f"data.tokenizer=bytes has {data.vocab_size} different tokens, but model.vocab_size={vocabulary}: set "
            f"data.tokenizer to the model's tokenizer.json, or model.vocab_size={data.vocab_size}"
        )
    return lines
