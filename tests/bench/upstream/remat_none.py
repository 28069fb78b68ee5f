"""Reproduces remat_none.md: MaxText's remat_policy=none recomputes every layer.

    python tests/bench/upstream/remat_none.py               # 4 layers of Llama2-7B
    python tests/bench/upstream/remat_none.py --layers=0    # all 32

Exit code 1 if the finding no longer holds, or if the patch does not remove the recomputation.
"""

import sys

from measure_maxtext import check, measure, parser_of, patch_of, print_head


def main() -> int:
    args = parser_of(__doc__).parse_args()
    print_head()
    full, none = measure(args, ["remat_policy=full", "remat_policy=none"])
    (patched,) = measure(args, ["remat_policy=none"], patch_of(__file__))
    return check(
        {
            "none needs the bytes of full": none.allocated_bytes == full.allocated_bytes,
            "none recomputes as much as full": none.recomputed == full.recomputed > 0.1,
            "patched, none recomputes nothing": patched.recomputed < 0.001,
            "patched, cuDNN's forward kernel is called once": (none.forward_calls, patched.forward_calls) == (2, 1),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
