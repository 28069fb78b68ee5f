"""Host memory of loading weights into their shardings, beyond what the devices hold.

    python tests/bench/loading.py --assert
    python tests/bench/loading.py --model=llama_8b --sparse --param=bfloat16 --devices=8

Writes a checkpoint of bf16 tensors in files of at most --shard bytes, and loads it in a process of its own over
simulated devices, whose memory is this host's: what counts is anonymous memory (RssAnon of /proc/self/status, watched
every 2 ms) at its most, less that before and less the bytes of the arrays. Pages of files are the kernel's to drop.
--sparse: tensors without bytes on disk, for models larger than it. --assert: at most 1.2x of the largest tensor.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

MOST = 1.2
# config.json of models by name; `2gib`: 16 layers of Llama's shape; `mixture`: half of the experts of two of Mixtral's.
MODELS = {
    "2gib": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 16384,
        "max_position_embeddings": 2048,
    },
    "llama_8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "mixture": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 8192,
        "max_position_embeddings": 8192,
        "num_local_experts": 4,
    },
}


def tensors_of(config: dict) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a checkpoint, in the order of its files."""
    from bytescope.model import ModelConfig
    from bytescope.train.program.config_files import load
    from bytescope.train.weights.families import FAMILIES
    from bytescope.train.weights.leaves import parameters_of, rows_by_path
    from bytescope.train.weights.patterns import Pattern, sizes_of

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = ModelConfig.from_dict(load(f"hf:{folder}").model)
    sizes, found = sizes_of(model), {}
    for row, name in rows_by_path(FAMILIES[config["model_type"]], parameters_of(model)).values():
        found[name] = Pattern.parse(row.pattern).their_shape(sizes)
    return found


def write(folder: Path, config: dict, shard: int, sparse: bool) -> tuple[int, int]:
    """Writes the checkpoint; returns its bytes and those of its largest tensor."""
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    held, rng = 0, np.random.default_rng(0)
    sizes = {name: 2 * int(np.prod(shape)) for name, shape in tensors_of(config).items()}
    for name, shape in tensors_of(config).items():
        if held + sizes[name] > shard and shards[-1]:
            shards.append({})
            held = 0
        shards[-1][name] = shape
        held += sizes[name]
    index = {}
    for number, tensors in enumerate(shards, 1):
        name, header, end = f"model-{number:05d}-of-{len(shards):05d}.safetensors", {}, 0
        for tensor, shape in tensors.items():
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + sizes[tensor]]}
            end += sizes[tensor]
            index[tensor] = name
        text = json.dumps(header).encode()
        with open(folder / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            if sparse:
                file.truncate(8 + len(text) + end)
                continue
            for tensor in tensors:  # any bits but those of infinities
                file.write(rng.integers(0, 2**14, sizes[tensor] // 2, np.uint16).tobytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return sum(sizes.values()), max(sizes.values())


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text().split("RssAnon:")[1]
    return int(status.split()[0]) * 1024


def measure(folder: str, keys: list[str], devices: int) -> dict[str, float]:
    """Loads the folder, in this process: bytes and seconds."""
    import jax

    from bytescope.train.program.config_files import load
    from bytescope.train.program.program import build
    from bytescope.train.weights.folder import Folder
    from bytescope.train.weights.load import load_params

    program = build(load(f"hf:{folder}", [tuple(key.split("=", 1)) for key in keys]), jax.devices()[:devices])
    opened = Folder.open(folder)
    jax.block_until_ready(jax.numpy.zeros(1))
    before, most, ended = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            most[0] = max(most[0], anonymous())

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.perf_counter()
    params = jax.block_until_ready(load_params(opened, program.model, program.state.params))
    seconds = time.perf_counter() - began
    ended.set()
    watching.join()
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    return {"devices": held, "beyond": max(most[0], anonymous()) - before - held, "seconds": seconds}


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", choices=MODELS, default="2gib", help="default %(default)s")
    flags.add_argument("--layers", type=int, help="instead of the model's own")
    flags.add_argument("--shard", type=int, default=2**29, help="bytes of a file (default %(default)s)")
    flags.add_argument("--param", choices=("float32", "bfloat16"), default="float32", help="default %(default)s")
    flags.add_argument("--strategy", default="zero3", help="mesh.strategy (default %(default)s)")
    flags.add_argument("--expert", type=int, default=1, help="mesh.expert (default %(default)s)")
    flags.add_argument("--devices", type=int, default=8, help="default %(default)s")
    flags.add_argument("--sparse", action="store_true", help="tensors of zeros without bytes on disk")
    flags.add_argument("--folder", help="where the checkpoint is written, new (default: the system's, then removed)")
    flags.add_argument("--assert", dest="check", action="store_true", help=f"exit 1 above {MOST}x")
    flags.add_argument("--measure", help=argparse.SUPPRESS)
    asked = flags.parse_args()
    keys = [f"precision.param={asked.param}", f"mesh.strategy={asked.strategy}", f"mesh.expert={asked.expert}"]
    if asked.param == "bfloat16":
        keys.append("precision.preset=bf16_params")
    if asked.measure:
        print(json.dumps(measure(asked.measure, keys, asked.devices)))
        return 0
    config = {"model_type": "llama", "tie_word_embeddings": False, **MODELS[asked.model]}
    config["num_hidden_layers"] = asked.layers or config["num_hidden_layers"]
    with tempfile.TemporaryDirectory(prefix="bytescope-loading-", dir=asked.folder) as folder:
        total, largest = write(Path(folder), config, asked.shard, asked.sparse)
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={asked.devices}",
        }
        done = subprocess.run(
            [sys.executable, *sys.argv, f"--measure={folder}"], env=env, check=True, stdout=subprocess.PIPE, text=True
        )
    found = json.loads(done.stdout.splitlines()[-1])
    ratio = found["beyond"] / largest
    print(
        f"checkpoint {total / 2**30:.2f} GiB, largest tensor {largest / 2**20:.1f} MiB; {asked.devices} devices "
        f"({asked.strategy}, {asked.param}) hold {found['devices'] / 2**30:.2f} GiB; beyond these "
        f"{found['beyond'] / 2**20:.1f} MiB, {ratio:.2f}x the largest tensor; {found['seconds']:.1f} s"
    )
    return int(asked.check and ratio > MOST)


if __name__ == "__main__":
    sys.exit(main())
