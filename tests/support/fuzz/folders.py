"""The readers of folders of weights: config.json, the index, the header of a file."""

import json
from pathlib import Path
from random import Random

from support.fuzz import mutations
from support.models import weights


def configs() -> list[bytes]:
    """config.json in both spellings, of three families."""
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    qwen = {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    found = (weights.LLAMA, {**weights.LLAMA, "rope_parameters": llama3}, weights.GPT2, {**weights.LLAMA, **qwen})
    return [json.dumps(config).encode() for config in found]


def read_config(data: bytes, folder: Path) -> None:
    """A run's config from the folder, checked as before a compile."""
    from bytescope.train.program.checks import check_without_devices
    from bytescope.train.program.config_files import load
    from bytescope.train.program.program_settings import read_settings

    (folder / "config.json").write_bytes(data)
    check_without_devices(read_settings(load(f"hf:{folder}")))


def indexes() -> list[bytes]:
    names = list(weights.llama_shapes())
    files = {name: f"model-{1 + number % 2:05d}-of-00002.safetensors" for number, name in enumerate(names)}
    return [json.dumps({"metadata": {"total_size": 1}, "weight_map": files}).encode()]


def read_index(data: bytes, folder: Path) -> None:
    tensors = list(weights.numbers(weights.llama_shapes()).items())
    (folder / "config.json").write_text(json.dumps(weights.LLAMA))
    for number in range(2):
        content = weights.encode(dict(tensors[number::2]))
        (folder / f"model-{number + 1:05d}-of-00002.safetensors").write_bytes(content)
    (folder / "model.safetensors.index.json").write_bytes(data)
    _use(folder)


def headers() -> list[bytes]:
    return [weights.encode(weights.numbers(weights.llama_shapes()))]


def damaged_header(data: bytes, rng: Random) -> bytes:
    """A file whose header is damaged, with its length right more often than not."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.2:
        return mutations.damaged_bytes(data[: 8 + length], rng) + data[8 + length :]
    text = mutations.damaged_json(data[8 : 8 + length], rng)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def read_header(data: bytes, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(weights.LLAMA))
    (folder / "model.safetensors").write_bytes(data)
    _use(folder)


def _use(folder: Path) -> None:
    """Opens the folder as a run does, and reads a row of each tensor."""
    from bytescope.train.weights.folder import Folder, close

    close()
    opened = Folder.open(folder)
    for name, tensor in opened.tensors.items():
        if all(tensor.shape):
            opened.read(name, [(0, 1) for _ in tensor.shape])
