"""The JSON of commands: the result, after a check of the whole against the command's JSON Schema."""

import functools
import json
from pathlib import Path

import jsonschema

from bytescope.train.commands.json_results import json_schema


@functools.cache
def validator(command: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json_schema(command))


def result_of(text: str):
    """The result in the JSON text that a command wrote."""
    envelope = json.loads(text)
    for error in validator(envelope["command"]).iter_errors(envelope):
        raise AssertionError(f"{error.json_path}: {error.message:.300}")
    assert list(envelope) == ["schema", "command", "versions", "target", "limit", "caveats", "result"]
    return envelope["result"]


def read_result(path):
    """The result in a file that a command wrote with --json."""
    return result_of(Path(path).read_text())
