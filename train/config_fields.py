"""Every key of the trainer's config, with what the trainer knows about it: its default, meaning and valid values, and
what a change of its value does to a run.

A row of FIELDS is a key. Defaults and meanings are read from configs/base.py, which explains each key in a comment.
These are derived from the rows:

    bytescope list keys, reference/keys.md    program/config_files.py
    checks of single values                   program/program_settings.py, data/settings.py
    the keys that a resumed run may change    checkpoints/workdir.py
    the cache of checked configs              plan/config_factory.py
    which rows of compare compete             plan/config_grid.py
    the compiled program of a measured run    run/measured_runs.py

The sizes of the model, the batch and the mesh have no range here: they are checked with the sizes that they must fit.
This module imports no jax; a table of names in another module is imported when a value is checked.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import io
import math
import re
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bytescope.memory.errors import ReportError, remedy_for
from bytescope.memory.units import MAX_COUNT, parse_bytes

# Integers must fit int32, because they are int32 on a device or count things of which no run has more. Floats must fit
# float32.
MAX_INT, MAX_FLOAT = 2**31 - 1, float(np.finfo(np.float32).max)
# Range of the dynamic loss scale. Below the minimum another halving does not help: the overflow is not in the gradient.
# The maximum is far below the maximum of float32.
MIN_LOSS_SCALE, MAX_LOSS_SCALE = 2.0**-14, 2.0**64
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # Python decodes bytes that are not UTF-8 to these


@dataclasses.dataclass(frozen=True)
class ConfigField:
    """A key of the config.

    Fields:
      key: the dotted key.
      minimum, maximum: the least and the largest valid number. Without a maximum, an integer must fit int32.
      positive: True if the number must be above 0.
      decay: True if the number must be at least 0 and below 1.
      choices: the valid names. "MODULE:TABLE" stands for the names of a table, and "MODULE:TABLE.ROW" for the names of
        a row of a table, whose module is in this package.
      optional: True if the value may be empty instead of one of the `choices`.
      plans: the valid names in a remat plan, such as "q_rot+v@host", in the form of `choices`.
      size: True if the value is a number of bytes, such as "72GiB", or empty.
      resumable: True if a run may be resumed with another value. False if the key decides the numbers of a run: its
        loss curve is then another one.
      compiled: True if the key changes the compiled step.
      how: True if `bytescope compare` ranks rows that differ only in this key against each other.
      path: True if the value is a path, or a name of workdir.NAMES.
      local: True if the processes of a run may have different values.
      contents: the fingerprint of a run (a field of `workdir.Identity`) that the key decides; "" for none.
      synonyms: names of the key in other programs or in our output.
    """

    key: str
    minimum: float | None = None
    maximum: float | None = None
    positive: bool = False
    decay: bool = False
    choices: tuple[str, ...] = ()
    optional: bool = False
    plans: tuple[str, ...] = ()
    size: bool = False
    resumable: bool = False
    compiled: bool = True
    how: bool = False
    path: bool = False
    local: bool = False
    contents: str = ""
    synonyms: tuple[str, ...] = ()

    @property
    def default(self) -> Any:
        """The value in configs/base.py. Raises KeyError if configs/base.py lacks the key."""
        value = _base_config()
        for name in self.key.split("."):
            value = value[name]
        return value

    @property
    def meaning(self) -> str:
        """The comment at the key in configs/base.py, on the same line or above it."""
        return _comments_of_keys()[self.key]

    def check(self, value: Any) -> None:
        """Raises ValueError if the value, which has the type of the default, is not valid. The message has the
        remedy."""
        if isinstance(value, int | float):
            self._check_number(value)
        elif isinstance(value, str) and not self.path and _LONE_SURROGATE.search(value):
            raise ValueError(f"{self.key}={value!r} is not valid UTF-8: write this value in UTF-8")
        if self.choices or self.plans:
            for name in value if isinstance(value, tuple) else (value,):
                self._check_name(str(name))
        if self.size and value:
            try:
                parse_bytes(value)
            except ReportError as error:
                raise ValueError(f"{self.key}: {error}") from error

    def _check_number(self, value: int | float) -> None:
        if isinstance(value, float) and (math.isnan(value) or abs(value) > MAX_FLOAT):
            raise ValueError(
                f"{self.key}={value} is not finite in float32: give a finite number that float32 can represent"
            )
        maximum = MAX_INT if self.maximum is None and isinstance(value, int) else self.maximum
        if maximum is not None and abs(value) > maximum:
            most = f"{maximum:g}" if isinstance(maximum, float) else maximum
            raise ValueError(f"{self.key}={value} is too large: give at most {most}")
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"{self.key}={value} is too small: give {self.minimum} or more")
        if self.positive and value <= 0:
            raise ValueError(f"{self.key}={value} is not positive: give a number above 0")
        if self.decay and not 0 <= value < 1:
            raise ValueError(f"{self.key}={value} is out of range: give a number from 0 to below 1, such as 0.9")

    def _check_name(self, text: str) -> None:
        names, tables = [text], self.choices
        if self.plans and ("+" in text or not self.choices):
            plan = text if self.choices else text.partition(":")[2]  # a range of layers is FIRST-END:PLAN
            names, tables = [name.removesuffix("@host") for name in plan.split("+") if name], self.plans
        elif self.optional and not text:
            return
        valid = names_in(tables)
        for name in names:
            if name not in valid:
                empty = ", or leave it empty for the default" if self.optional else ""
                raise ValueError(f"{self.key}={text!r}: {remedy_for(name, valid)}{empty}")


def names_in(tables: tuple[str, ...]) -> list[str]:
    """Returns the names that the `choices` of a field stand for. Imports the modules of their tables."""
    names: list[str] = []
    for item in tables:
        module, is_table, attribute = item.partition(":")
        if not is_table:
            names.append(item)
            continue
        table, _, row = attribute.partition(".")
        rows = getattr(importlib.import_module(f"bytescope.{module}"), table)
        names += rows[row] if row else rows
    return names


# Constructors of the fields of most groups.
_free = functools.partial(ConfigField, resumable=True)  # changes how a step is computed, not the loss curve
_ranked = functools.partial(ConfigField, resumable=True, how=True)  # the same, and rows of compare compete
_run = functools.partial(ConfigField, resumable=True, compiled=False)  # changes how a run is fed or recorded
_data = functools.partial(ConfigField, resumable=True, contents="data")
_NAMES, _POLICIES = "model.names:NAMES", "model.remat.policies:POLICIES"

_ROWS = (
    ConfigField("seed", minimum=0, compiled=False),
    # ---- model
    ConfigField("model.d_model", synonyms=("width", "hidden_size", "n_embd")),
    ConfigField("model.n_layers", maximum=2**16, synonyms=("layers",)),
    ConfigField("model.n_heads", synonyms=("heads",)),
    ConfigField("model.n_kv_heads"),
    ConfigField("model.d_head"),
    ConfigField("model.d_ff"),
    ConfigField("model.vocab_size", synonyms=("vocabulary",)),
    ConfigField("model.vocab_multiple"),
    ConfigField("model.max_seq_len"),
    ConfigField("model.norm", choices=("model.norm:NORMS",)),
    ConfigField("model.mlp", choices=("model.layers:MLPS",)),
    ConfigField("model.position", choices=("model.layers:POSITIONS",)),
    ConfigField("model.bias"),
    ConfigField("model.qkv_bias"),
    ConfigField("model.qk_norm"),
    ConfigField("model.tie_embeddings"),
    ConfigField("model.logits_softcap", minimum=0.0),
    ConfigField("model.norm_eps", minimum=0.0),
    ConfigField("model.post_norms"),
    ConfigField("model.embed_scale", positive=True),
    ConfigField("model.rope_theta", positive=True),
    ConfigField("model.rope_scaling"),
    ConfigField("model.rope_local_theta", minimum=0.0),
    ConfigField("model.global_every", minimum=0),
    ConfigField("model.init_std", positive=True),
    ConfigField("model.scan", how=True),
    _free("model.unroll"),
    ConfigField("model.dropout"),
    _ranked("model.attention", choices=("auto", "model.attention.attention_kernels:KERNELS")),
    _ranked("model.attention_chunk"),
    ConfigField("model.attention_scale", minimum=0.0, how=True),
    ConfigField("model.attention_softcap", minimum=0.0, how=True),
    ConfigField("model.attention_kind", choices=("model.block:KINDS",), how=True),
    ConfigField("model.mla_q_rank"),
    ConfigField("model.mla_kv_rank"),
    ConfigField("model.mla_d_rope"),
    ConfigField("model.mla_d_value"),
    ConfigField("model.experts"),
    ConfigField("model.experts_per_token"),
    ConfigField("model.d_expert"),
    ConfigField("model.shared_experts"),
    ConfigField("model.dense_layers"),
    ConfigField("model.moe_every"),
    ConfigField("model.router", choices=("model.experts.routers:ROUTERS",)),
    ConfigField("model.router_renormalize"),
    ConfigField("model.router_scale", minimum=0.0),
    ConfigField("model.router_bias"),
    ConfigField("model.router_groups"),
    ConfigField("model.router_top_groups"),
    ConfigField("model.moe_kernel", choices=("model.experts.expert_kernels:MOE_KERNELS",)),
    ConfigField("model.capacity_factor"),
    _free("model.mlp_chunk"),
    # ---- init, lora
    _free("init.folder", path=True, contents="weights"),
    _free("init.adapter", path=True, contents="adapter"),
    ConfigField("lora.rank", minimum=0),
    ConfigField("lora.alpha"),
    ConfigField("lora.targets"),
    ConfigField("lora.dropout"),
    ConfigField("lora.base", choices=("model.quantized.quantized_formats:BASES",)),
    # ---- loss, precision
    _ranked("loss.kind", choices=("train.step.losses:LOSSES",)),
    ConfigField("loss.balance", minimum=0.0, how=True),
    ConfigField("loss.balance_layers", choices=("train.step.routing:BALANCE_LAYERS",), how=True),
    ConfigField("loss.router_z", minimum=0.0, how=True),
    _ranked("loss.chunk", minimum=1),
    ConfigField("precision.preset", choices=("model.precision:PRECISIONS",), how=True),
    *(
        ConfigField(f"precision.{role}", choices=(f"model.precision:ROLES.{role}",), optional=True, how=True)
        for role in ("param", "compute", "reduce", "accumulator", "norm", "logits", "rounding", "cast", "loss_scale")
    ),
    ConfigField("precision.loss_scale_init", minimum=MIN_LOSS_SCALE, maximum=MAX_LOSS_SCALE, how=True),
    ConfigField("precision.loss_scale_growth_every", minimum=1, how=True),
    # ---- remat
    _ranked("remat.policy", choices=(_POLICIES, "auto"), plans=(_NAMES,)),
    _ranked("remat.budget", size=True),
    _ranked("remat.cost", choices=("memory.remat.remat_problem:COSTS",)),
    _ranked("remat.auto_offload"),
    _ranked("remat.save", choices=(_NAMES,)),
    _ranked("remat.offload", choices=(_NAMES,)),
    _ranked("remat.layers", plans=(_POLICIES, _NAMES)),
    _ranked("remat.granularity", choices=("model.remat.policies:GRANULARITIES",)),
    _ranked("remat.xla_pass"),
    # ---- data, batch
    _data("data.source", path=True, compiled=False),
    _data("data.eval_source", path=True, compiled=False),
    ConfigField("data.format", choices=("text", "chat", "pairs")),
    _data("data.field"),
    _data("data.skip_bad", minimum=0),
    _data("data.tokenizer", path=True),
    ConfigField("data.special_tokens", choices=("text", "parse")),
    _data("data.chat_template", path=True),
    ConfigField("data.loss_on", choices=("assistant", "all")),
    ConfigField("data.packing"),
    ConfigField("data.too_long", choices=("cut", "drop")),
    _data("data.dtype", choices=("train.data.shards:DTYPES",)),
    ConfigField("data.seq_len", minimum=1, synonyms=("context_length",)),
    # The host keeps a batch or a thread for each.
    _run("data.prefetch", minimum=0, maximum=2**16, local=True),
    _run("data.workers", minimum=0, maximum=2**12, local=True),
    _free("batch.micro", synonyms=("batch_size",)),
    _free("batch.accumulation"),
    _free("batch.tokens", minimum=0, maximum=MAX_COUNT),
    _free("batch.mode", choices=("train.step.train_step:ACCUMULATION",)),
    # ---- optimizer, offload
    ConfigField("optimizer.name", choices=("train.step.optimizer.rules:OPTIMIZERS",)),
    ConfigField("optimizer.learning_rate", minimum=0.0, synonyms=("lr",)),
    ConfigField("optimizer.warmup_steps", minimum=0),
    ConfigField("optimizer.end_fraction", minimum=0.0),
    ConfigField("optimizer.b1", decay=True),
    ConfigField("optimizer.b2", decay=True),
    ConfigField("optimizer.momentum", decay=True),
    ConfigField("optimizer.eps", minimum=0.0),
    ConfigField("optimizer.weight_decay", minimum=0.0),
    ConfigField("optimizer.router_bias_rate", minimum=0.0),
    ConfigField("optimizer.clip_norm", minimum=0.0),
    ConfigField("optimizer.fused_backward"),
    ConfigField("optimizer.freeze"),
    ConfigField("optimizer.clip", choices=("train.step.optimizer.rules:CLIPS",)),
    ConfigField("offload.optimizer"),
    ConfigField("offload.params"),
    # ---- mesh, pipeline, xla
    _ranked("mesh.strategy", choices=("train.parallel.axes:STRATEGIES",)),
    _ranked("mesh.stage"),
    _ranked("mesh.data"),
    _ranked("mesh.fsdp"),
    _ranked("mesh.expert"),
    _ranked("mesh.context"),
    _ranked("mesh.tensor"),
    _ranked("mesh.sequence_parallel"),
    _ranked("mesh.dispatch", choices=("model.experts.exchange:DISPATCHES",)),
    _ranked("mesh.prefetch", minimum=0),
    _free("pipeline.schedule"),
    _free("pipeline.virtual"),
    *(
        _ranked(f"xla.{key}", choices=(f"train.parallel.xla_options:TABLE.{key}",), optional=True)
        for key in ("optimization_level", "latency_hiding", "command_buffers", "gemm", "autotune_level")
    ),
    _ranked("xla.memory_slop"),
    _ranked("xla.memory_fence"),
    _ranked("xla.flags"),
    # ---- train
    _run("train.steps", minimum=1, synonyms=("max_steps",)),
    _run("train.log_every", minimum=1),
    _run("train.eval_every", minimum=0),
    _run("train.eval_sequences", minimum=0),
    _run("train.checkpoint_every", minimum=0),
    _run("train.keep"),
    _run("train.stall_timeout", minimum=0.0),
    _free("train.deterministic"),
    _run("train.sample_tokens", minimum=0),
    _run("train.sample_prompt"),
    _run("train.sample_temperature", minimum=0.0),
    _run("train.wandb"),
    _run("train.cache_dir", path=True),
)
# Dotted key -> its field.
FIELDS: Mapping[str, ConfigField] = {field.key: field for field in _ROWS}


@dataclasses.dataclass(frozen=True)
class RemovedKey:
    """A key that configs no longer have. The config.json of an older run may have it.

    Fields:
      remedy: what to use instead.
      neutral: the value that runs have today, as JSON. A run with another value has another loss curve; None if the
        key never changed the loss curve.
    """

    remedy: str
    neutral: Any = None


# Dotted key -> the key that is gone.
REMOVED: Mapping[str, RemovedKey] = {
    "batch.accumulation_schedule": RemovedKey(
        "leave it out: set batch.accumulation, and start again with --extend to change it", []
    ),
    "optimizer.batch_scaling": RemovedKey("set optimizer.learning_rate for the batch", "none"),
    "optimizer.base_batch_tokens": RemovedKey("set optimizer.learning_rate for the batch", 0),
    "train.eval_prompts": RemovedKey("leave it out: bytescope generate RUN --prompts=FILE --step=N answers prompts"),
    "train.tensorboard": RemovedKey(
        "leave it out: the page of the run has its curves, and train.wandb=PROJECT sends them"
    ),
}


@functools.cache
def _base_config() -> Any:
    from bytescope.configs import base  # its library is not needed for subjects that are not configs

    return base.get_config()


@functools.cache
def _comments_of_keys() -> dict[str, str]:
    from bytescope.configs import base

    source = Path(base.__file__).read_text(encoding="utf-8")
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    meanings = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            first = node.lineno
            while lines[first - 2].lstrip().startswith("#"):
                first -= 1
            key = ast.unparse(node.targets[0]).removeprefix("config.")
            meanings[key] = " ".join(comments[line] for line in range(first, node.lineno + 1) if line in comments)
    return meanings
