"""Readers of messages about memory. Each reader finds the messages of a few forms in a passage of a log.

Sources: xla/service/buffer_assignment.cc, xla/tsl/framework/bfc_allocator.cc,
xla/stream_executor/integrations/tf_allocator_adapter.cc, xla/hlo/transforms/simplifiers/hlo_rematerialization.cc,
xla/service/spmd/spmd_partitioner.cc, xla/error/error_codes.h, jax/_src/interpreters/mlir.py, and c10/cuda/
CUDACachingAllocator.cpp of PyTorch. The messages of libtpu are closed source; their grammar is taken from logs.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping

from bytescope.memory.hlo.sharding_text import parse_sharding
from bytescope.memory.messages.message_record import SIZE, ListedBuffer, Message, array_types, read_buffers, size_of
from bytescope.memory.units import plural

Reader = Callable[[str], Iterator[Message]]


def _pattern(text: str) -> re.Pattern[str]:
    """Compiles a regular expression in which a space matches any white space, <name> is a group for a size such as
    "4.44GiB", and <#name> is a group for a number of bytes."""
    text = re.sub(r"<#(\w+)>", r"(?P<\1>-?[0-9]+)", text)
    text = re.sub(r"(?<!\?P)<(\w+)>", lambda match: f"(?P<{match[1]}>{SIZE.replace(' ', '')})", text)
    return re.compile(text.replace(" ", r"\s+"))


def _figures(match: re.Match[str]) -> dict[str, int]:
    """Returns group name -> bytes for the groups of a match that are sizes. The group `requested_exact`, if it matched,
    replaces the rounded size of the group `requested`. Groups with the prefix "w_" are words."""
    out: dict[str, int] = {}
    for name, text in match.groupdict().items():
        size = None if name.startswith("w_") else size_of(text)
        if size is not None:
            out[name] = size
    if "requested_exact" in out:
        out["requested"] = out["requested_exact"]
    return out


def _words(match: re.Match[str]) -> dict[str, str]:
    return {
        name[2:]: " ".join(text.split()) for name, text in match.groupdict().items() if name.startswith("w_") and text
    }


def _message(
    form: str,
    match: re.Match[str],
    figures: Mapping[str, int] | None = None,
    words: Mapping[str, str] | None = None,
    buffers: tuple[ListedBuffer, ...] = (),
) -> Message:
    """Returns the message that begins with a match. `figures` and `words` replace the sizes and words of the match."""
    figures = _figures(match) if figures is None else figures
    words = _words(match) if words is None else words
    return Message(form, 0, match.start(), figures, words, buffers, " ".join(match[0].split())[:300])


# Name in `Message.figures` -> patterns with a group of this name, which is a size.
_Sizes = Mapping[str, tuple[re.Pattern[str], ...]]


def _search_sizes(patterns: _Sizes, text: str) -> dict[str, int]:
    """Returns name -> bytes for each name of which a pattern occurs in the text. The first pattern that does counts."""
    figures: dict[str, int] = {}
    for name, alternatives in patterns.items():
        match = next((match for pattern in alternatives if (match := pattern.search(text))), None)
        size = size_of(match[name]) if match else None
        if size is not None:
            figures[name] = size
    return figures


# ---- GPU: programs and requests -------------------------------------------------------------------------------

_REQUEST = _pattern(
    r"(?:(?:Out of memory )?while trying to allocate|Out of memory allocating)"
    r"(?: (?:<#requested_exact> byte|(?P<requested>[0-9.]+[KMGTP]?i?B)(?![A-Za-z]))(?:s?\.?(?: with allocator "
    r"(?P<w_allocator>\w+)"
    r" on device (?P<w_device>\d+))?)?)?"
)
_PLATFORM = _pattern(
    r"Failed to allocate request for <requested>(?:\s*\(<#requested_exact>B\))?(?: on device ordinal "
    r"(?P<w_device>\d+))?"
)
_XLA_HOST = _pattern(
    r"Out of host memory[^\n]{0,200}?(?:allocate <#requested_exact> bytes|allocate "
    r"<requested>)?[^\n]{0,300}?XLA_PJRT_GPU_HOST"
)
_DUMP = re.compile(
    r"BufferAssignment OOM Debugging|BufferAssignment stats:|Peak buffers:|\bBuffer \d+:\s*\n|\bXLA "
    r"Label:|maybe_live_out allocation:"
)
# Name in `Message.figures` -> row of XLA's statistics of a buffer assignment.
_STATISTICS = {
    "parameters": "parameter allocation",
    "constants": "constant allocation",
    "outputs": "maybe_live_out allocation",
    "temp": "preallocated temp allocation",
    "fragmentation": "total fragmentation",
    "temp_fragmentation": "preallocated temp fragmentation",
    "total": "total allocation",
}
_ROWS: _Sizes = {name: (_pattern(rf"{row}: <{name}>"),) for name, row in _STATISTICS.items()}


def read_requests(text: str) -> Iterator[Message]:
    """Yields messages about failed allocations on a GPU or CPU, including the list of the program's buffers that older
    versions print after the message.

    "Out of memory while trying to allocate N bytes." is printed since 2019; jaxlib 0.8.1 and newer print a rounded size
    instead, and versions after 0.11 add the allocator. The CPU backend prints "Out of memory allocating N bytes.".
    """
    heads = list(_REQUEST.finditer(text))
    dumps = [match.start() for match in _DUMP.finditer(text)]
    ends = [head.start() for head in heads[1:]] + [len(text)]
    if dumps and (not heads or dumps[0] < heads[0].start()):  # the message before the first list is cut off
        yield _with_dump(Message("gpu_buffers", 0, dumps[0]), text[: heads[0].start() if heads else len(text)])
    for head, end in zip(heads, ends):
        form = "gpu_request"
        if "allocating" in head[0]:
            form = "cpu_request"
        elif _is_autotuning(text, head.start()):
            form = "picker"
        message = _message(form, head)
        if any(head.end() <= dump < end for dump in dumps):
            message = _with_dump(dataclasses.replace(message, form="gpu_buffers"), text[head.end() : end])
        yield message
    for match in _PLATFORM.finditer(text):
        yield _message("picker" if _is_autotuning(text, match.start()) else "gpu_platform", match)
    for match in _XLA_HOST.finditer(text):
        yield _message("xla_host", match)


_PICKER = re.compile(r"Original\s+error:")


def _is_autotuning(text: str, position: int) -> bool:
    """Returns whether the failed request at a position of the text was made while XLA measured algorithms for a
    convolution or matmul."""
    before = text[max(position - 1000, 0) : position]
    return _PICKER.search(before.rpartition("\n\n")[2]) is not None


def _with_dump(message: Message, text: str) -> Message:
    figures = {**_search_sizes(_ROWS, text), **message.figures}
    return dataclasses.replace(message, figures=figures, buffers=read_buffers(text))


# ---- TPU ------------------------------------------------------------------------------------------------------

# The lookahead for "Used" saves the search for every length of the note where no "Used" follows.
_TPU_HEAD = _pattern(
    r"Ran out of memory in memory space (?P<w_space>\w+)(?:(?=[\s\S]{0,1800}?Used )"
    r"\.?(?: (?P<w_note>while allocating on stack for "
    r"[^\n]{0,200}?))?"
    r"(?:(?!Ran out of)[\s\S]){0,1500}?Used <requested> of <limit>(?: \w+\.?)?(?: Exceeded \w+ capacity by "
    r"<exceeded>)?)?"
)
_TPU_SCOPED = _pattern(r"Scoped allocation with size <requested> and limit <limit> exceeded")
_TPU_TABLE = re.compile(
    r"Total hbm usage|Program \w+ requirement|Largest program allocations|Allocation type:|Extra memory due to padding:"
)
_TPU_SPACE = _pattern(r"(?:Largest program allocations in|Program|Exceeded) (?P<w_space>hbm|[vs]mem)\b")
_TPU_ROWS: _Sizes = {
    "total": (_pattern(r"Total hbm usage >= <total>"),),
    "program": (_pattern(r"Program (?P<w_space>\w+) requirement <program>"),),
    "reserved": (_pattern(r"\breserved(?:\([^)\n]*\))? <reserved>"),),
    "arguments": (_pattern(r"\barguments <arguments>"),),
    "outputs": (_pattern(r"(?:Output size|\boutput) <outputs>"),),
    "temp": (_pattern(r"HLO temp <temp>"),),
    "unpadded": (_pattern(r"Unpadded \(<unpadded>\)"),),
    "padded": (_pattern(r"Padded \(<padded>\)"),),
    "heap": (_pattern(r"heap allocations[^\n]{0,60}? <heap>"),),
}
# Rows of the table that the runtime prints too, if it cannot reserve memory for a program.
_RUNTIME_ROWS = {name: _TPU_ROWS[name] for name in ("total", "outputs", "arguments", "program", "temp")}
_TPU_OTHER = {
    "tpu_sparse_core": _pattern(
        r"TensorCore Hbm usage: <tensor_core>, SparseCore Hbm usage:? <sparse_core>, exceeding available bytes: <limit>"
    ),
    "tpu_single": _pattern(
        r"Allocation \(size=<#requested>\) would exceed memory \(size=<#limit>\)(?: :: #\w+ "
        r"\[(?P<w_shape>[^\n]{0,600}))?"
    ),
    "tpu_allocate": _pattern(
        r"Attempting to allocate <requested>(?:\. That was not possible\.(?: There are <free> free\.?)?"
        r"(?: Due to fragmentation, the largest contiguous region of free memory is <largest>)?)?"
    ),
    "tpu_reserve": _pattern(
        r"Attempting to reserve <requested> at the bottom of memory(?:\. That was not possible\.(?: There are "
        r"<free> free"
        r"(?:, <reserved> reserved, and <reservable> reservable)?)?)?"
    ),
    "tpu_available": _pattern(
        r"Could not allocate <#requested> bytes in memory (?P<w_space>[\w.]+)(?:[;,:.] <#largest>"
        r"(?: bytes)? allocatable[;,] <#total>(?: bytes)? available)?"
    ),
}
_BALANCE: _Sizes = {
    "limit": (_pattern(r"HBM capacity <limit>"),),
    "requested": (_pattern(r"Program requirement: <printed> \(\s*<requested>\)"),),
    "in_use": (_pattern(r"Currently allocated: <printed> \(\s*<in_use>\)"),),
    "reserved": (_pattern(r"Top-of-Memory reserved: <printed> \(\s*<reserved>\)"),),
}


def read_tpu(text: str) -> Iterator[Message]:
    """Yields messages about the memory of TPUs: the compiler's table of a program that does not fit, and failed
    allocations of the runtime."""
    heads = list(_TPU_HEAD.finditer(text))
    runtime = [(form, match) for form, pattern in _TPU_OTHER.items() for match in pattern.finditer(text)]
    tables = [match.start() for match in _TPU_TABLE.finditer(text)]
    if tables and not heads and not any(form == "tpu_reserve" for form, _ in runtime):
        table = _with_table(Message("tpu_table", 0, tables[0]), text)
        if _search_sizes({"total": _TPU_ROWS["total"]}, text):
            table = dataclasses.replace(table, figures={**table.figures, "requested": table.figures["total"]})
        yield table
    for head, end in zip(heads, [head.start() for head in heads[1:]] + [len(text)]):
        scoped = _TPU_SCOPED.search(text, head.start(), end)
        if scoped:
            yield _message("tpu_scoped", head, _figures(scoped))
        else:
            yield _with_table(_message("tpu_table", head), text[head.start() : end])
    if not heads:
        for match in _TPU_SCOPED.finditer(text):
            yield _message("tpu_scoped", match)
    for form, match in runtime:
        message = _message(form, match)
        figures = dict(message.figures)
        if form == "tpu_sparse_core":
            figures["requested"] = figures["total"] = figures["tensor_core"] + figures["sparse_core"]
        buffers: tuple[ListedBuffer, ...] = ()
        if form == "tpu_single":
            arrays = array_types(message.words.get("shape", ""))[:1]
            tag = re.search(r"tag = '([^'\n]*)", message.words.get("shape", ""))
            buffers = tuple(ListedBuffer(figures["requested"], array, label=tag[1] if tag else "") for array in arrays)
        if form == "tpu_reserve":
            rest = text[match.end() :]
            rows = _search_sizes(_RUNTIME_ROWS, rest) if "HBM capacity" in rest else {}
            figures = {**rows, **figures, **_search_sizes(_BALANCE, rest)}
        yield dataclasses.replace(message, figures=figures, buffers=buffers)


def _with_table(message: Message, text: str) -> Message:
    figures = {**_search_sizes(_TPU_ROWS, text), **message.figures}
    words = dict(message.words)
    if "space" not in words:
        match = _TPU_ROWS["program"][0].search(text) or _TPU_SPACE.search(text)
        words["space"] = match["w_space"] if match else _guess_memory_space(text)
    if words.get("space", "hbm") != "hbm" and "program" in figures:
        figures.setdefault("total", figures["program"])
    return dataclasses.replace(message, figures=figures, words=words, buffers=read_buffers(text))


def _guess_memory_space(text: str) -> str:
    """Guesses the TPU memory of a list of buffers whose first lines are missing in the log: "vmem" if all allocations
    have the type "scoped" or all layouts contain S(1), otherwise "hbm"."""
    kinds = re.findall(r"Allocation type:\s*(\w+)", text)
    shapes = re.findall(r"\bShape:\s*([^\n]*)", text)
    is_scoped = bool(kinds) and all(kind == "scoped" for kind in kinds)
    return "vmem" if is_scoped or (shapes and all("S(1)" in shape for shape in shapes)) else "hbm"


# ---- allocators -----------------------------------------------------------------------------------------------

_BFC = _pattern(
    r"(?:Allocator \((?P<w_allocator>[\w.-]+)\) )?ran out of memory trying to allocate"
    r"(?: <requested>(?: \(rounded to <#requested_exact>\))?(?P<w_optional>[^\n]{0,40}?\s*with "
    r"freed_by_count=\d+\.[^\n]{0,400})?)?"
)
_BAR = re.compile(r"(?<![*_])[*_]{60,}(?![*_])")
_BFC_DUMP: _Sizes = {
    "in_use": (_pattern(r"\bInUse: <#in_use>(?!\d)"), _pattern(r"\bInUse: <in_use>")),
    "limit": (
        _pattern(r"\bLimit: <#limit>(?!\d)"),
        _pattern(r"\bLimit: <limit>"),
        _pattern(r"memory_limit_: <#limit>(?!\d)"),
        _pattern(r"pool limit:? <limit>"),
    ),
    "peak": (_pattern(r"\bMaxInUse: <#peak>(?!\d)"), _pattern(r"\bMaxInUse: <peak>")),
    "largest": (
        _pattern(r"\bLargestFreeBlock: <#largest>(?!\d)"),
        _pattern(r"largest free chunk[^\n]{0,40}?:? <largest>"),
    ),
    "unallocated": (_pattern(r"available bytes: <#unallocated>(?!\d)"), _pattern(r"unallocated bytes:? <unallocated>")),
    "free": (_pattern(r"total free in pool:? <free>"),),
}
_IN_USE_CHUNKS = _pattern(r"Sum Total of in-use chunks: <in_use>")
_CHUNKS = _pattern(r"(?P<count>\d+) Chunks of size (?P<size>\d+) totalling")
_IS_DUMP = re.compile(r"Total Chunks:|Chunks of size|in-use chunks|memory_limit_:|MaxAllocSize:|memory summary:")
_ASYNC = _pattern(r"cuMemAllocAsync failed to allocate(?: <#requested> bytes)?")
_ASYNC_CARD = _pattern(r"Free memory/Total memory: <#free>/<#card>(?!\d)")
_ASYNC_HISTOGRAM = re.compile(r"^(\d+), (\d+)$", re.MULTILINE)
_HOST = _pattern(
    r"(?:failed to alloc <#requested> bytes on host|could not allocate pinned host memory(?: of size: <#size>)?)"
)
_DRIVER = _pattern(
    r"failed to allocate <requested>(?:\s*\(<#requested_exact> bytes\))? from device(?:: (?P<w_error>CUDA_ERROR_\w+))?"
)
_VMM = _pattern(r"Not enough PA budget: pa_allocated=<#in_use>B, allocation_size=<#requested>B, pa_budget=<#limit>B")
_LIBRARY = re.compile(
    r"NCCL operation (?P<w_operation>\w+)|(?P<w_nccl>nccl(?:UnhandledCuda|System|Internal)Error|unhandled cuda error)"
    r"|(?P<w_status>(?:CUDNN|CUBLAS|CUSOLVER)_STATUS_\w+)|(?P<w_library>cu(?:DNN|BLAS|Solver|FFT)|DNN) library"
    r"|(?P<w_handle>(?:[Ff]ailed to (?:create|initialize)|[Cc]ould not (?:create|initialize)) (?:cu\w+|BLAS|DNN)\b)"
    r"|(?P<w_cudnn>cuDNN (?:launch failure|failed to initialize)|[Aa]ll algorithms tried|best cudnn \w+ algorithm)"
    r"|operation (?P<w_call>(?:gpu|cu)\w+)\([^\n]{0,80}\) failed"
)
# Maximum distance in characters between two matches in the same error. An error may name its library several times.
_SAME_ERROR = 300
_LIBRARY_MEMORY = re.compile(r"out of memory|OUT_OF_MEMORY|ALLOC_FAILED|[Ff]ailed to allocate")
# Libraries allocate memory when a handle is created. If memory is missing, many report only that they got no handle.
_LIBRARY_START = re.compile(
    r"NOT_INITIALIZED|[Ff]ailed to (?:create|initialize)|[Cc]ould not create|initialization (?:failed|error)"
    r"|[Aa]ll algorithms tried|best cudnn|launch failure"
    r"|Create\w*\([^\n]{0,80}\) failed|failed to initialize"
)


def read_allocators(text: str) -> Iterator[Message]:
    """Yields messages of allocators (BFC pools, cuda_async, the CUDA driver, pinned host memory) and errors of NCCL and
    other CUDA libraries."""
    bars = list(_BAR.finditer(text))
    heads = list(_BFC.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    is_async = _ASYNC.search(text)
    dump = _IS_DUMP.search(text) if not is_async else None
    dump_figures = _dump_figures(text) if dump else {}
    for head, end in zip(heads, ends):
        if "not a failure" in text[head.start() : min(head.start() + 800, end)] or head["w_optional"]:
            requested = _figures(head).get("requested")
            yield _message("bfc_no_failure", head, {} if requested is None else {"asked": requested})
            continue
        words = _words(head)
        bar = next((bar[0] for bar in bars if head.end() <= bar.start() < end), "")
        if bar:
            words["bar"] = bar
        # Only "(rounded to N)" is exact. It is the request rounded up to a multiple of 256 bytes.
        yield _message("bfc", head, {**dump_figures, **_figures(head)}, words, _chunks(text) if dump else ())
    if dump and not any("not a failure" not in text[head.start() : head.start() + 800] for head in heads):
        words = {"bar": bars[0][0]} if bars else {}
        yield Message("bfc_dump", 0, dump.start(), dump_figures, words, _chunks(text), "")
    for match in _ASYNC.finditer(text):
        figures = {**_dump_figures(text[match.end() :]), **_figures(match)}
        card = _ASYNC_CARD.search(text, match.end())
        if card:
            figures |= _figures(card)
            figures["limit"] = figures["card"]
        elif not figures.get("limit"):
            figures.pop("limit", None)
        sizes = tuple(
            ListedBuffer(int(size), label=plural(int(count), "allocation"))
            for size, count in _ASYNC_HISTOGRAM.findall(text)
            if len(size) < 19 and len(count) < 12 and int(size) >= 2**20
            for _ in range(min(int(count), 50))
        )
        yield _message("cuda_async", match, figures, buffers=sizes)
    for match in _HOST.finditer(text):
        figures = _figures(match)
        if "size" in figures:
            figures = {"requested": figures["size"]}
        yield _message("pinned_host", match, figures)
    for match in _DRIVER.finditer(text):
        yield _message("driver", match)
    for match in _VMM.finditer(text):
        yield _message("vmm_budget", match)
    last = -_SAME_ERROR
    for match in _LIBRARY.finditer(text):
        if match.start() - last < _SAME_ERROR or (match["w_cudnn"] and _PICKER.search(text, match.end())):
            continue
        last = match.start()
        around = text[max(match.start() - 150, 0) : match.end() + 400]
        is_nccl = bool(match["w_operation"] or match["w_nccl"])
        words = {
            **_words(match),
            "library": "NCCL"
            if is_nccl
            else match["w_status"] or match["w_library"] or match["w_call"] or "A CUDA library",
        }
        form = "library_other"
        if _LIBRARY_MEMORY.search(around):
            form = "nccl_memory" if is_nccl else "cudnn_memory"
        elif not is_nccl and _LIBRARY_START.search(around):
            form = "library_start"
        yield Message(form, 0, match.start(), {}, words, (), " ".join(around[150:].split())[:200])


def _dump_figures(text: str) -> dict[str, int]:
    figures = _search_sizes(_BFC_DUMP, text)
    if not figures.get("limit"):
        figures.pop("limit", None)
    if "in_use" not in figures and (match := _IN_USE_CHUNKS.search(text)):
        figures |= _figures(match)
    if "in_use" in figures:
        figures["total"] = figures["in_use"]
    return figures


def _chunks(text: str) -> tuple[ListedBuffer, ...]:
    found = []
    for match in _CHUNKS.finditer(text):
        if len(match["size"]) < 19 and len(match["count"]) < 9:
            found += [ListedBuffer(int(match["size"]), label="chunk of the pool")] * min(int(match["count"]), 50)
    return tuple(sorted(found, key=lambda chunk: -(chunk.bytes or 0))[:50])


# ---- the compiler's and JAX's warnings ------------------------------------------------------------------------

_PRINTED = r"-?[0-9.]+\s*[KMGTP]?i?B"
_REMAT_REST = (
    rf"{_PRINTED} \(<#limit> bytes\)(?: by rematerialization[;,.]?(?: only reduced to {_PRINTED} \(<#total> bytes\)"
    rf"(?:,? down from {_PRINTED} \(<#before> bytes\))?)?)?"
)
_REMAT = _pattern(rf"reduce memory use below(?: {_REMAT_REST})?")
_REMAT_TAIL = _pattern(rf"(?={_PRINTED} \(-?[0-9]+ bytes\) by rematerialization){_REMAT_REST}")
_REMAT_BUDGET = _pattern(
    r"byte size of input/output arguments \((?P<total>-?[0-9][0-9.,]*\s?\w*)\)"
    r" exceeds the base limit \((?P<limit>-?[0-9][0-9.,]*\s?\w*)\)"
)
_SHARDING = r"\{(?:[^{}\n]|\{[^{}\n]*\})*\}"
_SPMD = re.compile(
    r"full\s+rematerialization"
    rf"(?:[\s\S]{{0,160}}?from\s+sharding\s+(?P<w_source>{_SHARDING})\s+to\s+(?P<w_target>{_SHARDING}))?"
    r"(?:[\s\S]{0,120}?HLO\s+operation:?\s+(?P<w_hlo>%[^\n]{0,1500}?(?=\.\s+(?:You|As)\s|\n|$)))?"
)
_DONATION = re.compile(
    r"donated\s+buffers\s+were\s+not\s+usable:?\s*(?P<w_list>[^\n]*(?:\n[^\n]*(?:\w\[[\d,]*\])[^\n]*)*)"
)
_CONSTANTS = _pattern(
    r"(?:constants were captured during lowering|captured constants detected during lowering)(?: \(<total>(?: "
    r"total)?\))?"
)
_CONSTANT = re.compile(r"Constant\s+<[^\n>]*>,\s*([^\n]*?\]),[^\n]*captured at:(?:\s*\n\s*([^\n]+))?")


def read_warnings(text: str) -> Iterator[Message]:
    """Yields memory warnings of the compiler (rematerialization, resharding) and of JAX (unusable donation, captured
    constants)."""
    for match in _REMAT.finditer(text) if _REMAT.search(text) else _REMAT_TAIL.finditer(text):
        yield _message("remat", match)
    for match in _REMAT_BUDGET.finditer(text):
        yield _message("remat_budget", match)
    for match in _SPMD.finditer(text):
        yield _resharding(match, text)
    for match in _DONATION.finditer(text):
        buffers = tuple(ListedBuffer(array.bytes, array, is_argument=True) for array in array_types(match["w_list"]))
        donated = {"total": sum(buffer.bytes or 0 for buffer in buffers)} if buffers else {}
        yield _message("donation", match, donated, {}, buffers)
    for match in _CONSTANTS.finditer(text):
        printed = match["total"] or ""
        total = size_of(printed, decimal=True)
        buffers = tuple(
            ListedBuffer(array.bytes, array, source=" ".join((where or "").split()))
            for types, where in _CONSTANT.findall(text[match.end() :])
            for array in array_types(types)[:1]
        )
        exact = sum(buffer.bytes or 0 for buffer in buffers)
        if _rounds_to(exact, printed):
            total = exact
        figures = {} if total is None else {"total": total}
        yield _message("constants", match, figures, buffers=buffers)


def _rounds_to(exact: int, printed: str) -> bool:
    """Returns whether `printed`, a size in decimal units such as "8.39MB", is the rounded value of `exact` bytes."""
    digits = re.search(r"([\d.]+)\s?([KMGT])B", printed)
    if digits is None:
        return False
    unit, decimals = 1000.0 ** ("KMGT".index(digits[2]) + 1), len(digits[1].partition(".")[2])
    return abs(exact / unit - float(digits[1])) <= 0.51 / 10**decimals


def _resharding(match: re.Match[str], text: str) -> Message:
    hlo = match["w_hlo"] or ""
    arrays = array_types(hlo[:200])[:1]
    op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"?', hlo)
    figures: dict[str, int] = {}
    buffers: tuple[ListedBuffer, ...] = ()
    source = parse_sharding(match["w_source"] or "")
    if arrays and arrays[0].bytes is not None:
        # XLA prints the shape of a shard. The whole tensor is larger by the number of pieces.
        figures["shard"] = arrays[0].bytes
        whole = None
        if source and (not source.tiles or len(source.tiles) == len(arrays[0].dims)):
            whole = arrays[0].bytes * math.prod(source.tiles)
            figures["whole"] = whole
            if "last resort" in text[match.end() - 10 : match.end() + 200] or "cannot go from" in match[0]:
                figures["total"] = whole
        label = re.split(r"[ =]", hlo.lstrip("%"), maxsplit=1)[0]
        buffers = (ListedBuffer(whole or arrays[0].bytes, arrays[0], op_name[1] if op_name else "", label=label),)
    return _message("spmd", match, figures, buffers=buffers)


# ---- PyTorch, and errors that are not about memory ------------------------------------------------------------

_TORCH = _pattern(
    r"CUDA out of memory\.(?: Tried to allocate <requested>"
    r"(?:\.?\s*\(?GPU (?P<w_gpu>\d+)(?:;| has a total capac?i?ty of) <limit>(?: total capacity)?(?:;|,| of "
    r"which| already)*)?)?"
)
_TORCH_MORE: _Sizes = {
    "free": (_pattern(r"of which <free> is free"), _pattern(r"; <free> free;")),
    "in_use": (_pattern(r"<in_use> is allocated by PyTorch"), _pattern(r"; <in_use> already allocated")),
    "unused": (_pattern(r"<unused> is reserved by PyTorch but unallocated"),),
    "process": (_pattern(r"this process has <process> memory in use"),),
}
_QUOTA = re.compile(
    r"(?:RESOURCE_EXHAUSTED|[Rr]esource exhausted)[^\n]{0,80}?(?P<w_quota>[Qq]uota|message larger than max|rate "
    r"limit|Too many open files|No space left|Received message)"
)
_CODE = re.compile(r"\bE(?:0100|0101|1000|1001|3000)(?::\s+\w+)?\b")
_BARE = re.compile(r"RESOURCE_EXHAUSTED|[Rr]esource exhausted|CUDA_ERROR_OUT_OF_MEMORY")


def read_others(text: str) -> Iterator[Message]:
    """Yields PyTorch's out-of-memory errors, and RESOURCE_EXHAUSTED errors that are about a quota or another limit
    instead of memory."""
    for match in _TORCH.finditer(text):
        more = _search_sizes(_TORCH_MORE, text[match.start() : match.start() + 1200])
        yield _message("torch_cuda", match, {**more, **_figures(match)})
    for match in _QUOTA.finditer(text):
        yield _message("not_memory", match, {})


# Reader -> words. Only passages that contain at least one of these words are given to the reader.
READERS: Mapping[Reader, tuple[str, ...]] = {
    read_requests: ("allocat", "ssignment", "Buffer", "buffers", "XLA Label", "host memory"),
    read_tpu: ("memory space", "bm usage", "mem requirement", "bm requirement", "llocat", "ttempting", "padding"),
    read_allocators: (
        "llocat",
        "hunks",
        "InUse",
        "memory_limit",
        "summary",
        "NCCL",
        "nccl",
        "STATUS",
        "failed",
        "rror",
        "DNN",
    ),
    read_warnings: ("emat", "reduce", "base limit", "donated", "captured"),
    read_others: ("CUDA", "xhausted", "EXHAUSTED"),
}


def read_passage(text: str) -> list[Message]:
    """Returns all messages about memory in a passage of a log, in the order of the passage. If the passage contains
    only an error code such as RESOURCE_EXHAUSTED, returns one message of the form "bare_code"."""
    readers = [reader for reader, words in READERS.items() if any(word in text for word in words)]
    messages = sorted((message for reader in readers for message in reader(text)), key=lambda message: message.position)
    if code := _CODE.search(text):
        messages = [
            dataclasses.replace(message, words={**message.words, "code": " ".join(code[0].split())})
            for message in messages
        ]
    if not messages and (match := _BARE.search(text)):
        messages = [Message("bare_code", 0, match.start(), quote=text[match.start() :].split("\n")[0][:200])]
    return messages
