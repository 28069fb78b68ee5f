"""Rates: the table by chip, the file, the choice of a process, and seconds of single records at them."""

import dataclasses
import itertools
import json

import pytest

from bytescope.memory.devices.chips import CHIPS
from bytescope.memory.errors import ReportError
from bytescope.memory.records.schedule_records import ScheduledKernel, Start
from bytescope.memory.seconds import achieved, chip_rates, constants, rates
from bytescope.memory.seconds.operation_seconds import (
    attention_flops_per_s,
    kernel_seconds,
    product_flops_per_s,
    transfer_seconds,
)
from bytescope.memory.seconds.rate_records import from_json

pytestmark = pytest.mark.quick

H100 = chip_rates.rates_of_kind("NVIDIA H100 80GB HBM3")


def product(m, n, k, batch=1, dtype="bfloat16"):
    return ScheduledKernel(
        "product", "forward", 2 * batch * (m * k + k * n + m * n), 2 * batch * m * n * k, dtype, (batch, m, n, k)
    )


@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_has_rates_and_their_json_reads_back(name):
    found = chip_rates.rates_of_kind(CHIPS[name].kind)
    assert from_json(json.loads(json.dumps(found.to_json()))) == found
    assert set(found.products) == set(CHIPS[name].peak_flops)
    measured = set(achieved.MEASURED.get(name, {})) | set(achieved.COLLECTIVES.get(name, ()))
    assert f"measured on {name}: nothing" not in found.source or not measured


@pytest.mark.parametrize("name", CHIPS)
def test_no_rate_exceeds_the_data_sheet(name):
    chip, found = CHIPS[name], chip_rates.rates_of_kind(CHIPS[name].kind)
    for dtype, unit in (("bfloat16", "bf16"), ("float16", "fp16"), ("float8_e4m3fn", "fp8"), ("float32", "fp32")):
        if unit in chip.peak_flops:
            for shape in ((16384, 16384, 16384), (8192, 28672, 8192), (128, 128, 65536)):
                assert product_flops_per_s(product(*shape, dtype=dtype), found) <= chip.peak_flops[unit]
    assert all(rate <= chip.peak_flops[unit] for unit, curve in found.products.items() for _, rate in curve)
    assert max(rate for _, rate in found.memory) <= chip.hbm
    assert max(rate for row in found.collectives if row.hosts == 1 for _, rate in row.bus) <= 1.1 * chip.in_host


def test_a_target_has_the_rates_of_its_chip_and_an_unknown_accelerator_none():
    assert rates.select({"platform": "cuda", "kind": "NVIDIA H100 80GB HBM3", "n_devices": 8}) is H100
    assert rates.select({"platform": "rocm", "kind": "MI300X", "n_devices": 8}) is None


def test_a_cpus_are_measured_here_and_shared_by_its_devices():
    one, eight = (rates.select({"platform": "cpu", "kind": "cpu", "n_devices": n}) for n in (1, 8))
    kernel, floor = product(512, 512, 512, dtype="float32"), one.floor_seconds
    alone, shared = (kernel_seconds(kernel, found) - floor for found in (one, eight))
    assert shared == pytest.approx(8 * alone)
    assert one.source == "rates measured here"
    assert kernel_seconds(product(512, 512, 512), one) > 0  # bfloat16 takes the unit that there is
    assert transfer_seconds(Start("", "all-reduce", "forward", 2**20, 8), eight) > 0


def test_cubes_that_were_measured_are_met():
    """In their time: the floor of a kernel is within it."""
    for side, rate in achieved.MEASURED["h100"]["products", "bf16"].points:
        cube = product(*(int(side),) * 3)
        assert cube.flops / kernel_seconds(cube, H100) == pytest.approx(rate / constants.PRODUCTS, rel=0.01)


@pytest.mark.parametrize(
    "batch, m, n, k, measured",
    [
        (1, 1024, 4096, 2048, 634.2),
        (1, 2048, 1024, 4096, 653.1),
        (2, 512, 1024, 4096, 461.2),
        (1, 512, 4096, 4096, 644.1),
        (4, 2048, 2048, 256, 394.8),
        (1, 1024, 1024, 4096, 470.1),
        (2, 4096, 1024, 2048, 713.4),
        (1, 4096, 4096, 1024, 677.4),
    ],
)
def test_products_of_xlas_own_table_are_near_its_rates(batch, m, n, k, measured):
    """TFLOP/s in bfloat16 on sm_90, from which no curve was made (openxla/xla, matmul_interpolator_data.h). Split
    reductions are predicted too fast: 4096 x 256 x 4096 at 531, where 376 were measured."""
    kernel = product(m, n, k, batch)
    assert kernel.flops / kernel_seconds(kernel, H100) == pytest.approx(measured * 1e12, rel=0.16)


def test_a_thin_product_and_a_wave_more_are_slower():
    def rate(*shape):
        return product_flops_per_s(product(*shape), H100)

    assert rate(8192, 8192, 64) < rate(8192, 8192, 1024) < 1.05 * rate(8192, 8192, 8192)
    assert rate(128, 8192, 8192) < rate(4096, 8192, 8192)
    # 132 cores: two tiles more than a wave take a second one.
    assert rate(128 * 132, 256, 4096) > 1.3 * rate(128 * 134, 256, 4096)


def test_a_kernel_that_computes_little_takes_its_bytes():
    thin = ScheduledKernel("product", "forward", 2**30, 2**20, "bfloat16", (1, 1024, 1024, 1))
    moved = ScheduledKernel("memory", "forward", 2**30)
    assert kernel_seconds(thin, H100) == pytest.approx(kernel_seconds(moved, H100))
    assert kernel_seconds(ScheduledKernel("memory", "forward", 0), H100) == H100.floor_seconds


def test_attention_is_faster_without_a_mask_wider_and_longer():
    def rate(kind="attention", keys=4096, width=128, causal=False):
        return attention_flops_per_s(
            ScheduledKernel(kind, "forward", 1, 1, "bfloat16", (64, keys, keys, width), causal), H100
        )

    assert rate(causal=True) < rate()
    assert rate(width=64) < rate()
    assert rate(keys=512, causal=True) < rate(causal=True)
    assert rate("attention_backward") < rate()
    assert rate(width=96) in (rate(width=64), rate(width=128))


def test_collectives_grow_with_bytes_group_and_hosts():
    def seconds(kind, size, group=8, hosts=1):
        return transfer_seconds(Start("", kind, "forward", size, group, hosts), H100)

    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        assert seconds(kind, 2**10) < seconds(kind, 2**26) < seconds(kind, 2**30)
        assert seconds(kind, 2**30, 2) < seconds(kind, 2**30, 8) < seconds(kind, 2**30, 64, 8)
        # One device a host has one network card's bandwidth.
        assert seconds(kind, 2**30, 8, 8) > 4 * seconds(kind, 2**30)
        assert seconds(kind, 2**30, 1) == 0
        assert 5e-6 < seconds(kind, 8) == seconds(kind, 512) < 50e-6  # no payload is too small for the latency
        wire = (2 if kind == "all-reduce" else 1) * 7 / 8 * 2**30
        assert seconds(kind, 2**30, 8, 8) > wire / CHIPS["h100"].between_hosts


def test_the_host_link_takes_bytes_and_a_beginning():
    small, large = (transfer_seconds(Start("c", "to-host", "forward", size), H100) for size in (1, 2**30))
    assert small == pytest.approx(H100.host_link_seconds, rel=1e-3)
    assert large == pytest.approx(H100.host_link_seconds + 2**30 / H100.host_link_bytes_per_s)


def test_a_chosen_file_is_what_every_target_gets(tmp_path):
    path = tmp_path / "rates.json"
    mine = json.loads(json.dumps(H100.to_json())) | {"source": "measured on mine", "collectives": []}
    path.write_text(json.dumps(mine))
    target = {"platform": "cuda", "kind": "NVIDIA H200", "n_devices": 8}
    try:
        assert rates.use(path).source == "measured on mine"
        found = rates.select(target)
        assert found.products == H100.products
        assert found.source.startswith("measured on mine; collectives: measured on h200")
        assert found.collectives == chip_rates.rates_of_kind("NVIDIA H200").collectives
    finally:
        rates.use(None)
    assert rates.select(target).source == chip_rates.rates_of_kind("NVIDIA H200").source


@pytest.mark.parametrize(
    "change, said",
    [
        ({"format": 2}, "format 2"),
        ({"memory": []}, "memory is"),
        ({"memory": [[1, -1]]}, "memory is"),
        ({"memory": [[2, 1], [1, 1]]}, "memory is"),
        ({"floor_seconds": "fast"}, "floor_seconds is 'fast'"),
        ({"attention_slowdown": 0}, "attention_slowdown is 0"),
        ({"host_link_bytes_per_s": 0}, "host_link_bytes_per_s is 0"),
        ({"products": {}}, "products is empty"),
        ({"products": {"bf17": [[1, 1]]}}, "bf17"),
        ({"attention": {"forward": {}}}, "attention contains forward"),
        ({"attention": {"forward": {"wide": [[1, 1]]}}}, "damaged"),
        ({"surprise": 1}, "damaged"),
        ({"collectives": [{"kind": "gossip", "group": 8, "hosts": 1, "bus": [[1, 1]]}]}, "gossip"),
        ({"collectives": [{"kind": "all-reduce"}]}, "damaged"),
        ({"peak_flops": {"bf16": 0}}, "bf16"),
        ({"cores": 1.5}, "damaged (DeviceRates.cores is 1.5)"),
        ({"host": {"jax": 1}}, "'jax' is an unknown constant of host memory"),
        ({"host": {"python": -1}}, "the constant 'python' of host memory is -1"),
        ({"host": 3}, "damaged"),
    ],
)
def test_a_damaged_file_is_said_in_one_line(tmp_path, change, said):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(H100.to_json() | change))
    with pytest.raises(ReportError) as error:
        rates.load(path)
    assert said in str(error.value) and "\n" not in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '{"format": NaN}'])
def test_a_file_that_is_none_of_rates_is_said_in_one_line(tmp_path, text):
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(ReportError):
        rates.load(path)
    with pytest.raises(ReportError, match="give the file"):
        rates.load(tmp_path / "none.json")


def test_every_figure_has_its_source():
    figures = [figure for table in achieved.MEASURED.values() for figure in table.values()]
    tables = (*achieved.COLLECTIVES.values(), *achieved.NETWORKS.values())
    figures += [row.figure for table in tables for row in table]
    assert all(len(figure.source) > 12 and figure.points for figure in figures)
    assert set(achieved.NEAREST) == set(CHIPS)


def test_a_cube_mesh_gives_a_part_of_its_devices_a_part_of_its_links():
    v100 = chip_rates.rates_of_kind(CHIPS["v100"].kind)
    rows = {row.group: dict(row.bus) for row in v100.collectives if row.kind == "all-reduce" and row.hosts == 1}
    for size, whole in rows[8].items():
        assert rows[4][size] == pytest.approx(whole * 4 / 6) and rows[2][size] == pytest.approx(whole / 6)


@pytest.mark.parametrize("name", ["l40s", "a5000", "rtx3090", "h100-pcie"])
def test_cards_that_meet_over_pcie_take_the_efficiency_of_such_cards(name):
    found = chip_rates.rates_of_kind(CHIPS[name].kind)
    best = max(rate for row in found.collectives if row.hosts == 1 for _, rate in row.bus)
    assert 0.3 * CHIPS[name].in_host < best < 0.5 * CHIPS[name].in_host
    assert "collectives with the efficiency of rtx4090" in found.source
    borrowed = [part for words in found.source.split("; ")[1:] for part in words.partition(" with ")[0].split(", ")]
    assert len(borrowed) == len(set(borrowed)), "each kind of work is named once"


def test_a_kernel_that_scales_tiles_is_slower_than_a_librarys_whatever_its_shape():
    """torchao and vLLM on H100, about 0.3 of the library's 1382 TFLOP/s; bf16 of the library is faster."""
    for shape, measured in (
        ((16640, 5120, 8192), 399.5e12),
        ((16640, 8192, 5120), 367.3e12),
        ((8192, 2112, 7168), 406.5e12),
    ):
        library = product(*shape, dtype="float8_e4m3fn")
        tiled = dataclasses.replace(library, kind="tiled_product")
        assert library.flops / kernel_seconds(tiled, H100) == pytest.approx(measured, rel=0.1)
        assert kernel_seconds(library, H100) < kernel_seconds(product(*shape), H100) < kernel_seconds(tiled, H100)
    thin = product(16, 2112, 7168, dtype="float8_e4m3fn")
    assert kernel_seconds(dataclasses.replace(thin, kind="tiled_product"), H100) == kernel_seconds(thin, H100)


def test_another_network_changes_what_goes_between_hosts_alone():
    found = chip_rates.with_network(H100, "playbook")
    for group, hosts, slower in ((8, 1, False), (64, 8, True)):
        start = Start("", "all-reduce", "backward", 2**30, group, hosts)
        there, here = (transfer_seconds(start, each) for each in (found, H100))
        assert (there > 1.5 * here) if slower else there == here
    assert "EFA" in found.source and found.products == H100.products
    with pytest.raises(ReportError, match="unknown network"):
        chip_rates.with_network(H100, "carrier pigeon")


def test_a_network_measured_by_size_meets_its_points_and_is_slower_over_more_hosts():
    """nccl-tests on EFA: 256 MiB gathered by 32 devices of four hosts at 253.36 GB/s, by 64 of eight at 215.43."""
    found = chip_rates.with_network(H100, "efa")
    size = 256 << 20
    taken = [
        transfer_seconds(Start("", "all-gather", "forward", size, group=8 * hosts, hosts=hosts), found)
        for hosts in (4, 8)
    ]
    assert taken == [pytest.approx(31 / 32 * size / 253.36e9), pytest.approx(63 / 64 * size / 215.43e9)]
    for start in (("all-reduce", 64, 8), ("reduce-scatter", 64, 8), ("all-gather", 256, 32)):
        few, many = (
            transfer_seconds(Start("", start[0], "forward", size, group=start[1] // by, hosts=start[2] // by), found)
            for by in (2, 1)
        )
        assert few < many


def test_a_batch_of_small_products_fills_the_device_together():
    one, many = (product_flops_per_s(product(1024, 1024, 64, batch=batch), H100) for batch in (1, 64))
    assert many > 1.2 * one


@pytest.mark.parametrize("kernel", achieved.ATTENTION_KERNELS)
@pytest.mark.parametrize("name", ["a100-80g", "h100"])
def test_rates_of_an_attention_kernel_grow_with_the_sequence_and_stay_below_the_data_sheet(kernel, name):
    chip = CHIPS[name]
    found = chip_rates.with_attention(chip_rates.rates_of_kind(chip.kind), kernel, chip.kind)
    assert "FlashAttention" in found.source and found.sources["attention"] in found.source
    for table in found.attention.values():
        for width in (64, 128):
            rates_by_keys = [rate for _, rate in table[width]]
            # Measured curves dip by up to 14 %.
            assert all(later > 0.85 * earlier for earlier, later in itertools.pairwise(rates_by_keys))
            assert rates_by_keys[0] < rates_by_keys[-1] * 1.05 and max(rates_by_keys) < chip.peak_flops["bf16"]
    # Both passes together take what the figures say: 2.5 of 3.5 parts of the FLOPs are backward.
    parts = [found.attention[f"{way}_causal"][128][-1][1] for way in ("forward", "backward")]
    both = 3.5 / (1 / parts[0] + 2.5 / parts[1])
    expected = {("flash-attention-1-triton", "a100-80g"): 83, ("flash-attention-1-triton", "h100"): 137}
    expected |= {("flash-attention-2", "a100-80g"): 189, ("flash-attention-2", "h100"): 328}
    assert both == pytest.approx(expected[kernel, name] * 1e12)


def test_another_attention_kernel_changes_attention_alone():
    kernel = ScheduledKernel("attention_backward", "backward", 1, 2**50, "bfloat16", (64, 8192, 8192, 128), True)
    seconds = {"cuDNN": kernel_seconds(kernel, H100)}
    for name in achieved.ATTENTION_KERNELS:
        found = chip_rates.with_attention(H100, name, "NVIDIA H100 80GB HBM3")
        seconds[name] = kernel_seconds(kernel, found)
        assert kernel_seconds(product(4096, 4096, 4096), found) == kernel_seconds(product(4096, 4096, 4096), H100)
        # The published seconds, without the slowdown that was fitted to the usual kernels.
        alone = kernel.flops / found.attention["backward_causal"][128][4][1]
        assert seconds[name] == pytest.approx(alone + H100.floor_seconds)
        assert from_json(json.loads(json.dumps(found.to_json()))) == found
    assert seconds["flash-attention-1-triton"] > 2 * seconds["flash-attention-2"] > 2.5 * seconds["cuDNN"]


def test_an_attention_kernel_needs_a_known_name_and_a_known_chip():
    with pytest.raises(ReportError, match="unknown attention kernel 'abacus'.*triton"):
        chip_rates.with_attention(H100, "abacus", "NVIDIA H100 80GB HBM3")
    with pytest.raises(ReportError, match="'MI1'.*leave the kernel out"):
        chip_rates.with_attention(H100, "flash-attention-2", "MI1")
