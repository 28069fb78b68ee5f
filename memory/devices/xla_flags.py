"""Parses options of XLA's compiler (`--xla=FLAG=VALUE`), and explains which options XLA does not accept.

XLA accepts every field of its DebugOptions (xla.proto) as a compile option. jax adds two options with a
level from O0 to O3 (`LEVELS`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from bytescope.memory.errors import ReportError

Options = dict[str, bool | int | str]

# Options whose value is a level. jax takes it as a number: 9 is O0, 19 is O1, 29 is O2, 39 is O3 (xla.proto,
# ExecutionOptions.EffortLevel).
LEVELS = ("optimization_level", "memory_fitting_level")
LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
# The value of this option is a size in bytes. Larger buffers are freed before the next collective, as in the schedule
# that minimizes memory (xla#45929, scheduler_memory_fencing.h). jaxlib 0.12 and newer have the option.
FENCE, FENCE_SINCE = "xla_gpu_experimental_scheduler_memory_fencing_threshold_bytes", (0, 12)

# These options are set for every compile, because the report reads the buffers from XLA's dump.
_RESERVED = ("xla_dump_to", "xla_dump_hlo_as_proto")
_BOOLEANS = {"true": True, "false": False}
_UNKNOWN = re.compile(r"No such compile option: '([^']*)'")
_WRONG = re.compile(r"While setting option (\S+), '(.*)' is not a valid (\w+) value")
_KINDS = {"bool": "true or false", "enum": "one of the flag's names in xla.proto"}


def is_flag(key: str) -> bool:
    """Returns whether a key is the name of an option of XLA, such as "xla_gpu_memory_limit_slop_factor"."""
    return key.startswith("xla_") or key in LEVELS


def parse_flags(texts: Iterable[str], given: str = "--xla=") -> Options:
    """Returns flag -> value for texts of the form FLAG=VALUE, as compile options of jax.

    The values true and false become booleans, and whole numbers become integers. For the options `LEVELS`, the values
    O0 to O3 become jax's numbers of these levels.

    given: the beginning of the command-line argument, such as "--xla=", which error messages repeat.

    Raises ReportError if a text is not FLAG=VALUE with the name of an XLA option. XLA checks the name and the value
    only when the program is compiled.
    """
    options: Options = {}
    for text in texts:
        name, equals, value = text.strip().partition("=")
        name = name.removeprefix("--")
        if not equals or not is_flag(name):
            raise ReportError(
                f"{given}{text} does not set a flag of XLA: write {given}FLAG=VALUE, such as "
                f"{given}xla_gpu_memory_limit_slop_factor=80"
            )
        if name in _RESERVED:
            raise ReportError(f"{given}{text} cannot be set, because bytescope sets this flag itself: leave it out")
        options[name] = parse_value(name, value)
    return options


def parse_value(name: str, text: str) -> bool | int | str:
    """Returns the value of a flag as jax takes it: true and false as booleans, whole numbers as integers, other text
    unchanged. Flags in `LEVELS` take O0, O1, O2, O3 or a number.

    Raises ReportError if the value of a flag in `LEVELS` is something else.
    """
    if name in LEVELS and re.fullmatch("[oO][0-3]", text):
        return 10 * int(text[1]) + 9
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if name in LEVELS:
        raise ReportError(f"{name}={text} is not an optimization level: give O0, O1, O2 or O3")
    return _BOOLEANS.get(text.lower(), text)


def flags_text(options: Mapping[str, object]) -> str:
    """Returns compile options as the text FLAG=VALUE, separated by spaces."""
    return " ".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()
    )


def refusal(error: BaseException) -> ReportError | None:
    """Returns a one-line error for the user if XLA failed because of an unknown compile option or an invalid value;
    None if XLA failed for another reason.

    error: the exception of the compile.
    """
    import jaxlib

    if unknown := _UNKNOWN.search(str(error)):
        return ReportError(
            f"{unknown[1]} is not an option of XLA in jaxlib {jaxlib.__version__}: leave it out, or correct its name"
        )
    if wrong := _WRONG.search(str(error)):
        name, value, kind = wrong.groups()
        return ReportError(f"{name}={value} is not valid for XLA: give {_KINDS.get(kind, 'a whole number')}")
    return None
