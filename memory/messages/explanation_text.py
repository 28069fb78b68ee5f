"""Shows an explanation of an out-of-memory message or of a failed step on one screen, at any width from 80
columns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Group, RenderableType
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
from bytescope.memory.view.elements import row_name
from bytescope.memory.view.text_layout import CopyCommand, Items, Prose, blocks
from bytescope.memory.view.text_table import FigureTable, figure, fixed, label, words

# Maximum number of buffers, remedies, other messages, and rows of a drawn sharding.
MAX_CULPRITS, MAX_REMEDIES, MAX_OTHERS, MAX_DRAWN_ROWS = 4, 4, 4, 8
# Maximum characters of a buffer's name, of a path, of a buffer's origin, and of a row of a drawn sharding.
_MAX_NAME, _MAX_PATH, _MAX_ORIGIN, _MAX_DRAWING = 34, 40, 150, 76
# Maximum characters of the quoted message, of an instruction, and of an instruction for one program.
_MAX_QUOTE, _MAX_INSTRUCTION, _MAX_OWN_INSTRUCTION = 140, 330, 200
NOT_SAID = "not in the message"
_SHARDINGS = "the two shardings (numbers are devices)"
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


def render(explanation: ExplanationRecord, files: Sequence[str] = ()) -> RenderableType:
    """Returns an explanation as a rich renderable of about one screen. `files`: paths of files with more details."""
    if not explanation.recognized and not explanation.call:
        return blocks(
            Prose("No message about memory was recognized.", "bold"),
            Prose(
                "bytescope recognizes out-of-memory errors of JAX, XLA (GPU, TPU, CPU) and PyTorch, and memory "
                "warnings of JAX and of XLA's compiler. If the log contains one, its beginning may be missing: give "
                "the whole log."
            ),
        )
    shardings = draw_shardings(explanation)
    sentence, commands = next_steps(explanation)
    return blocks(
        _head(explanation),
        _where(explanation),
        _culprits(explanation),
        Group(Text(_SHARDINGS, style="bold"), *map(Text, shardings)) if shardings else None,
        _compared(explanation),
        _remedies(explanation),
        Group(Prose(sentence), *map(CopyCommand, commands)) if sentence else None,
        Items([f"written: {', '.join(files)}"], style="dim") if files else None,
    )


def _head(explanation: ExplanationRecord) -> RenderableType:
    title = (
        "out of memory" if explanation.failure and explanation.cause_kind != "no_memory_problem" else "memory message"
    )
    place = f" in {one_line(explanation.call)}" if explanation.call else f", {explanation.place}"
    head = Text.assemble((title, "bold red" if explanation.failure else "bold yellow"), place)
    if code := explanation.words.get("code"):
        head.append(f", error code {code}")
    lines = [Prose(head)]
    if explanation.call:
        lines.append(Prose(shorten(one_line(explanation.quote[: 2 * _MAX_QUOTE]), _MAX_QUOTE), "dim"))
    else:
        lines.append(Prose(one_line(explanation.happened)))
    cause = " ".join(filter(None, (explanation.cause, explanation.evidence)))
    lines.append(Prose(Text.assemble(("cause: ", "bold"), cause)))
    counts = {form: count - (form == explanation.form) for form, count in explanation.messages.items()}
    others = [f"{count} x {FORMS[form].name}" for form, count in counts.items() if count]
    if others and not explanation.call:
        more = f", {plural(len(others) - MAX_OTHERS, 'more kind')}" if len(others) > MAX_OTHERS else ""
        lines.append(Prose(f"also in the log: {', '.join(others[:MAX_OTHERS])}{more}", "dim"))
    return Group(*lines)


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


def _where(explanation: ExplanationRecord) -> RenderableType | None:
    rows = memory_rows(explanation)
    known, unknown = [row for row in rows if row[1] is not None], [name for name, size in rows if size is None]
    table = FigureTable(label("where the bytes are"), figure("bytes"))
    for name, size in known:
        table.add(name, human(size))
    missing = Prose(f"{missing_words(explanation)}: {', '.join(unknown)}", "dim") if unknown else None
    if not known:
        return missing
    return Group(table, missing) if missing else table


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


def _culprits(explanation: ExplanationRecord) -> RenderableType | None:
    """Returns a table of the first groups of alike buffers, with one more row for the others."""
    if not explanation.culprits:
        may_list = explanation.form in _LISTS_NO_MORE and explanation.cause_kind != "no_memory_problem"
        if explanation.call or not may_list:
            return None
        return Prose(
            f"largest buffers: {NOT_SAID}. XLA has not listed them for most GPU errors since jaxlib 0.4.29.", "dim"
        )
    table = FigureTable(fixed("largest buffers"), figure("bytes"), fixed("phase"), words())
    for culprit in explanation.culprits[:MAX_CULPRITS]:
        size = human(culprit.bytes) if culprit.bytes is not None else "?"
        phase = PHASES.get(culprit.phase) or ("" if culprit.identity in ("chunk", "other", "resharded") else "unknown")
        name = shorten(one_line(culprit_name(culprit)), _MAX_NAME)
        table.add(name, size, phase, shorten(one_line(culprit_origin(culprit)), _MAX_ORIGIN))
    rest = explanation.culprits[MAX_CULPRITS:]
    if rest:
        total = human(sum(culprit.bytes or 0 for culprit in rest))
        table.add(f"{sum(culprit.count for culprit in rest)} more", total, style="dim")
    return table


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


def _compared(explanation: ExplanationRecord) -> RenderableType | None:
    match = shown_match(explanation)
    if match is None:
        return None
    table = FigureTable(label("compared with the report"), figure("report"), figure("log"))
    for name, predicted, logged in compared_rows(match):
        table.add(name, human(predicted), human(logged) if logged is not None else "")
    lines: list[RenderableType] = [table, Prose(f"{one_line(match.title)}: {one_line(match.sentence)}")]
    for buffer in match.buffers[:MAX_CULPRITS]:
        where = buffer.source or buffer.module or "source line unknown"
        lines.append(
            Prose(f"{buffer.count} x {buffer.shape} at the program's peak: {buffer.category}, {one_line(where)}", "dim")
        )
    return Group(*lines)


def _remedies(explanation: ExplanationRecord) -> RenderableType | None:
    if not explanation.remedies:
        return None
    table = FigureTable(fixed(), words(style="", under=False), gap=1)
    for number, remedy in enumerate(explanation.remedies[:MAX_REMEDIES], 1):
        saved = remedy_saving(explanation, remedy)
        flags = f"{safe(remedy.flags)}: " if remedy.flags else ""
        most = _MAX_OWN_INSTRUCTION if remedy.bytes is not None else _MAX_INSTRUCTION
        instruction = shorten(one_line(remedy.words[: 2 * most]), most)
        table.add(f"{number}.", Text.assemble(flags, instruction, (f" {saved}" if saved else "", "bold")))
    return Group(Text("what to do, the cheapest first", style="bold"), table)


def remedy_saving(explanation: ExplanationRecord, remedy: Remedy, short: bool = False) -> str:
    """Returns a sentence with the bytes that a remedy can free, "" if they are unknown. `short`: only the bytes."""
    size, missing = remedy.bytes, explanation.figures.get("missing")
    if not size:
        return ""
    if short:
        return human(size)
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
