"""Errors that a user can fix, each with the exit code that every command returns for it.

Exit codes: 0 done, 1 a check that the user asked for failed, 2 a mistake in the command, config or data, 3 does not
fit in memory, 4 non-finite loss, 5 another process of the run is missing or died, 130 ended by Ctrl-C. A message is
one line: the wrong value, then the remedy.
"""

from collections.abc import Sequence


class UserError(ValueError):
    """A mistake in the command, the config or the data. Commands print it as one line without a traceback."""

    exit_code = 2


class DoesNotFit(UserError):
    """The training step needs more memory than a device has available.

    Attributes:
        advice: the lines to print below the message. They name changes that the user can try.
    """

    exit_code = 3

    def __init__(self, message: str, advice: Sequence[str] = ()):
        super().__init__(message)
        self.advice = tuple(advice)


class NonFinite(UserError):
    """The loss or a gradient is NaN or infinite."""

    exit_code = 4


class Lost(UserError):
    """Another process of a multi-process run is missing or died."""

    exit_code = 5
