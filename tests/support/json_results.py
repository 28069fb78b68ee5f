"""The JSON of commands: the result, after a check of the whole against the published JSON Schema of the command."""

import functools
import json
from pathlib import Path

import jsonschema

SCHEMAS = Path(__file__).parents[2] / "train" / "reference" / "schemas"


@functools.cache
def validator(command: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{command}.json").read_text()))


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
