"""A run that begins from adapters in peft's names: read bit by bit, checked against the config, never read again."""

import dataclasses
import io
import json

import jax
import numpy as np
import pytest
from rich.console import Console

from bytescope.memory import cli
from bytescope.train.checkpoints.checkpoint import Checkpoints, Position
from bytescope.train.checkpoints.workdir import Identity
from bytescope.train.program import config_files as configs
from bytescope.train.program.program import build
from bytescope.train.run import initial_state, loop, startup
from bytescope.train.run.initial_state import fingerprint_of_adapter, fingerprint_of_weights
from bytescope.train.user_errors import UserError
from bytescope.train.weights.folder import Folder
from support.models import weights
from support.toy import compiled_once

SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "vocab_size": 256}
PLAIN = {
    "peft_type": "LORA",
    "r": 3,
    "lora_alpha": 5,
    "target_modules": ["q_proj", "o_proj", "down_proj"],
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "init_lora_weights": True,
}
MODULES = {"self_attn.q_proj": (128, 128), "self_attn.o_proj": (128, 128), "mlp.down_proj": (128, 128)}
KEYS = {
    "data.seq_len": 32,
    "batch.micro": 2,
    "batch.accumulation": 1,
    "train.eval_every": 0,
    "train.eval_sequences": 2,
    "train.sample_tokens": 0,
    "train.log_every": 1,
    "train.steps": 4,
    "train.checkpoint_every": 2,
    "optimizer.warmup_steps": 0,
    "optimizer.learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return weights.llama(tmp_path_factory.mktemp("adapters") / "model", **SIZES)


def adapter(path, config=(), drop="", shapes=(), dtype="float32", more=()):
    """A folder of random adapters; `config`: keys of adapter_config.json; `drop`, `shapes`, `more`: other tensors."""
    found = {
        f"base_model.model.model.layers.{layer}.{name}.lora_{half}.weight": shape
        for layer in range(2)
        for name, (out, into) in MODULES.items()
        for half, shape in (("A", (3, into)), ("B", (out, 3)))
        if not drop or drop not in f"{layer}.{name}.lora_{half}"
    }
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({**PLAIN, **dict(config)}))
    (path / "adapter_model.safetensors").write_bytes(
        weights.encode(weights.numbers({**found, **dict(shapes), **dict(more)}, dtype))
    )
    return path


def config_of(folder, path, **keys):
    given = {"init.adapter": path, **keys}
    return configs.load(f"hf:{folder}", [(key, str(value)) for key, value in given.items()])


def tensors(path):
    opened = Folder.open_adapter(path)
    return {name: opened.read(name, []) for name in opened.tensors}


def test_what_is_read_is_what_is_exported(folder, tmp_path):
    path = adapter(tmp_path / "a")
    program = build(config_of(folder, path, **{"data.seq_len": 16, "batch.micro": 1}), jax.devices()[:2])
    lora = program.config.lora
    assert (lora.rank, lora.alpha, lora.targets) == (3, 5.0, ("q", "o", "down"))
    checkpoints = Checkpoints(tmp_path / "run", keep=1)
    said = io.StringIO()
    startup.show_program(Console(file=said, width=300), program, "text")
    assert f"adapters   from {path}\n" in said.getvalue()
    state, position = initial_state.start_state(program, checkpoints, Console(file=io.StringIO()))
    assert position == Position(0, 0)
    theirs, ours = tensors(path), state.params["blocks"]["attention"]["w_o_a"]
    first = theirs["base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"]
    np.testing.assert_array_equal(ours[1], first.T.reshape(4, 32, 3))
    assert [leaf.sharding for leaf in jax.tree.leaves(state.params)] == [
        leaf.sharding for leaf in jax.tree.leaves(program.state.params)
    ]
    checkpoints.save(state, Position(1, 8))
    checkpoints.close()
    identity = Identity.from_config(
        program.config, 8, "data", fingerprint_of_weights(program), fingerprint_of_adapter(program)
    )
    (tmp_path / "run" / "config.json").write_text(json.dumps(dataclasses.asdict(identity)))
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    written = tensors(tmp_path / "out")
    assert written.keys() == theirs.keys()
    assert all(written[name].tobytes() == array.tobytes() for name, array in theirs.items())
    again = configs.load(f"hf:{folder}", [("init.adapter", str(tmp_path / "out"))])
    assert again.lora == lora


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "keys", "message"),
    [
        ({}, {"lora.rank": 4}, r"lora.rank=4, but the adapters in .* have 3: set --config.lora.rank=3"),
        ({}, {"lora.rank": 3}, "lora.alpha=16, but .* have 5"),
        ({}, {"lora.alpha": 6}, "lora.alpha=6, but .* have 5"),
        ({}, {"lora.rank": 3, "lora.alpha": 5, "lora.targets": "q,v"}, "lora.targets=q,v, but .* have q,o,down"),
        ({}, {"init.folder": ""}, "without init.folder"),
        *(
            ({"config": {key: value}}, {}, f"has {key}=.*: only plain LoRA")
            for key, value in {
                "peft_type": "IA3",
                "use_dora": True,
                "use_rslora": True,
                "bias": "all",
                "modules_to_save": ["lm_head"],
                "rank_pattern": {"q_proj": 8},
                "init_lora_weights": "pissa",
            }.items()
        ),
        ({"config": {"r": "3"}}, {}, "has r='3'"),
        ({"config": {"lora_alpha": None}}, {}, "has lora_alpha=None"),
        (
            {"more": {"base_model.model.lm_head.lora_A.weight": (3, 128)}},
            {},
            "has tensor '.*lm_head.lora_A.weight', which",
        ),
        (
            {"more": {"base_model.model.model.layers.2.mlp.up_proj.lora_A.weight": (3, 128)}},
            {},
            "layers.2.* of 2 layers",
        ),
    ],
)
def test_what_does_not_agree_is_one_line(changes, keys, message, folder, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        if "init.folder" in keys:
            configs.load("tiny", [("init.adapter", str(adapter(tmp_path / "a")))])
        config_of(folder, adapter(tmp_path / "a", **changes), **keys)
    assert "\n" not in str(error.value)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": "1.mlp.down_proj.lora_B"}, "has no tensor .*layers.1.mlp.down_proj.lora_B.weight"),
        (
            {"shapes": {"base_model.model.model.layers.0.mlp.down_proj.lora_A.weight": (3, 64)}},
            r"lora_A.weight has shape 3 x 64, but the model with lora.rank=3 needs 3 x 128",
        ),
        ({"dtype": "int8"}, "has dtype I8: give float32"),
    ],
)
def test_tensors_are_checked_before_anything_is_compiled(changes, message, folder, tmp_path):
    program = build(config_of(folder, adapter(tmp_path / "a", **changes)), jax.devices()[:1])
    with pytest.raises(UserError, match=message):
        fingerprint_of_adapter(program)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("config.json", "model.safetensors"), "has no 'adapter_config.json'"),
        ((), "has no 'adapter_config.json'"),
        (("adapter_config.json",), "has no 'adapter_model.safetensors'"),
    ],
)
def test_other_folders_are_refused(names, message, folder, tmp_path):
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=message):
        config_of(folder, tmp_path)


def run(config, workdir):
    loop.run(config, workdir=workdir, extend=False, console=Console(file=io.StringIO()))
    last = max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    sums = next(json.loads(path.read_text())["checksums"] for path in last.rglob("metadata") if "meta" in path.parts)
    return [
        json.loads(line)["loss"]
        for line in (workdir / "metrics.jsonl").read_text().splitlines()
        if "loss" in json.loads(line)
    ], sums


@pytest.mark.exhaustive
def test_a_run_that_died_goes_on_bit_by_bit_and_reads_no_adapter_again(folder, tmp_path, monkeypatch):
    """Over a quantized base, which no checkpoint holds."""
    (tmp_path / "text.txt").write_text("some text to train on, in several lines\n" * 400)
    path = adapter(tmp_path / "a")
    config = config_of(
        folder,
        path,
        **KEYS,
        **{
            "lora.base": "int8",
            "lora.dropout": 0.1,
            "data.source": tmp_path / "text.txt",
            "train.cache_dir": tmp_path / "cache",
        },
    )
    program = build(config, jax.devices()[:1])
    monkeypatch.setattr(loop, "settled_program", lambda config, **_: program)
    compiled_once(monkeypatch)
    whole = run(config, tmp_path / "whole")
    real = loop.MetricsLog.write

    def dies(log, row, *rest):
        if row.get("step") == 4:
            raise RuntimeError("dead")
        return real(log, row, *rest)

    monkeypatch.setattr(loop.MetricsLog, "write", dies)
    with pytest.raises(RuntimeError, match="dead"):
        run(config, tmp_path / "run")
    monkeypatch.setattr(loop.MetricsLog, "write", real)
    monkeypatch.setattr(initial_state, "initial_adapters", lambda *_: pytest.fail("read again"))
    assert [entry.name for entry in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]
    assert run(config, tmp_path / "run") == whole
    assert len(set(whole[0])) == 4

    program.config.init.adapter = str(adapter(tmp_path / "b", dtype="float16"))
    with pytest.raises(UserError, match=r"another run: init.adapter '.*' -> '.*'"):
        run(config, tmp_path / "run")
