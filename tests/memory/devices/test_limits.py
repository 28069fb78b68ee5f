"""Limits and the choice of a platform, on made-up file systems."""

import argparse
import os
import subprocess
import sys

import pytest

from bytescope.memory.commands import arguments
from bytescope.memory.devices import limits, platform, targets
from bytescope.memory.errors import ReportError
from bytescope.memory.host import node_memory

pytestmark = pytest.mark.quick

GIB = 2**30


def _root(tmp_path, files):
    meminfo = {"proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n"}
    for name, content in {**meminfo, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return str(tmp_path)


def test_free_memory_without_a_cgroup_is_what_the_kernel_calls_available(tmp_path):
    root = _root(tmp_path, {})
    assert node_memory.free_host_bytes(root) == 8 * GIB and node_memory.cgroup_room(root) is None
    assert node_memory.physical_bytes(root) == 16 * GIB


def test_cgroup_version_2_counts_the_tightest_ancestor_and_gives_back_the_cache(tmp_path):
    root = _root(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/step/memory.current": "17\n",
        },
    )
    assert node_memory.free_host_bytes(root) == node_memory.cgroup_room(root) == 2 * GIB


def test_cgroup_version_1_and_a_path_that_only_the_host_has(tmp_path):
    root = _root(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/abc\nnonsense\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
        },
    )
    assert node_memory.free_host_bytes(root) == GIB


def test_the_address_space_of_a_process_is_a_limit_of_its_memory(tmp_path, monkeypatch):
    root = _root(tmp_path, {"proc/self/status": f"VmPeak:\t 9 kB\nVmSize:\t {3 * GIB // 1024} kB\n"})
    assert node_memory.free_host_bytes(root) == 8 * GIB
    monkeypatch.setattr(node_memory, "address_space_limit", lambda: 4 * GIB)
    assert node_memory.free_host_bytes(root) == GIB


def test_a_cgroup_over_its_limit_leaves_nothing_rather_than_less(tmp_path):
    root = _root(
        tmp_path,
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "100", "sys/fs/cgroup/memory.current": "200"},
    )
    assert node_memory.free_host_bytes(root) == 0


def test_without_proc_the_physical_memory_stands_in(tmp_path):
    assert node_memory.free_host_bytes(str(tmp_path)) == node_memory.physical_bytes(str(tmp_path)) > 0


class Device:
    def __init__(self, platform, kind, stats):
        self.platform, self.device_kind, self.stats = platform, kind, stats

    def memory_stats(self):
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats


def test_a_device_that_keeps_statistics_is_asked():
    assert limits.limit_bytes(Device("gpu", "NVIDIA H200", {"bytes_limit": 5})) == 5


def test_a_known_card_without_statistics_has_its_row_and_an_unknown_one_is_an_error(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    assert 68 * GIB < limits.limit_bytes(Device("gpu", "NVIDIA H200", RuntimeError("no"))) < 70 * GIB
    with pytest.raises(ReportError, match="Abacus 3"):
        limits.limit_bytes(Device("gpu", "Abacus 3", None))


def test_a_program_that_fits_a_larger_pool_says_how_to_get_it():
    target = targets.parse("h100@0.75").to_json()
    pool, larger = target["limit_bytes"], limits.pool_bytes(target["device_memory_bytes"], 0.92)
    assert limits.pool_notes(target, pool, pool, 0) == []
    hint = ["fits at 0.92: set XLA_CLIENT_MEM_FRACTION=0.92 before jax starts"]
    assert limits.pool_notes(target, pool, pool + 1, GIB) == hint
    assert limits.pool_notes(target, pool, larger, GIB) == hint
    assert limits.pool_notes(target, pool, larger + 1, GIB) == []
    assert limits.pool_notes(target, pool, larger, 7 * GIB) == [], "6.3 GiB are left at 0.92"
    assert limits.pool_notes(target, GIB, larger, 0) == [], "a size that somebody chose"
    old_name = {**target, "memory_fraction_source": "XLA_PYTHON_CLIENT_MEM_FRACTION"}  # jax refuses both variables
    assert "set XLA_PYTHON_CLIENT_MEM_FRACTION=0.92" in limits.pool_notes(old_name, pool, larger, 0)[0]
    at_most = targets.parse("h100@0.92").to_json()
    assert limits.pool_notes(at_most, at_most["limit_bytes"], larger + 1, 0) == []


def test_what_lies_outside_of_the_pool_must_fit_the_rest_of_the_gpu():
    target = targets.parse("h100@0.92").to_json()
    rest = target["device_memory_bytes"] - target["limit_bytes"]
    assert limits.outside_excess(target, target["limit_bytes"], GIB, rest) == 0
    assert limits.outside_excess(target, target["limit_bytes"], GIB, rest + 5) == 5
    [note] = limits.pool_notes(target, target["limit_bytes"], GIB, rest + GIB)
    assert "1.00 GiB more than the rest of the GPU: set XLA_CLIENT_MEM_FRACTION=0.9 or less" in note


@pytest.mark.parametrize(
    ("target", "limit", "words"),
    [
        (
            {"platform": "cuda", "limit_bytes": 72, "memory_fraction": 0.92, "memory_fraction_source": "X"},
            72,
            "92 % of the GPU's memory (X)",
        ),
        (
            {"platform": "cuda", "limit_bytes": 72, "memory_fraction": 0.755},
            72,
            "75.5 % of the GPU's memory",
        ),
        (
            {"platform": "cuda", "limit_bytes": 60, "memory_fraction": None, "device_memory_bytes": 80},
            60,
            "75 % of the GPU's memory, by its allocator",
        ),
        ({"platform": "cuda", "limit_bytes": 72, "memory_fraction": 0.92}, 70, ""),  # a size that somebody chose
        ({"platform": "tpu", "limit_bytes": 72}, 72, ""),
        ({"platform": "cpu", "limit_bytes": 72}, 72, ""),
        ({}, None, ""),
    ],
)
def test_the_share_of_a_gpus_memory_in_words(target, limit, words):
    assert limits.limit_share(target, limit) == words


def _nodes(tmp_path, *names):
    return _root(tmp_path, {name.lstrip("/"): "" for name in names})


@pytest.mark.parametrize(
    "nodes, env, expected, left",
    [
        ((), {}, "cpu", {"JAX_PLATFORMS": "cpu"}),
        ((), {"JAX_PLATFORMS": "cuda,cpu"}, "cuda", {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}),
        (("/dev/nvidiactl",), {}, "cuda", {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}),
        (("/dev/nvidiactl",), {"JAX_PLATFORMS": "cpu"}, "cpu", {}),
        (("/dev/nvidiactl",), {"CUDA_VISIBLE_DEVICES": ""}, "cpu", {"JAX_PLATFORMS": "cpu"}),
        (("/dev/nvidia0",), {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, "cuda", {}),
        (("/dev/nvidia0",), {"XLA_CLIENT_MEM_FRACTION": "0.5"}, "cuda", {}),
        (("/dev/accel0",), {}, "tpu", {}),
        (("/dev/kfd",), {}, "rocm", {}),
    ],
)
def test_the_platform_is_settled_without_overriding_anybody(tmp_path, nodes, env, expected, left):
    before = dict(env)
    assert platform.choose_platform(_nodes(tmp_path, *nodes), env, 0.92) == expected
    if left.get("XLA_PYTHON_CLIENT_MEM_FRACTION"):
        left = {**left, platform.OWN_FRACTION_VARIABLE: "0.92"}
    names = (platform.HOST_LIMIT_VARIABLE, platform.OWN_HOST_LIMIT_VARIABLE)
    pinned = dict.fromkeys(names, "7") if expected == "cuda" else {}  # nine tenths of 8 GiB
    assert env == {**before, **left, **pinned}
    env = {**before, platform.HOST_LIMIT_VARIABLE: "3"}
    assert platform.choose_platform(_nodes(tmp_path, *nodes), env) == expected
    assert env[platform.HOST_LIMIT_VARIABLE] == "3"


@pytest.mark.skipif(platform.accelerator() != "cpu", reason="this machine has an accelerator")
@pytest.mark.parametrize("order", ["import jax; choose()", "choose(); import jax"])
def test_no_traceback_on_a_machine_without_accelerator(order):
    code = (
        "from bytescope.memory.devices.platform import choose_platform as choose\n"
        f"{order}\nprint(jax.devices()[0].platform)"
    )
    env = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "cpu\n" and "Traceback" not in done.stderr and "cuPTI" not in done.stderr


# ---- the memory of a node ---------------------------------------------------------------------------------------


def test_the_limit_of_a_cgroup_is_the_memory_of_a_node_if_it_is_smaller(tmp_path):
    assert limits.machine_bytes(_root(tmp_path, {})) == (16 * GIB, "the memory of this machine")
    root = _root(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/job/step/memory.max": f"{6 * GIB}\n",
        },
    )
    assert limits.machine_bytes(root) == (4 * GIB, "the limit of a cgroup")
    assert targets.node_memory_of(None, root=root) == (4 * GIB, "the limit of a cgroup")
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text(f"{2**63}\n")  # no limit, as cgroups of version 1 write it
    (tmp_path / "sys/fs/cgroup/job/step/memory.max").write_text("max\n")
    assert limits.machine_bytes(root)[0] == 16 * GIB


def test_a_described_target_has_the_node_of_the_table_or_the_given_one():
    one, pod = targets.parse("h100"), targets.parse("h100:2x8")
    assert targets.node_memory_of(one) == targets.node_memory_of(pod) == (2048 * GIB, "a node with 8 h100")
    assert one.host_memory_bytes == 256 * GIB and pod.host_memory_bytes == 2048 * GIB
    assert targets.node_memory_of(pod, 512 * GIB) == (512 * GIB, "--host-memory")
    with arguments.chosen_node(argparse.Namespace(host_memory="512GiB")):
        assert targets.node_memory_of(pod) == (512 * GIB, "--host-memory")
        assert targets.parse("h100:2x8").host_memory_bytes == targets.parse("h100").host_memory_bytes == 512 * GIB
    assert targets.parse("h100:2x8") == pod


def test_a_number_of_processes_per_node():
    assert limits.processes_per_node() == 1
    with arguments.chosen_node(argparse.Namespace(host_memory=None, processes_per_node=8)):
        assert limits.processes_per_node() == 8 and limits.given_node_bytes() is None
    wrong = argparse.Namespace(host_memory=None, processes_per_node=0)
    with pytest.raises(ReportError, match="--processes-per-node=0"), arguments.chosen_node(wrong):
        pass


@pytest.mark.parametrize(
    ("text", "words"), [("many", "is not a valid size"), ("0", "must be more than 0"), ("72", "72GiB")]
)
def test_a_node_memory_that_is_no_size_is_refused(text, words):
    wrong = argparse.Namespace(host_memory=text)
    with pytest.raises(ReportError, match=f"--host-memory={text}.*{words}"), arguments.chosen_node(wrong):
        pass
