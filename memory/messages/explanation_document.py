"""Shows an explanation of an out-of-memory message or of a failed step: one screen at any width from 80 columns, or a
page with a bar for each buffer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.text import Text

from bytescope.memory.hlo.sharding_text import parse_sharding
from bytescope.memory.messages.culprits import Culprit
from bytescope.memory.messages.explanation_record import ExplanationRecord
from bytescope.memory.messages.message_forms import FORMS
from bytescope.memory.messages.remedies import Remedy
from bytescope.memory.messages.report_match import ReportMatch
from bytescope.memory.records.report_record import ROWS as BREAKDOWN
from bytescope.memory.units import human, plural
from bytescope.memory.view.console import one_line, safe, shorten
from bytescope.memory.view.document import Bars, Card, Commands, DocumentPart, Drawing, Paragraph, ResultDocument, Rows
from bytescope.memory.view.elements import RankedBar, figure, row_name
from bytescope.memory.view.table_model import PAGE, TERMINAL, ColumnView, TableView

# Maximum number of buffers, remedies, other messages, and rows of a drawn sharding.
MAX_CULPRITS, MAX_REMEDIES, MAX_OTHERS, MAX_DRAWN_ROWS = 4, 4, 4, 8
# Maximum number of bars, and of rows in the table of buffers, on a page.
MAX_BARS = 30
# Maximum characters of a buffer's name, of a path, of a buffer's origin, and of a row of a drawn sharding.
_MAX_NAME, _MAX_PATH, _MAX_ORIGIN, _MAX_DRAWING = 34, 40, 150, 76
# Maximum characters of the quoted message, of an instruction, and of an instruction for one program.
_MAX_QUOTE, _MAX_INSTRUCTION, _MAX_OWN_INSTRUCTION = 140, 330, 200
NOT_SAID = "not in the message"
# Phase -> its name on the screen.
PHASES = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recomputed",
    "optimizer": "optimizer",
    "argument": "argument",
    "output": "result",
    "": "",
}
# Name in `ExplanationRecord.figures` -> title of the row in the table of sizes, in the order of the rows.
ROWS = {
    "card": "memory of the GPU",
    "limit": "limit",
    "in_use": "in use before the request",
    "in_use_now": "in use",
    "peak_in_use": "peak in use",
    "free": "free",
    "largest": "largest free block",
    "largest_request": "largest request so far",
    "step": "this program, predicted",
    "parameters": "this program: arguments",
    "arguments": "this program: arguments",
    "outputs": "this program: results",
    "temp": "this program: temporary",
    "temp_fragmentation": "unused gaps in temporary memory",
    "constants": "this program: constants",
    **{f"peak_{row}": f"this program: {row_name(row)}" for row in BREAKDOWN},
    "others": "other arrays",
    "heap": "arrays on the device",
    "reserved": "reserved by the runtime",
    "process": "used by this process",
    "unused": "reserved by PyTorch, not in use",
    "shard": "one shard of the tensor",
    "whole": "the whole tensor",
    "before": "before rematerialization",
}
# Forms of messages that older versions of XLA printed with a list of buffers.
_LISTS_NO_MORE = ("gpu_request", "gpu_buffers", "gpu_platform", "bfc")
# A file of Python's own library, such as contextlib.py around a named scope.
_STANDARD_LIBRARY = re.compile(r"/lib(?:64)?/python3\.\d+/(?!site-packages|dist-packages)")
_LIMIT_NAMES = {
    "remat_warning": "budget of the compiler",
    "bfc": "limit of the pool",
    "allocator_other": "limit",
    "tpu_hbm": "capacity",
}
_TOTAL_NAMES = {
    "gpu_buffers": "this program in total",
    "tpu_hbm": "needed in total",
    "remat_warning": "temporary memory and results",
    "donation": "bytes in total",
    "spmd": "the whole tensor",
}


NOTES = (
    "Sizes with two decimals are rounded by XLA or libtpu. Units are binary: 1 GiB is 2**30 bytes.",
    "The kind of tensor is a guess from the name of the operation, the shape and the dtype. The message does not "
    "contain it.",
    "XLA lists at most 15 buffers on a GPU and 20 on a TPU, the largest first. Newer versions list none on a GPU.",
)


def document(explanation: ExplanationRecord, files: Sequence[str] = ()) -> ResultDocument:
    """Returns the document of an explanation, about one screen on the terminal. `files`: paths of files with more
    details."""
    recognized = explanation.recognized or bool(explanation.call)
    head = _head(explanation) if recognized else _UNRECOGNIZED
    written = Paragraph(f"written: {', '.join(files)}" if files else "", "dim", only=TERMINAL)
    return ResultDocument(
        [Card("", head), *cards(explanation), Card("", [written])],
        title="out of memory · explained",
        heading=explanation.happened,
        where=explanation.place,
        facts=[_cause(explanation)],
        figures=[
            figure(name, size)
            for name, size in (
                ("requested", explanation.requested_bytes),
                ("limit", explanation.limit_bytes),
                ("in total", explanation.total_bytes),
            )
            if size is not None
        ],
        notes=NOTES,
    )


def cards(explanation: ExplanationRecord) -> list[Card]:
    """Returns the cards of an explanation, which the page of a report after a failure shows too."""
    source = "the message" if not explanation.call else "the report, the allocator and the live arrays"
    sentence, commands = next_steps(explanation)
    return [
        Card("Where the bytes are", _memory(explanation), f"Bytes of one device, from {source}."),
        Card("The largest buffers", _buffers(explanation), f"From {source}, equal ones in one row.", "explained"),
        Card("The two shardings: each cell is a piece, with its devices", [Drawing(draw_shardings(explanation))]),
        Card("Compared with the report", _comparison(explanation)),
        Card("What to do, the cheapest first", [_remedies(explanation)]),
        Card("What to run next", [Paragraph(sentence), Commands(commands)]),
    ]


_UNRECOGNIZED = (
    Paragraph("No message about memory was recognized.", "strong"),
    Paragraph(
        "bytescope recognizes out-of-memory errors of JAX, XLA (GPU, TPU, CPU) and PyTorch, and memory warnings of JAX "
        "and of XLA's compiler. If the log contains one, its beginning may be missing: give the whole log."
    ),
)


def _cause(explanation: ExplanationRecord) -> str:
    return " ".join(filter(None, (explanation.cause, explanation.evidence)))


def _head(explanation: ExplanationRecord) -> list[Paragraph]:
    """Returns the first lines on the terminal; a page has the same texts at its top."""
    title = (
        "out of memory" if explanation.failure and explanation.cause_kind != "no_memory_problem" else "memory message"
    )
    place = f" in {one_line(explanation.call)}" if explanation.call else f", {explanation.place}"
    head = Text.assemble((title, "bold red" if explanation.failure else "bold yellow"), place)
    if code := explanation.words.get("code"):
        head.append(f", error code {code}")
    lines = [Paragraph(head, only=TERMINAL)]
    if explanation.call:
        quote = shorten(one_line(explanation.quote[: 2 * _MAX_QUOTE]), _MAX_QUOTE)
        lines.append(Paragraph(quote, "dim", only=TERMINAL))
    else:
        lines.append(Paragraph(one_line(explanation.happened), only=TERMINAL))
    lines.append(Paragraph(Text.assemble(("cause: ", "bold"), _cause(explanation)), only=TERMINAL))
    counts = {form: count - (form == explanation.form) for form, count in explanation.messages.items()}
    others = [f"{count} x {FORMS[form].name}" for form, count in counts.items() if count]
    if others and not explanation.call:
        more = f", {plural(len(others) - MAX_OTHERS, 'more kind')}" if len(others) > MAX_OTHERS else ""
        lines.append(Paragraph(f"also in the log: {', '.join(others[:MAX_OTHERS])}{more}", "dim", only=TERMINAL))
    return lines


def memory_rows(explanation: ExplanationRecord) -> list[tuple[str, int | None]]:
    """Returns the rows (name, bytes) of the table of sizes: first the known sizes, then the sizes that the log does not
    contain, with None for their bytes."""
    if not explanation.form and not explanation.call:
        return []
    own = explanation.figures
    kind = FORMS[explanation.form].kind if explanation.form else ""
    rows: dict[str, int | None] = {}
    if explanation.requested_bytes is not None:
        rows["requested"] = explanation.requested_bytes
    for name, title in ROWS.items():
        size = own.get(name)
        if name == "limit":  # a limit that is not in this message is from a compiler warning
            size = explanation.limit_bytes
            title = title if explanation.call else _LIMIT_NAMES.get(kind if name in own else "remat_warning", title)
        is_uncounted = size == 0 and (kind == "tpu_hbm" or name == "largest")
        is_limit = name == "card" and size == explanation.limit_bytes
        if size is not None and not is_uncounted and not is_limit:
            rows[title] = size
    if explanation.total_bytes is not None and explanation.total_bytes != own.get("in_use"):
        title = _TOTAL_NAMES.get(kind, "needed in total")
        rows[title if "total" in own else "temporary memory and results (warning)"] = explanation.total_bytes
    if kind in ("donation", "spmd") or explanation.cause_kind == "on_chip_memory":
        return list(rows.items())
    is_warning = kind == "remat_warning"
    known = {
        "size of the request": explanation.requested_bytes is not None or is_warning,
        "limit": explanation.limit_bytes is not None,
        "this program": is_warning or any(name.startswith("this program") or "total" in name for name in rows),
        "other arrays": "in_use" in own or "heap" in own or "others" in own,
        "memory outside the pool": "card" in own or kind == "tpu_hbm" or bool(explanation.call),
    }
    return [*rows.items(), *((name, None) for name, is_known in known.items() if not is_known)]


def missing_words(explanation: ExplanationRecord) -> str:
    """Returns the words that are printed before the names of the unknown sizes: "not in the message", or "unknown" for
    a failed call of this process."""
    return "unknown" if explanation.call else NOT_SAID


MEMORY_COLUMNS = (
    ColumnView("name", "what", path="0", short="where the bytes are"),
    ColumnView("bytes", "bytes", "bytes", path="1"),
)


def _memory(explanation: ExplanationRecord) -> list[DocumentPart]:
    rows = memory_rows(explanation)
    unknown = [name for name, size in rows if size is None]
    return [
        Rows(TableView(MEMORY_COLUMNS, [row for row in rows if row[1] is not None]), id="explained-memory"),
        Paragraph(f"{missing_words(explanation)}: {', '.join(unknown)}" if unknown else "", "dim"),
    ]


def culprit_name(culprit: Culprit) -> str:
    """Returns the number, shape and layers of buffers that are alike, such as "3 x float32[8,1024], layers 1 to 3". If
    the buffers are blocks of a memory pool, returns their number and size."""
    times = f"{culprit.count} x " if culprit.count > 1 else ""
    if culprit.identity == "chunk":
        return f"{times}{human((culprit.bytes or 0) / culprit.count)}"
    return f"{times}{culprit.shape or 'shape ' + NOT_SAID}"


def culprit_origin(culprit: Culprit) -> str:
    """Returns where buffers that are alike come from, such as "logits over the vocabulary; loss dot_general; net.py:7":
    the probable kind of tensor, the layers, the model component with the operation, and the source line."""
    if culprit.identity in ("", "chunk", "other"):
        return culprit.what
    padding = f", padded {culprit.padding:.3g} times" if culprit.padding >= 1.05 else ""
    layers = ""
    if len(culprit.layers) > 1:
        layers = f"layers {culprit.layers[0]} to {culprit.layers[-1]}"
    elif culprit.layers:
        layers = f"layer {culprit.layers[0]}"
    where = " ".join(filter(None, (culprit.component, culprit.operation)))
    parts = culprit.source.rsplit("/", 3)
    source = "/".join(["…", *parts[1:]]) if len(parts) == 4 and len(culprit.source) > _MAX_PATH else culprit.source
    if _STANDARD_LIBRARY.search(culprit.source):
        source = "source line in Python's library"
    elif not source and culprit.phase not in ("argument", "output"):
        source = "source line unknown" if culprit.category else f"source line {NOT_SAID}"
    return "; ".join(filter(None, (f"{culprit.what}{padding}", layers, where, source)))


def _phase(culprit: Culprit) -> str:
    unphased = culprit.identity in ("chunk", "other", "resharded")
    return PHASES.get(culprit.phase) or ("" if unphased else "unknown")


BUFFER_COLUMNS = (
    ColumnView(
        "name",
        "largest buffers",
        "text",
        read=lambda culprit: shorten(one_line(culprit_name(culprit)), _MAX_NAME),
        only=TERMINAL,
    ),
    ColumnView("shape", "shape", read=lambda culprit: culprit.shape or NOT_SAID, only=PAGE),
    ColumnView("count", "times", "count", only=PAGE),
    ColumnView("bytes", "bytes", "bytes", absent="?"),
    ColumnView("phase", "phase", "text", read=_phase),
    ColumnView(
        "origin",
        kind="words",
        read=lambda culprit: shorten(one_line(culprit_origin(culprit)), _MAX_ORIGIN),
        only=TERMINAL,
    ),
    ColumnView("component", "component", "words", only=PAGE),
    ColumnView("layers", "layers", "words", read=lambda culprit: ", ".join(map(str, culprit.layers)), only=PAGE),
    ColumnView("operation", "operation", "words", only=PAGE),
    ColumnView("what", "probable kind of tensor", "words", only=PAGE),
    ColumnView("source", "source", "words", read=lambda culprit: culprit.source or NOT_SAID, css="where", only=PAGE),
)


def _buffers(explanation: ExplanationRecord) -> list[DocumentPart]:
    """Returns bars and a table of the groups of alike buffers, and the sum of those that are left out."""
    found = explanation.culprits
    if not found:
        may_list = explanation.form in _LISTS_NO_MORE and explanation.cause_kind != "no_memory_problem"
        none = f"largest buffers: {NOT_SAID}. XLA has not listed them for most GPU errors since jaxlib 0.4.29."
        return [Paragraph(none, "dim", only=TERMINAL)] if may_list and not explanation.call else []
    most = max(culprit.bytes or 0 for culprit in found) or 1
    bars = [
        RankedBar(
            culprit_name(culprit),
            culprit_origin(culprit),
            culprit.bytes,
            100 * culprit.bytes / most,
            culprit.category or ("workspace" if culprit.identity != "other" else "unattributed"),
        )
        for culprit in found[:MAX_BARS]
        if culprit.bytes
    ]
    limits = {TERMINAL: MAX_CULPRITS, PAGE: MAX_BARS}
    return [
        Bars(bars),
        Rows(TableView(BUFFER_COLUMNS, found), limits, _rest, id="explained-buffers", css="sortable"),
    ]


def _rest(culprits: Sequence[Culprit]) -> str:
    total = human(sum(culprit.bytes or 0 for culprit in culprits))
    return f"and {sum(culprit.count for culprit in culprits)} more, {total}"


def draw_shardings(explanation: ExplanationRecord) -> list[str]:
    """Returns lines of text that draw the old and the new sharding of a tensor, if the explained message is XLA's
    warning that resharding needs the whole tensor ("full rematerialization"); [] for other messages."""
    source, target = (parse_sharding(explanation.words.get(name, "")) for name in ("source", "target"))
    if explanation.form != "spmd" or source is None or target is None:
        return []
    lines = []
    for name, sharding in (("from", source), ("to", target)):
        lines.append(f"{name}: {sharding.sentence()}")
        lines += [f"  {shorten(line, _MAX_DRAWING)}" for line in sharding.drawing()[:MAX_DRAWN_ROWS]]
    return lines


def compared_rows(match: ReportMatch) -> list[tuple[str, int, int | None]]:
    """Returns rows (name, bytes in the report, bytes in the log): the predicted total, with None for the log, and each
    size that both the report and the log contain."""
    return [("predicted in total", match.predicted_bytes, None), *match.rows]


def shown_match(explanation: ExplanationRecord) -> ReportMatch | None:
    """Returns the comparison of the failure with the report of a program, if it is to be shown. Returns None for a
    failed call of this process, because the explanation of such a call is made from the report already."""
    return None if explanation.call else explanation.match


COMPARED_COLUMNS = (
    ColumnView("name", "what", path="0", short="compared with the report"),
    ColumnView("report", "report", "bytes", path="1"),
    ColumnView("log", "log", "bytes", path="2"),
)


def _comparison(explanation: ExplanationRecord) -> list[DocumentPart]:
    match = shown_match(explanation)
    if match is None:
        return []
    lines = [Paragraph(f"{one_line(match.title)}: {one_line(match.sentence)}")]
    for buffer in match.buffers[:MAX_CULPRITS]:
        where = one_line(buffer.source or buffer.module or "source line unknown")
        lines.append(
            Paragraph(f"{buffer.count} x {buffer.shape} at the program's peak: {buffer.category}, {where}", "dim")
        )
    return [Rows(TableView(COMPARED_COLUMNS, compared_rows(match)), id="explained-compared"), *lines]


def _remedies(explanation: ExplanationRecord) -> Rows:
    """Returns the table of remedies: what the user can do, the command-line flags that do it, and the maximum bytes
    that this frees."""

    def number(remedy: Remedy) -> str:
        return f"{explanation.remedies.index(remedy) + 1}."

    def instruction(remedy: Remedy) -> Text:
        saved = remedy_saving(explanation, remedy)
        flags = f"{safe(remedy.flags)}: " if remedy.flags else ""
        most = _MAX_OWN_INSTRUCTION if remedy.bytes is not None and not remedy.saves else _MAX_INSTRUCTION
        words = shorten(one_line(remedy.words[: 2 * most]), most)
        return Text.assemble(flags, words, (f" {saved}" if saved else "", "bold"))

    columns = (
        ColumnView("number", kind="text", read=number, only=TERMINAL),
        ColumnView("instruction", kind="sentence", terminal=instruction, only=TERMINAL),
        ColumnView("words", "what to do", only=PAGE),
        ColumnView("flags", "flags", "words", only=PAGE),
        ColumnView("saves", "frees up to", "bytes", path="bytes", skip_zero=True, only=PAGE),
    )
    limits = {TERMINAL: MAX_REMEDIES}
    return Rows(TableView(columns, explanation.remedies), limits, lambda remedies: "", id="explained-remedies")


def remedy_saving(explanation: ExplanationRecord, remedy: Remedy) -> str:
    """Returns a sentence with the bytes that a remedy can free, "" if they are unknown."""
    size, missing = remedy.bytes, explanation.figures.get("missing")
    if not size:
        return ""
    if not explanation.call:
        return f"Frees up to {human(size)} of the listed buffers."
    return f"Up to {human(size)}{', which may be enough' if missing and size >= missing else ''}."


def next_steps(explanation: ExplanationRecord) -> tuple[str, tuple[str, ...]]:
    """Returns (sentence, shell commands) that tell the user how to get the report of the program, which names every
    buffer. Returns ("", ()) if a report was given already or cannot help."""
    if (
        explanation.cause_kind in ("no_memory_problem", "host_memory", "on_chip_memory")
        or explanation.form == "torch_cuda"
    ):
        return "", ()
    if explanation.match is not None:
        return "", ()
    return (
        "To know exactly, compile the step for this device without running it, or read XLA's dump of the failed job. "
        "The report names every buffer with its line of code:",
        (
            "bytescope report my_file.py:program TARGET",
            'XLA_FLAGS="--xla_dump_to=dump --xla_dump_hlo_as_proto" python train.py',
            "bytescope report dump",
        ),
    )
