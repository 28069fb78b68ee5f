"""Reads the lists of buffers in the messages of GPUs ("Buffer 3: Size: ...") and TPUs ("3. Size: ...")."""

from __future__ import annotations

import re

from bytescope.memory.messages.message_record import SIZE, ListedBuffer, array_types, size_of

_KEY = re.compile(
    rf"""(?P<start>\bBuffer\ \d+:|(?<![\w.])\d+\.\ +Size:\s+(?P<first>{SIZE}))
    |\bSize:\s+(?P<size>{SIZE})
    |\bOperator:\s+(?P<operator>.*)
    |\bEntry\ Parameter\ Subshape:\s*(?P<parameter>.*)
    |\bShape:\s*(?P<shape>.*)
    |\bUnpadded\ size:\s+(?P<unpadded>{SIZE})
    |\bExtra\ memory\ due\ to\ padding:\s+(?P<padding>{SIZE})
    |\bXLA\ [Ll]abel:\s*(?P<label>.*)
    |\bAllocation\ type:\s*(?P<allocation>.*)
    |(?P<end>={{10,}})""",
    re.VERBOSE,
)
# Keys whose values may continue on the next lines.
_LONG = ("operator", "label", "shape")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"?')
_SOURCE = re.compile(r'source_file="([^"]*)"(?:\s+source_line=(\d+))?')
# Maximum characters before a key in its line, characters of a value, and buffers of a list. XLA lists at most 20.
_MAX_PREFIX, _MAX_VALUE, _MAX_BUFFERS = 300, 4000, 500


def read_buffers(text: str) -> tuple[ListedBuffer, ...]:
    """Returns the buffers that a text lists, in the order of the text. An entry that is cut off at the beginning or end
    of the text is returned if it contains a size or a shape."""
    buffers: list[ListedBuffer] = []
    entry: dict[str, str] = {}
    last = ""

    def finish() -> None:
        nonlocal entry, last
        if any(key in entry for key in ("size", "shape", "parameter", "unpadded")) and len(buffers) < _MAX_BUFFERS:
            buffers.append(_buffer(entry))
        entry, last = {}, ""

    for line in text.split("\n"):
        found = _KEY.search(line, 0, _MAX_PREFIX)
        match = _KEY.match(line, found.start()) if found else None
        if match is None:
            if last and line.strip():
                entry[last] = (entry[last] + line.strip())[:_MAX_VALUE]
            elif not line.strip():
                last = ""
            continue
        key = match.lastgroup or ""
        if key == "end":
            finish()
        elif key in ("start", "first"):
            finish()
            if match["first"]:
                entry["size"] = match["first"]
        else:
            if key in entry:
                finish()
            entry[key] = match[key][:_MAX_VALUE]
            last = key if key in _LONG else ""
    finish()
    return tuple(buffers)


def _buffer(entry: dict[str, str]) -> ListedBuffer:
    operator, label = entry.get("operator", ""), entry.get("label", "")
    shapes = array_types(entry.get("shape") or entry.get("parameter") or "")
    if not shapes and " = " in label[:200]:  # the label is a whole instruction: "%name = shape opcode(...)"
        shapes = array_types(label.split("=", 1)[1][:200])[:1]
    array = max(shapes, key=lambda shape: shape.bytes or 0, default=None)
    unpadded, padding = size_of(entry.get("unpadded")), size_of(entry.get("padding"))
    size = size_of(entry.get("size"))
    if size is None and unpadded is not None:
        size = unpadded + (padding or 0)
    if size is None and array is not None and "parameter" not in entry:
        size = array.bytes
    name, source = _OP_NAME.search(operator), _SOURCE.search(operator)
    where = ""
    if source and source[1]:
        where = source[1] + (f":{source[2]}" if source[2] else "")
    return ListedBuffer(
        bytes=size,
        array=array,
        op_name=name[1].replace('\\"', '"') if name else "",
        source=where,
        label=re.split(r"[ =(]", label.strip().lstrip("%"), maxsplit=1)[0],
        unpadded_bytes=unpadded,
        is_argument="parameter" in entry
        or entry.get("allocation", "").strip().lower() in ("parameter", "argument", "arguments"),
    )
