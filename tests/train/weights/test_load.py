"""Weights from files into shardings: every value where it belongs, every byte read once, and errors by name."""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bytescope.model import ModelConfig, Precision, Transformer
from bytescope.train.generate.model_source import describe_model, open_source
from bytescope.train.program import config_files as configs
from bytescope.train.user_errors import UserError
from bytescope.train.weights import load as loading
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.leaves import checkpoint_leaves
from bytescope.train.weights.patterns import Pattern
from support.models import weights

H, G, K, D, F, V = 4, 2, 16, 32, 48, 250


def model_of(folder, **changes):
    return dataclasses.replace(ModelConfig.from_dict(configs.load(f"hf:{folder}").model), **changes)


def shapes_of(model, spec=lambda shape: P(), mesh=None, param="float32"):
    """Our parameters as shapes over 8 devices, sharded as `spec` says of a shape."""
    mesh = mesh or jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    abstract = nnx.eval_shape(lambda: Transformer(model, Precision(param=param), rngs=nnx.Rngs(params=0)))
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec(leaf.shape))),
        nnx.to_pure_dict(nnx.state(abstract, nnx.Param)),
    )


def rows(shape):
    """Over one axis or two of the mesh, wherever they divide; the rest replicated."""
    names = iter(("b", "a"))
    dims = [None] * len(shape)
    for axis in reversed(range(len(shape))):
        if shape[axis] % 4 == 0 and (name := next(names, None)):
            dims[axis] = name
    return P(*dims)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return weights.llama(tmp_path_factory.mktemp("llama") / "m", shards=3)


@pytest.fixture(scope="module")
def tensors():
    return weights.numbers(weights.llama_shapes())


def expected_llama(tensors):
    """The parameters of the scanned model, from the definition of each layout."""

    def stacked(name, layout):
        return np.stack([layout(tensors[f"model.layers.{n}.{name}.weight"]) for n in range(2)])

    def heads(count):
        return lambda w: w.T.reshape(D, count, K)

    padded = [(0, 6), (0, 0)]
    return {
        "w_token": np.pad(tensors["model.embed_tokens.weight"], padded),
        "w_head": np.pad(tensors["lm_head.weight"], padded).T,
        "final_norm": {"scale": tensors["model.norm.weight"]},
        "blocks": {
            "attention": {
                "w_q": stacked("self_attn.q_proj", heads(H)),
                "w_k": stacked("self_attn.k_proj", heads(G)),
                "w_v": stacked("self_attn.v_proj", heads(G)),
                "w_o": stacked("self_attn.o_proj", lambda w: w.T.reshape(H, K, D)),
            },
            "mlp": {
                "w_gate": stacked("mlp.gate_proj", np.transpose),
                "w_up": stacked("mlp.up_proj", np.transpose),
                "w_down": stacked("mlp.down_proj", np.transpose),
            },
            "norm_attention": {"scale": stacked("input_layernorm", np.asarray)},
            "norm_mlp": {"scale": stacked("post_attention_layernorm", np.asarray)},
        },
    }


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected)):
        assert np.array_equal(np.asarray(one), other), jax.tree_util.keystr(path)


@pytest.fixture(params=["whole", "in pieces"])
def way(request, monkeypatch):
    """A mesh; and a shard assembled in host memory, or written into an array on its device, pieces of 512 bytes."""
    axes = (jax.sharding.AxisType.Auto,) * 2
    if request.param == "whole":
        return jax.make_mesh((2, 4), ("a", "b"), axis_types=axes)
    monkeypatch.setattr(loading, "SMALL", -1)
    monkeypatch.setattr(loading, "PIECE", 512)
    monkeypatch.setattr(loading, "RELEASED", 4096)
    return jax.make_mesh((1, 2), ("a", "b"), devices=jax.devices()[:2], axis_types=axes)  # each piece compiles on each


def test_every_value_is_where_our_layout_has_it(folder, tensors, way):
    model = model_of(folder, vocab_multiple=128)
    shapes = shapes_of(model, rows, way)
    found = loading.load_params(Folder.open(folder), model, shapes)
    assert_equal(found, expected_llama(tensors))
    assert jax.tree.map(lambda leaf: leaf.sharding, found) == jax.tree.map(lambda leaf: leaf.sharding, shapes)


def test_layers_on_their_own_and_replicas(folder, tensors):
    model = model_of(folder, scan=False)
    found = loading.load_params(Folder.open(folder), model, shapes_of(model))
    stacks = expected_llama(tensors)["blocks"]
    for n in range(2):
        assert_equal(found["blocks"][n], jax.tree.map(lambda stack, n=n: stack[n], stacks))


def test_host_memory_is_that_of_all_copies_on_cpu_devices(folder):
    shapes = shapes_of(model_of(folder))
    one = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    assert loading.bytes_on_host(shapes) == 8 * one
    sharded = shapes_of(model_of(folder), rows)
    expected = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(loading.load_params(Folder.open(folder), model_of(folder), sharded))
        for shard in leaf.addressable_shards
    )
    assert loading.bytes_on_host(sharded) == expected < 8 * one
    assert loading.host_terms(sharded)[0].bytes == expected


def test_gpt2_shares_a_tensor_among_queries_keys_and_values(tmp_path):
    folder = weights.gpt2(tmp_path / "m")
    model, tensors = model_of(folder), weights.numbers(weights.gpt2_shapes())
    found = loading.load_params(Folder.open(folder), model, shapes_of(model, rows))
    for n in range(2):
        fused, bias = (tensors[f"transformer.h.{n}.attn.c_attn.{kind}"] for kind in ("weight", "bias"))
        for number, which in enumerate("qkv"):
            part = slice(D * number, D * (number + 1))
            own = found["blocks"]["attention"]
            assert np.array_equal(own[f"w_{which}"][n], fused[:, part].reshape(D, 4, 8))
            assert np.array_equal(own[f"b_{which}"][n], bias[part].reshape(4, 8))
        proj = tensors[f"transformer.h.{n}.attn.c_proj.weight"]
        assert np.array_equal(found["blocks"]["attention"]["w_o"][n], proj.reshape(4, 8, D))
        assert np.array_equal(found["blocks"]["mlp"]["w_up"][n], tensors[f"transformer.h.{n}.mlp.c_fc.weight"])
    assert np.array_equal(found["w_position"], tensors["transformer.wpe.weight"])
    assert "w_head" not in found


@pytest.mark.parametrize(
    ("stored", "param"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")],
)
def test_values_are_cast_on_their_way(tmp_path, stored, param):
    dtype = ml_dtypes.bfloat16 if stored == "bfloat16" else stored
    folder = weights.llama(tmp_path / "m", dtype)
    model = model_of(folder)
    found = loading.load_params(Folder.open(folder), model, shapes_of(model, rows, param=param))
    want = expected_llama(weights.numbers(weights.llama_shapes(), dtype))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(param)}
    assert_equal(found, jax.tree.map(lambda leaf: leaf.astype(jax.numpy.dtype(param)), want))


def test_every_byte_is_read_once_and_none_for_other_devices(folder, monkeypatch):
    """What a process reads is what its devices hold: replicas are read once, shards are slices of the files."""
    opened, read = Folder.open(folder), []
    real = Folder.read
    monkeypatch.setattr(Folder, "read", lambda self, *args: read.append(real(self, *args)) or read[-1])
    total = sum(np.prod(tensor.shape) * 4 for tensor in opened.tensors.values())
    model = model_of(folder)
    told = []
    layers_whole = shapes_of(model, lambda shape: P(None, "b") if len(shape) > 2 else P("b") if shape[0] > 4 else P())
    loading.load_params(opened, model, layers_whole, tell=lambda done, total: told.append((done, total)))
    assert sum(array.nbytes for array in read) == total
    # The progress counts what the arrays hold, padding included: two tables with 6 rows more.
    assert told[-1] == (total + 2 * 6 * D * 4,) * 2 and told == sorted(told)
    half = jax.make_mesh((4,), ("b",), devices=jax.devices()[:4])
    sharding = NamedSharding(half, P(None, "b"))
    read.clear()
    like = jax.ShapeDtypeStruct((2, D, F), np.float32, sharding=sharding)
    monkeypatch.setattr(
        NamedSharding,
        "addressable_devices_indices_map",
        lambda self, shape: {
            device: index for device, index in self.devices_indices_map(shape).items() if device.id == 2
        },
    )
    target = loading._Target(like)
    held = loading.by_array(model, checkpoint_leaves(opened, model))
    for job in loading._make_jobs(target, held["blocks.mlp.w_up"]):
        list(job.write())
    assert sum(array.nbytes for array in read) == 2 * D * F  # 4 bytes of a quarter of them


def test_files_are_read_one_after_the_other(folder, monkeypatch):
    opened, files = Folder.open(folder), []
    real = Folder.read
    monkeypatch.setattr(
        Folder, "read", lambda self, name, spans: files.append(self.tensors[name].file) or real(self, name, spans)
    )
    model = model_of(folder)
    loading.load_params(opened, model, shapes_of(model, rows))
    assert files == sorted(files) and len(set(files)) == 3


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_parameters_may_go_to_host_memory(folder, tensors, kind):
    model = model_of(folder)
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding.with_memory_kind(kind)),
        shapes_of(model, rows),
    )
    found = loading.load_params(Folder.open(folder), model, shapes)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(found)} == {kind}
    assert_equal(found, expected_llama(tensors))


def changed(path, change, config=weights.LLAMA):
    """A folder whose tensors were changed."""
    tensors = weights.numbers(weights.llama_shapes(config))
    change(tensors)
    return Folder.open(weights.write(path / "m", config, tensors))


def leaves(folder, **changes):
    return checkpoint_leaves(folder, model_of(folder.path, **changes))


def test_a_missing_a_surplus_a_misshapen_tensor_and_one_of_another_dtype(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    for number, (change, why) in enumerate(
        (
            (lambda t: t.pop(name), f"has no tensor {name}"),
            (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[name]}), "layers.2.mlp.up_proj.weight, which"),
            (lambda t: t.update({name: t[name].T}), f"{name} has shape 32 x 48, but config.json describes 48 x 32"),
            (lambda t: t.update({name: t[name].astype("int8")}), f"{name} has dtype I8"),
            (lambda t: t.update({name: t[name].astype("float64")}), f"{name} has dtype F64"),
            (lambda t: t.pop("lm_head.weight"), "has no tensor lm_head.weight"),
        )
    ):
        with pytest.raises(UserError) as caught:
            leaves(changed(tmp_path / str(number), change))
        assert why in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
def test_nan_and_infinite_weights_are_named(tmp_path, dtype):
    """generate and score read all parameters, quantize one at a time."""
    values = weights.numbers(weights.llama_shapes(), dtype)
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        values[name][3, 4], values[name][30, 1:3] = np.nan, (np.inf, -np.inf)
    source = open_source(weights.write(tmp_path / "m", weights.LLAMA, values))
    message = (
        f"{tmp_path / 'm' / 'model.safetensors'}: 3 of the 1,536 values of model.layers.1.mlp.up_proj.weight "
        "are NaN or infinite: download it again, or give other weights"
    )
    with pytest.raises(UserError) as caught:
        source.read(describe_model(source.config, jax.devices()[:1]), lambda done, total: None)
    assert str(caught.value) == message
    with pytest.raises(UserError) as caught:
        source.parameter("blocks.1.mlp.w_up")
    assert str(caught.value) == message
    largest = np.finfo(np.float16).max.astype(dtype)
    values = {name: np.full_like(array, largest) for name, array in values.items()}
    source = open_source(weights.write(tmp_path / "large", weights.LLAMA, values))
    assert np.array_equal(source.parameter("blocks.1.mlp.w_up"), np.full((32, 48), largest))


def test_a_tied_head_that_is_stored_too_has_to_be_the_table(tmp_path):
    config = {**weights.LLAMA, "tie_word_embeddings": True}
    table = "model.embed_tokens.weight"
    same = changed(tmp_path / "same", lambda t: t.update({"lm_head.weight": t[table]}), config)
    assert "w_head" not in leaves(same) and "w_token" in leaves(same)
    for number, other in enumerate((lambda w: w + 1e-6, lambda w: w[:-1], lambda w: w.astype("float16"))):
        with pytest.raises(UserError, match="lm_head.weight differs from model.embed_tokens.weight"):
            leaves(
                changed(
                    tmp_path / str(number), lambda t, other=other: t.update({"lm_head.weight": other(t[table])}), config
                )
            )


def test_names_without_the_model_in_front_and_buffers(tmp_path):
    config = {**weights.LLAMA, "tie_word_embeddings": True}

    def bare(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)

    found = leaves(changed(tmp_path, bare, config))
    assert found["blocks.1.mlp.w_up"].tensor.name == "layers.1.mlp.up_proj.weight"


def test_a_slice_of_a_leaf_is_that_slice(folder):
    found = leaves(Folder.open(folder))
    for path in ("blocks.0.attention.w_q", "blocks.1.attention.w_o", "blocks.1.mlp.w_down", "w_token", "w_head"):
        leaf = found[path]
        whole = leaf.read()
        assert whole.shape == leaf.shape and leaf.dtype == whole.dtype
        for part in (
            tuple(slice(1, size - 1) for size in leaf.shape),
            tuple(slice(0, 1) for _ in leaf.shape),
            (slice(leaf.shape[0] - 3, None), *(slice(None),) * (whole.ndim - 1)),
        ):
            assert np.array_equal(leaf.read(part), whole[part]), path
    assert not found["w_token"].read((slice(250, 256), slice(None))).any()


@pytest.mark.quick
@pytest.mark.parametrize("text", ["(h k) d -> d h k", "d (h k) -> h k d", "d f -> f d", "v d -> d v", "d -> d"])
def test_a_layout_and_its_inverse(text):
    sizes = {"d": 6, "h": 2, "g": 1, "k": 4, "f": 5, "v": 7, "p": 3}
    pattern = Pattern.parse(text)
    theirs = np.arange(np.prod(pattern.their_shape(sizes))).reshape(pattern.their_shape(sizes))
    ours = pattern.forward(theirs, [(0, sizes[letter]) for letter in pattern.ours], sizes)
    assert ours.shape == pattern.our_shape(sizes) and np.array_equal(pattern.back(ours), theirs)


@pytest.mark.quick
def test_pieces_are_the_whole_and_no_larger_than_asked():
    spans = [(3, 10), (0, 64), (5, 6)]
    found = list(loading.pieces(spans, 20, 1))
    cells = [cell for piece in found for cell in np.ndindex(*(stop - start for start, stop in piece))]
    assert len(cells) == 7 * 64 and all(np.prod([b - a for a, b in piece]) <= 20 for piece in found)
    covered = {
        tuple(a + i for (a, _), i in zip(piece, cell))
        for piece in found
        for cell in np.ndindex(*(b - a for a, b in piece))
    }
    assert covered == {(i, j, 5) for i in range(3, 10) for j in range(64)}
