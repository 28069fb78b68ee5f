"""`bytescope export`: what transformers loads is what the run holds, bit by bit; what cannot be is one line."""

import contextlib
import dataclasses
import errno
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from safetensors import safe_open

from bytescope.memory import cli
from bytescope.memory.host.host_ledger import ledger
from bytescope.model.frozen import split_parameters
from bytescope.train.checkpoints.checkpoint import Checkpoints, Position
from bytescope.train.checkpoints.saved_run import SavedRun
from bytescope.train.checkpoints.stored_array import StoredArray
from bytescope.train.checkpoints.workdir import Identity
from bytescope.train.data.tokenizer import ByteTokenizer
from bytescope.train.export import tensors as export_tensors
from bytescope.train.export.config_json import config_json
from bytescope.train.generate.model_source import describe_model, open_source
from bytescope.train.program.config_files import flatten, load, override
from bytescope.train.program.program import build
from bytescope.train.user_errors import UserError
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.load import load_params
from support.exhaustive import exhaustive
from support.models import checkpoints, weights
from support.toy import made_state, small_config

pytestmark = pytest.mark.oracle("transformers")


def saved(folder, workdir, overrides=(), devices=1, steps=(3,), change=lambda params: params):
    """A run directory as training from a folder leaves it, its checkpoint on so many devices, without training; moments
    are left out, which no export reads. change: (parameters) -> those that are saved."""
    config = load(f"hf:{folder}")
    for key, value in {"precision.preset": "fp32", "batch.accumulation": 1, **dict(overrides)}.items():
        override(config, key, str(value))
    program = build(config, jax.devices()[:devices])
    source = Folder.open(folder)
    params, frozen = split_parameters(
        load_params(source, program.model, program.state.model_params, order=program.order), program.frozen
    )
    state = dataclasses.replace(
        program.state,
        params=change(params),
        frozen=frozen,
        step=jnp.int32(steps[-1]),
        opt_state=(),
        tally=None,
        loss_scale=None,
    )
    checkpointer = Checkpoints(workdir, keep=len(steps))
    for step in steps:
        checkpointer.save(state, Position(step, 8 * step), order=program.order)
    checkpointer.close()
    identity = Identity.from_config(config, program.batch.global_rows, "data", source.fingerprint)
    (workdir / "config.json").write_text(json.dumps(dataclasses.asdict(identity)))
    return workdir


def without_folder(run, workdir, **keys):
    """The same run as one that began from random weights; `keys`: others of its config."""
    shutil.copytree(run, workdir)
    identity = json.loads((workdir / "config.json").read_text())
    identity["config"] |= {"init.folder": "", **keys}
    (workdir / "config.json").write_text(json.dumps(identity))
    return workdir


def tensors(folder):
    """Name -> (dtype, bytes) of all tensors of a folder."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            names = file.keys()
            found |= {name: (file.get_slice(name).get_dtype(), file.get_tensor(name).tobytes()) for name in names}
    return found


def loaded(folder):
    """A folder in transformers, which has to find there what it asks for and nothing else: (logits, its config)."""
    import torch
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    config = {
        key: value
        for key, value in model.config.to_dict().items()
        if key not in ("transformers_version", "_name_or_path")
    }
    with torch.no_grad():
        return model(torch.arange(20)[None] * 4 % config["vocab_size"]).logits.float().numpy(), config


# Our parameters in the dtype of the folder's.
PRESETS = {"float32": "fp32", "bfloat16": "bf16_params"}
NARROW = [("llama3", "bfloat16"), ("gpt2", "bfloat16"), ("mixtral", "bfloat16")]
FIRST = [("gpt2", "bfloat16"), ("mixtral", "bfloat16"), ("deepseek_v3", "float32")]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=() if case in FIRST else pytest.mark.exhaustive)
        for case in [*((name, "float32") for name in checkpoints.FAMILIES if (name, "bfloat16") not in NARROW), *NARROW]
    ],
    ids="-".join,
)
def run(request, tmp_path_factory):
    """(folder of a family and dtype, what `loaded` says of it, a run that began from it)."""
    name, dtype = request.param
    parent = tmp_path_factory.mktemp(name)
    folder = checkpoints.save(checkpoints.model(name, dtype), parent / "folder")
    return folder, loaded(folder), saved(folder, parent / "run", {"precision.preset": PRESETS[dtype]})


def test_a_folder_comes_back_bit_by_bit(run, tmp_path, monkeypatch):
    """In pieces that end within heads, within matrices and within the padding of the vocabulary."""
    folder, asked, workdir = run
    read, real = [], StoredArray.read
    monkeypatch.setattr(export_tensors, "PIECE", 200)
    monkeypatch.setattr(StoredArray, "read", lambda array, spans: read.append(real(array, spans)) or read[-1])
    assert cli.main(["export", str(workdir), str(tmp_path / "out"), "--shard-size=24KB"]) == 0
    source = tensors(folder)
    assert tensors(tmp_path / "out") == source and len(read) > 3 * len(source)
    assert max(piece.size for piece in read) <= 512  # a head of Qwen 3
    found = loaded(tmp_path / "out")
    assert found[1] == asked[1]
    np.testing.assert_array_equal(found[0], asked[0])
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1 and os.listdir(tmp_path) == ["out"]


def test_a_run_from_the_start_is_of_its_nearest_family(run, tmp_path):
    """As if it had not begun from a folder: config.json comes from the keys of config.model alone."""
    _, asked, workdir = run
    without_folder(workdir, tmp_path / "run")
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    (found, config), theirs = loaded(tmp_path / "out"), asked[1]["model_type"]
    np.testing.assert_array_equal(found, asked[0])
    assert config["model_type"] == ("llama" if theirs == "mistral" else theirs) and config["dtype"] == asked[1]["dtype"]
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, 1)  # </s> of its tokenizer ends a text


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("tiny", 918_656), ("gpt2_small", 124_475_904), ("gpt2_xl", 1_557_686_400), ("llama_8b", 8_030_261_248)],
)
def test_shipped_configs(name, parameters):
    """The architecture that their config.json asks for, nothing allocated; the published sizes, GPT-2's with 50,304."""
    import torch
    import transformers

    raw = config_json(load(name).model.to_dict())
    config = transformers.AutoConfig.for_model(**raw)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    assert raw["architectures"] == [type(made).__name__] and made.num_parameters() == parameters
    if name == "llama_8b":
        assert config.rope_parameters == {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"position": "none"}, "model.position=none: the nearest is llama"),
        ({"bias": True}, "model.bias=True: the nearest is llama"),
        ({"mlp": "gelu"}, "model.mlp=gelu: the nearest is llama"),
        ({"norm": "layernorm", "qkv_bias": True}, "model.norm=layernorm: the nearest is qwen2"),
    ],
)
def test_what_no_family_computes_is_named(changes, named):
    with pytest.raises(UserError, match="no family of transformers computes " + named):
        config_json(load("tiny").model.to_dict() | changes)


TEXTS = ("def f(x):\n\treturn x\n", "Ā zero \0 and one \1", "  two  spaces, größer, 日本, 🙂\r\n", "")


def test_a_model_of_bytes(tmp_path):
    """Its tokenizer gives in transformers the ids that the run was trained on."""
    from transformers import AutoTokenizer

    program = build(small_config({"model.vocab_size": 256}), jax.devices()[:1])
    workdir = tmp_path / "run"
    with contextlib.closing(Checkpoints(workdir, keep=1)) as checkpointer:
        checkpointer.save(made_state(program), Position(1, 8))
    identity = Identity.from_config(program.config, program.batch.global_rows, "data")
    (workdir / "config.json").write_text(json.dumps(dataclasses.asdict(identity)))
    assert cli.main(["export", str(workdir), str(tmp_path / "out")]) == 0
    _, config = loaded(tmp_path / "out")
    assert (config["model_type"], config["eos_token_id"]) == ("llama", 0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == ByteTokenizer().encode(text).tolist()
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [({"mesh.tensor": 2, "mesh.fsdp": 4, "batch.micro": 1}, 8), ({"model.scan": False}, 1)],
    ids=["mesh", "unrolled"],
)
def test_however_it_was_trained(overrides, devices, tmp_path):
    folder = checkpoints.save(checkpoints.model("llama"), tmp_path / "folder")
    workdir = saved(folder, tmp_path / "run", overrides, devices)
    assert cli.main(["export", str(workdir), str(tmp_path / "out")]) == 0
    assert tensors(tmp_path / "out") == tensors(folder)


def test_stages_that_hold_the_layers_in_an_order_of_their_own(tmp_path, capsys):
    """Read and written in the order of the layers, rows of no layer too under the checksum."""
    folder = checkpoints.save(checkpoints.model("qwen3_moe", num_hidden_layers=5), tmp_path / "folder")
    workdir = saved(
        folder,
        tmp_path / "run",
        {"mesh.stage": 2, "mesh.fsdp": 1, "pipeline.schedule": "v", "batch.mode": "scan", "batch.accumulation": 4},
        2,
    )
    meta = json.loads((workdir / "checkpoints" / "3" / "meta" / "metadata").read_text())
    # Layers 0 and 4 lie on the first stage, where the V begins and ends, 1 to 3 on the other; a chunk has 2 rows.
    assert meta["order"] == {"dense_blocks": [0, -1, -1, -1], "blocks": [-1, -1, 4, -1, 1, 2, 3, -1]}
    assert cli.main(["export", str(workdir), str(tmp_path / "out")]) == 0
    assert tensors(tmp_path / "out") == tensors(folder)
    record_another_sum(workdir / "checkpoints" / "3", "experts")
    assert cli.main(["export", str(workdir), str(tmp_path / "other")]) == 2
    assert "does not match its checksum" in capsys.readouterr().err


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A run of two checkpoints, with a number that float16 does not hold."""
    parent, made = tmp_path_factory.mktemp("gpt2"), checkpoints.model("gpt2")
    made.transformer.wpe.weight.data[3, 4] = 1e5
    return saved(checkpoints.save(made, parent / "folder"), parent / "run", steps=(3, 5))


def flip(checkpoint):
    """One bit of the longest data file is another, near its beginning: what Orbax replaced lies at its end."""
    longest = max((file for file in checkpoint.rglob("d/*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(longest.read_bytes())
    content[len(content) // 8] ^= 8
    longest.write_bytes(content)


def rewrite(checkpoint):
    """A number in the padding of the vocabulary is another, and the file is whole."""
    kvstore = {"driver": "ocdbt", "base": (checkpoint / "state").as_uri(), "path": "params.w_token/"}
    tensorstore.open({"driver": "zarr", "kvstore": kvstore}).result()[127, 0].write(0.125).result()


def record_another_sum(checkpoint, array="mlp"):
    """The checksum of a stack of layers is another."""
    path = checkpoint / "meta" / "metadata"
    meta = json.loads(path.read_text())
    meta["checksums"][list(meta["arrays"]).index(f".params['blocks']['{array}']['w_down']")] ^= 1
    path.write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip, ""),
        (record_another_sum, "blocks.mlp.w_down does not match its checksum"),
        *exhaustive((rewrite, "w_token does not match its checksum")),
    ],
)
def test_a_damaged_checkpoint_is_noticed(gpt2, damage, named, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(export_tensors, "PIECE", 200)
    workdir = shutil.copytree(gpt2, tmp_path / "run")
    damage(workdir / "checkpoints" / "5")
    before = sorted(path for path in workdir.rglob("*"))
    assert cli.main(["export", str(workdir), str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "checkpoint 5" in line and "damaged" in line and "--step=3" in line, line
    assert named in line and sorted(workdir.rglob("*")) == before and os.listdir(tmp_path) == ["run"]


def test_another_checkpoint_is_asked_for(gpt2, tmp_path, capsys):
    assert cli.main(["export", str(gpt2), str(tmp_path / "out"), "--step=3"]) == 0
    assert cli.main(["export", str(gpt2), str(tmp_path / "other"), "--step=4"]) == 2
    assert "checkpoints of the steps 3, 5" in capsys.readouterr().err


def test_a_config_of_fewer_layers_than_the_checkpoint_has(gpt2, tmp_path, capsys):
    workdir = without_folder(gpt2, tmp_path / "run", **{"model.n_layers": 1})
    assert cli.main(["export", str(workdir), str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "b_k of shape [2, 4, 8], but its config.json describes the shape [1, 4, 8]" in line


def test_nothing_is_overwritten_unasked(gpt2, tmp_path, capsys):
    out, command = tmp_path / "out", ["export", str(gpt2), str(tmp_path / "out")]
    assert cli.main(command) == 0
    first = tensors(out)
    (out / "more.txt").write_text("mine")
    assert cli.main(command) == 2 and "--force" in capsys.readouterr().err
    began = json.loads((gpt2 / "config.json").read_text())["config"]["init.folder"]
    assert cli.main(["export", str(gpt2), began, "--force"]) == 2 and "started from" in capsys.readouterr().err
    (tmp_path / ".out.partial").mkdir()  # of one that was killed
    assert cli.main([*command, "--force", "--dtype=bfloat16"]) == 0
    assert {dtype for dtype, _ in tensors(out).values()} == {"BF16"} and tensors(out).keys() == first.keys()
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert sorted(os.listdir(tmp_path)) == ["out"] and not (out / "more.txt").exists()


def test_host_memory_is_that_of_the_largest_stack(gpt2, tmp_path):
    assert cli.main(["export", str(gpt2), str(tmp_path / "out")]) == 0
    counted = {term.name: term.bytes for term in ledger().terms if term.phase == "export"}
    # The table of tokens is larger than a stack of two layers; queries, keys and values are in one tensor.
    sizes = {name: array.nbytes for name, array in SavedRun.open(gpt2).arrays.items()}
    joined = sum(size for name, size in sizes.items() if name.rpartition(".")[2] in ("w_q", "w_k", "w_v"))
    assert counted["largest stack of layers, decoded"] == max(joined, *sizes.values())
    assert ledger().measured["export"] >= counted["Python, jax and libraries"] > 2**20


def test_a_full_disk_is_one_line_and_leaves_nothing(gpt2, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert cli.main(["export", str(gpt2), str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "No space left" in line and "make room" in line and os.listdir(tmp_path) == []


def test_what_float16_does_not_hold(gpt2, tmp_path, capsys):
    assert cli.main(["export", str(gpt2), str(tmp_path / "out"), "--dtype=float16"]) == 2
    assert "wpe.weight has values above 65,504" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_checkpoint_with_nan_is_not_generated_from(tmp_path):
    """generate and score read all parameters, quantize one at a time."""

    def spoil(params):
        scale = params["blocks"]["norm_mlp"]["scale"]
        return params | {"blocks": params["blocks"] | {"norm_mlp": {"scale": scale.at[1, 5:7].set(np.nan)}}}

    workdir = saved(weights.llama(tmp_path / "folder"), tmp_path / "run", steps=(3, 5), change=spoil)
    source = open_source(workdir)
    message = (
        f"step 5 of {workdir}: 2 of the 32 values of blocks.1.norm_mlp.scale are NaN or infinite: choose "
        "another with --step=3"
    )
    with pytest.raises(UserError) as caught:
        source.read(describe_model(source.config, jax.devices()[:1]), lambda done, total: None)
    assert str(caught.value) == message
    with pytest.raises(UserError) as caught:
        source.parameter("blocks.1.norm_mlp.scale")
    assert str(caught.value) == message and source.parameter("blocks.0.norm_mlp.scale").shape == (32,)


def test_what_is_not_trained_is_read_from_the_folder_that_the_run_began_from(tmp_path, capsys):
    folder = checkpoints.save(checkpoints.model("llama"), tmp_path / "folder")
    workdir = saved(folder, tmp_path / "run", {"optimizer.freeze": "blocks.mlp.*,w_token"})
    assert cli.main(["export", str(workdir), str(tmp_path / "out")]) == 0
    assert tensors(tmp_path / "out") == tensors(folder)
    checkpoints.save(checkpoints.model("llama", seed=1), folder)
    assert cli.main(["export", str(workdir), str(tmp_path / "other")]) == 2
    assert "other weights than" in capsys.readouterr().err
    shutil.rmtree(folder)
    assert cli.main(["export", str(workdir), str(tmp_path / "other")]) == 2
    assert "which the run does not train" in capsys.readouterr().err


def test_config_of_a_run(gpt2):
    """The recorded config comes back as it was, tuples and all."""
    from bytescope.train.checkpoints.saved_run import SavedRun

    run = SavedRun.open(gpt2)
    assert json.loads(json.dumps(flatten(run.config))) == run.identity.config and run.step == 5
    assert isinstance(run.config.remat.save, tuple)
