"""index.html of a run directory, written when a start of the run ends, however it ends."""

from collections.abc import Callable, Mapping
from pathlib import Path

from bytescope.memory.errors import ReportError


class RunPage:
    """A recorder whose rows are in metrics.jsonl already: it reads what the run directory holds.

    Args:
      workdir: the run directory. tell: says in a line what failed.
    """

    def __init__(self, workdir: Path, tell: Callable[[str], None]):
        self._workdir, self._tell = workdir, tell

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing: a page for each row would cost too much."""

    def finish(self, step: int, sample: str) -> None:
        """Nothing: a run that is stopped has its page too."""

    def close(self, failed: bool) -> None:
        """Writes the page; a disk that is full ends no training."""
        del failed  # the curves of a run that failed are worth a look
        from bytescope.train.run import run_directory_page

        try:
            run_directory_page.write(self._workdir)
        except OSError as error:
            self._tell(
                f"warning: no {run_directory_page.PAGE}: {error.strerror}; "
                f"bytescope page {self._workdir} writes it later"
            )
        except ReportError:  # nothing of a run is there yet
            return
