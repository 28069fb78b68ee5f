"""Explains a log with an out-of-memory message: `explain(text)` returns an `Explanation`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from bytescope.memory.devices.chips import CHIPS, GPU_PLATFORMS
from bytescope.memory.devices.platform import JAX_FRACTION
from bytescope.memory.messages import causes, explanation_document, log_text
from bytescope.memory.messages.culprits import Culprit, describe
from bytescope.memory.messages.explanation_record import ExplanationRecord
from bytescope.memory.messages.message_forms import FORMS, KINDS
from bytescope.memory.messages.message_readers import read_passage
from bytescope.memory.messages.message_record import Message
from bytescope.memory.messages.remedies import remedies_for
from bytescope.memory.messages.report_match import match_report
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.view import draw_page, draw_terminal
from bytescope.memory.view.console import plain_text, prompt_width

# Maximum bytes by which an allocator rounds a request up.
_ROUNDING = 512
# Sizes in messages of these kinds are ignored if the log contains a message of another kind.
_WARNINGS = ("spmd", "donation")


class Explanation(ExplanationRecord):
    """An explanation of a log, as `memory.explain` returns it. `print` shows it on one screen."""

    def __str__(self) -> str:
        return plain_text(draw_terminal.draw(explanation_document.document(self)), prompt_width())

    def to_html(self) -> str:
        """Returns the explanation as an HTML page that opens offline, with a bar for each listed buffer."""
        return draw_page.draw(explanation_document.document(self))


def explain(text: str | bytes, report: ReportRecord | None = None) -> Explanation:
    """Explains the first failed allocation in a log of any size. No text raises an error.

    text: the whole log, as text or as the bytes of its file. Prefixes of loggers and launchers, colours, quotation
    marks and wrapped lines are accepted, and the beginning or end of a message may be missing.
    report: memory report of the program that ran. The failure is compared with this report, and source lines that are
    missing in the message are taken from it.
    """
    messages = find_messages(log_text.as_bytes(text))
    if not messages:
        return Explanation()
    kind = min((FORMS[message.form].kind for message in messages), key=KINDS.index)
    primary = _explained_message(messages)
    figures = _headline_figures(messages, kind)
    culprits = describe(primary.buffers, primary.form)
    cause, evidence = causes.decide(messages, primary, figures, culprits)
    savings = _savings(primary, culprits)
    match = None
    if report is not None:
        match = match_report(report, primary.form, cause, {**primary.figures, **figures}, culprits)
        sources = {buffer.shape: buffer.source for buffer in match.buffers}
        culprits = tuple(
            dataclasses.replace(culprit, source=culprit.source or sources.get(culprit.shape, ""))
            for culprit in culprits
        )
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
        savings=savings,
        remedies=remedies_for(
            cause, primary.form, primary.words.get("space", ""), savings, _has_default_pool(messages)
        ),
        messages=dict(Counter(message.form for message in messages)),
        match=match,
    )


def find_messages(log: bytes) -> list[Message]:
    """Returns the messages about memory in a log, in the order of the log."""
    messages: list[Message] = []
    for passage in log_text.find_passages(log):
        readings = [read_passage(text) for text in passage.texts()]
        best = max(readings, key=_rate_content)
        text = passage.texts()[0] if best is readings[0] else ""
        for message in best:
            line = passage.line_at(text, message.position) if text else passage.lines[0].number
            messages.append(dataclasses.replace(message, line=line))
    return sorted(messages, key=lambda message: message.line)


def _rate_content(messages: Sequence[Message]) -> tuple[int, int]:
    best_kind = min((KINDS.index(FORMS[message.form].kind) for message in messages), default=len(KINDS))
    known = sum(
        len(message.figures)
        + sum((buffer.bytes is not None) + (buffer.array is not None) for buffer in message.buffers)
        for message in messages
    )
    return -best_kind, known


def _explained_message(messages: Sequence[Message]) -> Message:
    """Returns the message that is explained: the first error of the most informative kind (`KINDS`), or the first
    warning of this kind if the log contains no error. A message without sizes and buffers is skipped if a later message
    of the same kind contains some."""
    failures = [message for message in messages if FORMS[message.form].failure] or list(messages)
    kind = min((FORMS[message.form].kind for message in failures), key=KINDS.index)
    of_kind = [message for message in failures if FORMS[message.form].kind == kind]
    return next((message for message in of_kind if message.figures or message.buffers), of_kind[0])


def _headline_figures(messages: Sequence[Message], kind: str) -> dict[str, int | None]:
    """Returns the bytes "requested", "limit" and "total" of a log: for each name, the first size in the messages, None
    if no message contains one. A request that an allocator rounded up is replaced by the exact request if another
    message contains it.

    kind: the most informative kind (`KINDS`) among the messages.
    """
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


def _has_default_pool(messages: Sequence[Message]) -> bool:
    """Returns whether a message states a limit of JAX's pool that is 0.75 of the memory of a known GPU."""
    limits = [message.figures.get("limit", 0) for message in messages if message.form in _POOL_FORMS]
    whole = [limit / JAX_FRACTION.value for limit in limits]
    totals = [chip.device_memory_bytes for chip in CHIPS.values() if chip.platform in GPU_PLATFORMS]
    return any(abs(size / total - 1) < _TOTALS_DIFFER for size in whole for total in totals)


# Messages whose limit is the size of the pool.
_POOL_FORMS = ("bfc", "bfc_dump", "remat_budget")
# Drivers report totals of one GPU that differ by up to this fraction (measured: 0.001).
_TOTALS_DIFFER = 0.003


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
    if "unpadded" in own and own.get("padded", 0) > own["unpadded"]:
        sizes["padding"] = own["padded"] - own["unpadded"]
    if "outputs" in own and "parameters" in own:
        sizes["outputs"] = min(own["outputs"], own["parameters"])
    if "whole" in own and "shard" in own:
        sizes["whole"] = own["whole"] - own["shard"]
    return {name: size for name, size in sizes.items() if size > 0}
