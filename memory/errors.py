"""What goes wrong for the user of a report: one line, the value, then the remedy."""


class ReportError(ValueError):
    """A mistake the user can mend; the command prints it without a traceback and exits with `exit_code`."""

    exit_code = 2


class GuardError(ReportError, AssertionError):
    """A program needs more memory than its guard allows: pytest shows it as a failed assertion."""

    exit_code = 1
