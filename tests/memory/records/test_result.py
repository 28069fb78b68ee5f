"""Result records: their JSON, their JSON Schema with descriptions and units, and the errors of damaged files."""

import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest

from bytescope.memory.errors import ReportError
from bytescope.memory.records.report_record import Buffer, ReportRecord
from bytescope.memory.records.result import (
    ABSENT,
    INTERNAL,
    LARGEST,
    Absent,
    Count,
    JsonForm,
    descriptions,
    json_keys,
    plain,
    read,
    schema,
    unit_of_field,
)

pytestmark = pytest.mark.quick


@dataclasses.dataclass(frozen=True)
class Part:
    """A part.

    Fields:
        name, kind: two texts.
        size_bytes: bytes of the part,
            with its padding.
    """

    name: str
    kind: str = ""
    size_bytes: Count = 0


@dataclasses.dataclass(frozen=True)
class Whole:
    """A whole.

    Attributes:
        parts: its parts.
        first: the first part; None if there are none.
        rates: size -> pair of rates.
        words: the JSON of this text is a list of words.
        note: a note.
        secret: a field that is not in the JSON.
    """

    COMPUTED_KEYS: typing.ClassVar = ("total_bytes",)

    parts: tuple[Part, ...] = ()
    first: Part | None = None
    rates: Mapping[int, tuple[float, float]] = dataclasses.field(default_factory=dict)
    words: Annotated[str, JsonForm(list[str], str.split, " ".join)] = ""
    note: str | Absent = ABSENT
    secret: Annotated[str, INTERNAL] = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.size_bytes for part in self.parts)


WHOLE = Whole((Part("a", size_bytes=3), Part("b", "c")), Part("a"), {8: (1, 2.5)}, "two words", secret="x")


def test_a_record_is_its_json():
    values = plain(WHOLE)
    assert values == {
        "parts": [{"name": "a", "kind": "", "size_bytes": 3}, {"name": "b", "kind": "c", "size_bytes": 0}],
        "first": {"name": "a", "kind": "", "size_bytes": 0},
        "rates": {"8": [1, 2.5]},
        "words": ["two", "words"],
        "total_bytes": 3,
    }
    again = read(Whole, json.loads(json.dumps(values | {"unknown": 1})))
    assert again == dataclasses.replace(WHOLE, secret="")
    assert plain(Whole(note="n"))["note"] == "n"


def test_the_schema_has_descriptions_and_units():
    found = schema(Whole)
    assert found["required"] == ["parts", "first", "rates", "words", "total_bytes"]
    assert found["properties"]["total_bytes"] == {
        "type": "integer",
        "description": "Bytes of all parts.",
        "unit": "bytes",
    }
    part = found["properties"]["parts"]["items"]
    assert part["properties"]["kind"] == {"type": "string", "description": "two texts."}
    assert part["properties"]["size_bytes"]["description"] == "bytes of the part, with its padding."
    assert found["properties"]["words"]["items"] == {"type": "string"}
    units = map(unit_of_field, ("predicted_seconds_low", "hbm_bytes_per_s", "model_flops", "predicted_mfu", "name"))
    assert list(units) == ["seconds", "bytes/s", "FLOPs", "fraction (0 to 1)", ""]
    with pytest.raises(TypeError, match="has no JSON Schema"):
        schema(set[str])


@pytest.mark.parametrize(
    "change, said",
    [
        ({"parts": [{"name": 1}]}, "Part.name is 1"),
        ({"parts": [{"name": "a", "size_bytes": -1}]}, "Part.size_bytes is -1"),
        ({"parts": [{"name": "a", "size_bytes": LARGEST + 1}]}, "Part.size_bytes is 12089"),
        ({"parts": [{"name": "a", "size_bytes": True}]}, "Part.size_bytes is True"),
        ({"parts": [{}]}, "'name'"),
        ({"parts": [3]}, "Whole.parts must be a JSON object"),
        ({"parts": "abc"}, "Whole.parts is 'abc'"),
        ({"first": []}, "Whole.first must be a JSON object"),
        ({"rates": {"8": [1]}}, r"Whole.rates is \[1\]"),
        ({"rates": {"8": [1, float("nan")]}}, "Whole.rates is nan"),
        ({"rates": []}, r"Whole.rates is \[\]"),
    ],
)
def test_a_damaged_value_names_its_field(change, said):
    with pytest.raises(TypeError, match=said):
        read(Whole, {"parts": []} | change)
    with pytest.raises(TypeError, match="a Whole must be a JSON object, but it is"):
        read(Whole, [])


@pytest.mark.parametrize(
    "change, said",
    [
        ({"peak_bytes": -1}, "ReportRecord.peak_bytes is -1"),
        ({"allocated_bytes": 2**90}, "ReportRecord.allocated_bytes is 12379"),
        ({"buffers": [{"name": "b", "bytes": "many"}]}, "Buffer.bytes is 'many'"),
        ({"breakdown": {"params": None}}, "ReportRecord.breakdown is None"),
        ({"prediction": {"seconds": -1}}, "ReportRecord.prediction is {'seconds': -1}"),
        ({"roofline": {"total": 1.0, "by_term": {"memory": None}}}, "ReportRecord.roofline is {'total': 1.0"),
        ({"target": {"name": 3}}, "ReportRecord.target is {'name': 3}"),
        ({"host_memory": {"processes": "two"}}, "HostMemory.processes is 'two'"),
        ({"notes": 3}, "ReportRecord.notes is 3"),
    ],
)
def test_a_damaged_report_names_the_field(change, said):
    report = ReportRecord(1, 1, {}, buffers=(Buffer("b", 1),))
    assert ReportRecord.from_json(plain(report)) == report
    with pytest.raises(ReportError) as error:
        ReportRecord.from_json(plain(report) | change)
    assert said in str(error.value)


def records_in(hint: Any) -> set[type]:
    """The records of an annotation, and those of their fields."""
    forms = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, JsonForm)]
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return {hint}.union(*map(records_in, json_keys(hint).values()))
    inner: Sequence[Any] = [form.hint for form in forms] or typing.get_args(hint)
    return set().union(*map(records_in, inner))


def test_every_field_of_a_result_is_described(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    import reference

    records = set().union(*map(records_in, reference.RESULTS.values()))
    own = {record for record in records if record.__module__ != "search_schemas"}
    assert len(own) > 40
    for record in own:
        missing = [key for key in json_keys(record) if not descriptions(record).get(key)]
        assert not missing, f"{record.__name__}: describe {', '.join(missing)} in the docstring's section Fields"
