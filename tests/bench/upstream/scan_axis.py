"""Reproduces scan_axis.md: MaxText's default param_scan_axis=1 copies all stacked weights in float32.

    python tests/bench/upstream/scan_axis.py               # 4 layers of Llama2-7B
    python tests/bench/upstream/scan_axis.py --layers=0    # all 32

Exit code 1 if the finding no longer holds, or if the patched default needs other bytes than param_scan_axis=0.
"""

import sys

from measure_maxtext import check, measure, parser_of, patch_of, print_head


def main() -> int:
    args = parser_of(__doc__).parse_args()
    print_head()
    default, axis_0 = measure(args, ["remat_policy=full", "remat_policy=full param_scan_axis=0"])
    (patched,) = measure(args, ["remat_policy=full"], patch_of(__file__))
    return check(
        {
            "the default needs more temporary bytes than param_scan_axis=0": default.temp_bytes > axis_0.temp_bytes,
            "patched, the default needs the bytes of param_scan_axis=0": patched.temp_bytes == axis_0.temp_bytes,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
