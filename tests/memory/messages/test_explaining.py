"""What an explanation says: causes, culprits, shardings, remedies that exist, one screen, and the page."""

import dataclasses
import importlib
import mmap
import random
import re
from pathlib import Path

import jaxlib
import pytest

from bytescope import memory
from bytescope.memory.hlo.sharding_text import parse_sharding
from bytescope.memory.messages import causes, culprits, explanation_document
from bytescope.memory.messages.message_forms import FORMS
from bytescope.memory.messages.message_record import ArrayType, ListedBuffer
from bytescope.memory.messages.remedies import BY_CAUSE, BY_FORM, REMEDIES, remedies_for
from bytescope.memory.view import draw_terminal
from bytescope.memory.view.console import plain_text
from support import memory_messages as written

pytestmark = pytest.mark.quick

SAMPLES = [form(random.Random(seed)) for form in written.FORMS.values() for seed in range(3)]


# ---- remedies -------------------------------------------------------------------------------------------------

NAMES = sorted({name for remedy in REMEDIES.values() for name in remedy.uses})


@pytest.fixture(scope="module")
def libraries():
    """The files in which jaxlib, its plugins and jax read variables and flags."""
    root = Path(jaxlib.__file__).parent.parent
    files = [*root.glob("jaxlib/*.so"), *root.glob("jax_plugins/*/*.so"), root / "jaxlib/xla_client.py"]
    return [*files, *(root / "jax/_src").glob("*.py")]


def contains(files, word):
    for path in files:
        if path.stat().st_size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if content.find(word.encode()) >= 0:
                    return True
    return False


@pytest.mark.parametrize("name", NAMES)
def test_every_remedy_names_what_exists(name, libraries):
    if re.match(r"(jax|optax)\.", name):
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            try:
                value = importlib.import_module(".".join(parts[:length]))
            except ModuleNotFoundError:
                continue
            break
        for part in parts[length:]:
            value = getattr(value, part)
    elif name == "vmem_limit_bytes":
        from jax.experimental.pallas import tpu

        assert name in tpu.CompilerParams.__dataclass_fields__
    elif name.startswith("XLA_CLIENT_") or name.startswith("XLA_PJRT"):
        plugins = [path for path in libraries if "jax_plugins" in str(path) or path.name == "xla_client.py"]
        if not any("jax_plugins" in str(path) for path in plugins) and name.startswith("XLA_PJRT"):
            pytest.skip("no GPU plugin is installed")
        assert contains(plugins, name)
    else:
        assert contains(reversed(libraries), name.removeprefix("--")), name


def test_a_listed_tensor_adds_its_remedy_where_it_helps():
    plain = remedies_for("saved_activations", "gpu_buffers", "", ("saved",))
    assert remedies_for("saved_activations", "gpu_buffers", "", ("saved", "scores")) == (REMEDIES["flash"], *plain)
    assert remedies_for("device_full", "gpu_buffers", "", ("scores",)) == remedies_for("device_full", "gpu_buffers")


def test_remedies_and_causes_fit_together():
    assert BY_CAUSE.keys() == causes.CAUSES.keys() and {cause for cause, _ in BY_FORM} <= BY_CAUSE.keys()
    assert {form for _, form in BY_FORM} <= {*FORMS, "smem"}
    used = {name for names in (*BY_CAUSE.values(), *BY_FORM.values()) for name in names}
    assert used == REMEDIES.keys()
    for remedy in REMEDIES.values():
        assert all(re.search(rf"(?<![\w.]){re.escape(name)}", remedy.words) for name in remedy.uses), remedy.words
        written_names = re.findall(r"\b(?:jax|optax)\.[\w.]*\w|\b(?:XLA|TF|JAX)_[A-Z_]+\b", remedy.words)
        assert set(written_names) <= set(remedy.uses)


def test_expected_bytes_follow_from_the_message():
    padded = memory.explain(written.tpu_padding(random.Random(1)).text)
    (buffer,) = padded.culprits
    assert padded.savings["padding"] == pytest.approx(buffer.bytes * (1 - 1 / buffer.padding), rel=0.01)
    assert "Frees up to" in str(padded)
    unknown = memory.explain(written.plain(random.Random(1)).text)
    assert not unknown.savings and "Frees up to" not in str(unknown)


# ---- culprits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op_name, array, label, identity, phase",
    [
        (
            "jit(f)/jvp(Net)/h_3/attn/bqhd,bkhd->bhqk/dot_general",
            ("float32", (2, 8, 512, 512)),
            "",
            "scores",
            "forward",
        ),
        ("jit(f)/transpose(jvp(Net))/lm_head/dot_general", ("float32", (8, 1024, 50304)), "", "logits", "backward"),
        ("jit(f)/jvp(Net)/h_3/mlp/dot_general", ("bfloat16", (8, 1024, 4096)), "", "saved", "forward"),
        ("jit(f)/transpose(jvp(Net))/h_3/mlp/dot_general", ("bfloat16", (8, 1024, 4096)), "", "gradient", "backward"),
        ("jit(f)/jvp(Net)/rematted_computation/mlp/add", ("bfloat16", (8, 1024, 4096)), "", "recomputed", "recompute"),
        ("jit(f)/jvp(Net)/ln_1/mul", ("float32", (8, 1024, 4096)), "", "norm", "forward"),
        ("jit(f)/while/body/dynamic_update_slice", ("bfloat16", (32, 8, 1024, 4096)), "", "stack", ""),
        ("jit(f)/optimizer/scale_by_adam/mul", ("float32", (4096, 4096)), "", "optimizer", "optimizer"),
        ("jit(init)/Dense_0/threefry2x32", ("uint32", (2, 4096)), "", "random", ""),
        ("", ("float32", (2, 8, 2048, 2048)), "fusion.3", "scores", ""),
        ("", ("float32", (8, 2048, 151936)), "fusion.3", "logits", ""),
        ("", ("float32", (8, 2048)), "copy.12", "copy", ""),
        ("jit(f)/all_gather", ("bfloat16", (8192, 8192)), "all-gather.3", "gathered", ""),
        ("", None, "fusion", "", ""),
    ],
)
def test_what_a_tensor_usually_is(op_name, array, label, identity, phase):
    buffer = ListedBuffer(2**30, ArrayType(*array) if array else None, op_name, label=label)
    (culprit,) = culprits.describe([buffer], "gpu_buffers")
    assert (culprit.identity, culprit.phase) == (identity, phase)
    assert culprit.what == culprits.IDENTITIES[identity].format(leading=32)


def test_equal_buffers_of_several_layers_are_one_row():
    buffers = [ListedBuffer(2**20, ArrayType("bfloat16", (8, 64)), f"jit(f)/jvp(Net)/h_{i}/mlp/add") for i in (3, 7, 5)]
    (culprit,) = culprits.describe([*buffers], "gpu_buffers")
    assert culprit.count == 3 and culprit.layers == (3, 5, 7) and culprit.bytes == 3 * 2**20
    assert explanation_document.culprit_name(culprit) == "3 x bfloat16[8,64]"
    origin = explanation_document.culprit_origin(culprit)
    assert "; layers 3 to 7; mlp add; source line not in the message" in origin
    library = dataclasses.replace(culprit, source="/usr/lib/python3.9/contextlib.py:84")
    assert explanation_document.culprit_origin(library).endswith("; source line in Python's library")


def test_a_rematerialization_warning_becomes_a_need():
    found = memory.explain(
        "Can't reduce memory use below 1.00GiB (1073741824 bytes) by rematerialization; only reduced to 3.00GiB "
        "(3221225472 "
        "bytes), down from 4.00GiB (4294967296 bytes) originally"
    )
    assert "needs 3.00 GiB plus its arguments" in found.evidence and "saved 1.00 GiB" in found.evidence
    assert not found.failure and "may still succeed" in str(found)


# ---- shardings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, tiles, copies, devices, drawing",
    [
        ("{devices=[4,1]0,1,2,3}", (4, 1), 1, (0, 1, 2, 3), ["|0|1|2|3|"]),
        ("{devices=[2,1,4]<=[4,2]T(1,0)}", (2, 1, 4), 1, (0, 2, 4, 6, 1, 3, 5, 7), ["|0|2|4|6|", "|1|3|5|7|"]),
        ("{devices=[2,1,2]<=[4] last_tile_dim_replicate}", (2, 1), 2, (0, 1, 2, 3), ["|0,1|2,3|"]),
        ("{replicated}", (), 0, (), []),
        ("{maximal device=0}", (), 0, (), []),
        ("{devices=[2,4]<=[9]}", (2, 4), 1, (), []),
        ("{devices=[2,4]<=[8]T(1,0)}", (2, 4), 1, (), []),
    ],
)
def test_shardings_are_read_and_drawn(text, tiles, copies, devices, drawing):
    found = parse_sharding(text)
    assert (found.tiles, found.copies, found.devices, found.drawing()) == (tiles, copies, devices, drawing)


def test_text_that_is_no_sharding():
    assert parse_sharding("{}") is None and parse_sharding("{devices=[0,1]0}") is None
    assert parse_sharding("{devices=[1048577]<=[1048577]}") is None
    assert "whole on every device" in parse_sharding("{replicated}").sentence()


def test_both_shardings_are_on_the_screen_and_the_page():
    found = memory.explain(written.spmd(random.Random(1)).text)
    for text in (str(found), found.to_html()):
        assert (
            "|0|2|4|6|" in text and "|0|1|2|3|4|5|6|7|" in text and "dimension 0 in 2, dimension 2 in 4 pieces" in text
        )


# ---- the screen and the page ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_an_explanation_is_one_screen(width):
    for sample in SAMPLES:
        found = memory.explain(sample.text)
        text = plain_text(draw_terminal.draw(explanation_document.document(found)), width)
        lines = text.splitlines()
        assert len(lines) <= 45 and max(map(len, lines)) <= width, text
        assert "{" not in found.happened.replace("{devices", "") and found.happened.endswith("."), found.happened
        assert "cause: " in text


def test_missing_figures_are_named():
    text = str(memory.explain(written.plain(random.Random(1)).text))
    assert "not in the message: limit, this program, other arrays, memory outside the pool" in " ".join(text.split())
    assert "The log does not contain the cause." in text and "bytescope report" in text
    assert "largest buffers: not in the message" in text


def test_names_cannot_move_the_cursor():
    sample = written.gpu_buffers(random.Random(2)).text.replace("model.py", "mo\x1b[2Jdel\u202e.py")
    text = str(memory.explain(sample))
    assert "\x1b" not in text and "\u202e" not in text


def test_the_page_has_a_bar_for_each_buffer():
    sample = written.gpu_buffers(random.Random(3))
    found = memory.explain(sample.text.replace("model.py", "<script>alert(1)</script>"))
    page = found.to_html()
    assert page.count('class="c-workspace"') == len(found.culprits) > 0
    assert sample.shape in page and "<script>alert" not in page and found.cause in page
    assert "No message" in memory.explain("").to_html() or "no message" in memory.explain("").to_html()


# From a run of ours on an H100 (jax 0.11.2): a step of 8B parameters in the default pool, where arguments alone are
# larger than the pool.
DEFAULT_POOL = """\
E1127 14:46:05.380917 6548 gpu_hlo_schedule.cc:1068] The byte size of input/output arguments (64242090348) exceeds the \
base limit ({pool}). This indicates an error in the calculation!
W1127 14:46:05.501584 6548 hlo_rematerialization.cc:3363] Can't reduce memory use below 59.83GiB (64242090344 bytes) \
by rematerialization; only reduced to 60.27GiB (64711852752 bytes), down from 60.77GiB (65249899544 bytes) originally
W1127 14:46:17.707188 6548 bfc_allocator.cc:598] Allocator (GPU_0_bfc) ran out of memory trying to allocate 256.00MiB \
(rounded to 268435456) from the lower end requested by op
Current allocation summary follows.
W1127 14:46:17.707506 6548 bfc_allocator.cc:609] {stars}
jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 256.00MiB with allocator \
GPU_0_bfc on device 0. [executable_name='jit_some'] [tf-allocator-allocation-error='']
"""


@pytest.mark.parametrize(("pool", "first"), [(63_763_906_560, True), (78_217_478_144, False), (60_000_000_000, False)])
def test_a_pool_of_the_default_size_is_recognized_and_enlarged_first(pool, first):
    found = memory.explain(DEFAULT_POOL.format(pool=pool, stars="*" * 100))
    assert found.recognized and found.limit_bytes in (pool, None)
    assert (found.remedies[0].words == REMEDIES["larger_pool"].words) is first
