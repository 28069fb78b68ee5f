"""Opens the unquantized weights of a run or a folder, and the other files that are copied to the quantized folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bytescope.model import ModelConfig
from bytescope.train.checkpoints.saved_run import SavedRun, began_from
from bytescope.train.export import tokenizer_files
from bytescope.train.export.config_json import config_json
from bytescope.train.export.tokenizer_files import COMPANIONS, GENERATION
from bytescope.train.generate.model_source import Source, open_source
from bytescope.train.user_errors import UserError
from bytescope.train.weights.families import FAMILIES, Family
from bytescope.train.weights.finetune import TOKENIZER
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.leaves import PACKED, rows_by_path
from bytescope.train.weights.packed import PER_WORD, SIZES, matrices, packed_paths
from bytescope.train.weights.patterns import Pattern


@dataclasses.dataclass(frozen=True)
class Origin:
    """A model to quantize.

    Fields:
      source: the unquantized weights and their tokenizer.
      model: config of the model.
      family: Hugging Face model family of the folder to write.
      raw: content of the config.json to write.
      write_text: function that writes tokenizer and generation_config.json into a folder.
      fingerprint: hash of the weights.
      held: bytes of a checkpoint that stay in host memory while it is read layer by layer.
    """

    source: Source
    model: ModelConfig
    family: Family
    raw: Mapping[str, Any]
    write_text: Callable[[Path], None]
    fingerprint: str
    held: int


def open_origin(path: Path, step: int | None, group: int) -> Origin:
    """Opens the weights of a run or a folder to quantize them. `group`: number of inputs whose 4-bit codes will share a
    quantization scale. `step`: the checkpoint of a run, None for the newest.

    Raises:
      UserError: the weights cannot be read, are already quantized, or cannot be stored in a 4-bit format.
    """
    source = open_source(path, step)
    if source.parameter is None:
        raise UserError(
            f"{path} is quantized already ({PACKED} in its config.json): give the folder of unquantized weights"
        )
    check_model(str(path), ModelConfig.from_dict(source.config.model), group)
    if isinstance(source.origin, SavedRun):
        origin = _origin_of_run(source, source.origin)
    else:
        origin = _origin_of_folder(source, source.origin)
    for row, _ in rows_by_path(origin.family, packed_paths(origin.model)).values():
        pattern = Pattern.parse(row.pattern)
        # Both formats store each weight in a tensor of its own, [outputs, inputs].
        if row.parts or pattern.ours[: len(pattern.theirs[1])] != pattern.theirs[1]:
            raise UserError(
                f"{path}: the 4-bit formats store each weight in a separate tensor [outputs, inputs], but "
                f"{origin.raw['model_type']} stores {row.tensor} in another way: write the model unquantized with "
                "bytescope export"
            )
    return origin


def _origin_of_run(source: Source, run: SavedRun) -> Origin:
    folder = began_from(run)
    raw = config_json(run.config.model.to_dict(), None if folder is None else folder.config)
    text, place = tokenizer_files.text_of(run.config), None if folder is None else folder.path
    if folder is None:
        raw |= tokenizer_files.special_ids(text)

    def write_text(out: Path) -> None:
        tokenizer_files.write_text_files(out, text, run.config, place)
        tokenizer_files.write_generation_config(out, raw, place)

    checksums = json.dumps([run.step, *(array.checksum for array in run.arrays.values())])
    return Origin(
        source=source,
        model=ModelConfig.from_dict(run.config.model),
        family=FAMILIES[raw["model_type"]],
        raw=raw,
        write_text=write_text,
        fingerprint=hashlib.sha256(checksums.encode()).hexdigest()[:16],
        held=sum(array.nbytes for array in run.arrays.values()),
    )


def _origin_of_folder(source: Source, folder: Folder) -> Origin:
    def write_text(out: Path) -> None:
        for name in (TOKENIZER, *COMPANIONS, GENERATION):
            if (folder.path / name).is_file():
                shutil.copyfile(folder.path / name, out / name)

    return Origin(
        source=source,
        model=ModelConfig.from_dict(source.config.model),
        family=FAMILIES[folder.config["model_type"]],
        raw=dict(folder.config),
        write_text=write_text,
        fingerprint=folder.fingerprint,
        held=0,
    )


def check_model(title: str, model: ModelConfig, group: int) -> None:
    """Raises UserError if the model cannot be quantized. `title` names the model in the message.

    The model must be dense with grouped-query attention. The number of inputs of each weight must be a multiple of
    `group`, and the number of its outputs a multiple of the weights per 32-bit word.
    """
    if model.experts or model.attention_kind != "gqa":
        what = "experts" if model.experts else "latent attention"
        raise UserError(
            f"{title} has {what}: only dense models with grouped-query attention can be quantized; write it "
            "unquantized with bytescope export"
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
                "32-bit word: the model cannot be written in 4 bits; write it unquantized with bytescope export"
            )
