"""Reproduces context_kernel.md: MaxText's minimal_with_context runs cuDNN's forward attention twice.

    python tests/bench/upstream/context_kernel.py               # 4 layers of Llama2-7B
    python tests/bench/upstream/context_kernel.py --layers=0    # all 32

Exit code 1 if the finding no longer holds, or if the patch does not remove the second call.
"""

import sys

from measure_maxtext import check, measure, parser_of, patch_of, print_head


def main() -> int:
    args = parser_of(__doc__).parse_args()
    print_head()
    minimal, context = measure(args, ["remat_policy=minimal", "remat_policy=minimal_with_context"])
    (patched,) = measure(args, ["remat_policy=minimal_with_context"], patch_of(__file__))
    return check(
        {
            "minimal_with_context calls cuDNN's forward kernel as often as minimal, twice": (
                context.forward_calls == minimal.forward_calls == 2
            ),
            "it holds more bytes than minimal": context.allocated_bytes > minimal.allocated_bytes,
            "patched, it calls the kernel once": patched.forward_calls == 1,
            "patched, it recomputes less": patched.recomputed < context.recomputed,
            "patched, it needs at most 2 % more bytes": patched.allocated_bytes <= 1.02 * context.allocated_bytes,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
