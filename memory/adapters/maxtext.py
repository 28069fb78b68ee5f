"""Makes MaxText's training step for a described target, from MaxText's own config, shaped inputs, shardings and step.

The name of a program is `maxtext:` and a model of MaxText, as in `maxtext:llama2-7b`, or a config file, as in
`maxtext:my.yml`. All other keys are keys of MaxText's config. Checked with MaxText 0.2.5 (jax 0.12.0, flax 0.12.12).

What differs from MaxText's own ahead-of-time compile (`train_compile`):

- The number of devices comes from the target, also for GPUs that are not present.
- The mesh over several hosts is built in this module. Described hosts all have the same `slice_index`, which MaxText's
  function for several slices refuses.
- An attention kernel that cannot be lowered on this machine is replaced by another one, and a note of the report says
  so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory import environment
from bytescope.memory.adapters.trainers import TrainerFactory
from bytescope.memory.compare import what_if
from bytescope.memory.compare.compare_rows import Row
from bytescope.memory.compare.grids import CONFIG
from bytescope.memory.compare.prepared_program import PreparedProgram
from bytescope.memory.compare.what_if import Variant
from bytescope.memory.devices.chips import CHIPS, base_name
from bytescope.memory.devices.xla_flags import LEVELS, is_flag, parse_value
from bytescope.memory.errors import ReportError, did_you_mean, message_of, one_line, remedy_for
from bytescope.memory.program.compilation import compiled_for
from bytescope.memory.records.report_record import Finding, ReportRecord
from bytescope.memory.units import plural

if TYPE_CHECKING:
    import numpy as np

    from bytescope.memory.devices.compiler import Compilation
    from bytescope.memory.devices.targets import Target

PREFIX = "maxtext:"
POLICY, ATTENTION = "remat_policy", "attention"
INSTALL = (
    "pip install maxtext in Python 3.12, with the packages that its wheel does not require "
    "(memory/guides/maxtext.md lists them)"
)
# Policies that need no other keys, from the most recomputation to the least. Left out: `custom`, which needs the names
# of tensors, and the two for quantized products.
POLICIES = (
    "full",
    "save_out_proj",
    "save_qkv_proj",
    "save_dot_except_mlp",
    "save_dot_with_context_except_mlp",
    "save_dot_except_mlpwi",
    "minimal",
    "minimal_with_context",
    "qkv_proj_offloaded",
    "minimal_offloaded",
    "none",
)
_OTHER_POLICIES = ("custom", "minimal_flash", "minimal_with_quantization", "minimal_with_context_and_quantization")
# Attention kernels that cannot be lowered here -> the reason. Platform -> the kernel in their place.
_FLASH_TE = "it is a kernel of Transformer Engine, which cannot be lowered without its GPU"
_ON_GPU = {
    "autoselected": "MaxText would select a kernel for the devices of this machine",
    "flash": "it is a Pallas kernel for TPUs",
    "cudnn_flash_te": _FLASH_TE,
}
_CUDNN = {"cudnn_flash_jax": "cuDNN runs on NVIDIA's GPUs"}
_NOT_LOWERED: Mapping[str, Mapping[str, str]] = {
    "cuda": _ON_GPU,
    "rocm": _ON_GPU | _CUDNN,
    "cpu": {"flash": _ON_GPU["flash"], "cudnn_flash_te": _FLASH_TE, **_CUDNN},
}
_IN_ITS_PLACE = {"cuda": "cudnn_flash_jax", "rocm": "dot_product", "cpu": "dot_product"}
# Kind of a finding -> its remedy in MaxText's keys.
REMEDIES: Mapping[str, str] = {
    "checkpoint_saves": f"choose a {POLICY} that saves less: bytescope compare with --remat=all shows each policy",
    "full_logits": (
        "num_vocab_tiling=8 computes the loss in parts, but gathers the output head once for each part; with "
        "vocab_tiling_ag_once=true it is gathered once, and held until the backward pass"
    ),
    "kernel_runs_again": f"{POLICY}=minimal does not keep these bytes, and recomputes the same",
    "spare_memory": f"choose a {POLICY} that saves more: bytescope compare with --remat=all shows each policy",
    "state_too_large": "shard the state over more devices (ici_fsdp_parallelism, dcn_fsdp_parallelism)",
    "unrolled_layers": "scan_layers=true loops over the layers",
    "whole_state": "shard the state over the hosts too: dcn_fsdp_parallelism=HOSTS dcn_data_parallelism=1",
    "weight_copies": "param_scan_axis=0 stacks the weights by layer, as the loop over the layers reads them",
}


class MaxTextRow(Row):
    """One training step of MaxText in a comparison, given by values of MaxText's keys and by flags of XLA."""

    how = (POLICY, "scan_layers", "param_scan_axis", ATTENTION, "ici_", "dcn_", "num_vocab_tiling", "xla_", *LEVELS)
    policy_key = POLICY


class MaxTextFactory(TrainerFactory):
    """Makes MaxText's training steps. The overrides of a step are keys of MaxText's config and flags of XLA, with their
    values as texts; the key `config` has the name of the program, such as "maxtext:llama2-7b"."""

    reference = "bytescope.memory.adapters.maxtext:FACTORY"
    row = MaxTextRow
    policy_key = POLICY
    policies = POLICIES
    batch_key, scan_key = "per_device_batch_size", "scan_layers"

    def __call__(self, overrides: Mapping[str, Any], target: Target) -> PreparedProgram:
        """Returns MaxText's training step with these overrides, traced for a target and ready to be compiled. Raises
        ReportError, a one-line message, if MaxText is not installed or refuses the keys."""
        self.check(overrides)
        keys = {key: str(value) for key, value in overrides.items() if key != CONFIG and not is_flag(key)}
        return prepare_step(overrides[CONFIG], keys, target)

    def split_options(
        self, overrides: Mapping[str, Any], target: Target
    ) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
        """Splits overrides by their names. Returns (the keys of MaxText, the flags of XLA with parsed values; None if
        there are no flags)."""
        options = {key: parse_value(key, str(text)) for key, text in overrides.items() if is_flag(key)}
        return {key: text for key, text in overrides.items() if key not in options}, options or None

    def what_if(self, overrides: Mapping[str, Any], platform: str) -> Sequence[Variant]:
        """Returns the variants that `compare --what-if` compiles: the loop over the layers switched on or off; weights
        stacked by layer, if the layers run in a loop; the program as given; and each row of `what_if.VARIANTS` as flags
        of XLA."""
        scanned = str(overrides.get("scan_layers", "true")).lower() == "true"
        variants = [Variant(f"scan {'off' if scanned else 'on'}", {"scan_layers": str(not scanned).lower()})]
        if scanned and overrides.get("param_scan_axis", "1") != "0":
            variants.append(Variant("stacked weights by layer", {"param_scan_axis": "0"}))
        # Without the last variant, which says that only the user's function can switch its scan.
        return [*variants, *what_if.flag_variants(platform)[:-1]]

    def resolve(self, overrides: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns everything on which the compiled program depends: the overrides, the texts of the user's config
        file and of the config files that it is based on, and the environment variables named M_ and a key, because
        MaxText reads values of keys from them."""
        variables = {name: value for name, value in sorted(environment.variables().items()) if name.startswith("M_")}
        texts = {str(path): path.read_text() for path in _config_files(_model_of(overrides))}
        return {**overrides, **variables, **texts}

    def keys_of_names(self, names: Collection[str], kept: Collection[str]) -> dict[str, str]:
        """Returns MaxText's keys of the remat policy that keeps the tensors `kept`: `remat_policy=full` if there are
        none, otherwise `remat_policy=custom` with one key NAME=device or NAME=remat for each of `names`."""
        if not kept:
            return {POLICY: "full"}
        return {POLICY: "custom", **{name: "device" if name in kept else "remat" for name in sorted(names)}}

    def names_with_keys(self, names: Collection[str]) -> set[str]:
        """Returns those of `names` that are also keys of MaxText. Such a key says whether the tensor with this name is
        kept or recomputed."""
        with _quiet():
            known = _import_maxtext("configs.types").MaxTextConfig.model_fields
        return {name for name in names if name in known}

    def check(self, overrides: Mapping[str, Any]) -> None:
        """Raises ReportError if MaxText is not installed, or if it does not know the model, a key or the remat
        policy. Other values are checked when a program is made."""
        model = _model_of(overrides)
        with _quiet(), _one_line_errors("MaxText cannot be imported"):
            types = _import_maxtext("configs.types")
            known = types.MaxTextConfig.model_fields
            models = types.ModelName.__args__
        if not model.endswith(".yml") and model not in models:
            raise ReportError(
                f"MaxText has no model {model}: {remedy_for(model, models)}; or give a file, maxtext:my.yml"
            )
        for key in overrides:
            if key not in known and key != CONFIG and not is_flag(key):
                near = did_you_mean(key, known)
                raise ReportError(f"MaxText has no key {key}: {near or 'its file configs/base.yml lists the keys'}")
        policy = overrides.get(POLICY, POLICIES[0])
        if policy not in (*POLICIES, *_OTHER_POLICIES):
            raise ReportError(f"MaxText has no {POLICY}={policy}: {remedy_for(policy, POLICIES)}")

    def sources(self) -> Sequence[Path]:
        """Returns this file and the files of MaxText: its code and its configs."""
        files = [path for folder in _maxtext_folders() for path in folder.rglob("*") if path.suffix in (".py", ".yml")]
        return [Path(__file__), *sorted(files)]


FACTORY = MaxTextFactory()


# ---- MaxText's step --------------------------------------------------------------------------------------------------


def prepare_step(name: str, keys: Mapping[str, str], target: Target) -> PreparedProgram:
    """Traces MaxText's training step for a target and returns it, ready to be compiled.

    name: the program, such as "maxtext:llama2-7b". keys: MaxText's keys with their values.

    Raises ReportError, a one-line message, if MaxText refuses the keys or the step cannot be traced.
    """
    import jax

    devices = target.devices()  # a missing compiler is reported before anything is traced
    config, notes = _config_of(name, keys, target)
    with _quiet():
        with _one_line_errors(f"MaxText cannot arrange {target.n_devices} devices by the keys ici_* and dcn_*"):
            mesh = _mesh(config, devices)
        with _one_line_errors(f"{name} cannot be traced"):
            traced = _trace(config, mesh)

    def compile_step(options: Mapping[str, Any] | None = None) -> tuple[Compilation, Target | None]:
        with _quiet(), _one_line_errors(f"{name} cannot be compiled"), jax.set_mesh(mesh):
            return compiled_for(traced, target=target, compiler_options=options)

    batch, length = config.global_batch_size_to_train_on, config.max_target_length
    axes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    return PreparedProgram(
        compile_step,
        name=name,
        config={CONFIG: name, **keys},
        tokens_per_update=batch * length,
        settled={ATTENTION: config.attention, "mesh": axes},
        batch=f"{plural(batch, 'sequence')} of {length:,} = {batch * length:,} tokens per update",
        policy=keys.get(POLICY, config.remat_policy or "none"),
        trace=lambda: traced,
        notes=notes,
        findings=lambda report: _findings(report, keys),
    )


def _findings(report: ReportRecord, keys: Mapping[str, str]) -> list[Finding]:
    """Returns the findings of a report with remedies in MaxText's keys. Adds a finding if the policy is "none" but
    the program recomputes: MaxText 0.2.5 converts the text "none" to None (configs/pyconfig.py:274). Unscanned
    layers are recomputed if the policy is not equal to "none" (layers/nnx_decoders.py:2248),
    scanned layers always (line 1159).
    """
    findings = [
        dataclasses.replace(finding, remedy=REMEDIES.get(finding.kind, finding.remedy)) for finding in report.findings
    ]
    flops = {phase: sum(work.get("flops", {}).values()) for phase, work in report.work.items()}
    if keys.get(POLICY) == "none" and flops.get("recompute"):
        share = flops["recompute"] / sum(flops.values())
        message = (
            f"{POLICY}=none keeps no activations: MaxText recomputes all layers as with full, and {share:.0%} of all "
            "FLOPs are recomputation"
        )
        findings.insert(0, Finding("policy_none", 0, message, f"{POLICY}=minimal recomputes least"))
    return findings


def _config_of(name: str, keys: Mapping[str, str], target: Target) -> tuple[Any, tuple[str, ...]]:
    """Returns (MaxText's config for a target, notes). A note is a sentence about a key whose value was replaced, such
    as the attention kernel."""
    model, given = name.removeprefix(PREFIX), dict(keys)
    own = {
        "run_name": "bytescope",
        "hardware": {"cuda": "gpu", "rocm": "gpu"}.get(target.platform, target.platform),
        "enable_checkpointing": "False",
        "dataset_type": "synthetic",
        "log_config": "False",
        "skip_jax_distributed_system": "True",
        # Without these keys, MaxText uses the number of devices of the chip's usual host, or of this process.
        "internal_compile": "True",
        "internal_compile_num_devices": str(target.n_devices),
        "compile_topology": target.name,
        "compile_topology_num_slices": str(_slices(target)),
    }
    with _quiet():
        pyconfig = _import_maxtext("configs.pyconfig")
        if not model.endswith(".yml"):
            own["model_name"] = model
            model = str(Path(pyconfig.__file__).parent / "base.yml")

        def read(values: Mapping[str, str]) -> Any:
            with _one_line_errors(f"MaxText refuses the keys of {name}"):
                return pyconfig.initialize(["", model, *(f"{key}={value}" for key, value in values.items())])

        config = read({**own, **given})
        reason = _NOT_LOWERED.get(target.platform, {}).get(config.attention, "")
        if not reason:
            return config, ()
        kernel = _IN_ITS_PLACE[target.platform]
        note = f"attention={config.attention} is replaced by attention={kernel}: {reason}"
        return read({**own, **given, ATTENTION: kernel}), (note,)


def _trace(config: Any, mesh: Any) -> Any:
    """Returns MaxText's training step, traced with its shaped inputs: the state and a batch.

    The function makes the same calls as MaxText's `train_compile.main`. The context manager `logical_axis_rules` is
    needed, because without it nothing is sharded as the config asks.
    """
    import jax
    from flax.core.spmd import logical_axis_rules

    train, train_compile = (_import_maxtext(f"trainers.pre_train.{name}") for name in ("train", "train_compile"))
    sharding, utils = _import_maxtext("utils.sharding"), _import_maxtext("utils.maxtext_utils")
    with _host_memory():
        arguments, named, state, _, model = train_compile.get_shaped_inputs(mesh, config)
    params, state = sharding.maybe_update_params_sharding_with_opt(config, state)
    state = sharding.build_zero1_input_state_mesh_shardings(config, state, params)
    data = sharding.get_input_data_sharding(config, mesh)
    step, inputs, outputs, static, donated = utils.get_functional_train_with_signature(
        train.train_step, data, state, model, config, params
    )
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        jitted = jax.jit(
            step, in_shardings=inputs, out_shardings=outputs, static_argnums=static, donate_argnums=donated
        )
        return jitted.trace(*arguments, **named)


@contextlib.contextmanager
def _host_memory() -> Iterator[None]:
    """Lets MaxText place arrays in host memory (`optimizer_memory_host_offload`, `parameter_memory_host_offload`).

    Described devices list no memories, so jax drops the memory kind that MaxText gives their shardings. A sharding over
    an abstract mesh keeps the memory kind; the program takes its devices from its other arguments.
    """
    from jax.sharding import NamedSharding

    utils = _import_maxtext("utils.maxtext_utils_nnx")
    own = utils.move_memory_to_host

    def move_memory_to_host(path: Any, sharding: Any) -> Any:
        moved = own(path, sharding)
        if moved.memory_kind is not None:
            return moved
        return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind="pinned_host")

    utils.move_memory_to_host = move_memory_to_host
    try:
        yield
    finally:
        utils.move_memory_to_host = own


def _mesh(config: Any, devices: Sequence[Any]) -> Any:
    import jax

    jax.config.update("jax_default_prng_impl", "unsafe_rbg")  # as MaxText's `train.initialize` sets them
    jax.config.update("jax_use_shardy_partitioner", config.shardy)
    jax.config.update("jax_remove_size_one_mesh_axis_from_type", config.remove_size_one_mesh_axis_from_type)
    explicit = getattr(config.shard_mode, "value", config.shard_mode) == "explicit"
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    if config.num_slices > 1:
        array = _mesh_of_slices(config, devices)
    else:
        array = _import_maxtext("utils.maxtext_utils").create_device_mesh(config, devices)
    return jax.sharding.Mesh(array, config.mesh_axes, axis_types=(kind,) * len(config.mesh_axes))


def _mesh_of_slices(config: Any, devices: Sequence[Any]) -> np.ndarray:
    """Returns the devices as an array with MaxText's mesh axes. The size of an axis is its parallelism between slices
    (dcn_*, outside) times its parallelism within a slice (ici_*), as `mesh_utils.create_hybrid_device_mesh` arranges
    them."""
    import numpy as np

    fill = _import_maxtext("utils.max_utils").fill_unspecified_mesh_axes
    outside = fill(list(config.dcn_parallelism), config.num_slices, "DCN")
    inside = fill(list(config.ici_parallelism), len(devices) // config.num_slices, "ICI")
    axes = len(inside)
    pairs = [axis for pair in zip(range(axes), range(axes, 2 * axes)) for axis in pair]
    array = np.array(devices).reshape(*outside, *inside).transpose(pairs)
    return array.reshape([out * within for out, within in zip(outside, inside)])


def _slices(target: Target) -> int:
    """Returns the value of MaxText's `num_slices`: the number of hosts for GPUs; 1 for a TPU slice and for a rack of
    GPUs in one NVLink domain, because all their devices are connected alike."""
    chip = CHIPS.get(base_name(target.name))
    if target.platform not in ("cuda", "rocm") or (chip is not None and chip.max_shape):
        return 1
    return max(target.n_devices // max(target.devices_per_host, 1), 1)


# ---- MaxText's package -----------------------------------------------------------------------------------------------


def _model_of(overrides: Mapping[str, Any]) -> str:
    """Returns the name of the program without the prefix "maxtext:", which is a model or the path of a config file.
    Raises ReportError if it is empty, or if there is no such file."""
    model = str(overrides[CONFIG]).removeprefix(PREFIX)
    if not model:
        raise ReportError(
            f"{PREFIX} names no model: write a model such as maxtext:llama2-7b, or a file, maxtext:my.yml"
        )
    if model.endswith(".yml") and not Path(model).is_file():
        raise ReportError(f"there is no file {model}: give a model such as maxtext:llama2-7b, or an existing .yml file")
    return model


def _config_files(model: str) -> list[Path]:
    """Returns the user's config file `model` and the config files that it is based on, without the files of MaxText
    itself. Returns [] if `model` is the name of a model."""
    files: list[Path] = []
    path = Path(model)
    while path.suffix == ".yml" and path.is_file() and path not in files:
        files.append(path)
        bases = [line.partition(":")[2] for line in path.read_text().splitlines() if line.startswith("base_config:")]
        path = path.parent / bases[0].partition("#")[0].strip(" \"'") if bases else Path()
    return files


def _maxtext_folders() -> list[Path]:
    spec = importlib.util.find_spec("maxtext")
    if spec is None:
        raise ReportError(f"MaxText is not installed: {INSTALL}")
    return [Path(folder) for folder in spec.submodule_search_locations or ()]


def _import_maxtext(module: str) -> Any:
    """Imports a module of MaxText. Raises ReportError if MaxText or a package that it needs is not installed."""
    import jax  # noqa: F401  # before MaxText, whose first lines make XLA log more than jax does

    _maxtext_folders()
    try:
        return importlib.import_module(f"maxtext.{module}")
    except ModuleNotFoundError as error:
        raise ReportError(f"MaxText cannot be imported without {error.name}: pip install {error.name}") from error


@contextlib.contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    """Context manager that turns an error of MaxText into a ReportError, a one-line message that begins with `what`."""
    try:
        yield
    except (ReportError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        # MaxText's config exits after it has logged the error.
        cause = error.__context__ if isinstance(error, SystemExit) and error.__context__ else error
        raise ReportError(f"{what}: {_reason(cause)}") from error


def _reason(error: BaseException) -> str:
    if hasattr(error, "errors"):  # a ValidationError of pydantic
        reasons: dict[str, str] = {}
        for item in error.errors():  # one for each type that a key may have
            key = str(next(iter(item["loc"]), ""))
            reasons.setdefault(key, f"{key}={item['input']}: {item['msg']}" if key else item["msg"])
        return one_line("; ".join(reasons.values()), 300)
    kind = "" if isinstance(error, ValueError | AssertionError) else f"{type(error).__name__}: "
    return one_line(f"{kind}{message_of(error)}", 300)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context manager that discards what MaxText and its packages print and log. Errors are raised."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
