"""Damaged inputs through every reader, for as long as you like.

    python tests/support/fuzz/run.py --minutes=10 --seed=3 [--readers=hlo,report] [--keep=FOLDER]

Prints what came out, by reader; inputs that failed are kept in a folder. One that has been mended belongs into
tests/support/corpus/READER/ under a telling name, where a test replays it.
"""

import argparse
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
sys.path.insert(0, str(Path(__file__).parents[2]))

from support.fuzz import harness
from support.fuzz.readers import READERS, prepare


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="for all readers together, in equal parts (default: 10)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the damage (default: 0)")
    parser.add_argument("--readers", default=",".join(READERS), help="some of them (default: all)")
    parser.add_argument("--keep", type=Path, help="a folder for inputs that failed (default: a new one in /tmp)")
    args = parser.parse_args()
    warnings.simplefilter("error")
    chosen = [READERS[name] for name in args.readers.split(",")]
    keep, failed = args.keep, 0
    prepare()
    for reader in chosen:
        with tempfile.TemporaryDirectory() as folder:
            found, failures = harness.run(reader, Path(folder), seed=args.seed, seconds=60 * args.minutes / len(chosen))
        print(
            f"{reader.name:10} {found.total():7,} inputs: {found['answer']:7,} answered, "
            f"{found['refused']:7,} refused, {found['failed']:5,} failed",
            flush=True,
        )
        alike = {re.sub(r"\W*[\W\d]\w*", " ", failure.error)[:60]: failure for failure in failures}
        for one in alike.values():
            keep = keep or Path(tempfile.mkdtemp(prefix="fuzz-failed-"))
            path = keep / reader.name / one.case.replace("/", "-")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(one.data)
            print(f"    {path}: {one.error}")
        failed += len(failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
