"""Shows an explanation of an out-of-memory message on one screen, at any width from 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.messages.culprits import Culprit
from bytescope.memory.messages.explanation_record import ExplanationRecord
from bytescope.memory.messages.message_forms import FORMS
from bytescope.memory.messages.report_match import ReportMatch
from bytescope.memory.messages.sharding_text import parse_sharding
from bytescope.memory.units import human
from bytescope.memory.view.console import one_line, shorten
from bytescope.memory.view.text_layout import CopyCommand, Prose, blocks
from bytescope.memory.view.text_table import FigureTable, figure, fixed, label, words

# Maximum number of buffers, remedies, other messages, and rows of a drawn sharding.
MAX_CULPRITS, MAX_REMEDIES, MAX_OTHERS, MAX_DRAWN_ROWS = 4, 4, 4, 8
# Maximum characters of a buffer's name, of a path, of a buffer's origin, and of a row of a drawn sharding.
_MAX_NAME, _MAX_PATH, _MAX_ORIGIN, _MAX_DRAWING = 34, 40, 150, 76
NOT_SAID = "not in the message"
# Phase -> its name on the screen.
PHASES = {"forward": "forward", "backward": "backward", "recompute": "recomputed", "optimizer": "optimizer", "": ""}
# Name in `Message.figures` -> title of the row in the table of sizes, in the order of the rows.
ROWS = {
    "card": "memory of the GPU",
    "limit": "limit",
    "in_use": "in use before the request",
    "free": "free",
    "largest": "largest free block",
    "parameters": "this program: arguments",
    "arguments": "this program: arguments",
    "outputs": "this program: results",
    "temp": "this program: temporary",
    "constants": "this program: constants",
    "temp_fragmentation": "unused gaps in temporary memory",
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


def render(explanation: ExplanationRecord) -> RenderableType:
    """Returns an explanation as a rich renderable of about one screen."""
    if not explanation.recognized:
        return blocks(
            Prose("No message about memory was recognized.", "bold"),
            Prose(
                "bytescope recognizes out-of-memory errors of JAX, XLA (GPU, TPU, CPU) and PyTorch, and memory "
                "warnings of JAX and of XLA's compiler. If the log contains one, its beginning may be missing: give "
                "the whole log."
            ),
        )
    return blocks(
        _head(explanation),
        _where(explanation),
        _culprits(explanation),
        _resharding(explanation),
        _compared(explanation),
        _remedies(explanation),
        _next(explanation),
    )


def _head(explanation: ExplanationRecord) -> RenderableType:
    title = (
        "out of memory" if explanation.failure and explanation.cause_kind != "no_memory_problem" else "memory message"
    )
    head = Text.assemble(
        (title, "bold red" if explanation.failure else "bold yellow"), f", line {explanation.line:,} of the log"
    )
    if code := explanation.words.get("code"):
        head.append(f", error code {code}")
    cause = Text.assemble(("cause: ", "bold"), " ".join(filter(None, (explanation.cause, explanation.evidence))))
    return Group(Prose(head), Prose(one_line(explanation.happened)), Prose(cause), *_others(explanation))


def _others(explanation: ExplanationRecord) -> Iterable[RenderableType]:
    others = []
    for form, count in explanation.messages.items():
        count -= form == explanation.form
        if count:
            others.append(f"{count} x {FORMS[form].name}")
    if others:
        more = f", {len(others) - MAX_OTHERS} more kinds" if len(others) > MAX_OTHERS else ""
        yield Prose(f"also in the log: {', '.join(others[:MAX_OTHERS])}{more}", "dim")


def memory_rows(explanation: ExplanationRecord) -> list[tuple[str, int | None]]:
    """Returns the rows (name, bytes) of the table of sizes: first the sizes in the log, then with None the sizes that
    the log does not contain."""
    form, own = FORMS[explanation.form], explanation.figures
    rows: dict[str, int | None] = {}
    if explanation.requested_bytes is not None:
        rows["requested"] = explanation.requested_bytes
    for name, title in ROWS.items():
        size = own.get(name)
        if name == "limit":  # a limit that is not in this message is from a compiler warning
            size, kind = explanation.limit_bytes, form.kind if name in own else "remat_warning"
            title = _LIMIT_NAMES.get(kind, title)
        is_uncounted = size == 0 and (form.kind == "tpu_hbm" or name == "largest")
        is_limit = name == "card" and size == explanation.limit_bytes
        if size is not None and not is_uncounted and not is_limit:
            rows[title] = size
    if explanation.total_bytes is not None and explanation.total_bytes != own.get("in_use"):
        title = _TOTAL_NAMES.get(form.kind, "needed in total")
        rows[title if "total" in own else "temporary memory and results (warning)"] = explanation.total_bytes
    if form.kind in ("donation", "spmd") or explanation.cause_kind == "on_chip_memory":
        return list(rows.items())
    is_warning = form.kind == "remat_warning"
    known = {
        "size of the request": explanation.requested_bytes is not None or is_warning,
        "limit": explanation.limit_bytes is not None,
        "this program": is_warning or any(name.startswith("this program") or "total" in name for name in rows),
        "other arrays": "in_use" in own or "heap" in own,
        "memory outside the pool": "card" in own or form.kind == "tpu_hbm",
    }
    return [*rows.items(), *((name, None) for name, is_known in known.items() if not is_known)]


def _where(explanation: ExplanationRecord) -> RenderableType | None:
    rows = memory_rows(explanation)
    known, unknown = [row for row in rows if row[1] is not None], [name for name, size in rows if size is None]
    table = FigureTable(label("where the bytes are"), figure("bytes"))
    for name, size in known:
        table.add(name, human(size))
    missing = Prose(f"{NOT_SAID}: {', '.join(unknown)}", "dim") if unknown else None
    if not known:
        return missing
    return Group(table, missing) if missing else table


def culprit_name(culprit: Culprit) -> str:
    """Returns the number, shape and layers of buffers that are alike, such as "3 x float32[8,1024], layers 1 to 3". If
    the buffers are blocks of a memory pool, returns their number and size."""
    times = f"{culprit.count} x " if culprit.count > 1 else ""
    if culprit.identity == "chunk":
        return f"{times}{human((culprit.bytes or 0) / culprit.count)}"
    layers = ""
    if len(culprit.layers) > 1:
        layers = f", layers {culprit.layers[0]} to {culprit.layers[-1]}"
    elif culprit.layers:
        layers = f", layer {culprit.layers[0]}"
    return f"{times}{culprit.shape or 'shape ' + NOT_SAID}{layers}"


def culprit_origin(culprit: Culprit) -> str:
    """Returns where buffers that are alike come from, such as "logits over the vocabulary; loss dot_general; net.py:7":
    the probable kind of tensor, the model component with the operation, and the source line."""
    if culprit.identity == "chunk":
        return culprit.what
    where = " ".join(filter(None, (culprit.component, culprit.operation)))
    padding = f", padded {culprit.padding:.3g} times" if culprit.padding >= 1.05 else ""
    parts = culprit.source.rsplit("/", 3)
    source = "/".join(["…", *parts[1:]]) if len(parts) == 4 and len(culprit.source) > _MAX_PATH else culprit.source
    return f"{culprit.what}{padding}; {f'{where}; ' if where else ''}{source or f'source line {NOT_SAID}'}"


def _culprits(explanation: ExplanationRecord) -> RenderableType | None:
    if explanation.culprits:
        return culprit_table(explanation.culprits)
    if explanation.form in _LISTS_NO_MORE and explanation.cause_kind != "no_memory_problem":
        return Prose(
            f"largest buffers: {NOT_SAID}. XLA has not listed them for most GPU errors since jaxlib 0.4.29.", "dim"
        )
    return None


def culprit_table(culprits: Sequence[Culprit], max_rows: int = MAX_CULPRITS) -> FigureTable | None:
    """Returns a table of the first `max_rows` groups of alike buffers, with one more row for the others; None if there
    are no buffers."""
    if not culprits:
        return None
    table = FigureTable(fixed("largest buffers"), figure("bytes"), fixed("phase"), words())
    for culprit in culprits[:max_rows]:
        size = human(culprit.bytes) if culprit.bytes is not None else "?"
        phase = PHASES[culprit.phase] or "unknown"
        name = shorten(one_line(culprit_name(culprit)), _MAX_NAME)
        table.add(name, size, phase, shorten(one_line(culprit_origin(culprit)), _MAX_ORIGIN))
    rest = culprits[max_rows:]
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


def _compared(explanation: ExplanationRecord) -> RenderableType | None:
    match = explanation.match
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


def _resharding(explanation: ExplanationRecord) -> RenderableType | None:
    lines = draw_shardings(explanation)
    if not lines:
        return None
    return Group(Text("the two shardings (numbers are devices)", style="bold"), *map(Text, lines))


def _remedies(explanation: ExplanationRecord) -> RenderableType | None:
    if not explanation.remedies:
        return None
    table = FigureTable(fixed(), words(style="", under=False), gap=1)
    for number, remedy in enumerate(explanation.remedies[:MAX_REMEDIES], 1):
        saved = explanation.savings.get(remedy.saves)
        size = Text.assemble((f" Frees up to {human(saved)} of the listed buffers.", "bold")) if saved else Text()
        table.add(f"{number}.", Text.assemble(remedy.words, size))
    return Group(Text("what to do, the cheapest first", style="bold"), table)


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
            "bytescope report --program=my_file.py:program --target=TARGET",
            'XLA_FLAGS="--xla_dump_to=dump --xla_dump_hlo_as_proto" python train.py',
            "bytescope report --hlo=dump",
        ),
    )


def _next(explanation: ExplanationRecord) -> RenderableType | None:
    sentence, commands = next_steps(explanation)
    return Group(Prose(sentence), *map(CopyCommand, commands)) if sentence else None
