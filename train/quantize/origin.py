"""Opens the folder of unquantized weights, and copies its other files to the quantized folder."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from bytescope.model import ModelConfig
from bytescope.train.export.tokenizer_files import COMPANIONS, GENERATION
from bytescope.train.generate.model_source import UNQUANTIZED, Source, open_source
from bytescope.train.source import is_run
from bytescope.train.user_errors import UserError
from bytescope.train.weights.families import FAMILIES, Family
from bytescope.train.weights.finetune import TOKENIZER
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.leaves import PACKED, rows_by_path
from bytescope.train.weights.packed import PER_WORD, SIZES, matrices, packed_paths
from bytescope.train.weights.patterns import Pattern


@dataclasses.dataclass(frozen=True)
class Origin:
    """A folder of unquantized weights.

    Fields:
      source: the weights and their tokenizer.
      folder: the opened folder.
      model: config of the model.
    """

    source: Source
    folder: Folder
    model: ModelConfig

    @property
    def family(self) -> Family:
        """The Hugging Face model family of the folder."""
        return FAMILIES[self.folder.config["model_type"]]

    def copy_text_files(self, out: Path) -> None:
        """Copies the tokenizer and generation_config.json into the folder `out`."""
        for name in (TOKENIZER, *COMPANIONS, GENERATION):
            if (self.folder.path / name).is_file():
                shutil.copyfile(self.folder.path / name, out / name)


def open_origin(path: Path, group: int) -> Origin:
    """Opens a folder of weights to quantize them. `group`: number of inputs whose 4-bit codes will share a quantization
    scale.

    Raises:
      UserError: the weights cannot be read, are already quantized, or cannot be stored in a 4-bit format.
    """
    if is_run(path):
        raise UserError(f"{path} is a run: write its weights with bytescope export {path} FOLDER, and give FOLDER")
    source = open_source(path)
    assert isinstance(source.origin, Folder)
    if source.base != UNQUANTIZED:
        raise UserError(
            f"{path} is quantized already ({PACKED} in its config.json): give the folder of unquantized weights"
        )
    origin = Origin(source, source.origin, ModelConfig.from_dict(source.config.model))
    check_model(str(path), origin.model, group)
    for row, _ in rows_by_path(origin.family, packed_paths(origin.model)).values():
        pattern = Pattern.parse(row.pattern)
        # Both formats store each weight in a tensor of its own, [outputs, inputs].
        if row.parts or pattern.ours[: len(pattern.theirs[1])] != pattern.theirs[1]:
            raise UserError(
                f"{path}: the 4-bit formats store each weight in a separate tensor [outputs, inputs], but "
                f"{origin.folder.config['model_type']} stores {row.tensor} in another way: keep it unquantized"
            )
    return origin


def check_model(title: str, model: ModelConfig, group: int) -> None:
    """Raises UserError if the model cannot be quantized. `title` names the model in the message.

    The model must be dense with grouped-query attention. The number of inputs of each weight must be a multiple of
    `group`, and the number of its outputs a multiple of the weights per 32-bit word.
    """
    if model.experts or model.attention_kind != "gqa":
        what = "experts" if model.experts else "latent attention"
        raise UserError(
            f"{title} has {what}: only dense models with grouped-query attention can be quantized: keep it unquantized"
        )
    sizes = {path: matrix.sizes for path, matrix in matrices(model).items()}
    for path, (inputs, outputs) in sizes.items():
        if inputs % group:
            fitting = [size for size in SIZES if all(inputs % size == 0 for inputs, _ in sizes.values())]
            sizes_text = ", ".join(map(str, SIZES))
            remedy = f"give --group={max(fitting)}" if fitting else f"none of the sizes {sizes_text} divides all inputs"
            raise UserError(f"--group={group} does not divide the {inputs} inputs of {path}: {remedy}")
        if outputs % PER_WORD:
            raise UserError(
                f"{path} has {outputs} outputs, which is not a multiple of {PER_WORD}, the number of weights in a "
                "32-bit word: the model cannot be written in 4 bits, keep it unquantized"
            )
