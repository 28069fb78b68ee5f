"""Finds the parts of a log that may contain a message about memory (passages), and cleans their lines.

In: a log of any size, as bytes. Out: passages, each with a few lines of plain text. Only passages are decoded and
cleaned, so the time for a large log is the time of one search for `KEY_PHRASES`.

    for passage in find_passages(log):
        for text in passage.texts(): ...
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np

# Each message about memory contains at least one of these texts, even if a line break cuts another one. The first
# letter is left out where it may be upper or lower case.
KEY_PHRASES = (
    b"of memory",
    b"ailed to alloc",
    b"CUDA_ERROR_OUT_OF_MEMORY",
    b"RESOURCE_EXHAUSTED",
    b"esource exhausted",
    b"would exceed memory",
    b"pinned host memory",
    b"ttempting to reserve",
    b"ttempting to allocate",
    b"BufferAssignment",
    b"Peak buffers",
    b"XLA Label:",
    b"XLA label:",
    b"Allocation type:",
    b"bm usage",
    b"bm requirement",
    b"mem requirement",
    b"program allocations in",
    b"memory space",
    b"trying to allocate",
    b"due to padding",
    b"ould not allocate",
    b"in-use chunks",
    b"hunks of size",
    b"memory_limit_",
    b"MaxAllocSize",
    b"memory summary:",
    b"reduce memory use below",
    b"input/output arguments",
    b"the base limit",
    b"ematerialization",
    b"donated buffers",
    b"captured constants",
    b"captured during lowering",
    b"onstants were captured",
    b"PA budget",
    b"NCCL operation",
    b"ncclUnhandledCudaError",
    b"unhandled cuda error",
    b"CUDNN_STATUS_",
    b"CUBLAS_STATUS_",
    b"CUSOLVER_STATUS_",
    b"DNN library",
    b"DNN failed",
    b"DNN launch failure",
    b"best cudnn",
    b"ll algorithms tried",
    b"ncclSystemError",
    b"ncclInternalError",
    b"to create cu",
    b"not create cu",
    b"to initialize BLAS",
    b" failed: cu",
    b"operation gpu",
    b"operation cuda",
)
# Maximum number of places of each key phrase, number of lines before and after a place that belong to the passage,
# maximum characters of a line, and maximum characters of all passages. Later places are ignored, because the first
# failure of a job shows the cause.
MAX_PLACES, LINES_BEFORE, LINES_AFTER, MAX_LINE, MAX_TEXT = 100, 3, 16, 20_000, 2_000_000
_CHUNK = 1 << 21
# Shorter lines are never taken for lines that a terminal wrapped.
_MIN_WRAPPED = 40

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_LABEL = (
    r"\((?:[\w.:/@-]+ ){0,3}(?:pid|rank|ip)=[^()\n]{1,120}\)|\[(?:rank|default)?\d+(?:,\d+)?\](?:<std(?:out|err)>)?:?"
)
_PREFIX = re.compile(
    rf"""\s*(?:
      (?P<label>{_LABEL}|\d{{1,5}}:(?=\s|$)|[\w./-]{{1,60}}\s{{0,30}}\|(?=\s|$))
    | [>#]+(?=[^>#]|$)                                                          # quoted in an e-mail or a comment
    | \d{{4}}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,Z+:]*:?(?:\ +std(?:out|err)\ [FP])?(?=\s|$)   # a time
    | \[?[EWIF](?:\d{{4}}\ \d\d:\d\d:\d\d\.\d+)?\s+(?:\d+\s+)?[\w./\\-]+\.(?:cc|cpp|h|cu|py):\d+\]   # absl, TensorFlow
    | [\w./\\-]+\.(?:cc|h):\d+\]
    )""",
    re.VERBOSE,
)
_BREAK = re.compile(
    r"(?:\\n)+(?=(?:\\t|\s)*(?:BufferAssignment|Peak buffers|Buffer \d|Total hbm|Program \w|Output "
    r"size|Largest|\d+\. Size"
    r"|Size:|Operator:|Entry Param|Shape:|XLA [Ll]abel|Unpadded|Extra memory|Allocation "
    r"type|=====|reserved|program|global"
    r"|arguments|scoped|HLO temp|parameter all|constant all|maybe_live|prealloc|total (?:all|frag)|HBM "
    r"capacity|Current))"
)


@dataclasses.dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log.

    Fields:
        number: number of the line in the log, starting at 1.
        source: the process that wrote the line, as the line's prefix names it, such as "(worker pid=12)"; "" if
            unknown.
        text: the line without colours, quotation marks, times and other prefixes.
        length: number of characters of the line before the prefixes were removed.
    """

    number: int
    source: str
    text: str
    length: int


@dataclasses.dataclass(frozen=True)
class Passage:
    """Neighbouring lines of a log, all written by one process, that may contain a message about memory."""

    lines: tuple[LogLine, ...]

    def texts(self) -> list[str]:
        """Returns the texts in which messages are searched: the lines of the passage as one text, and, if a terminal
        may have wrapped long lines, a second text in which the wrapped lines are joined."""
        plain = "\n".join(line.text for line in self.lines)
        width = max((line.length for line in self.lines), default=0)
        if width < _MIN_WRAPPED or sum(line.length == width for line in self.lines[:-1]) == 0:
            return [plain]
        joined = "".join(line.text + ("" if line.length == width else "\n") for line in self.lines)
        return [plain, joined]

    def line_at(self, text: str, position: int) -> int:
        """Returns the number of the line of the log, starting at 1, that contains the character at `position` of
        `text`. `text` is the first text that the method `texts` returns."""
        return self.lines[min(text.count("\n", 0, position), len(self.lines) - 1)].number


def as_bytes(log: str | bytes) -> bytes:
    """Returns a log as UTF-8 bytes. A log in UTF-16 with a byte-order mark, as Windows shells write it, is
    converted."""
    if isinstance(log, str):
        return log.encode("utf-8", "replace")
    if log[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return log.decode("utf-16", "replace").encode("utf-8", "replace")
    return log


def find_passages(log: bytes) -> list[Passage]:
    """Returns the parts of a log around the `KEY_PHRASES` of memory messages, in the order of the log. If several
    processes wrote lines of a part, each process gets its own passage."""
    passages: list[Passage] = []
    end = number = size = 0
    for start, stop in _passage_ranges(log):
        number += log.count(b"\n", end, start)
        end = start
        raw = log[start:stop].decode("utf-8", "replace")
        size += len(raw)
        lines, source = [], ""
        for offset, line in enumerate(raw.split("\n")):
            for cleaned in _clean(line[:MAX_LINE], number + offset + 1):
                source = cleaned.source or source
                lines.append(dataclasses.replace(cleaned, source=source))
        sources = dict.fromkeys(line.source for line in lines)
        passages += [Passage(tuple(line for line in lines if line.source == each)) for each in sources]
        if size > MAX_TEXT:
            break
    return passages


def _clean(raw: str, number: int) -> Iterable[LogLine]:
    """Yields the parts of one line of a log, without colours and prefixes. The line is split at carriage returns. It is
    also split where a known line of a memory message follows the two characters "\\n", as in the repr of a Python
    string. `number`: the number of the line in the log."""
    text = _ESCAPES.sub("", raw) if "\x1b" in raw else raw
    text = text.rstrip("\r")
    if "\\n" in text:
        text = _BREAK.sub("\n", text)
    for part in re.split(r"[\r\n]", text) if "\n" in text or "\r" in text else [text]:
        source, at = "", 0
        for _ in range(8):
            match = _PREFIX.match(part, at)
            if not match or match.end() == at:
                break
            source = source or (match["label"] or "").strip()
            at = match.end()
        yield LogLine(number, source, part[at:], len(part.rstrip("\n")))


def _passage_ranges(log: bytes) -> list[tuple[int, int]]:
    """Returns (start, end), as positions in bytes, of the lines around each of the `KEY_PHRASES` in a log. Ranges are
    sorted, and overlapping ranges are merged."""
    ranges: list[tuple[int, int]] = []
    for place in find_phrases(log, KEY_PHRASES, MAX_PLACES):
        if ranges and place < ranges[-1][1] - 1 and log.find(b"\n", place, ranges[-1][1] - 1) < 0:
            pass  # the place is in the last line of the previous range
        elif ranges and place < ranges[-1][1] and log.count(b"\n", place, ranges[-1][1]) >= LINES_AFTER:
            continue
        start = stop = place
        for _ in range(LINES_BEFORE + 1):
            start = log.rfind(b"\n", max(start - MAX_LINE, 0), start) if start > 0 else -1
            if start < 0:
                start = max(place - MAX_LINE, 0) if place > MAX_LINE else -1
                break
        for _ in range(LINES_AFTER + 1):
            found = log.find(b"\n", stop, stop + MAX_LINE)
            stop = found + 1 if found >= 0 else min(stop + MAX_LINE, len(log))
            if found < 0:
                break
        start += 1
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(stop, ranges[-1][1]))
        else:
            ranges.append((start, stop))
    return ranges


def find_phrases(log: bytes, phrases: Sequence[bytes], max_places: int) -> list[int]:
    """Returns the positions in `log` at which one of the `phrases` begins, sorted. Only the first `max_places`
    positions of each phrase are returned.

    `bytes.find` would read the log once for each phrase. This function reads it once: it looks for the two neighbouring
    bytes of each phrase that are rarest in the log, and compares only the places found with the phrases.
    """
    found: dict[bytes, list[int]] = {phrase: [] for phrase in phrases}
    data = np.frombuffer(log, np.uint8)
    if len(data) < 2:
        return []
    step = max(len(data) >> 21, 1) | 1  # odd, so that lines of equal length are sampled at all columns
    sample = data[:-1:step].astype(np.int32) | data[1::step].astype(np.int32)[: len(data[:-1:step])] << 8
    frequency = np.bincount(sample, minlength=1 << 16)
    table, offsets = np.zeros(1 << 16, np.bool_), {}
    for phrase in phrases:
        pairs = [_pair(phrase, at) for at in range(len(phrase) - 1)]
        offsets[phrase] = int(frequency[pairs].argmin())
        table[pairs[offsets[phrase]]] = True
    for start in range(0, len(data) - 1, _CHUNK):
        candidates = []
        for shift in (0, 1):
            part = data[start + shift : start + shift + _CHUNK]
            candidates.append(np.flatnonzero(table[part[: len(part) // 2 * 2].view("<u2")]) * 2 + start + shift)
        places = np.sort(np.concatenate(candidates))
        for phrase in [phrase for phrase in phrases if len(found[phrase]) < max_places]:
            first = places - offsets[phrase]
            first = first[(first >= 0) & (first <= len(data) - len(phrase))]
            for index in (offsets[phrase], offsets[phrase] + 1, *range(len(phrase))):
                if not len(first):
                    break
                first = first[data[first + index] == phrase[index]]
            found[phrase] += first[: max_places - len(found[phrase])].tolist()
            if len(found[phrase]) == max_places:
                table[:] = False
                for other in phrases:
                    table[_pair(other, offsets[other])] |= len(found[other]) < max_places
    return sorted({place for at in found.values() for place in at})


def _pair(text: bytes, at: int) -> int:
    return text[at] | text[at + 1] << 8
