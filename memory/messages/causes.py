"""Decides the cause of a failed allocation from the messages of a log: one of `CAUSES`, with the evidence.

Some messages state their cause. For others, the cause is derived from the sizes and the largest buffers in the message.
If these do not show the cause, it is "unknown".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from bytescope.memory.devices.platform import JAX_FRACTION
from bytescope.memory.messages.culprits import Culprit
from bytescope.memory.messages.message_record import Message
from bytescope.memory.units import GIB, MIB, human

# Cause -> the sentence that the user reads.
CAUSES: Mapping[str, str] = {
    "saved_activations": "Activations take most of the memory: the forward pass keeps them for the backward pass.",
    "attention_scores": "Attention scores take most of the memory. They grow with the square of the sequence length.",
    "logits": "Logits over the vocabulary take most of the memory.",
    "large_tensor": "Intermediate tensors are too large for this device. They grow with the inputs of the program.",
    "padding": "Padding takes most of the memory: a TPU pads the last two dimensions to tiles of 8 x 128.",
    "outputs": "The results of the program take most of the memory.",
    "weights_and_state": "Parameters, optimizer state or other arguments take most of the memory.",
    "replicated_tensor": "A tensor that should be sharded is whole on one device or on every device.",
    "captured_constant": "The function closes over arrays instead of taking them as arguments.",
    "unusable_donation": "The donated arrays could not be reused: they take memory in addition to the results.",
    "device_full": "The device is already full: other arrays and programs hold its memory.",
    "fragmentation": "Enough memory is free in total, but no contiguous free block is large enough.",
    "other_process": "XLA's memory pool is small: another process probably uses the rest of the device.",
    "outside_pool": "Too little memory is left outside of XLA's pool. The pool takes "
    f"{100 * JAX_FRACTION.value:g} % of a GPU by default; "
    "libraries and the driver use the rest.",
    "host_memory": "The computer has too little host memory. The memory of the GPU or TPU is not full.",
    "on_chip_memory": "A kernel needs more on-chip memory than a TPU core has. HBM is not full.",
    "no_memory_problem": "The message does not indicate a lack of memory.",
    "unknown": "The log does not contain the cause.",
}
# (cause, form of the message) -> the sentence that replaces the cause's sentence in `CAUSES` for this form.
_SENTENCES: Mapping[tuple[str, str], str] = {
    ("saved_activations", "remat"): "Temporary values and results (mostly activations) exceed the compiler's budget.",
    ("large_tensor", "bfc"): "One program is too large for this device. The log does not show which tensor is large.",
    ("large_tensor", "cuda_async"): "The request exceeds the GPU's memory, so freeing memory does not help.",
    ("replicated_tensor", "gpu_buffers"): "Each device creates the whole array, although it keeps only a shard.",
}
# Form of a message that states the cause -> the cause.
CAUSE_OF_FORM: Mapping[str, str] = {
    "tpu_scoped": "on_chip_memory",
    "tpu_single": "large_tensor",
    "remat_budget": "weights_and_state",
    "constants": "captured_constant",
    **dict.fromkeys(("driver", "nccl_memory", "cudnn_memory", "library_start", "picker"), "outside_pool"),
    **dict.fromkeys(("library_other", "bfc_no_failure", "not_memory"), "no_memory_problem"),
}
# Requests, donated bytes and tensors below these sizes do not matter.
_TINY_REQUEST, _TINY_DONATION, _TINY_TENSOR = 256, MIB, 16 * MIB
# Requests from this size on are usually the temporary memory of a whole program.
_LARGE_REQUEST = GIB
# A failed request below this fraction of the program's temporary memory is for one of its results. A program below this
# size does not fill a device.
_PART, _SMALL_PROGRAM = 0.5, GIB
# Minimum fraction of the listed bytes to which a cause must apply. Minimum ratio of padded to unpadded bytes for the
# cause "padding". Minimum free fraction of a pool for the cause "fragmentation" if the size of the request is unknown.
_SHARE, _PADDING, _FREE = 0.5, 1.5, 0.3
# Kind of tensor (key of `culprits.IDENTITIES`) -> the cause if most of the listed bytes are such tensors.
_BY_IDENTITY = {
    "scores": "attention_scores",
    "logits": "logits",
    "stack": "saved_activations",
    "saved": "saved_activations",
    "norm": "saved_activations",
    "argument": "weights_and_state",
    "optimizer": "weights_and_state",
    "accumulator": "weights_and_state",
    "gathered": "replicated_tensor",
    "recomputed": "large_tensor",
    "gradient": "large_tensor",
    "copy": "large_tensor",
    "tensor": "large_tensor",
}


def decide(
    messages: Sequence[Message], primary: Message, figures: Mapping[str, int | None], culprits: Sequence[Culprit]
) -> tuple[str, str]:
    """Decides the cause of a failed allocation. Returns (a key of `CAUSES`, such as "fragmentation"; the evidence in
    the log as one sentence, "" if there is none).

    messages: all messages of the log. primary: the message that is explained. figures: bytes in the log by name:
    "requested" (the failed request), "limit" (the capacity) and "total" (all arrays and programs together). culprits:
    the buffers that `primary` lists.
    """
    form, own = primary.form, primary.figures
    requested = figures.get("requested")
    if form in CAUSE_OF_FORM:
        return CAUSE_OF_FORM[form], ""
    if form in ("gpu_buffers", "tpu_table"):
        return _from_program(primary, culprits)
    if form in ("cpu_request", "pinned_host", "xla_host"):
        if requested is not None and requested <= _TINY_REQUEST:
            return "no_memory_problem", f"A request of only {requested} bytes does not fail for a lack of memory."
        return "host_memory", ""
    if form == "tpu_sparse_core":
        if own["sparse_core"] > own["tensor_core"]:
            return "weights_and_state", f"Embedding tables on the SparseCores take {human(own['sparse_core'])}."
        return "unknown", ""
    if form in ("tpu_allocate", "tpu_reserve", "tpu_available"):
        free = own.get("total") if form == "tpu_available" else own.get("free")
        if requested is None or free is None:
            return ("fragmentation", "") if "largest" in own else ("unknown", "")
        if own.get("outputs", 0) > _SHARE * own.get("in_use", own.get("heap", 1 << 62)):
            return "outputs", f"Results take {human(own['outputs'])} of the allocated memory."
        if free >= requested:
            return "fragmentation", f"{human(free)} are free, more than the request of {human(requested)}."
        return "device_full", f"Only {human(free)} are free."
    if form in ("bfc", "bfc_dump", "cuda_async"):
        return _from_pool(messages, primary, requested)
    if form == "remat":
        if own.get("limit", 0) < 0:
            return "weights_and_state", "Arguments and results alone exceed the memory that the compiler plans with."
        total, before = own.get("total"), own.get("before")
        if total is None:
            return "saved_activations", ""
        reduced = f" XLA's rematerialization already saved {human(before - total)}." if before is not None else ""
        return "saved_activations", (
            f"On the device, the program needs {human(total)} plus its arguments that are not donated.{reduced}"
        )
    if form == "spmd":
        whole = own.get("whole", own.get("shard"))
        if whole is not None and whole < _TINY_TENSOR:
            return "no_memory_problem", f"The tensor has only {human(whole)}, which does not matter."
        return "replicated_tensor", ""
    if form == "donation":
        if own.get("total", _TINY_DONATION) < _TINY_DONATION:
            return "unusable_donation", f"The donated arrays have only {human(own['total'])}, which does not matter."
        return "unusable_donation", ""
    if requested is not None and requested <= _TINY_REQUEST:
        return "no_memory_problem", (
            f"A request of {requested} bytes fails only if the allocator itself does not work, or if a device is full "
            "to the last byte."
        )
    if requested is not None and form == "gpu_request":
        usual = "usually fails because other arrays had filled the device before."
        if requested >= _LARGE_REQUEST:
            usual = "is usually the temporary memory of one program: activations and gradients."
        return "unknown", f"A request of this size {usual}"
    return "unknown", ""


def _from_pool(messages: Sequence[Message], primary: Message, requested: int | None) -> tuple[str, str]:
    own = primary.figures
    limit, in_use = own.get("limit"), own.get("in_use")
    if limit and requested and requested > limit:
        return (
            "large_tensor",
            f"One allocation of {human(requested)} is larger than the whole memory of {human(limit)}.",
        )
    if limit and in_use is not None:
        free = limit - in_use
        if primary.form == "cuda_async":
            free = own.get("free", free)
        if free >= (_FREE * limit if requested is None else requested):
            return "fragmentation", f"{human(free)} of {human(limit)} are not in use."
        return "device_full", f"{human(in_use)} of {human(limit)} are in use."
    bar = primary.words.get("bar", "")
    if not bar:
        return "unknown", ""
    used = bar.count("*") / len(bar)
    warning = next((message for message in messages if message.form == "remat" and "total" in message.figures), None)
    if used <= 0.02:
        return "other_process", "XLA's drawing of the pool shows that the pool is empty, and still too small."
    if warning:
        return "large_tensor", (
            f"The compiler had warned: the program's memory could not be brought below "
            f"{human(warning.figures['total'])}."
        )
    holes = [len(hole) for hole in bar.split("*") if hole]
    if used >= 0.9:
        return "device_full", f"{used:.0%} of the pool is in use."
    if len(holes) >= 8 and max(holes) < len(bar) / 4:
        return "fragmentation", f"{1 - used:.0%} of the pool is free, in at least {len(holes)} separate pieces."
    return "unknown", f"{used:.0%} of the pool was in use."


def _from_program(primary: Message, culprits: Sequence[Culprit]) -> tuple[str, str]:
    own = primary.figures
    if primary.words.get("space", "hbm") not in ("hbm", ""):
        return "on_chip_memory", ""
    listed = sum(culprit.bytes or 0 for culprit in culprits)
    padded = sum((culprit.bytes or 0) * (1 - 1 / culprit.padding) for culprit in culprits)
    if own.get("unpadded") and own.get("padded", 0) > _PADDING * own["unpadded"]:
        times = f"{own['padded'] / own['unpadded']:.1f} times as much"
        return "padding", f"Padding enlarges {human(own['unpadded'])} to {human(own['padded'])}, {times}."
    if listed and padded > _SHARE * listed:
        return "padding", f"{human(padded)} of the {human(listed)} in the list of buffers are padding."
    outputs, temp, parameters = (
        own.get("outputs", 0),
        own.get("temp", 0),
        own.get("parameters", own.get("arguments", 0)),
    )
    complete = {"outputs", "temp"} <= own.keys()  # False if the table in the message is cut off
    if complete and outputs > max(temp, parameters):
        return "outputs", f"Results take {human(outputs)}, temporary memory {human(temp)}."
    if complete and parameters > max(temp, outputs):
        return "weights_and_state", f"Arguments take {human(parameters)}, temporary memory {human(temp)}."
    requested, total = own.get("requested"), own.get("total")
    if complete and requested is not None and requested < _PART * temp:
        # XLA allocates results before temporary memory.
        return "device_full", (
            f"XLA could not even allocate a result of {human(requested)}, and the program also needs "
            f"{human(temp)} of temporary memory."
        )
    if complete and total is not None and total < _SMALL_PROGRAM:
        return "device_full", f"This program needs only {human(total)} in total."
    sizes: Counter[str] = Counter()
    for culprit in culprits:
        if culprit.identity:
            sizes[culprit.identity] += culprit.bytes or 0
    listed = sizes.total()
    if not listed:
        return "unknown", ""
    if sizes["random"] > _SHARE * listed:
        evidence = "The largest buffers are the random bits of an initialization"
        if temp > 2 * outputs > 0:
            return "replicated_tensor", f"{evidence}; the initialized arrays on this device have only {human(outputs)}."
        return "weights_and_state", f"{evidence}."
    causes: Counter[str] = Counter()
    for identity, size in sizes.items():
        causes[_BY_IDENTITY.get(identity, "unknown")] += size
    saved = causes["saved_activations"]
    scores = sum(c.bytes or 0 for c in culprits if c.identity == "scores" and c.phase == "forward" and c.count > 1)
    # Saved scores of several layers and other saved activations show that no activation is recomputed.
    if saved and scores and saved + scores > _SHARE * listed:
        evidence = f"{human(saved + scores)} of the {human(listed)} in the list of buffers are saved activations."
        return "saved_activations", evidence
    cause, size = causes.most_common(1)[0]
    evidence = f"Such buffers are {human(size)} of the {human(listed)} in the list of buffers."
    return (cause, evidence) if size > _SHARE * listed else ("large_tensor", "")


def sentence(cause: str, form: str) -> str:
    """Returns the sentence that explains a cause to the user.

    cause: a key of `CAUSES`. form: the form of the explained message, such as "gpu_request" (`message_forms.FORMS`).
    Some forms have another sentence than their cause.
    """
    return _SENTENCES.get((cause, form), CAUSES[cause])
