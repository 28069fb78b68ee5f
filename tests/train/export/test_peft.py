"""Adapters out: peft loads them over the folder that the run began from, and computes what our model computes; so does
transformers with the merged weights."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytescope.memory import cli
from bytescope.train.checkpoints.checkpoint import Checkpoints, Position
from bytescope.train.checkpoints.workdir import Identity
from bytescope.train.export.peft import module_ends
from bytescope.train.program.config_files import load, override
from bytescope.train.program.program import build
from bytescope.train.run.initial_state import fingerprint_of_adapter, initial_adapters
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.load import load_params
from support.models import checkpoints

pytestmark = [
    pytest.mark.oracle("peft"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12) * 7 % 50 + 2


def run_over(family, parent, **keys):
    """(folder of weights of a family, run of random adapters over it, our loss and its gradients of the adapters)."""
    folder = checkpoints.save(checkpoints.model(family), parent / "folder")
    config = load(f"hf:{folder}")
    given = {"precision.preset": "fp32", "batch.accumulation": 1, "lora.rank": 3, "lora.alpha": 5, **keys}
    for key, value in given.items():
        override(config, key, str(value))
    program, rng = build(config, jax.devices()[:1]), np.random.default_rng(5)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), program.state)
    adapters = jax.tree.map(lambda leaf: jnp.asarray(0.2 * rng.standard_normal(leaf.shape), leaf.dtype), state.params)
    checkpointer, source = Checkpoints(parent / "run", keep=1), Folder.open(folder)
    checkpointer.save(dataclasses.replace(state, params=adapters), Position(3, 24))
    checkpointer.close()
    identity = Identity.from_config(config, program.batch.global_rows, "data", source.fingerprint)
    (parent / "run" / "config.json").write_text(json.dumps(dataclasses.asdict(identity)))
    base = load_params(source, program.model, program.state.frozen)
    batch = {"inputs": jnp.asarray(TOKENS[:, :-1]), "targets": jnp.asarray(TOKENS[:, 1:])}
    return folder, parent / "run", jax.jit(jax.value_and_grad(program.parts.objective))(adapters, batch, None, base)


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    return run_over("llama", tmp_path_factory.mktemp("peft"))


def loss_of(model):
    """The sum over positions of the loss of `TOKENS`, a torch scalar."""
    import torch

    tokens = torch.tensor(TOKENS.astype(np.int64))
    logits = model(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1), reduction="sum"
    )


def test_peft_computes_the_same_loss_and_gradients(lora, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, run, (loss, grads) = lora
    assert cli.main(["export", str(run), str(tmp_path / "adapters")]) == 0
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapters", is_trainable=True
    )
    theirs = loss_of(model)
    np.testing.assert_allclose(theirs.item(), loss, rtol=1e-5)
    assert abs(loss_of(AutoModelForCausalLM.from_pretrained(folder)).item() - float(loss)) > 1e-3
    theirs.backward()
    found = {name: param.grad for name, param in model.named_parameters() if "lora_" in name}
    assert len(found) == 14 * 2
    for path, ours in jax.tree_util.tree_leaves_with_path(grads):
        target, half = path[-1].key.split("_")[1:]
        for layer in range(2):
            (name,) = [
                name
                for name in found
                if f".layers.{layer}." in name and f".{target}_proj." in name and f".lora_{half.upper()}." in name
            ]
            one = np.asarray(ours[layer])
            one = one.reshape(-1, one.shape[-1]) if half == "a" else one.reshape(one.shape[0], -1)
            np.testing.assert_allclose(found[name].numpy().T, one, atol=1e-4 * np.abs(one).max(), err_msg=name)


def test_gpt2_adapters_are_of_the_modules_that_have_one_and_of_no_namesake(tmp_path, recwarn):
    """`c_proj` is a module of the attention, and another one of the MLP, of weights that have their inputs first."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, run, (loss, _) = run_over("gpt2", tmp_path, **{"lora.targets": "o,up"})
    assert cli.main(["export", str(run), str(tmp_path / "adapters")]) == 0
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["attn.c_proj", "c_fc"]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapters")
    assert not [
        str(found.message)
        for found in recwarn
        if "adapter keys" in str(found.message) or "fan_in_fan_out" in str(found.message)
    ]
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 4
    np.testing.assert_allclose(loss_of(model).item(), loss, rtol=1e-5)
    both = ["h.0.attn.c_proj", "h.0.mlp.c_proj"]
    assert module_ends(both, ["h.0.mlp.c_fc"]) == ["c_proj"] and module_ends(both[1:], both[:1]) == ["mlp.c_proj"]


def test_adapters_of_a_mixture_are_of_its_attention(tmp_path):
    """Both ways, over a layer that is dense and two that have experts."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, run, (loss, _) = run_over("qwen3_moe", tmp_path, **{"loss.balance": 0.0, "lora.targets": "q,o"})
    assert cli.main(["export", str(run), str(tmp_path / "adapters")]) == 0
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapters")
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 3 * 2
    np.testing.assert_allclose(loss_of(model).item(), loss, rtol=1e-5)
    program = build(load(f"hf:{folder}", [("init.adapter", str(tmp_path / "adapters"))]), jax.devices()[:1])
    ours, theirs = initial_adapters(program), Folder.open_adapter(tmp_path / "adapters")
    for layer, stack in enumerate((("dense_blocks", 0), ("blocks", 0), ("blocks", 1))):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.weight"
        np.testing.assert_array_equal(ours[stack[0]]["attention"]["w_q_a"][stack[1]], theirs.read(name, []).T)


def test_adapters_of_dense_layers_beside_experts_are_merged(tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    _, run, (loss, _) = run_over("qwen3_moe", tmp_path, **{"loss.balance": 0.0})
    assert cli.main(["export", str(run), str(tmp_path / "adapters")]) == 2
    line = "blocks.0.mlp.w_down, a dense MLP in a model with experts: export with --merge"
    assert line in capsys.readouterr().err
    assert cli.main(["export", str(run), str(tmp_path / "whole"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    np.testing.assert_allclose(loss_of(merged).item(), loss, rtol=1e-5)


def test_what_peft_saves_is_what_a_run_begins_from(lora, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, run, _ = lora
    assert cli.main(["export", str(run), str(tmp_path / "ours")]) == 0
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "ours").save_pretrained(
        tmp_path / "theirs"
    )
    config = load(f"hf:{folder}", [("init.adapter", str(tmp_path / "theirs"))])
    assert (config.lora.rank, config.lora.alpha) == (3, 5.0) and len(config.lora.targets) == 7
    program = build(config, jax.devices()[:1])
    assert fingerprint_of_adapter(program)
    ours, theirs = (Folder.open_adapter(tmp_path / name) for name in ("ours", "theirs"))
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(np.array_equal(ours.read(name, []), theirs.read(name, [])) for name in ours.tensors)


def test_merged_weights_compute_the_same(lora, tmp_path):
    from transformers import AutoModelForCausalLM

    _, run, (loss, _) = lora
    assert cli.main(["export", str(run), str(tmp_path / "whole"), "--merge"]) == 0
    np.testing.assert_allclose(
        loss_of(AutoModelForCausalLM.from_pretrained(tmp_path / "whole")).item(), loss, rtol=1e-5
    )
