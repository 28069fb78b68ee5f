"""Messages about memory are read in all forms, with all prefixes and line breaks, and cut anywhere."""

import json
import random
import time

import pytest

from bytescope import memory
from bytescope.memory.messages import log_text
from bytescope.memory.messages.causes import CAUSES
from bytescope.memory.messages.message_forms import FORMS, KINDS
from support import memory_messages as written

pytestmark = pytest.mark.quick


def says(sample, text):
    found = memory.explain(text)
    assert isinstance(found, memory.Explanation) and found.recognized
    assert (found.kind, found.requested_bytes, found.limit_bytes, found.total_bytes) == sample[1:5], text[:2000]
    if sample.shape:
        assert sample.shape in [culprit.shape for culprit in found.culprits]
    return found


@pytest.mark.parametrize("name", written.FORMS)
def test_each_form_is_read(name):
    for seed in range(8):
        sample = written.FORMS[name](random.Random(f"{name} {seed}"))
        found = says(sample, sample.text)
        if sample.cause is not None:
            assert found.cause_kind == sample.cause


@pytest.mark.parametrize("dressing", written.DRESSINGS)
def test_prefixes_and_line_breaks_do_not_matter(dressing):
    for name, form in written.FORMS.items():
        sample = form(random.Random(f"{name} {dressing}"))
        says(sample, written.DRESSINGS[dressing](sample.text))


def test_lines_of_several_processes_are_separated():
    samples = [written.gpu_buffers(random.Random(seed)) for seed in (1, 2)]
    lines = [
        written.each_line(lambda number, rank=rank: f"[rank{rank}]: ")(sample.text).splitlines()
        for rank, sample in enumerate(samples)
    ]
    mixed = [line for pair in zip(*lines) for line in pair] + max(lines, key=len)[min(map(len, lines)) :]
    found = memory.explain("\n".join(mixed))
    assert (found.requested_bytes, found.total_bytes) == (samples[0].requested, samples[0].total)
    assert found.messages == {"gpu_buffers": 2}


def test_bytes_and_other_encodings():
    sample = written.plain(random.Random(0))
    for raw in (
        sample.text.encode(),
        sample.text.encode("utf-16"),
        b"\xff\xfe\x00" + b"\x80" * 9,
        b"",
        b"\x00\n" + sample.text.encode(),
    ):
        found = memory.explain(raw)
        assert found.requested_bytes in (sample.requested, None)
    assert memory.explain(sample.text.encode("utf-16")).requested_bytes == sample.requested
    representation = repr(written.gpu_buffers(random.Random(1)).text).replace("\\t", " ")
    assert memory.explain(representation).total_bytes == written.gpu_buffers(random.Random(1)).total


def test_the_first_failure_is_explained():
    first, second = (written.bfc(random.Random(seed)) for seed in (3, 4))
    warning = written.donation(random.Random(0))
    found = memory.explain(
        "step 1\n" * 500 + warning.text + "step 2\n" * 500 + first.text + "step 3\n" * 500 + second.text
    )
    assert found.requested_bytes == first.requested and found.total_bytes is None
    assert found.line == 1003 and found.messages["bfc"] == 2 and found.messages["donation"] == 1


def test_a_table_without_its_head_names_its_memory():
    text = written.tpu_vmem(random.Random(1)).text
    found = memory.explain(text[text.index("Program") :])
    assert found.cause_kind == "on_chip_memory" and found.total_bytes == written.tpu_vmem(random.Random(1)).total


def test_a_result_that_cannot_be_allocated_shows_a_full_device():
    sample = written.gpu_buffers(random.Random(1))
    found = memory.explain(sample.text.replace(f"allocate {sample.requested} bytes", "allocate 10485760 bytes"))
    assert found.cause_kind == "device_full" and "could not even allocate a result of 10.00 MiB" in found.evidence


def test_pytorch_is_told_apart():
    torch, ours = written.torch(random.Random(1)), written.plain(random.Random(2))
    both = memory.explain(torch.text + "\n" * 30 + ours.text)
    assert both.kind == "plain" and both.requested_bytes == ours.requested and both.limit_bytes is None
    assert both.messages == {"torch_cuda": 1, "gpu_request": 1} and "PyTorch" in str(both)
    assert "PyTorch's error, not JAX's" in str(memory.explain(torch.text))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "loss 1.0",
        "RuntimeError: shapes do not match",
        "OSError: [Errno 28] No space left on device",
        "memory " * 99,
    ],
)
def test_other_logs_are_not_recognized(text):
    found = memory.explain(text)
    assert not found.recognized and found.kind == "unknown" and "No message about memory" in str(found)


def test_quotas_are_not_memory():
    found = memory.explain("grpc: RESOURCE_EXHAUSTED: Quota exceeded for requests per minute")
    assert found.cause_kind == "no_memory_problem"


def check(text):
    found = memory.explain(text)
    json.dumps(found.to_json(), allow_nan=False)
    str(found)
    assert found.kind in (*KINDS, "unknown") and found.cause_kind in CAUSES
    assert found.recognized == (found.form in FORMS)
    assert len(found.happened) > 20 and "{" not in found.happened


def cuts(name, step):
    text = written.FORMS[name](random.Random(name)).text
    for at in range(step // 2, len(text), step):
        yield text[:at]
        yield text[at:]


def splices(count, seed=0):
    texts = [form(random.Random(name)).text for name, form in written.FORMS.items()]
    rng = random.Random(seed)
    for _ in range(count):
        pieces = [rng.choice(texts) for _ in range(rng.randrange(2, 5))]
        yield "".join(piece[rng.randrange(len(piece)) :][: rng.randrange(1, 2000)] for piece in pieces)


def test_cut_and_spliced_messages():
    check("Total hbm usage >= 11.47G:\n Padded (10.96G), 0.0% fragmentation (0B))")
    for text in (*(text for name in written.FORMS for text in cuts(name, 171)), *splices(40)):
        check(text)


def large_logs(size):
    rng = random.Random(0)
    samples = [form(rng).text for form in written.FORMS.values()]
    steps = "".join(
        f"I1124 18:46:02.123456 step {step} loss 2.34 memory 12.3GiB allocated 3 buffers\n" for step in range(2000)
    )
    yield "ordinary", steps * (size // len(steps))
    yield "with messages", "".join(steps + sample for sample in samples) * (size // (len(steps) * len(samples)))
    yield "no lines", "of memory " * (size // 10)
    yield "one word", "memory" * (size // 6)
    yield "zeros", "\0" * size


def check_time(size, max_ratio):
    """Compares the CPU time to explain a log with the time to count each key phrase in it, one after the other."""
    for name, log in large_logs(size):
        data, ratios = log.encode(), []
        for _ in range(3):
            start = time.process_time()
            memory.explain(data)
            explained = time.process_time()
            for phrase in log_text.KEY_PHRASES:
                data.count(phrase)
            ratios.append((explained - start) / (time.process_time() - explained))
            if ratios[-1] < max_ratio:
                break
        assert min(ratios) < max_ratio, name


def test_the_time_to_explain_a_log_is_bounded():
    check_time(5_000_000, max_ratio=5.0)  # most of it is spent on messages, which are bounded for logs of any size


def test_places_are_those_of_a_plain_search():
    rng = random.Random(5)
    log = bytes(rng.choice(b"abc of memory\n") for _ in range(300_000)) + b"of memory"
    phrases = (b"of", b"memo", b"of memory", b"not there")
    expected = {at for phrase in phrases for at in range(len(log)) if log.startswith(phrase, at)}
    assert log_text.find_phrases(log, phrases, 10**9) == sorted(expected)
    few = log_text.find_phrases(log, phrases, 3)
    assert few == sorted(
        {at for phrase in phrases for at in [p for p in sorted(expected) if log.startswith(phrase, p)][:3]}
    )


@pytest.mark.parametrize("name", ["remat", "bfc", "plain", "tpu_vmem"])
def test_messages_without_their_first_words(name):
    sample = written.FORMS[name](random.Random(3))
    first = {"remat": "below", "bfc": ")", "plain": "memory", "tpu_vmem": "Program"}[name]
    found = memory.explain(
        sample.text[sample.text.index(first) + len(first) if name != "tpu_vmem" else sample.text.index(first) :]
    )
    assert found.kind == sample.kind and found.total_bytes == sample.total
    assert found.requested_bytes == (None if name == "tpu_vmem" else sample.requested)
