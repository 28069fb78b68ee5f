"""Finds the passages of a log that are about memory, and cleans their lines.

In: a log of any size, as bytes. Out: passages, each with a few lines of plain text. Only passages are decoded and
cleaned, so the time for a large log is the time of one scan for `ANCHORS`.

    for passage in find_passages(log):
        for text in passage.texts(): ...
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np

# Texts of which at least one is in each message about memory, also if a line ends inside another one. The first
# letter is
# left out where its case varies.
ANCHORS = (
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
# Maximum number of places of each anchor, lines around a place, characters of a line, and characters of all passages.
# The first failure has the cause, so that places after the first ones are only counted.
MAX_PLACES, LINES_BEFORE, LINES_AFTER, MAX_LINE, MAX_TEXT = 100, 3, 16, 20_000, 2_000_000
_CHUNK = 1 << 21
# Minimum length of lines that a terminal may have wrapped.
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
        number: its number in the log, starting at 1.
        source: the process that wrote it, as the prefix names it, such as "(worker pid=12)"; "" if unknown.
        text: the line without colours, quotation marks, times and other prefixes.
        length: number of characters before the prefixes were removed.
    """

    number: int
    source: str
    text: str
    length: int


@dataclasses.dataclass(frozen=True)
class Passage:
    """Consecutive lines of one process that are about memory."""

    lines: tuple[LogLine, ...]

    def texts(self) -> list[str]:
        """Returns the passage as text with one line per line of the log. If a terminal may have wrapped long lines,
        also returns the text with the wrapped lines joined."""
        plain = "\n".join(line.text for line in self.lines)
        width = max((line.length for line in self.lines), default=0)
        if width < _MIN_WRAPPED or sum(line.length == width for line in self.lines[:-1]) == 0:
            return [plain]
        joined = "".join(line.text + ("" if line.length == width else "\n") for line in self.lines)
        return [plain, joined]

    def line_at(self, text: str, position: int) -> int:
        """Returns the number in the log of the line at a position of the first of `texts`."""
        return self.lines[min(text.count("\n", 0, position), len(self.lines) - 1)].number


def as_bytes(log: str | bytes) -> bytes:
    """Returns a log as UTF-8 bytes. Windows shells write UTF-16 with a byte-order mark."""
    if isinstance(log, str):
        return log.encode("utf-8", "replace")
    if log[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return log.decode("utf-16", "replace").encode("utf-8", "replace")
    return log


def find_passages(log: bytes) -> list[Passage]:
    """Returns the passages of a log that contain an anchor, in the order of the log. Lines of several processes that
    are mixed in one passage are separated."""
    passages: list[Passage] = []
    end = number = size = 0
    for start, stop in _windows(log):
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
    """Removes colours and prefixes from a line. Yields several lines if "\\n" is written in it as two characters, as in
    the representation of a Python string, or if it was overwritten with a carriage return."""
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


def _windows(log: bytes) -> list[tuple[int, int]]:
    """Returns (start, end) of the groups of lines around the anchors of a log, in order, without overlaps."""
    windows: list[tuple[int, int]] = []
    for place in find_places(log, ANCHORS, MAX_PLACES):
        if windows and place < windows[-1][1] - 1 and log.find(b"\n", place, windows[-1][1] - 1) < 0:
            pass  # the place is in the last line of the previous window
        elif windows and place < windows[-1][1] and log.count(b"\n", place, windows[-1][1]) >= LINES_AFTER:
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
        if windows and start <= windows[-1][1]:
            windows[-1] = (windows[-1][0], max(stop, windows[-1][1]))
        else:
            windows.append((start, stop))
    return windows


def find_places(log: bytes, anchors: Sequence[bytes], most: int) -> list[int]:
    """Returns the positions in `log` of the texts `anchors`, sorted, at most the first `most` of each.

    A loop over `bytes.find` reads a log once for each anchor. Here a table of the rarest two bytes of each anchor
    selects a few candidates in one pass, and only these are compared with the anchors.
    """
    found: dict[bytes, list[int]] = {anchor: [] for anchor in anchors}
    data = np.frombuffer(log, np.uint8)
    if len(data) < 2:
        return []
    step = max(len(data) >> 21, 1) | 1  # odd, so that a period of the log is not mistaken for the whole
    sample = data[:-1:step].astype(np.int32) | data[1::step].astype(np.int32)[: len(data[:-1:step])] << 8
    frequency = np.bincount(sample, minlength=1 << 16)
    table, offsets = np.zeros(1 << 16, np.bool_), {}
    for anchor in anchors:
        pairs = [_pair(anchor, at) for at in range(len(anchor) - 1)]
        offsets[anchor] = int(frequency[pairs].argmin())
        table[pairs[offsets[anchor]]] = True
    for start in range(0, len(data) - 1, _CHUNK):
        candidates = []
        for shift in (0, 1):
            part = data[start + shift : start + shift + _CHUNK]
            candidates.append(np.flatnonzero(table[part[: len(part) // 2 * 2].view("<u2")]) * 2 + start + shift)
        places = np.sort(np.concatenate(candidates))
        for anchor in [anchor for anchor in anchors if len(found[anchor]) < most]:
            first = places - offsets[anchor]
            first = first[(first >= 0) & (first <= len(data) - len(anchor))]
            for index in (offsets[anchor], offsets[anchor] + 1, *range(len(anchor))):
                if not len(first):
                    break
                first = first[data[first + index] == anchor[index]]
            found[anchor] += first[: most - len(found[anchor])].tolist()
            if len(found[anchor]) == most:
                table[:] = False
                for other in anchors:
                    table[_pair(other, offsets[other])] |= len(found[other]) < most
    return sorted({place for at in found.values() for place in at})


def _pair(text: bytes, at: int) -> int:
    return text[at] | text[at + 1] << 8
