"""Compiles for GPUs that are not present leave out machine code, and no report shows a difference."""

import json

import jax
import pytest

from bytescope.memory.devices import machine_code, targets
from bytescope.train.plan.config_factory import FACTORY
from support.described import SMALL_GPU
from support.described import described as devices_of
from support.exhaustive import exhaustive

pytestmark = pytest.mark.oracle("cuda")
REAL_OPTIONS = machine_code.options_without  # the fixture `assembler` replaces it


def report(keys, target):
    jax.clear_caches()
    overrides = {"config": "tiny", **{key: str(value) for key, value in keys.items()}}
    return FACTORY.report_json(overrides, targets.parse(target))["report"]


ONE = {**SMALL_GPU, "model.n_layers": 2}
EIGHT = {**ONE, "mesh.data": 1, "mesh.fsdp": 8}
TENSOR = {"mesh.tensor": 2, "model.n_kv_heads": 2}
CASES = [
    (ONE, "h100"),
    ({**EIGHT, "remat.policy": "dots"}, "h100:8"),
    *exhaustive(
        ({**ONE, "remat.policy": "offload"}, "h100"),
        ({**EIGHT, "remat.policy": "offload"}, "h100:8"),
        ({**ONE, "remat.policy": "full", "model.attention": "naive"}, "a100-80g"),
        ({**ONE, "remat.policy": "selective", "model.scan": "false"}, "h100"),
        ({**EIGHT, "remat.policy": "minimal", "mesh.fsdp": 4, **TENSOR}, "b200:8"),
        ({**ONE, "xla.flags": "xla_gpu_autotune_level=4"}, "h100"),
        ({**ONE, "xla.gemm": "cublas"}, "h100"),
    ),
]


@pytest.fixture(scope="module")
def report_with_code(assembler):
    """Returns a function that makes the report of keys and a target with machine code, each only once."""
    known = {}

    def make(keys, target):
        case = json.dumps([keys, target])
        if case not in known:
            known[case] = report(keys, target)
        return known[case]

    return make


@pytest.mark.parametrize(("keys", "target"), CASES)
def test_a_report_is_the_same_with_and_without_machine_code(report_with_code, keys, target, monkeypatch, tmp_path):
    with_code = report_with_code(keys, target)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine_code, "options_without", REAL_OPTIONS)
    new, known = report(keys, target), report(keys, target)
    assert [path for path in (tmp_path / "bytescope" / "kernels").iterdir() if path.is_file()], "kernels were kept"
    assert json.dumps(new) == json.dumps(with_code) == json.dumps(known)
    assert with_code["xla"]["generated_code_bytes"] == 0, "no figure of a report depends on machine code"


def test_a_damaged_file_of_kernels_is_removed(report_with_code, monkeypatch, tmp_path):
    expected = report_with_code(ONE, "h100")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "bytescope" / "kernels" / "damaged"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\xff" * 1000)
    monkeypatch.setattr(machine_code, "_kernel_file", lambda kind: file)
    monkeypatch.setattr(machine_code, "options_without", REAL_OPTIONS)
    assert report(ONE, "h100") == expected and not file.exists()


def test_kernels_of_other_gpus_and_compilers_are_in_other_files(monkeypatch):
    [h100], [h200] = devices_of("h100"), devices_of("h200")
    files = {REAL_OPTIONS(device)[machine_code.KERNEL_FILE] for device in (h100, h200)}
    monkeypatch.setattr("jaxlib.__version__", "99.0")
    files.add(REAL_OPTIONS(h100)[machine_code.KERNEL_FILE])
    assert len(files) == 3


def test_a_file_of_kernels_stays_small(monkeypatch):
    [h100] = devices_of("h100")
    file = machine_code._kernel_file(h100.device_kind)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"12345")
    assert machine_code._kernel_file(h100.device_kind).exists()
    monkeypatch.setattr(machine_code, "_MAX_KERNEL_FILE_BYTES", 4)
    assert not machine_code._kernel_file(h100.device_kind).exists()


def test_machine_code_is_made_where_it_may_run_or_nothing_can_stand_in(monkeypatch, tmp_path):
    assert REAL_OPTIONS(jax.devices()[0]) == {}, "a CPU of this machine"
    [h100] = devices_of("h100")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_cuda_data_dir=/elsewhere")
    assert REAL_OPTIONS(h100) == {}, "the user chose a CUDA folder"
    monkeypatch.delenv("XLA_FLAGS")
    assert REAL_OPTIONS(h100)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert REAL_OPTIONS(h100) == {}, "the cache folder cannot be written"
