"""Edits of source files: donated arguments, names of policies, decorators."""

import pytest

from bytescope.memory.compare.source_edits import SourceFile, changed_text

pytestmark = pytest.mark.quick


def edited(tmp_path, text, method, *words):
    path = tmp_path / "steps.py"
    path.write_text(text)
    source = SourceFile(path)
    edits = getattr(source, method)(*words)
    return changed_text(source, edits) if edits else ""


@pytest.mark.parametrize(
    ("returned", "donated"),
    [
        ("step, (state, batch)", 'step, (state, batch), {"donate_argnums": (0, 1)}'),
        ("step, (é, batch), {}", 'step, (é, batch), {"donate_argnums": (0, 1)}'),
        ('step, args, {"tokens": 8}', 'step, args, {"donate_argnums": (0, 1), "tokens": 8}'),
        ('step, args, {"donate_argnums": 2}', 'step, args, {"donate_argnums": (0, 1, 2)}'),
        ("jax.jit(step).trace(a, b)", "jax.jit(step, donate_argnums=(0, 1)).trace(a, b)"),
        ("jit(step, donate_argnums=(1,)).lower(a)", "jit(step, donate_argnums=(0, 1)).lower(a)"),
        ('step, args, {"donate_argnums": numbers}', ""),
        ("step, args, OPTIONS", ""),
        ("jax.jit(step, **options).trace(a)", ""),
        ("jax.jit(jax.jit(step))", ""),
        ("config", ""),
    ],
)
def test_donated_arguments(tmp_path, returned, donated):
    text = "def program(width=8):\n    return {}\n"
    found = edited(tmp_path, text.format(returned), "donate", "program", (0, 1))
    assert found == (text.format(donated) if donated else "")


def test_names_of_policies(tmp_path):
    text = "p = save_only_these_names('hiden', \"out\")\nx = checkpoint_name(x, 'hiden')\n"
    assert edited(tmp_path, text, "rename", "hiden", "hidden").startswith(
        "p = save_only_these_names('hidden', \"out\")"
    )
    assert edited(tmp_path, text * 2, "rename", "hiden", "hidden") == ""
    assert edited(tmp_path, "x = checkpoint_name(x, 'hiden')\n", "rename", "hiden", "hidden") == ""


OFFLOADING = """p = save_and_offload_only_these_names(
    names_which_can_be_saved=["attention"],
    names_which_can_be_offloaded=["residal", 'hiden'],
    offload_src="device", offload_dst="pinned_host")
"""


def test_names_of_policies_that_offload(tmp_path):
    """A name is replaced in either list, and never by a name of the same policy."""
    changed = edited(tmp_path, OFFLOADING, "rename", "hiden", "hidden")
    assert changed == OFFLOADING.replace("'hiden'", "'hidden'")
    changed = edited(tmp_path, OFFLOADING, "rename", "attention", "attn")
    assert changed == OFFLOADING.replace('"attention"', '"attn"')
    assert edited(tmp_path, OFFLOADING, "rename", "residal", "attention") == ""
    listed = OFFLOADING.replace("""["residal", 'hiden']""", "NAMES") + "NAMES = ['hiden']\n"
    assert edited(tmp_path, listed, "rename", "hiden", "hidden") == ""


def test_an_offloaded_name_is_saved_instead(tmp_path):
    changed = edited(tmp_path, OFFLOADING, "save_on_device", "residal")
    assert changed == OFFLOADING.replace('["attention"]', '["attention", "residal"]').replace(
        """["residal", 'hiden']""", '["hiden"]'
    )
    assert edited(tmp_path, OFFLOADING, "save_on_device", "attention") == ""
    assert edited(tmp_path, OFFLOADING * 2, "save_on_device", "residal") == ""
    assert edited(tmp_path, OFFLOADING.replace('["attention"]', "NAMES"), "save_on_device", "residal") == ""


def test_the_protection_of_a_recomputation(tmp_path):
    text = "f = jax.checkpoint(layer, prevent_cse=False, policy=p)\ng = checkpoint(other, prevent_cse=False)\n"
    assert edited(tmp_path, text, "prevent_cse", "layer") == text.replace("False", "True", 1)
    assert edited(tmp_path, text, "prevent_cse", "third") == ""


def test_the_policy_of_the_only_checkpoint(tmp_path):
    text = "import jax\nf = jax.checkpoint(layer)\n"
    with_policy = text.replace("(layer)", "(layer, policy=jax.checkpoint_policies.{})")
    assert edited(tmp_path, text, "policy", "dots_saveable") == with_policy.format("dots_saveable")
    changed = edited(tmp_path, with_policy.format("nothing_saveable"), "policy", "dots_saveable")
    assert changed == with_policy.format("dots_saveable")
    assert edited(tmp_path, text.replace("(layer)", "(layer, policy=mine)"), "policy", "dots_saveable") == ""
    assert edited(tmp_path, text * 2, "policy", "dots_saveable") == ""
    assert edited(tmp_path, text.replace("import jax", "from my import jax"), "policy", "dots_saveable") == ""


def test_a_decorator(tmp_path):
    text = "import jax\ndef f():\n    @other\n    def layer(x):\n        return x\n"
    changed = edited(tmp_path, text, "checkpoint", "f.<locals>.layer")
    assert changed == text.replace("    @other", "    @jax.checkpoint\n    @other")
    assert edited(tmp_path, text.replace("import jax", "import jax as j"), "checkpoint", "layer") == ""
    assert edited(tmp_path, text * 2, "checkpoint", "layer") == ""
    with pytest.raises(ValueError, match="is not Python"):
        edited(tmp_path, "def (:\n", "checkpoint", "layer")
