"""Writes messages about memory in the formats of XLA, libtpu, JAX and PyTorch, with figures, names and shapes drawn at
random, and the prefixes and line breaks of loggers, launchers and terminals.

The formats are typed here from the print statements, independently of the readers. Each function takes a random
generator and returns a `Sample`: the text and what it says.
"""

import math
import random
import textwrap
from collections.abc import Callable
from typing import NamedTuple

SHORT = {
    "float32": ("f32", 4),
    "bfloat16": ("bf16", 2),
    "int32": ("s32", 4),
    "uint32": ("u32", 4),
    "float64": ("f64", 8),
}


class Sample(NamedTuple):
    """A message: its text, its kind, the figures it prints (None: not printed), its cause, and a shape it lists."""

    text: str
    kind: str
    requested: int | None = None
    limit: int | None = None
    total: int | None = None
    cause: str | None = None
    shape: str = ""


def human(count: float) -> str:
    """tsl::strings::HumanReadableNumBytes."""
    sign, count = ("-", -count) if count < 0 else ("", count)
    if count < 1024:
        return f"{sign}{count:.0f}B"
    for unit, scale in (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40)):
        if count < 1024 * scale or unit == "TiB":
            return f"{sign}{count / scale:.{1 if unit == 'KiB' else 2}f}{unit}"
    raise AssertionError


def libtpu(count: float) -> str:
    """libtpu's sizes: 15.90G, 17.43M, 4.0K, 0B."""
    for unit, scale in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if count >= scale:
            return f"{count / scale:.{1 if unit == 'K' else 2}f}{unit}"
    return f"{count:.0f}B"


def printed(text: str) -> int:
    """The bytes of a printed size, rounded as it is printed."""
    number = text.rstrip("BKMGTi")
    scale = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}.get(text[len(number) : len(number) + 1], 1)
    return round(float(number) * scale)


def size(rng: random.Random, low: float = 1.5, high: float = 60) -> int:
    """Bytes between `low` and `high` GiB."""
    return int(rng.uniform(low, high) * 2**30)


def shape(rng: random.Random, dims: tuple[int, ...], dtype: str = "") -> tuple[str, str, int]:
    """(jax's name, XLA's name, bytes) of an array."""
    dtype = dtype or rng.choice(("float32", "bfloat16"))
    short, width = SHORT[dtype]
    text = ",".join(map(str, dims))
    return f"{dtype}[{text}]", f"{short}[{text}]", width * math.prod(dims)


def class_name(rng: random.Random) -> str:
    names = ("jaxlib.xla_extension.XlaRuntimeError: ", "jax.errors.JaxRuntimeError: ", "RuntimeError: ", "")
    return rng.choice(names) + "RESOURCE_EXHAUSTED: "


# ---- GPU ------------------------------------------------------------------------------------------------------

MODULES = ("Transformer", "Model", "Net", "GPT")


def saved_buffer(rng: random.Random) -> tuple[str, str]:
    layer, width = rng.randrange(48), rng.choice((1024, 2048, 5120))
    name, short, count = shape(rng, (rng.choice((8, 16, 24)), rng.choice((1024, 2048)), width))
    op = f"jit(train_step)/jit(main)/jvp({rng.choice(MODULES)})/layers_{layer}/mlp/wi/dot_general"
    return name, gpu_entry(op, "fusion", short, count)


def scores_buffer(rng: random.Random) -> tuple[str, str]:
    tokens = rng.choice((1024, 2048, 4096))
    name, short, count = shape(rng, (rng.choice((2, 4)), rng.choice((8, 12)), tokens, tokens))
    op = "jit(step)/jit(main)/jvp(Net)/blocks_0/attention/bqhd,bkhd->bhqk/dot_general[precision=None]"
    return name, gpu_entry(op, "custom-call", short, count)


def logits_buffer(rng: random.Random) -> tuple[str, str]:
    name, short, count = shape(rng, (rng.choice((8, 16)), 2048, rng.choice((32000, 50304, 128256))), "float32")
    return name, gpu_entry("jit(step)/jit(main)/jvp(Net)/lm_head/dot_general", "fusion", short, count)


def gpu_entry(op: str, label: str, short: str, count: int) -> str:
    return (
        f'\t\tSize: {human(count)}\n\t\tOperator: op_type="dot" op_name="{op}" '
        'source_file="/home/user/project/model.py" '
        f"source_line=42\n\t\tXLA Label: {label}\n\t\tShape: {short}\n\t\t==========================\n"
    )


def gpu_buffers(rng: random.Random) -> Sample:
    entry, cause = rng.choice(
        ((saved_buffer, "saved_activations"), (scores_buffer, "attention_scores"), (logits_buffer, "logits"))
    )
    temp, parameters, outputs = size(rng, 8, 60), size(rng, 1, 2), size(rng, 0.5, 2)
    total = temp + parameters + outputs
    name, first = entry(rng)
    rows = [("parameter allocation", parameters), ("constant allocation", rng.randrange(1000))]
    rows += [("maybe_live_out allocation", outputs), ("preallocated temp allocation", temp)]
    lines = [f"{row:>33}: {human(count):>10}" for row, count in rows]
    if rng.random() < 0.5:
        lines.append(f" preallocated temp fragmentation: {human(temp // 40):>10} (2.50%)")
    lines.append(f"{'total allocation':>33}: {human(total):>10}")
    buffers = "".join(f"\tBuffer {i}:\n{first}\n" for i in range(1, rng.randrange(2, 6)))
    text = (
        f"{class_name(rng)}Out of memory while trying to allocate {temp} bytes.\nBufferAssignment OOM Debugging.\n"
        "BufferAssignment stats:\n" + "\n".join(lines) + f"\nPeak buffers:\n{buffers}"
    )
    return Sample(text, "gpu_buffers", temp, None, printed(human(total)), cause, name)


def plain(rng: random.Random) -> Sample:
    count = size(rng)
    code = rng.choice(("RESOURCE_EXHAUSTED", "Resource exhausted"))
    return Sample(
        f"RuntimeError: {code}: Out of memory while trying to allocate {count} bytes.\n",
        "plain",
        count,
        cause="unknown",
    )


def plain_rounded(rng: random.Random) -> Sample:
    text = human(size(rng))
    more = rng.choice(("", " with allocator GPU_0_bfc on device 0"))
    return Sample(
        f"{class_name(rng)}Out of memory while trying to allocate {text}{more}.\n",
        "plain",
        printed(text),
        cause="unknown",
    )


def platform(rng: random.Random) -> Sample:
    count = size(rng)
    text = (
        f"{class_name(rng)}Failed to allocate request for {human(count)} ({count}B) on device ordinal "
        f"{rng.randrange(8)}\n"
    )
    return Sample(text, "plain", count, cause="unknown")


def picker(rng: random.Random) -> Sample:
    count = size(rng, 0.5, 2)
    text = (
        "UNKNOWN: Failed to determine best cudnn convolution algorithm for: %cudnn-conv = f32[8,8]. Original error: "
        "RESOURCE_EXHAUSTED: "
    )
    text += rng.choice(
        (
            f"Out of memory while trying to allocate {count} bytes.\n",
            f"Failed to allocate request for {human(count)} ({count}B) on device ordinal 0\n",
        )
    )
    return Sample(text, "plain", count, cause="outside_pool")


def cpu(rng: random.Random) -> Sample:
    count = size(rng, 100, 5000)
    return Sample(f"{class_name(rng)}Out of memory allocating {count} bytes.\n", "plain", count, cause="host_memory")


# ---- TPU ------------------------------------------------------------------------------------------------------


def tpu_table(rng: random.Random) -> Sample:
    used, limit = libtpu(size(rng, 20, 60)), rng.choice(("15.48G", "30.75G", "7.48G"))
    total = libtpu(printed(used) + 2**30)
    code = rng.choice(("", "E1000: CompileTimeHbmOom: ", "XLA:TPU compile permanent error. "))
    layer, tokens = rng.randrange(9), rng.choice((2048, 4096))
    name, short, count = shape(rng, (rng.choice((16, 32)), tokens, 11008), "float32")
    text = f"""{class_name(rng)}{code}Ran out of memory in memory space hbm. Used {used} of {limit} hbm. \
Exceeded hbm capacity by 4.00G.

Total hbm usage >= {total}:
    reserved          1.00G
    program          {used}
    arguments            0B

Output size 0B; shares 0B with arguments.

Program hbm requirement {used}:
    global             4.0K
    HLO temp         {used} (100.0% utilization: Unpadded ({used}) Padded ({used}), 0.0% fragmentation (0B))

  Largest program allocations in hbm:

  1. Size: {libtpu(count)}
     Operator: op_name="pjit(train_step)/jit(main)/jvp(Model)/h/{layer}/feed_forward/w1/dot_general" \
source_file="/home/user/m.py" source_line=7
     Shape: {short}{{2,1,0:T(8,128)}}
     Unpadded size: {libtpu(count)}
     XLA label: fusion.3056.remat4 = fusion(copy-done.1, fusion.2), kind=kOutput, calls=fused_computation.3799
     Allocation type: HLO temp
     ==========================

"""
    return Sample(text, "tpu_hbm", printed(used), printed(limit), printed(total), "saved_activations", name)


def tpu_padding(rng: random.Random) -> Sample:
    factor = rng.choice((32, 64, 128))
    rows = rng.choice((1 << 22, 3 << 22))
    count = rows * 4 * factor
    used, limit = libtpu(count), "15.48G"
    extra = libtpu(count - rows * 4)
    text = f"""{class_name(rng)}Ran out of memory in memory space hbm. Used {used} of {limit} hbm. Exceeded \
hbm capacity by 1.00G.

  Largest program allocations in hbm:

  1. Size: {used}
     Shape: u32[{rows},{128 // factor}]{{1,0:T(8,128)}}
     Unpadded size: {libtpu(rows * 4)}
     Extra memory due to padding: {extra} ({factor}.0x expansion)
     XLA label: %fusion.7 = u32[{rows},1]{{1,0:T(8,128)}} fusion(u32[]{{:T(256)}} %add.1...
     Allocation type: HLO temp
     ==========================
"""
    return Sample(text, "tpu_hbm", printed(used), printed(limit), None, "padding", f"uint32[{rows},{128 // factor}]")


def tpu_vmem(rng: random.Random) -> Sample:
    space, used = rng.choice(("vmem", "smem")), libtpu(rng.randrange(17 << 20, 90 << 20))
    text = (
        f"{class_name(rng)}Ran out of memory in memory space {space}. Used {used} of 16.00M {space}. Exceeded "
        f"{space} capacity "
        f"by 1.00M.\n\nProgram {space} requirement {used}:\n    scoped           {used}\n"
    )
    return Sample(text, "tpu_hbm", printed(used), 16 << 20, printed(used), "on_chip_memory")


def tpu_scoped(rng: random.Random) -> Sample:
    used = libtpu(rng.randrange(17 << 20, 90 << 20))
    text = (
        f"{class_name(rng)}Ran out of memory in memory space vmem while allocating on stack for %fusion.12 = "
        f"bf16[8,128] "
        f"custom-call(). Scoped allocation with size {used} and limit 16.00M exceeded scoped vmem limit by 2.00M.\n"
    )
    return Sample(text, "tpu_hbm", printed(used), 16 << 20, None, "on_chip_memory")


def tpu_runtime(rng: random.Random) -> Sample:
    wanted, free = libtpu(size(rng, 2, 10)), libtpu(size(rng, 0.1, 12))
    text = (
        f"{class_name(rng)}Error allocating device buffer: Attempting to allocate {wanted}. That was not "
        f"possible. There are {free} free.; (0x0x0_HBM0)\n"
    )
    if rng.random() < 0.5:
        text = (
            f"{class_name(rng)}Attempting to reserve {wanted} at the bottom of memory. That was not possible. "
            f"There are {free} "
            f"free, 0B reserved, and {free} reservable.\n"
        )
    cause = "fragmentation" if printed(free) >= printed(wanted) else "device_full"
    return Sample(text, "plain", printed(wanted), None, None, cause)


def tpu_balance(rng: random.Random) -> Sample:
    wanted, held, limit = size(rng, 3, 5), size(rng, 5, 7), 8 << 30
    total = libtpu(wanted + held)
    text = f"""RuntimeError: Resource exhausted: From /job:tpu_worker/replica:0/task:0:
Attempting to reserve {libtpu(wanted)} at the bottom of memory. That was not possible. There are 1.00G free, \
0B reserved, and 1.00G reservable.;
HBM capacity {libtpu(limit)}:
       Top-of-Memory reserved:  529.00M (     554,696,704 bytes)
          Currently allocated:    {libtpu(held)} (   {held:,} bytes)
          Program requirement:    {libtpu(wanted)} (   {wanted:,} bytes)
                               ------------
      Available after request:   -1.00G (  -1,073,741,824 bytes)
; attempting reservation for program memory

Total hbm usage >= {total}:
    reserved(Infeed/Outfeed/Continuations) 529.00M
    program                    {libtpu(wanted)}
"""
    return Sample(text, "plain", wanted, limit, printed(total), "device_full")


def tpu_available(rng: random.Random) -> Sample:
    word = rng.choice(("", " bytes"))
    wanted, largest, free = size(rng, 2, 3), size(rng, 0.5, 1), size(rng, 0.5, 6)
    text = (
        f"{class_name(rng)}Could not allocate {wanted} bytes in memory 0x0x0_HBM0; "
        f"{largest}{word} allocatable, {free}{word} available\n"
    )
    return Sample(text, "plain", wanted, None, free, "fragmentation" if free >= wanted else "device_full")


def tpu_other(rng: random.Random) -> Sample:
    if rng.random() < 0.5:
        dense, sparse, limit = (libtpu(size(rng, 20, 200)) for _ in range(3))
        text = (
            f"{class_name(rng)}TPU TensorCore Hbm usage: {dense}, SparseCore Hbm usage {sparse}, exceeding "
            f"available bytes: {limit}\n"
        )
        total = printed(dense) + printed(sparse)
        return Sample(text, "tpu_hbm", total, printed(limit), total)
    side = rng.choice((300_000, 400_000))
    text = (
        f"XlaRuntimeError: RESOURCE_EXHAUSTED: Allocation (size={side * side}) would exceed memory "
        f"(size={16 << 30}) :: #allocation7 "
        f"[shape = 'u8[{side},{side}]{{1,0:T(8,128)(4,1)}}', space=hbm, tag = 'output of fusion@{{}}'] :: "
        f"<no-hlo-instruction>\n"
    )
    return Sample(text, "tpu_hbm", side * side, 16 << 30, None, "large_tensor")


# ---- allocators -----------------------------------------------------------------------------------------------


def bfc_line(count: int, tail: str = "requested by op ") -> str:
    rounded = -(-count // 256) * 256
    return f"Allocator (GPU_0_bfc) ran out of memory trying to allocate {human(count)} (rounded to {rounded}){tail}\n"


def bfc(rng: random.Random) -> Sample:
    count = size(rng)
    used = rng.choice((0, 95, 100))
    bar = "*" * used + "_" * (100 - used)
    exact = rng.random() < 0.5
    text = bfc_line(count) + bar + "\n"
    if exact:
        text += (
            f"Execution of replica 0 failed: RESOURCE_EXHAUSTED: Out of memory while trying to allocate {count} "
            "bytes.\n"
        )
    cause = "other_process" if not used else "device_full"
    return Sample(text, "bfc", count if exact else -(-count // 256) * 256, None, None, cause)


def bfc_no_failure(rng: random.Random) -> Sample:
    text = (
        f"Allocator (GPU_0_bfc) ran out of memory trying to allocate {human(size(rng))} with freed_by_count=0. "
        f"The caller indicates "
        "that this is not a failure, but this may mean that there could be performance gains if more memory were "
        "available.\n"
    )
    return Sample(text, "bfc", None, None, None, "no_memory_problem")


def bfc_dump(rng: random.Random) -> Sample:
    limit = size(rng, 10, 70)
    use = int(limit * rng.uniform(0.3, 0.6))
    count = int((limit - use) * rng.uniform(0.5, 0.9))
    text = bfc_line(count) + (
        f"Bin (262144): \tTotal Chunks: 4, Chunks in use: 2. 1.00MiB allocated for chunks. 1.00MiB in use in "
        f"bin. 1.00MiB "
        f"client-requested in use in bin.\n2 Chunks of size {use // 2} totalling {human(use)}\n"
        f"Sum Total of in-use chunks: {human(use)}\nStats: \nLimit:            {limit:>20}\nInUse:            "
        f"{use:>20}\n"
        f"MaxInUse:         {use:>20}\nNumAllocs:        {25:>20}\nMaxAllocSize:     {use // 2:>20}\n"
    )
    return Sample(text, "bfc", -(-count // 256) * 256, limit, use, "fragmentation")


def cuda_async(rng: random.Random) -> Sample:
    card, use = 85095874560, size(rng, 10, 60)
    count = card * rng.randrange(2, 9)
    text = (
        f"gpu_async_1 cuMemAllocAsync failed to allocate {count} bytes: RESOURCE_EXHAUSTED: : "
        f"CUDA_ERROR_OUT_OF_MEMORY: out of "
        f"memory\n Reported by CUDA: Free memory/Total memory: {card - use}/{card}\nStats: Limit:                "
        f"               0\n"
        f"InUse:                     {use}\nMaxInUse:                  {use}\nNumAllocs:                       21841\n"
    )
    return Sample(text, "allocator_other", count, card, use, "large_tensor")


def pinned_host(rng: random.Random) -> Sample:
    count, text = size(rng, 0.2, 30), ""
    first = count
    for _ in range(rng.randrange(1, 4)):
        text += f"failed to alloc {count} bytes on host: CUDA_ERROR_OUT_OF_MEMORY: out of memory\n"
        text += f"could not allocate pinned host memory of size: {count}\n"
        count = int(count * 0.9)
    return Sample(text, "allocator_other", first, None, None, "host_memory")


def driver(rng: random.Random) -> Sample:
    count = size(rng, 0.2, 4)
    text = f"failed to allocate {libtpu(count)} ({count} bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory\n"
    return Sample(text, "allocator_other", count, None, None, "outside_pool")


def library(rng: random.Random) -> Sample:
    if rng.random() < 0.5:
        text = (
            "NCCL operation ncclCommInitRank(&comm, nranks, id, rank) failed: unhandled cuda error. Last NCCL "
            "warning(error) log "
            "entry (may be unrelated) 'Cuda failure 2 'out of memory''.\n"
        )
        return Sample(text, "allocator_other", cause="outside_pool")
    text = "NCCL operation ncclGroupEnd() failed: unhandled system error (run with NCCL_DEBUG=INFO for details).\n"
    return Sample(text, "allocator_other", cause="no_memory_problem")


# ---- warnings -------------------------------------------------------------------------------------------------


# The apostrophe of the print statement, and those of word processors and representations of strings.
APOSTROPHES = ("'", "\u2019", "\\'", "&#39;")


def remat(rng: random.Random) -> Sample:
    limit, reached = size(rng, -10, 30), size(rng, 31, 60)
    before = reached + size(rng, 0, 5)
    down = f", down from {human(before)} ({before} bytes) originally" if rng.random() < 0.7 else ""
    text = (
        f"Can{rng.choice(APOSTROPHES)}t reduce memory use below {human(limit)} ({limit} bytes) by "
        f"rematerialization; only reduced to "
        f"{human(reached)} "
        f"({reached} bytes){down}\n"
    )
    cause = "weights_and_state" if limit < 0 else "saved_activations"
    return Sample(text, "remat_warning", None, limit, reached, cause)


def remat_budget(rng: random.Random) -> Sample:
    write = rng.choice((human, str))
    total, limit = write(size(rng, 70, 90)), write(size(rng, 10, 60))
    text = (
        f"The byte size of input/output arguments ({total}) exceeds the base limit ({limit}). This indicates an "
        f"error in the "
        "calculation!\n"
    )
    return Sample(text, "remat_warning", None, printed(limit), printed(total), "weights_and_state")


def spmd(rng: random.Random) -> Sample:
    name, short, count = shape(rng, (8, 4096, rng.choice((128, 256))), "float32")
    text = (
        "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding "
        "{devices=[2,1,4]<=[4,2]T(1,0)} to "
        f"{{devices=[1,8,1]<=[8]}} efficiently for HLO operation %add.1 = {short}{{2,1,0}} add(%param, %param), "
        'sharding={devices=[2,1,4]<=[4,2]T(1,0)}, metadata={op_name="jit(step)/update/add" '
        "stack_frame_id=2}. As the last "
        "resort, SPMD will replicate the tensor and then partition it to obtain the target sharding, which is "
        "inefficient.\n"
    )
    return Sample(text, "spmd", None, None, 8 * count, "replicated_tensor", name)


def spmd_old(rng: random.Random) -> Sample:
    text = (
        "[spmd] Involuntary full rematerialization. The compiler was not able to go from sharding "
        "{devices=[4,1]0,1,2,3} to "
        "{devices=[1,4]0,1,2,3} without doing a full rematerialization of the tensor. You probably want to "
        "enrich the sharding "
        "annotations to prevent this from happening.\n"
    )
    return Sample(text, "spmd", cause="replicated_tensor")


def donation(rng: random.Random) -> Sample:
    arrays = [shape(rng, (rng.randrange(512, 1024), rng.randrange(512, 1024))) for _ in range(rng.randrange(1, 5))]
    style = rng.choice(("ShapedArray({0})", "{0}", "{1}{{1,0}}"))
    listed = ", ".join(style.format(name, short) for name, short, _ in arrays)
    text = (
        f"/home/user/jax/_src/interpreters/mlir.py:1233: UserWarning: Some donated buffers were not usable: "
        f"{listed}.\nSee an "
        "explanation at https://docs.jax.dev/en/latest/faq.html#buffer-donation.\n"
    )
    return Sample(text, "donation", None, None, sum(count for *_, count in arrays), "unusable_donation", arrays[0][0])


def constants(rng: random.Random) -> Sample:
    name, _, count = shape(rng, (2048, rng.randrange(1024, 4096)), "float32")
    printed_size = f"{count / 1e6:.2f}MB"
    text = (
        f"UserWarning: A large amount of constants were captured during lowering ({printed_size} total). If this "
        f"is intentional, "
        f"disable this warning by setting JAX_CAPTURED_CONSTANTS_WARN_BYTES=-1.\n\nLargest 1 allocation(s):\n  "
        f"Constant <class "
        f"'jaxlib._jax.ArrayImpl'>, {name}, {printed_size} captured at:\n    /home/user/const.py:4:21 (loss)\n"
    )
    return Sample(text, "donation", None, None, count, "captured_constant", name)


def torch(rng: random.Random) -> Sample:
    wanted, card, free = (human(size(rng, *ends)).replace("GiB", " GiB") for ends in ((2, 9), (40, 80), (1, 1.9)))
    text = (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of "
        f"{card} of which "
        f"{free} is free. Process 77 has 70.00 GiB memory in use.\n"
    )
    return Sample(text, "torch_cuda", printed(wanted.replace(" ", "")), printed(card.replace(" ", "")), None, "unknown")


FORMS: dict[str, Callable[[random.Random], Sample]] = {
    each.__name__: each
    for each in (
        gpu_buffers,
        plain,
        plain_rounded,
        platform,
        picker,
        cpu,
        tpu_table,
        tpu_padding,
        tpu_vmem,
        tpu_scoped,
        tpu_runtime,
        tpu_balance,
        tpu_available,
        tpu_other,
        bfc,
        bfc_no_failure,
        bfc_dump,
        cuda_async,
        pinned_host,
        driver,
        library,
        remat,
        remat_budget,
        spmd,
        spmd_old,
        donation,
        constants,
        torch,
    )
}


# ---- loggers, launchers and terminals -------------------------------------------------------------------------


def each_line(prefix: Callable[[int], str]) -> Callable[[str], str]:
    return lambda text: "".join(f"{prefix(number)}{line}\n" for number, line in enumerate(text.splitlines()))


def hard_wrap(text: str, width: int = 100) -> str:
    """A terminal breaks a line at its last column, inside words and numbers."""
    return "\n".join(line[at : at + width] for line in text.split("\n") for at in range(0, max(len(line), 1), width))


def soft_wrap(text: str) -> str:
    """Breaks sentences between words; rows of tables keep their indentation."""
    lines = []
    for line in text.split("\n"):
        is_sentence = len(line) > 90 and not line.startswith((" ", "\t"))
        lines += textwrap.wrap(line, 90, break_long_words=False, break_on_hyphens=False) if is_sentence else [line]
    return "\n".join(lines)


def training_log(text: str) -> str:
    steps = [f"step {step} loss {9 / (step + 1):.3f} memory 12.3 GiB\n" for step in range(200)]
    return "".join(steps[:100]) + text + "".join(steps[100:])


DRESSINGS: dict[str, Callable[[str], str]] = {
    "bare": lambda text: text,
    "absl": each_line(lambda number: f"W1227 21:38:16.{462000 + number}   34782 bfc_allocator.cc:497] "),
    "tensorflow": each_line(lambda number: "2024-12-27 21:38:16.462633: E external/xla/xla/service/some_file.cc:300] "),
    "ray": each_line(lambda number: "\x1b[36m(RayTrainWorker pid=1234, ip=10.0.0.1)\x1b[0m "),
    "srun": each_line(lambda number: "3: "),
    "docker": each_line(lambda number: "backend-1    | "),
    "rank": each_line(lambda number: "[rank2]: "),
    "quoted": each_line(lambda number: "> "),
    "commented": each_line(lambda number: "# "),
    "kubernetes": each_line(lambda number: "2026-01-02T03:04:05.678Z stderr F "),
    "colours": each_line(lambda number: "\x1b[31m\x1b[1m"),
    "windows": lambda text: text.replace("\n", "\r\n"),
    "blanks": lambda text: text.replace("\t", "        "),
    "flat": lambda text: "\n".join(line.strip() for line in text.split("\n")),
    "soft wrap": soft_wrap,
    "hard wrap": hard_wrap,
    "in a log": training_log,
}
