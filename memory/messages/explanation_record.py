"""The record of an explanation: what a log says about memory, the cause, the largest buffers and the remedies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from bytescope.memory.messages import causes
from bytescope.memory.messages.culprits import Culprit
from bytescope.memory.messages.message_forms import FORMS
from bytescope.memory.messages.remedies import Remedy
from bytescope.memory.messages.report_match import ReportMatch
from bytescope.memory.records.result import plain
from bytescope.memory.units import human


@dataclasses.dataclass(frozen=True)
class ExplanationRecord:
    """The sizes and buffers in the messages about memory of a log or of an exception, the cause of the failure, and the
    remedies. All sizes are bytes on one device; None if they are unknown. The explanation of an exception
    (`post_mortem`) also has what the process of the failed step knows: its live arrays, the statistics of its
    allocator, and the report of the step.

    Fields:
        recognized: whether the log contains a message about memory.
        kind: the kind of the most informative message, one of `message_forms.KINDS`; "unknown" if there is none.
        form: the form of the explained message, a key of `message_forms.FORMS` such as "gpu_request"; "" if there is
            none.
        failure: whether the explained message is an error; False for a warning.
        line: line of the log in which the explained message begins, starting at 1.
        quote: beginning of the explained message.
        requested_bytes: size of the failed request.
        limit_bytes: capacity of the memory, or for a warning the compiler's memory budget, which may be negative.
        total_bytes: bytes of all arrays and programs that are in the memory or should be placed in it.
        figures: name -> bytes of each size in the explained message, such as "temp", "outputs", "free" and "in_use".
            For an exception also "step", "others" and "missing", and rows of the report's breakdown, such as
            "peak_residuals".
        words: name -> text of other values in the explained message, such as "allocator" and "space".
        cause_kind: the cause of the failure, a key of `causes.CAUSES`.
        cause: the cause as a sentence.
        evidence: a sentence with the sizes in the log that show the cause; "" if there are none.
        culprits: the buffers that the explained message lists, grouped by shape and operation, most bytes first. For an
            exception, the buffers of the report and the live arrays that are not arguments of the step.
        savings: name -> bytes that a remedy can free, such as "padding" or "logits", computed from the listed buffers.
        remedies: what the user can do, the cheapest remedy first.
        messages: form -> number of messages of this form in the log, including the explained message.
        match: the failure compared with the memory report of a program; None without a report.
        call: the failed call, such as "step, call 3, on NVIDIA H200"; "" for a log.
    """

    COMPUTED_KEYS: ClassVar[tuple[str, ...]] = ("happened",)

    recognized: bool = False
    kind: str = "unknown"
    form: str = ""
    failure: bool = False
    line: int = 0
    quote: str = ""
    requested_bytes: int | None = None
    limit_bytes: int | None = None
    total_bytes: int | None = None
    figures: Mapping[str, int] = dataclasses.field(default_factory=dict)
    words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cause_kind: str = "unknown"
    cause: str = causes.CAUSES["unknown"]
    evidence: str = ""
    culprits: tuple[Culprit, ...] = ()
    savings: Mapping[str, int] = dataclasses.field(default_factory=dict)
    remedies: tuple[Remedy, ...] = ()
    messages: Mapping[str, int] = dataclasses.field(default_factory=dict)
    match: ReportMatch | None = None
    call: str = ""

    def __post_init__(self) -> None:
        sizes = (self.savings.get(remedy.saves) if remedy.bytes is None else remedy.bytes for remedy in self.remedies)
        remedies = tuple(dataclasses.replace(remedy, bytes=size) for remedy, size in zip(self.remedies, sizes))
        object.__setattr__(self, "remedies", remedies)

    @property
    def place(self) -> str:
        """Where the failure was: the line of the log, or the failed call."""
        return self.call or (f"line {self.line:,} of the log" if self.recognized else "no message")

    @property
    def happened(self) -> str:
        """What happened, in one or two sentences, such as "XLA could not allocate 4.00 GiB on the device."."""
        if not self.form:
            return "The log contains no known message about memory."
        form = FORMS[self.form]
        sizes: dict[str, int | None] = {
            **self.figures,
            "requested": self.requested_bytes,
            "limit": self.limit_bytes,
            "total": self.total_bytes,
        }
        names = {name: human(size) for name, size in sizes.items() if size is not None}
        words = {name: word.upper() if name == "space" else word for name, word in self.words.items()}
        try:
            return form.sentence.format(**{**words, **names})
        except (KeyError, IndexError):
            return form.short

    def to_json(self) -> dict[str, Any]:
        """Returns the explanation as a dictionary that can be written as JSON."""
        return plain(self)
