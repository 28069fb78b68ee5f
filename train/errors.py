"""What goes wrong for the user, each with the exit code every command of the project uses.

Exit codes: 0 done, 1 a check the user asked for failed, 2 the user's mistake, 3 does not fit,
4 non-finite loss, 5 a process of several never came or died. A message is one line: the value, then the remedy.
"""


class UserError(ValueError):
    """A mistake that the user can mend: one line, no traceback."""

    exit_code = 2


class DoesNotFit(UserError):
    """The step needs more memory than a device has available."""

    exit_code = 3


class NonFinite(UserError):
    """The loss is no longer a number."""

    exit_code = 4


class Lost(UserError):
    """Another process of the run never came, or died."""

    exit_code = 5
