"""Converts names to targets: devices of this machine, simulated CPU devices, or devices that are not present.

    local              the default devices of jax
    cpu:8              eight CPU devices of this process (simulated devices share the host)
    h200  h100:8       described GPUs of one host: compiled with no GPU in the machine
    h100:2x8           hosts x devices per host
    h100:8@0.9         jax's pool takes 90 % of each GPU's memory
    v5e:4x4  v5p:2x2x1 a described TPU slice, by its shape in chips

The names of described targets are checked without importing jax; `local` and `cpu:8` import it. jax's plugins provide
the described devices.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bytescope.memory import environment
from bytescope.memory.devices import cuda_plugins
from bytescope.memory.devices.chips import CHIPS, CUDA_13_FROM, GPU_PLATFORMS, Chip, base_name, target_config
from bytescope.memory.devices.compiler_log import hold_back_log
from bytescope.memory.devices.cuda_plugins import CUDA_PLUGINS
from bytescope.memory.devices.limits import given_node_bytes, limit_bytes, machine_bytes, pool_bytes
from bytescope.memory.devices.platform import (
    JAX_FRACTION,
    MemoryFraction,
    accelerator,
    allocates_singly,
    choose_platform,
    pool_can_grow,
    simulate_devices,
    user_fraction,
)
from bytescope.memory.errors import ReportError, install_remedy, nearest, one_line, suggestion
from bytescope.memory.hlo.jax_types import JaxDevice
from bytescope.memory.host.node_memory import physical_bytes
from bytescope.memory.units import plural

if TYPE_CHECKING:
    import jax
    import numpy as np

# jax's plugin for AMD GPUs. It compiles for described GPUs too, but loads only if ROCm's libraries are found, and
# registers itself only on a machine with an AMD GPU.
ROCM_PLUGIN = "xla_rocm7"

# Without these variables, libtpu looks for a TPU machine and takes a lock file, which compiling does not need.
_LIBTPU_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
# Platform of a described target -> the package with its compiler, as pip names it.
_COMPILER_PACKAGES = {"cuda": "'jax[cuda13]'", "rocm": "'jax[rocm7-local]'", "tpu": "libtpu"}
# Maximum devices of a target. jax starts a client for each simulated CPU device, which takes seconds for thousands.
MAX_CPU_DEVICES, MAX_DEVICES = 2**12, 2**16
_CPU_REMEDY = "set JAX_NUM_CPU_DEVICES={n} or XLA_FLAGS=--xla_force_host_platform_device_count={n}"


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for, with their memory, bandwidths and peak FLOP/s.

    Sizes are in bytes. Bandwidths are in bytes/s for one device in one direction. Unknown values are 0 or empty.

    Fields:
        name: the name given by the user.
        platform: "cpu", "cuda", "rocm" or "tpu".
        kind: jax's device_kind.
        shape: (hosts, devices per host) of GPUs, chips along each axis of a TPU slice, otherwise (devices,).
        n_devices: number of devices.
        devices_per_host: number of devices on one host.
        device_memory_bytes: memory of one device.
        reserved_bytes: the part of the device's memory that the runtime takes.
        memory_fraction: the fraction (0 to 1) of the memory that is in jax's pool, for a GPU that is not present. None
            for other targets, and for the `platform` allocator, which has no pool.
        memory_fraction_source: what set the fraction, for messages, such as "jax's default".
        pool_can_grow: whether jax's pool can become larger than the fraction (the allocator `cuda_async`).
        host_memory_bytes: the target's part of the memory of one host, in proportion to its devices. For one GPU of a
            host with eight, it is an eighth of the memory. If the user gives the memory of a node (--host-memory),
            it is this size.
        hbm_bytes_per_s: bandwidth of the device's memory.
        host_link_bytes_per_s: bandwidth between device and host.
        interconnect_bytes_per_s: link ("in_host" or "between_hosts") -> bandwidth between devices over this link.
        peak_flops: dtype (fp32, tf32, bf16, fp16, fp8) -> dense FLOP/s. A dtype without a compute unit is missing.
        sources: name of a value above -> its source.
        is_described: True if the devices are not present. Programs can then be compiled for the devices, but not run.
    """

    name: str
    platform: str
    kind: str
    shape: tuple[int, ...]
    n_devices: int
    devices_per_host: int
    device_memory_bytes: int = 0
    reserved_bytes: int = 0
    memory_fraction: float | None = None
    memory_fraction_source: str = ""
    pool_can_grow: bool = False
    host_memory_bytes: int = 0
    hbm_bytes_per_s: float = 0.0
    host_link_bytes_per_s: float = 0.0
    interconnect_bytes_per_s: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    peak_flops: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    is_described: bool = False

    @property
    def limit_bytes(self) -> int:
        """Bytes that programs can use on one device: its memory minus the parts that the runtime and jax's memory
        fraction leave out; for a CPU, free host memory divided by the number of devices. A pool that can grow is
        limited only by the device."""
        return limit_bytes(self)

    @property
    def pool_bytes(self) -> int | None:
        """Bytes of jax's pool at its start, on a GPU that is not present. On the real GPU, XLA's compiler takes this
        size as the device memory. None for other targets and without a pool."""
        if not self.memory_fraction:
            return None
        if self.pool_can_grow:  # cuda_async does not round
            return int(self.device_memory_bytes * self.memory_fraction)
        return pool_bytes(self.device_memory_bytes, self.memory_fraction)

    @property
    def host_bytes_per_device(self) -> float:
        """Bytes of host memory per device; infinite if unknown."""
        return self.host_memory_bytes / max(self.devices_per_host, 1) or math.inf

    def devices(self) -> list[JaxDevice]:
        """Returns the jax devices of this target. Devices that are not present are compile-only. Every call returns
        the same objects.

        Raises ReportError if the optional package that compiles for the devices is missing, or if the machine has too
        few devices.
        """
        return list(_devices_of_target(self.name))

    def mesh_devices(self, *sizes: int) -> np.ndarray:
        """Returns the devices as an array of shape `sizes`, for a `jax.sharding.Mesh`.

        Raises ReportError if the product of the sizes is not the number of devices.
        """
        import numpy as np

        if math.prod(sizes) != self.n_devices:
            mesh = " x ".join(map(str, sizes)) or "()"
            raise ReportError(
                f"a mesh of {mesh} devices does not fit {self.name}, which has {plural(self.n_devices, 'device')}: "
                "change the mesh or the target"
            )
        return np.array(self.devices()).reshape(sizes)

    def mesh(self, **axes: int) -> jax.sharding.Mesh:
        """Returns a `jax.sharding.Mesh` of all devices, such as `mesh(data=2, model=4)`.

        axes: axis name -> size, in order. Raises ReportError if the product of the sizes is not the number of devices.
        """
        import jax

        return jax.sharding.Mesh(self.mesh_devices(*axes.values()), tuple(axes))

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values, with one more key: `limit_bytes`."""
        return {**dataclasses.asdict(self), "shape": list(self.shape), "limit_bytes": self.limit_bytes}


def names() -> tuple[str, ...]:
    """Returns the target names that `parse` accepts, without device counts."""
    return ("local", "cpu", *CHIPS)


def parse(name: str, default_fraction: MemoryFraction = JAX_FRACTION) -> Target:
    """Returns the target with a name such as `local`, `cpu:8`, `h100:2x8`, `h100:8@0.9` or `v5e:4x4`.

    The part after @ is the fraction of a GPU's memory that is in jax's pool. Without this part, it is the value of the
    variable XLA_CLIENT_MEM_FRACTION or XLA_PYTHON_CLIENT_MEM_FRACTION if the user set one, otherwise the default.

    default_fraction: this default, which the program's own process sets before jax starts.

    Raises ReportError for an unknown name, for a shape or a fraction that does not exist, and for `cpu:N` or `local` if
    jax does not have the devices.
    """
    place, at, given = name.strip().lower().partition("@")
    base, colon, count = place.partition(":")
    if base not in names():
        remedy = suggestion(_similar_targets(base, place.removeprefix(base) + at + given))
        raise ReportError(
            f"unknown target {name!r}: {remedy or 'give the name of a chip.'} Targets: {', '.join(names())} "
            "(cpu:8, h100:8, h100:2x8, h100:8@0.9, v5e:4x4)"
        )
    shape = _parse_shape(count) if colon else ()
    if colon and not shape:
        raise ReportError(
            f"target {name!r} has no number of devices after the colon: write a count such as 8 or a shape such as 2x8"
        )
    if math.prod(shape) > (most := MAX_CPU_DEVICES if base == "cpu" else MAX_DEVICES):
        raise ReportError(f"target {name!r} has {math.prod(shape):,} devices: give at most {most:,}")
    if at and (base not in CHIPS or CHIPS[base].platform not in GPU_PLATFORMS):
        raise ReportError(
            f"target {name!r} is not valid: @ sets the memory fraction of a GPU that is not present; leave @{given} out"
            + (", and set XLA_CLIENT_MEM_FRACTION" if base == "local" else "")
        )
    if base == "local":
        if colon:
            raise ReportError(
                f"target {name!r} is not valid: local takes no count; write local for all devices of this process"
            )
        return _local()
    if base == "cpu":
        return _cpu(name, shape)
    chip = CHIPS[base]
    full = _SHAPES[chip.platform](place, chip, shape)
    plain = f"{base}{':' if colon else ''}{'x'.join(map(str, shape))}"
    if chip.platform not in GPU_PLATFORMS:
        return _described(plain, chip, full)
    if not at:
        return _described(plain, chip, full, _fraction(default_fraction))
    value = float(given) if re.fullmatch(r"\d*\.?\d+", given) else 0.0  # refused, as 0 is
    if not 0 < value <= 1:
        raise ReportError(
            f"target {name!r}: @{given} is not a fraction of a GPU's memory; give more than 0 and at most 1, such as "
            "@0.9"
        )
    return _described(f"{plain}@{value:g}", chip, full, MemoryFraction(value, "set by the target"))


def _similar_targets(base: str, rest: str) -> list[str]:
    """Returns the valid targets that a wrong name may mean: "h100:8" for "h100x8", "8xh100" and "h10:8".

    base: the name before the colon. rest: the text after it, with the colon.
    """
    for name in names():
        before, found, after = base.partition(name)
        count = re.fullmatch(r"(\d+)[x*]", before) if not after else re.fullmatch(r"[x*_-]?(\d+(?:x\d+)*)", after)
        if found and count and _parse_shape(count[1]) and not (before and after) and ":" not in rest:
            return [f"{name}:{count[1]}{rest}"]
    return [name + rest for name in nearest(base, names())]


def _fraction(default: MemoryFraction) -> MemoryFraction | None:
    """Returns the fraction that the user's environment sets for jax's pool, otherwise the default (each with its
    source). Returns None if the user chose an allocator without a pool."""
    return None if allocates_singly() else user_fraction() or default


def to_compile_for(name: str, default_fraction: MemoryFraction = JAX_FRACTION) -> Target:
    """Returns the target with this name, for a process that compiles programs but does not run them. GPUs of this
    machine are treated as not present, because jax would take their memory if it opened them.

    default_fraction: the fraction of a GPU's memory in jax's pool, if neither the name nor the user's environment sets
    it. Raises ReportError for an invalid name, and for local GPUs that are not in the table of chips.
    """
    choose_platform()
    if name.strip().lower() != "local" or accelerator() != "cuda":
        simulate_devices([name.strip().lower()])
        return parse(name, default_fraction)
    import pynvml

    pynvml.nvmlInit()
    kind = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))  # a machine has one kind of GPU
    kind = kind.decode() if isinstance(kind, bytes) else kind
    chip = next((chip for chip in CHIPS.values() if chip.kind == kind), None)
    if chip is None:
        raise ReportError(f"{kind} is not in the table of chips: give as target one of {', '.join(names())}")
    return parse(f"{chip.name}:{pynvml.nvmlDeviceGetCount()}", default_fraction)


def from_devices(devices: Sequence[JaxDevice], default_fraction: MemoryFraction = JAX_FRACTION) -> Target:
    """Returns the target that consists of these jax devices, which may be compile-only.

    default_fraction: the fraction of a GPU's memory in jax's pool, if the user's environment does not set it. Raises
    ReportError for compile-only devices that are not in the table of chips.
    """
    import jax

    devices, first = list(devices), devices[0]
    if first.platform == "cpu":
        return _cpu(f"cpu:{len(devices)}", (len(devices),))
    if devices == jax.devices():
        return _local()
    chip = next((chip for chip in CHIPS.values() if chip.kind == first.device_kind), None)
    if chip is None:
        raise ReportError(f"{first.device_kind} is not in the table of chips: compile for one of {', '.join(names())}")
    if chip.platform == "tpu":
        coords = [device.coords[: len(chip.max_shape)] for device in devices]
        shape = tuple(max(axis) + 1 for axis in zip(*coords))
    else:
        hosts = len({device.process_index for device in devices})
        shape = (hosts, len(devices) // hosts)
    # The short forms for one host and for one device: h200:8, h200.
    counts = shape[1:] if chip.platform in GPU_PLATFORMS and shape[0] == 1 else shape
    count = f":{'x'.join(map(str, counts))}" if len(devices) > 1 or chip.platform == "tpu" else ""
    name = f"{chip.name}{count}"
    if chip.platform not in GPU_PLATFORMS:
        return _described(name, chip, shape)
    if first in _GIVEN_FRACTIONS:
        fraction = _GIVEN_FRACTIONS[first]
        return _described(f"{name}@{fraction.value:g}", chip, shape, fraction)
    return _described(name, chip, shape, _fraction(default_fraction))


def _parse_shape(text: str) -> tuple[int, ...]:
    # such as 2x8
    if not re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){0,2}", text):
        return ()
    return tuple(int(part) for part in text.split("x"))


def _check_gpu_shape(name: str, chip: Chip, shape: tuple[int, ...]) -> tuple[int, ...]:
    # (hosts, devices per host); one number means devices of one host
    full = (1, *shape)[-2:] if shape else (1, 1)
    per_host = chip.devices_per_host
    if len(shape) > 2 or full[1] > per_host:
        hosts, left = divmod(math.prod(shape), per_host)
        example = f"{chip.name}:{hosts if hosts and not left else 2}x{per_host}"
        raise ReportError(
            f"target {name!r} does not exist: a host has at most {per_host} of these devices; "
            f"write {example} (hosts x devices)"
        )
    if chip.max_shape and full[0] > chip.max_shape[0]:
        largest = "x".join(map(str, chip.max_shape))
        raise ReportError(
            f"target {name!r}: a rack has {largest} of these devices (hosts x devices), and connections between racks "
            f"are not described; give at most {chip.name}:{largest}"
        )
    return full


def _check_tpu_shape(name: str, chip: Chip, shape: tuple[int, ...]) -> tuple[int, ...]:
    # The first two axes are even, because a host has 2x2 chips.
    rank = len(chip.max_shape)
    smallest = (1, 1) if rank == 2 else (2, 2, 1)
    full = shape or smallest
    fits = len(full) == rank and all(n <= longest for n, longest in zip(full, chip.max_shape, strict=True))
    if not fits or not (full == smallest or (full[0] % 2 == 0 and full[1] % 2 == 0)):
        min_shape, max_shape = ("x".join(map(str, bound)) for bound in (smallest, chip.max_shape))
        raise ReportError(
            f"target {name!r} does not exist: a {chip.name} slice has {rank} axes; give {min_shape}, or even numbers "
            f"of chips on the first two axes, up to {max_shape}"
        )
    return full


_SHAPES = {**dict.fromkeys(GPU_PLATFORMS, _check_gpu_shape), "tpu": _check_tpu_shape}


def _described(name: str, chip: Chip, shape: tuple[int, ...], fraction: MemoryFraction | None = None) -> Target:
    n_devices = math.prod(shape)
    per_host = shape[1] if chip.platform in GPU_PLATFORMS else min(n_devices, chip.devices_per_host)
    return Target(
        name=name,
        platform=chip.platform,
        kind=chip.kind,
        shape=shape,
        n_devices=n_devices,
        devices_per_host=per_host,
        device_memory_bytes=chip.device_memory_bytes,
        host_memory_bytes=given_node_bytes() or chip.host_memory_bytes * per_host // chip.devices_per_host,
        memory_fraction=fraction.value if fraction else None,
        memory_fraction_source=fraction.source if fraction else "",
        pool_can_grow=fraction is not None and pool_can_grow(),
        is_described=True,
        **_figures(chip),
    )


def _figures(chip: Chip) -> dict[str, Any]:
    return {
        "reserved_bytes": chip.reserved_bytes,
        "hbm_bytes_per_s": chip.hbm,
        "host_link_bytes_per_s": chip.host_link,
        "peak_flops": dict(chip.peak_flops),
        "interconnect_bytes_per_s": {"in_host": chip.in_host, "between_hosts": chip.between_hosts},
        "sources": dict(chip.sources),
    }


def _cpu(name: str, shape: tuple[int, ...]) -> Target:
    if len(shape) > 1:
        raise ReportError(f"target {name!r} is not valid: CPU devices have a count and no shape; write cpu:8")
    n = shape[0] if shape else 1
    plain = f"cpu:{n}"
    _devices_of_target(plain)
    return Target(
        plain,
        "cpu",
        "cpu",
        (n,),
        n,
        n,
        physical_bytes(),
        host_memory_bytes=node_memory_of(None)[0],
        sources={"device_memory_bytes": "this host's memory, shared by its simulated devices"},
    )


def _local() -> Target:
    devices = _devices_of_target("local")
    first = devices[0]
    per_host = sum(d.process_index == first.process_index for d in devices)
    chip = next((c for c in CHIPS.values() if c.kind == first.device_kind), None)
    platform = platform_of(first)
    host = node_memory_of(None)[0]
    if platform == "cpu":
        memory = physical_bytes()
    else:
        memory = chip.device_memory_bytes if chip else limit_bytes(first)
    return Target(
        "local",
        platform,
        first.device_kind,
        (len(devices),),
        len(devices),
        per_host,
        memory,
        host_memory_bytes=host,
        **(_figures(chip) if chip else {}),
    )


def platform_of(device: JaxDevice) -> str:
    """Returns the platform of a jax device: "cpu", "cuda", "rocm" or "tpu". jax calls both NVIDIA and AMD GPUs "gpu",
    so the version string of jax's client decides between them."""
    if device.platform != "gpu":
        return device.platform
    chip = next((chip for chip in CHIPS.values() if chip.kind == device.device_kind), None)
    if chip:
        return chip.platform
    return "rocm" if "rocm" in str(getattr(device.client, "platform_version", "")).lower() else "cuda"


# Devices of targets with a fraction in their name -> the fraction. A program whose arguments are sharded over these
# devices is then judged by it, although only the devices are known.
_GIVEN_FRACTIONS: dict[JaxDevice, MemoryFraction] = {}


# Cached, because jax treats meshes over two equal topologies as different.
@functools.lru_cache(maxsize=64)
def _devices_of_target(name: str) -> tuple[JaxDevice, ...]:
    import jax

    place, _, given = name.partition("@")
    base, _, count = place.partition(":")
    if base == "local":
        return tuple(_start_jax(name, jax.devices))
    if base == "cpu":
        n, devices = int(count), _start_jax(name, functools.partial(jax.local_devices, backend="cpu"))
        if len(devices) < n:
            raise ReportError(
                f"target {name}: this process has only {len(devices)} CPU devices; "
                + _CPU_REMEDY.format(n=n)
                + " before jax starts"
            )
        return tuple(devices[:n])
    chip = CHIPS[base]
    shape = _SHAPES[chip.platform](place, chip, _parse_shape(count))
    if chip.platform == "tpu":
        return tuple(tpu_devices(name, chip, shape))
    gpus = tuple(gpu_devices(name, chip, shape))
    if given:
        _GIVEN_FRACTIONS.update(dict.fromkeys(gpus, MemoryFraction(float(given), "set by the target")))
    return gpus


def _start_jax(name: str, devices: Callable[[], list[JaxDevice]]) -> list[JaxDevice]:
    try:
        return devices()
    except RuntimeError as error:
        reason = one_line(error, 160)
        raise ReportError(
            f"target {name}: jax cannot start ({reason}); unset JAX_PLATFORMS, or set it to an available platform"
        ) from error


# ---- described devices --------------------------------------------------------------------------------------------


def gpu_devices(name: str, chip: Chip, shape: tuple[int, ...]) -> list[JaxDevice]:
    """Returns GPUs that are not present as compile-only jax devices.

    name: the target's name, for messages. shape: (hosts, devices per host). Raises ReportError if the optional package
    that compiles for GPUs is not installed, or if its compiler rejects the GPU.
    """
    assert chip.gpu is not None
    if chip.platform == "rocm":
        _register_rocm_without_gpu(name)
        config = target_config(chip, (0, 0))
        return _topology(name, "rocm", topology=_gpu_topology(shape), target_config=config)
    old = chip.gpu.capability < CUDA_13_FROM
    cuda_plugins.make_importable()
    able = [plugin for plugin, version in CUDA_PLUGINS.items() if version < (13, 0) or not old]
    plugins = [plugin for plugin in able if installed(f"jax_plugins.{plugin}")]
    if not plugins and old:
        major, minor = chip.gpu.capability
        raise ReportError(
            f"target {name}: CUDA 13 cannot compile for sm_{major}{minor}; in a separate environment, "
            f"{install_remedy('cuda12')} (it needs no GPU)"
        )
    if not plugins:
        raise ReportError(
            f"target {name}: no CUDA compiler is installed; {install_remedy('cuda')} (4.1 GB, it needs no GPU)"
        )
    config = target_config(chip, CUDA_PLUGINS[plugins[0]])
    cuda_plugins.register(plugins[0], gpu_present=accelerator() == "cuda")
    return _topology(name, "cuda", topology=_gpu_topology(shape), target_config=config)


def _gpu_topology(shape: tuple[int, ...]) -> str:
    return f"1x{shape[0]}x{shape[1]}"  # slices x hosts x devices


def _register_rocm_without_gpu(name: str) -> None:
    """Registers jax's ROCm plugin, which refuses to do so on a machine without an AMD GPU.

    name: the target's name, for messages. Raises ReportError if the plugin or ROCm's libraries are not installed.
    """
    if not installed(f"jax_plugins.{ROCM_PLUGIN}"):
        raise ReportError(
            f"target {name}: no ROCm compiler is installed; {install_remedy('rocm')} and install ROCm 7 (it "
            "needs no GPU)"
        )
    if accelerator() == "rocm":
        return
    from jax._src import hardware_utils, xla_bridge  # no public API registers a plugin

    xla_bridge._discover_and_register_pjrt_plugins()  # the ROCm plugin refuses; jax looks for plugins only once
    if "rocm" in xla_bridge._backend_factories:
        return
    count = hardware_utils.num_available_amd_gpus
    hardware_utils.num_available_amd_gpus = lambda stop_at=None: 1
    try:
        importlib.import_module(f"jax_plugins.{ROCM_PLUGIN}").initialize()
    except Exception as error:  # jaxlib raises its own type if the plugin's library cannot be loaded
        raise ReportError(
            f"target {name}: jax's ROCm plugin cannot be loaded ({one_line(error, 160)}); install ROCm 7 and add its "
            "folder of libraries to LD_LIBRARY_PATH (it needs no GPU)"
        ) from error
    finally:
        hardware_utils.num_available_amd_gpus = count


def tpu_devices(name: str, chip: Chip, shape: tuple[int, ...]) -> list[JaxDevice]:
    """Returns TPUs that are not present as compile-only jax devices.

    name: the target's name, for messages. shape: number of chips along each axis. Raises ReportError if the optional
    package that compiles for TPUs is not installed, or if its compiler rejects the shape.
    """
    if not installed("libtpu"):
        raise ReportError(f"target {name}: no TPU compiler is installed; {install_remedy('tpu')} (it needs no TPU)")
    if accelerator() != "tpu":  # on a TPU machine, these variables describe the real TPU
        environment.set_defaults(_LIBTPU_QUIET)
    bounds = {"chips_per_host_bounds": [1, 1, 1]} if math.prod(shape) == 1 else {}
    return _topology(name, "tpu", name=f"{chip.name}:{'x'.join(map(str, shape))}", **bounds)


def _topology(target: str, platform: str, *, name: str | None = None, **options: Any) -> list[JaxDevice]:
    from jax.experimental import topologies

    with hold_back_log():
        try:
            return topologies.get_topology_desc(name or target, platform=platform, **options).devices
        except Exception as error:  # the plugins raise RuntimeError, NotImplementedError and other types
            refused = error
    reason = one_line(refused, 160)
    raise ReportError(
        f"target {target}: the {platform} compiler rejects this target ({reason}); update the compiler with "
        f"pip install -U {_COMPILER_PACKAGES[platform]}"
    ) from refused


def installed(module: str) -> bool:
    """Returns whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def node_memory_of(target: Target | None, given: int | None = None, root: str = "/") -> tuple[int, str]:
    """Returns the host memory of one node of a target, which all processes of the node share: (bytes, source of the
    number in words). 0 bytes mean that the size is unknown.

    The size is `given`, or else the size that `assumed_node` set. If both are missing, the size is the memory of this
    machine (`machine_bytes`) in two cases: `target` is None, or the devices of the target are in this machine. For
    other devices, it is the memory of a whole node with such devices, for example with 8 H100, in the table of chips.

    given: the host memory of one node in bytes; None or 0 if unknown. root: the root of the file system to read, for
    tests.
    """
    size = given or given_node_bytes()
    if size:
        return size, "--host-memory"
    if target is None or not target.is_described:
        return machine_bytes(root)
    chip = CHIPS.get(base_name(target.name))
    if chip is None:
        return 0, ""
    return chip.host_memory_bytes, f"a node with {chip.devices_per_host} {chip.name}"
