"""Reproduces megablox.md: on GPUs, MaxText interprets the Pallas kernel of its experts.

    python tests/bench/upstream/megablox.py               # 2 layers of Mixtral 8x7B
    python tests/bench/upstream/megablox.py --layers=0    # all 32

Exit code 1 if the finding no longer holds, or if the patch does not remove the interpreted loops.
"""

import sys

from measure_maxtext import check, measure, parser_of, patch_of, print_head

MIXTRAL = "maxtext:mixtral-8x7b"


def main() -> int:
    parser = parser_of(__doc__)
    parser.set_defaults(layers=2)
    args = parser.parse_args()
    print_head()
    default, ragged = measure(args, ["remat_policy=full", "remat_policy=full megablox=false"], model=MIXTRAL)
    (patched,) = measure(args, ["remat_policy=full"], patch_of(__file__), MIXTRAL)
    for name, figures in (("default", default), ("megablox=false", ragged), ("default, patched", patched)):
        print(f"{name}: {figures.flops / 1e12:.1f} TFLOP, where a loop over tiles counts as one turn")
    return check(
        {
            "the grouped products are loops over tiles": default.flops < ragged.flops / 4,
            "patched, they are jax.lax.ragged_dot": patched.flops == ragged.flops,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
