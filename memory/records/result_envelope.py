"""The JSON that every command writes with --json: its result, with the facts that are needed to read the figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bytescope.memory.errors import ReportError

# The version number of this layout. Files of schema 1 contain only the result.
ENVELOPE_SCHEMA = 2


@dataclasses.dataclass(frozen=True)
class MemoryLimit:
    """The limit that the bytes of a result are judged by.

    Fields:
        bytes: memory that programs may use on one device.
        source: what the limit is, in words, such as "92 % of the GPU's memory (the trainer's default)".
    """

    bytes: int
    source: str


@dataclasses.dataclass(frozen=True)
class ResultEnvelope:
    """The JSON of a command.

    Fields:
        schema: the version number of this layout.
        command: the command without its arguments, such as "report".
        versions: package -> version, for bytescope, Python and the packages that compiled the programs.
        target: the devices that were compiled for; None if nothing was compiled, or for unknown devices.
        limit: the memory limit on one device; None if no limit applies.
        caveats: sentences that say where the figures are from and what they do not contain.
        result: the figures of the command.
    """

    schema: int = dataclasses.field(default=ENVELOPE_SCHEMA, init=False)
    command: str
    versions: Mapping[str, str]
    target: Mapping[str, Any] | None
    limit: MemoryLimit | None
    caveats: tuple[str, ...]
    result: Mapping[str, Any]


def unwrap(value: Any, command: str) -> Any:
    """Returns the result in the parsed JSON of `command`. JSON of schema 1, which contains only the result, is returned
    unchanged.

    Raises ReportError if another command wrote the JSON, or if its schema is newer.
    """
    if not isinstance(value, dict) or not {"command", "result"} <= value.keys():
        return value
    if value["command"] != command:
        raise ReportError(
            f"the JSON is the result of bytescope {value['command']!s:.40}: give a file that bytescope {command} "
            "--json=FILE wrote"
        )
    if value.get("schema") != ENVELOPE_SCHEMA:
        raise ReportError(
            f"the JSON has schema {value.get('schema')!r:.40}, but this version reads schemas 1 and {ENVELOPE_SCHEMA}: "
            f"write it again with bytescope {command} --json=FILE"
        )
    return value["result"]
