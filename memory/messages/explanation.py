"""Explains a log with an out-of-memory message: `explain(text)` returns an `Explanation`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.messages import causes, log_text
from bytescope.memory.messages.culprits import Culprit, describe
from bytescope.memory.messages.message_forms import FORMS, KINDS
from bytescope.memory.messages.message_readers import read_passage
from bytescope.memory.messages.message_record import Message
from bytescope.memory.messages.remedies import Remedy, remedies_for
from bytescope.memory.units import human

# Kind of an explanation without any message.
UNKNOWN = "unknown"
# Maximum bytes by which an allocator rounds a request up.
_ROUNDING = 512
# Figures of these kinds do not count if another kind of message is in the log.
_WARNINGS = ("spmd", "donation")


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a log says about memory. All sizes are bytes on one device; None if the log does not contain them.

    Fields:
        recognized: whether the log contains a message about memory.
        kind: the kind of the richest message, one of `message_forms.KINDS`; "unknown" if there is none.
        form: the form of the explained message, a key of `message_forms.FORMS`; "" if there is none.
        failure: whether the explained message is an error; False for a warning.
        line: number of the message's line in the log, starting at 1.
        quote: beginning of the message.
        requested_bytes: what the failed allocation asked for.
        limit_bytes: the printed capacity of the memory, or the budget of the compiler's pass; may be negative.
        total_bytes: bytes of all that is or would be in the memory.
        figures: all other sizes in the message, such as "temp", "outputs", "free" and "in_use".
        words: names in the message, such as "allocator" and "space".
        cause_kind: the cause, a key of `causes.CAUSES`. cause: the same in a sentence. evidence: what in the message
            shows it, "" if nothing more does.
        culprits: the listed buffers, the ones with the most bytes first.
        savings: name of a saving -> the bytes that the listed buffers show for it.
        remedies: what to do, the cheapest first.
        messages: number of messages of each form in the log, the explained form included.
    """

    recognized: bool = False
    kind: str = UNKNOWN
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

    @property
    def happened(self) -> str:
        """What happened, in one or two sentences."""
        if not self.form:
            return "The log contains no message about memory that is known here."
        form = FORMS[self.form]
        sizes: dict[str, int | None] = {
            **self.figures,
            "requested": self.requested_bytes,
            "limit": self.limit_bytes,
            "total": self.total_bytes,
        }
        names = {name: human(size) for name, size in sizes.items() if size is not None}
        try:
            return form.sentence.format(**{**self.words, **names})
        except (KeyError, IndexError):
            return form.short

    def to_json(self) -> dict[str, Any]:
        """Returns the explanation as JSON values."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **own,
            "happened": self.happened,
            "figures": dict(self.figures),
            "words": dict(self.words),
            "savings": dict(self.savings),
            "messages": dict(self.messages),
            "culprits": [{**dataclasses.asdict(culprit), "layers": list(culprit.layers)} for culprit in self.culprits],
            "remedies": [
                {"words": remedy.words, "uses": list(remedy.uses), "bytes": self.savings.get(remedy.saves)}
                for remedy in self.remedies
            ],
        }

    def __str__(self) -> str:
        from bytescope.memory.messages import explanation_text
        from bytescope.memory.view.console import plain_text, prompt_width

        return plain_text(explanation_text.render(self), prompt_width())

    def to_html(self) -> str:
        """Returns the explanation as an HTML page that opens offline."""
        from bytescope.memory.messages import explanation_page

        return explanation_page.render(self)


def explain(text: str | bytes) -> Explanation:
    """Explains the first failed allocation in a log of any size. Never raises.

    text: the whole log, as text or as the bytes of its file. Prefixes of loggers and launchers, colours, quotation
    marks, wrapped lines and cut ends are accepted.
    """
    messages = find_messages(log_text.as_bytes(text))
    if not messages:
        return Explanation()
    kind = min((FORMS[message.form].kind for message in messages), key=KINDS.index)
    primary = _explained_message(messages)
    figures = _headline_figures(messages, kind)
    culprits = describe(primary.buffers, primary.form)
    cause, evidence = causes.decide(messages, primary, figures, culprits)
    return Explanation(
        recognized=True,
        kind=kind,
        form=primary.form,
        failure=FORMS[primary.form].failure,
        line=primary.line,
        quote=primary.quote,
        requested_bytes=figures["requested"],
        limit_bytes=figures["limit"],
        total_bytes=figures["total"],
        figures=primary.figures,
        words=primary.words,
        cause_kind=cause,
        cause=causes.sentence(cause, primary.form),
        evidence=evidence,
        culprits=culprits,
        savings=_savings(primary, culprits),
        remedies=remedies_for(cause, primary.form, primary.words.get("space", "")),
        messages=dict(Counter(message.form for message in messages)),
    )


def find_messages(log: bytes) -> list[Message]:
    """Returns the messages about memory of a log, in its order."""
    messages: list[Message] = []
    for passage in log_text.find_passages(log):
        readings = [read_passage(text) for text in passage.texts()]
        best = max(readings, key=_content)
        text = passage.texts()[0] if best is readings[0] else ""
        for message in best:
            line = passage.line_at(text, message.position) if text else passage.lines[0].number
            messages.append(dataclasses.replace(message, line=line))
    return sorted(messages, key=lambda message: message.line)


def _content(messages: Sequence[Message]) -> tuple[int, int]:
    richest = min((KINDS.index(FORMS[message.form].kind) for message in messages), default=len(KINDS))
    known = sum(
        len(message.figures)
        + sum((buffer.bytes is not None) + (buffer.array is not None) for buffer in message.buffers)
        for message in messages
    )
    return -richest, known


def _explained_message(messages: Sequence[Message]) -> Message:
    """Returns the first message of the richest kind among the failures; among the warnings if nothing failed. A message
    without figures is passed over if a later one of its form has some."""
    failures = [message for message in messages if causes.is_failure(message)] or list(messages)
    kind = min((FORMS[message.form].kind for message in failures), key=KINDS.index)
    of_kind = [message for message in failures if FORMS[message.form].kind == kind]
    return next((message for message in of_kind if message.figures or message.buffers), of_kind[0])


def _headline_figures(messages: Sequence[Message], kind: str) -> dict[str, int | None]:
    """Returns "requested", "limit" and "total" of a log: the first of each in its messages. Exact bytes are preferred
    to the rounded bytes of an allocator."""
    counted = [
        message for message in messages if FORMS[message.form].kind not in _WARNINGS or FORMS[message.form].kind == kind
    ]
    if kind != "torch_cuda":
        counted = [message for message in counted if message.form != "torch_cuda"]
    out: dict[str, int | None] = {}
    for name in ("requested", "limit", "total"):
        out[name] = next((message.figures[name] for message in counted if name in message.figures), None)
    exact = [
        message.figures["requested_exact"]
        for message in counted
        if "requested_exact" in message.figures and message.form in ("gpu_request", "gpu_buffers", "picker")
    ]
    rounded = out["requested"]
    first = next((message for message in counted if "requested" in message.figures), None)
    if exact and rounded is not None and first is not None and first.form == "bfc":
        out["requested"] = next((size for size in exact if 0 <= rounded - size < _ROUNDING), exact[0])
    return out


def _savings(primary: Message, culprits: Sequence[Culprit]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for culprit in culprits:
        size = culprit.bytes or 0
        if culprit.identity in ("stack", "saved", "norm") or (
            culprit.identity == "scores" and culprit.phase == "forward"
        ):
            sizes["saved"] += size
        if culprit.identity in ("scores", "logits"):
            sizes[culprit.identity] += size
        sizes["padding"] += round(size * (1 - 1 / culprit.padding))
        if culprit.identity == "constant":
            sizes["constants"] += size
    own = primary.figures
    if own.get("padded", 0) > own.get("unpadded", 0):
        sizes["padding"] = own["padded"] - own["unpadded"]
    if "outputs" in own and "parameters" in own:
        sizes["outputs"] = min(own["outputs"], own["parameters"])
    if "whole" in own and "shard" in own:
        sizes["whole"] = own["whole"] - own["shard"]
    return {name: size for name, size in sizes.items() if size > 0}
