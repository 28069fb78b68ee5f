"""Targets: names, shapes, figures, and compiling for devices that are not here."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bytescope import memory
from bytescope.memory import analysis
from bytescope.memory.devices import chips, limits, platform, targets
from bytescope.memory.devices.chips import CHIPS
from bytescope.memory.errors import ReportError
from bytescope.memory.watching import device_tables

pytestmark = pytest.mark.quick

HAS_CUDA = any(targets.installed(f"jax_plugins.{name}") for name in targets.CUDA_PLUGINS)
HAS_TPU = importlib.util.find_spec("libtpu") is not None
needs_cuda = pytest.mark.oracle("cuda")
needs_tpu = pytest.mark.oracle("tpu")

SHAPES = {
    "h200": ((1, 1), 1, 1),
    "h200:8": ((1, 8), 8, 8),
    "h100:2x8": ((2, 8), 16, 8),
    "h100:64x8": ((64, 8), 512, 8),
    "a100-40g:4": ((1, 4), 4, 4),
    "H100:8 ": ((1, 8), 8, 8),
    "v5e": ((1, 1), 1, 1),
    "v5e:4x4": ((4, 4), 16, 4),
    "v5p": ((2, 2, 1), 4, 4),
    "v5p:2x2x2": ((2, 2, 2), 8, 4),
    "v6e:2x4": ((2, 4), 8, 4),
    "gb200:18x4": ((18, 4), 72, 4),
    "gb200": ((1, 1), 1, 1),
    "t4:2x8": ((2, 8), 16, 8),
    "gb300:18x4": ((18, 4), 72, 4),
    "gh200-96g:2x1": ((2, 1), 2, 1),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shape_of_a_described_target(name):
    target = targets.parse(name)
    assert (target.shape, target.n_devices, target.devices_per_host) == SHAPES[name]
    assert target.is_described and target.name == name.strip().lower()


@pytest.mark.parametrize(
    "name, words",
    [
        ("h2000", "did you mean h200?"),
        ("gh200", "did you mean gh200-96g or gh200-144g?"),
        ("a100", "did you mean a100-40g or a100-80g?"),
        ("zzz", "rtx4090"),
        ("", "local"),
        ("h100:", "after the colon"),
        ("h100:0", "after the colon"),
        ("h100:-1", "after the colon"),
        ("h100:8x", "after the colon"),
        ("h100:1e9", "after the colon"),
        ("h100:16", "write h100:2x8"),
        ("h100:1x2x3", "at most 8"),
        ("v5e:3x3", "even numbers"),
        ("v5e:32x2", "up to 16x16"),
        ("v5e:8", "2 axes"),
        ("v5p:1x1x1", "3 axes"),
        ("local:2", "takes no count"),
        ("cpu:2x4", "write cpu:8"),
        ("cpu:4096", "JAX_NUM_CPU_DEVICES=4096"),
        ("h10", "did you mean h100, h100-pcie or h100-nvl?"),
        ("rtx4080", "did you mean rtx4090"),
        ("gb200:8", "write gb200:2x4"),
        ("gb200:19x4", "a rack has 18x4"),
        ("gh200-96g:4", "write gh200-96g:4x1"),
    ],
)
def test_a_wrong_name_is_one_line_that_says_what_exists(name, words):
    with pytest.raises(ReportError) as caught:
        targets.parse(name)
    message = str(caught.value)
    assert words in message and "\n" not in message and caught.value.exit_code == 2


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_every_figure_of_every_chip_is_there_and_has_its_source(chip):
    target = targets.parse(chip.name)
    figures = ("device_memory_bytes", "hbm_bytes_per_s", "host_link_bytes_per_s", "host_memory_bytes")
    for figure in figures:
        assert getattr(target, figure) > 0 and target.sources[figure]
    assert set(target.interconnect_bytes_per_s) == {"in_host", "between_hosts"}
    assert min(target.interconnect_bytes_per_s.values()) > 0 and target.sources["interconnect_bytes_per_s"]
    assert min(target.peak_flops.values()) > 0 and target.sources["peak_flops"]
    tensor = target.peak_flops["fp16" if chip.name in ("t4", "v100") else "bf16"]
    assert tensor > target.peak_flops.get("fp32", 0)
    assert target.peak_flops.get("fp8", 2 * tensor) == pytest.approx(2 * tensor, rel=0.02)
    assert target.reserved_bytes < target.device_memory_bytes
    assert 15e9 < target.device_memory_bytes < 300e9
    if chip.gpu:  # the vector units' rate is that of their number: two FLOPs each and tick, but for what is rounded
        vector = 2 * chip.gpu.cores * chip.gpu.fpus_per_core * chip.gpu.clock_ghz * 1e9
        assert target.peak_flops["fp32"] == pytest.approx(vector, rel=0.05)
    json.dumps(target.to_json())
    hash(target)


def test_host_memory_is_the_share_of_the_devices_taken():
    whole, one = targets.parse("h200:8"), targets.parse("h200")
    assert whole.host_memory_bytes == 8 * one.host_memory_bytes == CHIPS["h200"].host_memory_bytes


@pytest.fixture
def unset(monkeypatch):
    """No variable of jax's allocator is set."""
    for name in (*platform.FRACTION_VARIABLES, platform.OWN_FRACTION_VARIABLE, "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_limit_of_a_described_gpu_is_jaxlibs_pool(unset):
    """On a real H100, `bytes_limit` is 63,707,283,456 at jax's default."""
    assert targets.parse("h100").limit_bytes == targets.parse("h100").pool_bytes == 63_707_283_456
    ours = platform.MemoryFraction(0.92, "the trainer's default")
    assert targets.parse("h100:8", ours).limit_bytes == 78_148_272_128
    assert targets.parse("h100:8@0.5", ours).limit_bytes == 42_471_522_304
    assert targets.parse("v5e").limit_bytes == int(15.75 * 2**30)  # TPUs have no fraction
    assert targets.parse("v5e").pool_bytes is targets.parse("v5e").memory_fraction is None


def test_the_fraction_comes_from_the_target_then_the_environment_then_the_program(unset):
    def settled(name):
        target = targets.parse(name, platform.MemoryFraction(0.92, "a trainer"))
        return target.memory_fraction, target.memory_fraction_source

    assert settled("h100:2x8") == (0.92, "a trainer")
    unset.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    assert settled("h100") == (0.6, "XLA_PYTHON_CLIENT_MEM_FRACTION")
    unset.setenv("XLA_CLIENT_MEM_FRACTION", ".7")
    assert settled("h100") == (0.7, "XLA_CLIENT_MEM_FRACTION")
    assert settled("h100:8@0.9") == (0.9, "set by the target")
    unset.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    assert settled("h100") == (None, "")
    whole = targets.parse("h100")
    assert whole.limit_bytes == whole.device_memory_bytes - chips.CONTEXT_BYTES and whole.pool_bytes is None


def test_the_pool_of_cuda_async_limits_xlas_compiler_but_not_the_program(unset):
    """Its fraction is a release threshold; XLA's compiler takes it as the device's memory, not rounded to 2 MiB."""
    unset.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")
    target = targets.parse("h100@0.92")
    assert target.pool_bytes == int(84_942_979_072 * 0.92)
    assert target.limit_bytes == 84_942_979_072 - chips.CONTEXT_BYTES and target.to_json()["pool_can_grow"]
    assert limits.limit_share(target.to_json(), target.limit_bytes) == "99 % of the GPU's memory, by its allocator"
    assert limits.pool_notes(target.to_json(), target.limit_bytes, target.limit_bytes + 1, 0) == []
    # marin-community/marin#8490: GB200 at jax's default; a peak of 143.72 GiB ran with a pool of 138.22 GiB, and
    # sometimes failed until the fraction was raised ("the floor is 0.781").
    measured = targets.parse("gb200")
    peak = int(143.72 * 2**30)
    assert measured.pool_bytes < peak < measured.limit_bytes
    [advice] = limits.pool_notes(measured.to_json(), measured.limit_bytes, peak, 0)
    assert "keeps 138.2" in advice and "XLA_CLIENT_MEM_FRACTION=0.78 or more" in advice
    larger = targets.parse("gb200@0.83")
    assert limits.pool_notes(larger.to_json(), larger.limit_bytes, peak, 0) == []
    assert targets.parse("v5e").pool_can_grow is False
    unset.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "default")
    assert targets.parse("h100").pool_can_grow is False


@pytest.mark.parametrize("allocator", ["cuda_async", "platform"])
def test_nccl_and_code_share_the_gpu_with_an_allocator_that_takes_all_of_it(unset, allocator):
    """A preallocated pool leaves the rest of the GPU for them; without one, the program can take what they need."""
    unset.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", allocator)
    target = targets.parse("h100:8")
    outside, limit = chips.CONTEXT_BYTES + 2**30, target.limit_bytes
    most = target.device_memory_bytes - outside
    assert analysis._verdict(most, target, outside).fits
    assert analysis._verdict(most + 1, target, outside).verdict == "exceeds" and most + 1 < limit
    assert limits.outside_excess(target.to_json(), limit, most + 7, outside) == 7
    [note] = limits.pool_notes(target.to_json(), limit, most + 2**20, outside)
    assert "CUDA context, NCCL, code), 1.00 MiB more than the program leaves of the GPU" in note
    assert limits.outside_excess(target.to_json(), 2**30, most + 7, outside) == 0, "a limit that the user chose"
    unset.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "default")
    assert (
        limits.outside_excess(targets.parse("h100:8").to_json(), targets.parse("h100:8").limit_bytes, 0, outside) == 0
    )


def test_a_fraction_that_bytescope_set_is_not_the_users(unset):
    env = {"JAX_PLATFORMS": "cuda"}
    platform.choose_platform(env=env, fraction=0.92)
    assert env["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.92" and platform.user_fraction(env) is None
    assert platform.user_fraction({**env, "XLA_CLIENT_MEM_FRACTION": "0.8"}).value == 0.8
    assert platform.user_fraction({**env, "XLA_CLIENT_MEM_FRACTION": "0.92"}).value == 0.92
    assert platform.user_fraction({"XLA_PYTHON_CLIENT_MEM_FRACTION": "much"}) is None


@pytest.mark.parametrize(
    "name", ["h100@", "h100@0", "h100@1.01", "h100:8@x", "h100@0.9@0.8", "v5e@0.9", "local@0.9", "cpu:8@1"]
)
def test_a_fraction_that_no_gpu_has_is_refused_in_one_line(name):
    with pytest.raises(ReportError, match="@") as caught:
        targets.parse(name)
    assert "\n" not in str(caught.value)


def test_a_name_has_one_spelling(unset):
    assert targets.parse("H100:8@0.90").name == "h100:8@0.9"


def test_local_devices_and_simulated_ones():
    local = targets.parse("local")
    assert local.devices() == jax.devices() and not local.is_described
    two = targets.parse("cpu:2")
    assert two.devices() == jax.devices("cpu")[:2] and two.n_devices == 2 and two.platform == "cpu"
    free = limits.free_host_bytes() // len(jax.local_devices(backend="cpu"))
    assert two.limit_bytes == pytest.approx(free, rel=0.2)
    assert two.mesh_devices(2, 1).shape == (2, 1)
    with pytest.raises(ReportError, match="a mesh of 3 devices does not fit cpu:2, which has 2"):
        two.mesh_devices(3)


def test_a_missing_compiler_says_which_extra_to_install(monkeypatch):
    monkeypatch.setattr(targets, "installed", lambda module: False)
    targets._devices_of_target.cache_clear()
    for name, extra in (("h100", "cuda"), ("v5e", "tpu")):
        with pytest.raises(ReportError, match=rf"run pip install -e '\.\[{extra}\]' in the checkout") as caught:
            targets.parse(name).devices()
        assert "\n" not in str(caught.value)


def test_a_gpu_that_cuda_13_has_left_needs_the_compiler_of_cuda_12(monkeypatch):
    asked = []
    monkeypatch.setattr(targets, "_topology", lambda name, platform, **options: asked.append(options) or [])
    monkeypatch.setattr(targets.cuda_plugins, "register", lambda plugin, gpu_present: None)
    monkeypatch.setattr(targets, "installed", lambda module: module.endswith("cuda13"))
    with pytest.raises(ReportError, match=r"sm_70; in a separate environment, run pip install -e '.\[cuda12\]'"):
        targets.gpu_devices("v100", CHIPS["v100"], (1, 1))
    monkeypatch.setattr(targets, "installed", lambda module: True)
    for name in ("v100", "t4"):
        targets.gpu_devices(name, CHIPS[name], (1, 1))
    old, new = (options["target_config"] for options in asked)
    assert "runtime_version { major: 12 minor: 9 }" in old and "major: 7 minor: 0" in old
    assert "runtime_version { major: 13 minor: 0 }" in new and "major: 7 minor: 5" in new


def test_the_listing_says_what_old_cards_lack():
    rows = device_tables.targets().cells()
    notes = {row[0]: row[-1] for row in rows if row[-1]}
    assert notes == {
        "mi300x": "needs the extra rocm and ROCm 7",
        "mi325x": "needs the extra rocm and ROCm 7",
        "t4": "no bf16 units; fp16 65 TFLOP/s",
        "v100": "no bf16 units; fp16 125 TFLOP/s; needs CUDA 12: the extra cuda12",
    }
    assert {row[0] for row in rows} == {*CHIPS, "local", "cpu:8"}


def _compile(devices):
    mesh = jax.sharding.Mesh(devices, ("data",))
    x_BD = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    return jax.jit(lambda x_BD: (x_BD @ x_BD.T).sum(axis=0)).lower(x_BD).compile()


@needs_cuda
def test_gpus_that_are_not_here_are_described():
    for name in ("h200:2", "rtx4090:2", "gh200-96g:2x1", "b300:2", "h20:2"):
        target = targets.parse(name)
        assert len(target.devices()) == target.n_devices
        assert target.devices()[0].device_kind == target.kind
        assert target.devices()[0] is targets.parse(name).devices()[0]  # meshes made twice are equal


@needs_cuda
@pytest.mark.parametrize("name", ["h100:2x2", "a100-80g:2", "b200:2", "l40s:2", "t4:2", "rtx5090:2", "gb300:2"])
def test_a_program_compiles_for_each_generation_of_gpus(name):
    target = targets.parse(name)
    assert target.devices()[0].device_kind == target.kind and len(target.devices()) == target.n_devices
    memory = _compile(target.mesh_devices(target.n_devices)).memory_analysis()
    assert memory.argument_size_in_bytes == 64 * 32 * 4 // target.n_devices


@pytest.mark.skipif(not targets.installed(f"jax_plugins.{targets.ROCM_PLUGIN}"), reason="needs jax's ROCm plugin")
@pytest.mark.parametrize("name", ["mi300x:2", "mi325x:2x8"])
def test_a_program_compiles_for_amd_gpus_that_are_not_here(name):
    target = targets.parse(name)
    assert [targets.platform_of(device) for device in target.devices()] == ["rocm"] * target.n_devices
    assert targets.from_devices(target.devices()) == target
    stats = _compile(target.mesh_devices(target.n_devices)).memory_analysis()
    assert stats.argument_size_in_bytes == 64 * 32 * 4 // target.n_devices
    report = memory.analyze(lambda x: (x @ x.T).sum(), jax.ShapeDtypeStruct((512, 512), jnp.float32), target="mi300x")
    assert report.limit_bytes == targets.parse("mi300x").pool_bytes


def test_an_amd_gpu_is_described_in_xlas_terms_and_its_missing_compiler_is_named(monkeypatch):
    text = chips.target_config(CHIPS["mi300x"], (0, 0))
    assert 'gcn_arch_name: "gfx942' in text and 'platform_name: "ROCM"' in text and "cuda" not in text
    assert targets.parse("mi325x:2x8@0.9").pool_bytes == limits.pool_bytes(CHIPS["mi325x"].device_memory_bytes, 0.9)
    monkeypatch.setattr(targets, "installed", lambda module: False)
    with pytest.raises(ReportError, match=r"pip install -e '\.\[rocm\]' in .* and install ROCm 7"):
        targets.gpu_devices("mi300x", CHIPS["mi300x"], (1, 1))


@needs_cuda
def test_a_compile_only_device_has_the_limit_of_its_chip():
    target = targets.parse("h200")
    assert limits.limit_bytes(target.devices()[0]) == target.limit_bytes


@needs_tpu
@pytest.mark.parametrize("name", ["v5e", "v5e:2x2", "v5p", "v6e:2x4"])
def test_a_program_compiles_for_tpus_that_are_not_here(name):
    target = targets.parse(name)
    assert target.devices()[0].device_kind == target.kind
    memory = _compile(target.mesh_devices(target.n_devices)).memory_analysis()
    assert memory.argument_size_in_bytes > 0


def test_a_gpu_description_names_its_chip_and_a_tpu_has_none():
    text = chips.target_config(CHIPS["rtx4090"], (13, 0))
    assert "major: 8 minor: 9" in text and "core_count: 128" in text and "feature_extension" not in text
    with pytest.raises(ValueError, match="is not a GPU"):
        chips.target_config(CHIPS["v5e"], (13, 0))


@pytest.mark.oracle("cuda")
def test_devices_of_a_target_with_a_fraction_keep_it(unset):
    """A mesh over them is all that a program may know of its target."""
    target = memory.target("h100:8@0.9")
    again = targets.from_devices(list(target.mesh(data=8).devices.flat))
    assert again == target == targets.parse("h100:8@0.9") and again.pool_bytes == target.limit_bytes
    plain = targets.from_devices(targets.parse("h100:8").devices())
    assert plain.name == "h100:8" and plain.memory_fraction == 0.75
