"""Activation bytes a layer of Korthikanti et al. 2022 (arXiv 2205.05198), Table 2: the paper's beside the compiler's.

    python tests/bench/published.py
    python tests/bench/published.py --models 22B --names

Units of s b h bytes a device, tensor parallel 8, micro-batch as in the paper, dropout masks included, compiled for 8
described H100. The paper has no figure for three rows of a model: full recomputation with sequence parallelism (shown:
2/t) and plain JAX autodiff (remat.policy=none). `--names` lists what each row keeps, by checkpoint name or, where it
has none, by the operation.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs here: the compiler is asked
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from interleave import versions

from support.korthikanti import MODELS, ROWS, kept, units


def what(buffer) -> str:
    """The name of a residual, else its component and the operation that makes it, with the dtype."""
    return buffer.checkpoint_name or f"({buffer.component}/{buffer.op_name.rsplit('/', 1)[-1]} {buffer.dtype})"


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL", help=f"of {', '.join(MODELS)}"
    )
    flags.add_argument("--names", action="store_true", help="what each row keeps")
    asked = flags.parse_args()
    print(f"{'model':6}{'policy':>10}  {'parallel':9}{'paper':>8}{'compiler':>10}")
    for model in asked.models:
        heads, width, _ = MODELS[model]
        for policy, sequence_parallel in [*ROWS, ("none", False), ("none", True)]:
            formula = ROWS.get((policy, sequence_parallel))
            buffers = kept(model, policy, sequence_parallel)
            paper = f"{formula(heads, width):8.2f}" if formula else f"{'-':>8}"
            print(
                f"{model:6}{policy:>10}  {'TP + SP' if sequence_parallel else 'TP':9}{paper}"
                f"{units(model, buffers):10.2f}",
                flush=True,
            )
            if asked.names:
                sizes: Counter[str] = Counter()
                for buffer in buffers:
                    sizes[what(buffer)] += units(model, [buffer])
                print("\n".join(f"{'':8}{size:6.2f}  {name}" for name, size in sizes.most_common()), flush=True)
    print(versions())
    return 0


if __name__ == "__main__":
    sys.exit(main())
