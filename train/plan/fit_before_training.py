"""`bytescope train --fit`: finds the configuration to run here (train/plan/fit/fit_walk.py), to train with.

The search compiles in other processes and is done before jax starts in this one.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bytescope.memory.commands.arguments import DOES_NOT_FIT, INTERRUPTED
from bytescope.train.user_errors import DoesNotFit, UserError


def fitted(
    config: str, overrides: Sequence[tuple[str, str]], budget: str, rates: Path | None = None
) -> list[tuple[str, str]]:
    """The overrides with those that the fit adds, (dotted key, text). The walk is printed as it happens.

    budget: bytes of a device, such as "72GiB"; "" for all that it has available.
    rates: the file of --rates, None for the rates of the table.

    Raises:
      DoesNotFit: nothing fits the budget.
      UserError: a mistake in the config or the budget, or a search that was stopped.
    """
    with tempfile.TemporaryDirectory(prefix="bytescope-fit-") as folder:
        out = Path(folder) / "fit.json"
        command = [
            sys.executable,
            "-m",
            "bytescope.memory",
            "fit",
            f"--config={config}",
            f"--json={out}",
            *(f"--config.{key}={text}" for key, text in overrides),
        ]
        if budget:
            command.append(f"--budget={budget}")
        if rates is not None:
            command.append(f"--rates={rates}")
        sys.stdout.flush()
        code = _wait(subprocess.Popen(command))
        if code == INTERRUPTED:
            raise UserError("the fit was stopped; the best that it found is shown above, with the flags to train with")
        if code == DOES_NOT_FIT:
            raise DoesNotFit("nothing fits, as shown above: give a larger --budget, or a smaller model")
        if code or not out.exists():
            raise UserError("the fit failed, as shown above: correct that, or train without --fit")
        found = json.loads(out.read_text())["best"]["overrides"]
    return [*overrides, *found.items()]


def _wait(search: subprocess.Popen) -> int:
    """The exit code. Ctrl-C reaches the search too, which then ends with the best so far."""
    while True:
        try:
            return search.wait()
        except KeyboardInterrupt:
            continue
