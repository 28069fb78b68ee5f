"""`bytescope train --fit`: looks for the configuration to run here (memory/plan/fit.py), then trains with it.

The search compiles in processes of its own and is done before jax starts in this one.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bytescope.train.errors import DoesNotFit, UserError

DOES_NOT_FIT, INTERRUPTED = 3, 130


def fitted(config: str, overrides: Sequence[tuple[str, str]], budget: str) -> list[tuple[str, str]]:
    """The overrides and what the fit adds to them. Its walk is printed as it happens.

    Raises:
      DoesNotFit: nothing fits the budget.
      UserError: a mistake in the config or the budget, or a search that was stopped.
    """
    with tempfile.TemporaryDirectory(prefix="bytescope-fit-") as folder:
        out = Path(folder) / "fit.json"
        words = [sys.executable, "-m", "bytescope.memory", "fit", f"--config={config}", f"--json={out}",
                 *([f"--budget={budget}"] if budget else []),
                 *(f"--config.{key}={text}" for key, text in overrides)]
        sys.stdout.flush()
        code = _wait(subprocess.Popen(words))
        if code == INTERRUPTED:
            raise UserError("the fit was stopped; the best that it found stands above, with the flags to train with it")
        if code == DOES_NOT_FIT:
            raise DoesNotFit("nothing fits, as the fit says above: give a larger --budget, or another model")
        if code or not out.exists():
            raise UserError("the fit did not come to its end, see above: mend that, or train without --fit")
        found = json.loads(out.read_text())["best"]["overrides"]
    return [*overrides, *found.items()]


def _wait(search: subprocess.Popen) -> int:
    """The exit code. Ctrl-C reaches the search too: it ends by itself, with the best so far."""
    while True:
        try:
            return search.wait()
        except KeyboardInterrupt:
            continue
