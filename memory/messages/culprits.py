"""Describes the buffers that a message lists, the buffers of a report, and the live arrays of a process: phase, model
component, layer and probable kind of tensor."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from bytescope.memory.hlo import scopes
from bytescope.memory.messages.message_record import ArrayType, ListedBuffer
from bytescope.memory.records.report_record import Buffer, ReportRecord

# Kind of tensor -> its description.
IDENTITIES: Mapping[str, str] = {
    "scores": "attention scores, queries x keys",
    "logits": "logits over the vocabulary",
    "stack": "activations of {leading} loop steps, stacked for the backward pass",
    "random": "random bits of an initialization or of dropout",
    "optimizer": "optimizer state or an update of it",
    "accumulator": "gradient accumulator",
    "argument": "an argument: a parameter, state or the batch",
    "spill": "register spills of a kernel",
    "gathered": "an array gathered from all devices",
    "saved": "an activation saved for the backward pass",
    "recomputed": "an activation computed again",
    "gradient": "a gradient",
    "norm": "a float32 copy of activations in a norm",
    "copy": "a copy in another layout or dtype",
    "donated": "a donated argument",
    "constant": "an array captured by the function",
    "resharded": "the whole tensor, on every device",
    "chunk": "a block of the memory pool; the message does not say which array is in it",
    "parameter": "a parameter",
    "cache": "state that the step passes on",
    "batch": "the batch, or another argument",
    "output": "a result",
    "collective": "a buffer of a collective",
    "other": "live arrays that are not arguments of the step",
    "tensor": "an intermediate result",
    "": "cut off in the message",
}
# Category of a report's buffer -> key of `IDENTITIES`. Other categories are identified like a message's buffers.
_BY_CATEGORY: Mapping[str, str] = {
    "params": "parameter",
    "frozen": "parameter",
    "optimizer": "optimizer",
    "accumulator": "accumulator",
    "cache": "cache",
    "rng": "random",
    "gradients": "gradient",
    "residuals": "saved",
    "logits_loss": "logits",
    "collectives": "collective",
    "batch": "batch",
    "outputs": "output",
}
# Saved activations of these kinds are named by what they are.
_NAMED_RESIDUALS = ("scores", "logits", "stack", "norm")
_SCORES = re.compile(
    r"->[a-z.]*(?:qk|ts|tk|lm|ij)\b|hqk|\bqk\b|attention_(?:scores|probs|weights)|attn_(?:weights|scores)|softmax", re.I
)
_RANDOM = re.compile(r"threefry|random_bits|rng_bit|_uniform\b|_normal\b|bernoulli|dropout", re.I)
_OPTIMIZER = re.compile(
    r"adam|adafactor|opt_state|optimizer|momentum|scale_by_|apply_updates|\[?['.](?:mu|nu)['\]]", re.I
)
_ACCUMULATOR = re.compile(r"acc(?:umulat\w*)?_?grads?|grads?_acc\w*|MultiSteps", re.I)
_LAYER = re.compile(r"^(?:\w*(?:layers?|blocks?)|h|stage)?[_.]?(\d{1,4})$", re.I)
_GATHER = re.compile(r"all[-_]gather")
_COPY = re.compile(r"^(?:copy|transpose|convert|bitcast_convert|reshape|pad)(?:[._-]|$)")
# Minimum size of a vocabulary, minimum sequence length of attention scores, maximum number of layers of a model.
_VOCABULARY, _SEQUENCE, _LAYERS = 8192, 128, 400
# Sizes of vocabularies by which logits without a name are recognized.
_USUAL_VOCABULARIES = (30_000, 300_000)


@dataclasses.dataclass(frozen=True)
class Culprit:
    """Buffers of a message or of a report that have the same shape, operation and phase. They may be in several layers.
    Also the live arrays of a process that have the same shape and dtype.

    Fields:
        count: number of buffers.
        bytes: bytes of all these buffers, with padding; None if the message does not contain their size.
        shape: dtype and dimensions, such as "float32[8,1024]"; "" if unknown.
        phase: "forward", "backward", "recompute" or "optimizer"; "" if unknown. Buffers of a report also have
            "argument" and "output".
        component: component of the model, such as "attention"; "" if unknown.
        layers: numbers of the layers, () if unknown.
        operation: the operation that creates the buffers, such as "dot_general"; XLA's label if the message contains no
            operation.
        op_name: jax's full name of the operation; "" if unknown.
        source: file and line of the operation, such as "model.py:12"; "" if unknown.
        identity: probable kind of tensor, a key of `IDENTITIES`.
        what: description of this kind.
        padding: bytes with padding divided by bytes without padding; 1 if there is no padding or it is unknown.
        category: row of the report's breakdown, such as "residuals"; "" for buffers of a message and for live arrays.
    """

    count: int
    bytes: int | None
    shape: str
    phase: str
    component: str
    layers: tuple[int, ...]
    operation: str
    op_name: str
    source: str
    identity: str
    what: str
    padding: float = 1.0
    category: str = ""


def describe(buffers: Iterable[ListedBuffer], form: str) -> tuple[Culprit, ...]:
    """Groups the buffers that a message lists by shape, operation and phase. Returns the groups, most bytes first.

    form: the form of the message, such as "gpu_request" (`message_forms.FORMS`).
    """
    groups: dict[tuple[object, ...], list[tuple[ListedBuffer, int | None]]] = {}
    for buffer in buffers:
        scope = _scope(buffer.op_name)
        layer = next((int(match[1]) for word in scope.path if (match := _LAYER.match(word))), None)
        path = tuple(re.sub(r"\d+", "", word) for word in scope.path)
        key = (buffer.array, path, scope.phase, scope.operation or buffer.label.split(".")[0], buffer.bytes)
        groups.setdefault(key, []).append((buffer, layer))
    culprits = []
    for group in groups.values():
        first = group[0][0]
        scope = _scope(first.op_name)
        sizes = [buffer.bytes for buffer, _ in group if buffer.bytes is not None]
        identity = identify(first, form)
        leading = first.array.dims[0] if first.array and first.array.dims else 0
        plain = first.unpadded_bytes or (first.array.bytes if first.array else None)
        padded = first.bytes / plain if first.bytes and plain and form.startswith("tpu") else 1.0
        culprits.append(
            Culprit(
                count=len(group),
                bytes=sum(sizes) if sizes else None,
                shape=str(first.array) if first.array else "",
                phase="optimizer" if identity == "optimizer" and not scope.phase else scope.phase,
                component=scope.component,
                layers=tuple(sorted({layer for _, layer in group if layer is not None})),
                operation=(scope.operation.split("[")[0] or first.label)[:80],
                op_name=first.op_name,
                source=first.source,
                identity=identity,
                what=IDENTITIES[identity].format(leading=leading),
                padding=max(padded, 1.0),
            )
        )
    return tuple(sorted(culprits, key=lambda culprit: -(culprit.bytes or 0)))


def describe_report(report: ReportRecord) -> tuple[Culprit, ...]:
    """Returns the buffers in device memory at a report's peak as culprits, the ones with the most bytes first. Buffers
    that are alike are one culprit."""
    groups: dict[tuple[object, ...], list[Buffer]] = {}
    for buffer in report.buffers:
        if buffer.at_peak and buffer.memory == "device":
            path = re.sub(r"\d+", "", buffer.module)
            key = (buffer.dtype, buffer.shape, buffer.category, buffer.phase, buffer.checkpoint_name, path)
            groups.setdefault(key, []).append(buffer)
    culprits = []
    for group in groups.values():
        first = next((buffer for buffer in group if buffer.source), group[0])
        array = ArrayType(first.dtype, first.shape)
        seen = identify(ListedBuffer(first.bytes, array, first.op_name), "")
        identity = _BY_CATEGORY.get(first.category, seen or "tensor")
        if first.category == "residuals" and seen in _NAMED_RESIDUALS:
            identity = seen
        layers = {
            int(match[1]) for buffer in group for word in buffer.module.split("/") if (match := _LAYER.match(word))
        }
        culprits.append(
            Culprit(
                count=len(group),
                bytes=sum(buffer.bytes for buffer in group),
                shape=str(array) if first.dtype else first.name,
                phase=first.phase,
                component=first.component,
                layers=tuple(sorted(layers)),
                operation=first.checkpoint_name or _scope(first.op_name).operation.split("[")[0][:80],
                op_name=first.op_name,
                source=first.source,
                identity=identity,
                what=IDENTITIES[identity].format(leading=first.shape[0] if first.shape else 0),
                category=first.category,
            )
        )
    return tuple(sorted(culprits, key=lambda culprit: -(culprit.bytes or 0)))


def _scope(op_name: str) -> scopes.Scope:
    # Before 2023, jax wrote the parameters of an operation after its name: dot_general[precision=None].
    head, bracket, _ = op_name.partition("[")
    return scopes.parse(
        scopes.first_of_merged(op_name if bracket and op_name[len(head) + 1 : len(head) + 2] == "'" else head)
    )


def identify(buffer: ListedBuffer, form: str) -> str:
    """Guesses the kind of tensor in a listed buffer from its name, shape and dtype. Returns a key of `IDENTITIES`, such
    as "logits"; "" if the message contains neither name nor shape.

    form: the form of the message that lists the buffer, such as "gpu_request" (`message_forms.FORMS`).
    """
    by_form = {
        "donation": "donated",
        "constants": "constant",
        "spmd": "resharded",
        "bfc": "chunk",
        "bfc_dump": "chunk",
        "cuda_async": "chunk",
    }
    if form in by_form:
        return by_form[form]
    if buffer.is_argument:
        return "argument"
    if "spill" in buffer.label or buffer.label == "register":
        return "spill"
    if buffer.array is None and not buffer.op_name:
        return ""
    name, scope = buffer.op_name, _scope(buffer.op_name)
    dims, dtype = (buffer.array.dims, buffer.array.dtype) if buffer.array else ((), "")
    last, before_last = (dims[-1], dims[-2]) if len(dims) >= 2 else (0, 0)
    is_float = dtype.startswith(("float", "bfloat"))
    in_attention = scope.component == "attention"
    if "threefry" in name or (_RANDOM.search(name) and dtype in ("uint32", "")):
        return "random"
    if (is_float or dtype == "bool") and len(dims) >= 3 and min(last, before_last) >= _SEQUENCE:
        named_scores = bool(_SCORES.search(name))
        if (last == before_last and (in_attention or named_scores or not name)) or (in_attention and named_scores):
            return "scores"
    if last >= _VOCABULARY and (scope.component in scopes.LOSS_COMPONENTS or "logits" in name.lower()):
        return "logits"
    if (
        scope.operation.startswith("dynamic_update_slice")
        and "while" in name
        and 1 < min(dims[:1], default=0) <= _LAYERS
    ):
        return "stack"
    if _ACCUMULATOR.search(name):
        return "accumulator"
    if _OPTIMIZER.search(name) or scope.component == "optimizer":
        return "optimizer"
    if _GATHER.search(buffer.label) or _GATHER.search(scope.operation):
        return "gathered"
    if scope.phase == "forward":
        return "norm" if scope.component == "norm" and dtype == "float32" else "saved"
    if scope.phase:
        return {"recompute": "recomputed", "backward": "gradient"}.get(scope.phase, "tensor")
    if not name and is_float and _USUAL_VOCABULARIES[0] <= last <= _USUAL_VOCABULARIES[1]:
        return "logits"
    return "copy" if _COPY.match(buffer.label) else "tensor"
