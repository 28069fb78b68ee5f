"""The training step of a script: found without data, without accelerators and without allocating the model."""

import textwrap

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from bytescope import memory
from bytescope.memory.errors import ReportError
from bytescope.memory.program import program_file, user_program
from bytescope.memory.program.retarget import argument_shardings
from bytescope.memory.program.script_capture import capture
from bytescope.memory.program.stand_ins import MissingPiece, parse_value

pytestmark = pytest.mark.quick

MODEL = """
import jax, jax.numpy as jnp, optax

def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)

@jax.jit
def init(key):
    return {"w": jax.random.normal(key, (64, WIDTH)), "v": jnp.zeros((WIDTH, 8))}

optimizer = optax.adam(1e-3)

def update(params, state, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value
"""
TRAIN = """
step = jax.jit(update, donate_argnums=(0, 1))
params = init(jax.random.key(0))
state = optimizer.init(params)
x, y = jnp.ones((16, 64)), jnp.ones((16, 8))
print("loss before", float(jax.jit(loss)(params, x, y)))
for _ in range(3):
    params, state, value = step(params, state, x, y)
raise AssertionError("the script goes on after its step")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script into an empty working folder; returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="train.py", width=32):
        (tmp_path / name).write_text(textwrap.dedent(text).replace("WIDTH", str(width)))
        return name

    return write


def line_of(name, text):
    with open(name) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


def names(traced):
    return list(traced.jaxpr.jaxpr.debug_info.arg_names)


def test_the_step_is_found_and_a_large_model_is_not_allocated(script):
    """A model of 280 GB with its moments; the evaluation before the step is no step, and its value is taken as 0."""
    width = 500_000_000
    found = capture(script(MODEL + TRAIN, width=width), ())
    assert found.defined == f"update (train.py:{line_of('train.py', 'def update')})"
    assert str(found.called) == f"train.py:{line_of('train.py', 'params, state, value')}" and found.updates
    assert {"params['w']", "state[0].mu['w']", "x"} <= set(names(found.traced))
    donated = [leaf.donated for leaf in jax.tree.leaves(found.traced.args_info)]
    assert donated == [True] * 7 + [False] * 2
    assert sum(leaf.size for leaf in jax.tree.leaves(found.traced.in_avals)) > 3 * 72 * width
    (place, what), *more = found.assumptions
    assert "float32[]" in what and place.line == line_of("train.py", "loss before") and not more


def test_the_captured_step_is_the_scripts_own(script):
    """The jaxpr that jax makes of the same function and shapes."""
    name = script(MODEL + TRAIN)
    namespace: dict = {}
    exec(MODEL.replace("WIDTH", "32"), namespace)
    params = jax.eval_shape(namespace["init"], jax.random.key(0))
    state = jax.eval_shape(namespace["optimizer"].init, params)
    x, y = jax.ShapeDtypeStruct((16, 64), "float32"), jax.ShapeDtypeStruct((16, 8), "float32")
    direct = jax.jit(namespace["update"], donate_argnums=(0, 1)).trace(params, state, x, y)
    assert str(memory.captured_step(name).jaxpr) == str(direct.jaxpr)


def test_nothing_stays_replaced(script):
    jit, devices, memmap, zeros_like = jax.jit, jax.devices, np.memmap, jax.lax.full_like
    capture(script("import no_such_tracker\n" + MODEL + TRAIN), ())
    assert (jax.jit, jax.devices, np.memmap, jax.lax.full_like) == (jit, devices, memmap, zeros_like)
    assert float(jax.numpy.zeros((1000, 1000)).sum()) == 0
    with pytest.raises(ImportError):
        __import__("no_such_tracker")


LOADER = """
import no_such_tracker
import no_such_datasets as nsd

no_such_tracker.init(project="p")

@no_such_tracker.watch
def run():
    step = jax.jit(update)
    params = init(jax.random.key(0))
    state = optimizer.init(params)
    evaluate = jax.jit(loss)
    for batch in nsd.load("mnist").batch(16):
        assert float(evaluate(params, batch["x"], batch["y"])) < 10
        params, state, value = step(params, state, batch["x"], batch["y"])

if __name__ == "__main__":
    run()
"""


def test_a_missing_data_package_is_asked_for_by_line_and_then_given(script):
    name = script(MODEL + LOADER)
    loop, evaluation, call = (line_of(name, text) for text in ("for batch", "assert float", "params, state, value"))
    with pytest.raises(MissingPiece) as missing:
        capture(name, ())
    places, texts = zip(*missing.value.pieces)
    assert [place.line for place in places] == [evaluation, evaluation, call, call]
    assert f"the argument x of the call at train.py:{evaluation}" in texts[0] and "no_such_datasets.load()" in texts[0]
    assert f"--value 'train.py:{call}=dtype[dimensions]'" in texts[2]
    with pytest.raises(ReportError, match=r"train\.py:\d+: the argument x .* 3 more"):
        memory.captured_step(name)
    found = capture(name, (), values={f"train.py:{loop}": "x:float32[16,64],y:float32[16,8]"})
    assert [aval.shape for aval in found.traced.jaxpr.in_avals[-2:]] == [(16, 64), (16, 8)]
    assert list(found.packages) == ["no_such_tracker", "no_such_datasets"]
    # The written file names the line by its text, so it survives lines before it.
    text = program_file.file_text(
        found, name, (), out=user_file("p.py"), target="h100", step=None, without=(), auto_axes=False
    )
    user_file("p.py").write_text(text)
    script("\n\n" + MODEL + LOADER)
    assert "no_such_datasets has a stand-in" in text
    assert names(user_program.load_function("p.py:program").make().program)[-2:] == ["x", "y"]


def user_file(name):
    from pathlib import Path

    return Path(name)


def test_pmap_with_a_replicated_state(script):
    found = capture(
        script(
            MODEL
            + """
            n = jax.local_device_count()
            step = jax.pmap(update, axis_name="i", donate_argnums=(0,))
            params = jax.pmap(init)(jax.random.split(jax.random.key(0), n))
            state = jax.pmap(optimizer.init)(params)
            params = jax.tree.map(lambda x: x * 2, params)
            step(params, state, jnp.ones((n, 4, 64)), jnp.ones((n, 4, 8)))
            """.replace("\n            ", "\n"),
            width=4096,
        ),
        (),
    )
    params, *rest = found.traced.args_info[0]
    assert params["w"].shape == (8, 64, 4096) and params["w"].donated and not rest[-1].donated
    assert argument_shardings(found.traced)[0].num_devices == 8


SHARDED = """
import sys
from jax.sharding import NamedSharding, PartitionSpec as P, AxisType
types = {} if "old" in sys.argv else {"axis_types": (AxisType.Auto,)}
mesh = jax.make_mesh((len(jax.devices("gpu")),), ("data",), **types)

@jax.jit
def sharded_init(key):
    shard = NamedSharding(mesh, P(None, "data"))
    return {"w": jax.lax.with_sharding_constraint(init(key)["w"], shard), "v": init(key)["v"]}

params = sharded_init(jax.random.key(0))
state = optimizer.init(params)
rows = NamedSharding(mesh, P("data"))
x, y = jax.device_put((jnp.ones((4096, 64)), jnp.ones((4096, 8))), rows)
with jax.set_mesh(mesh):
    compiled = jax.jit(update).lower(params, state, x, y).compile()
"""


@pytest.mark.parametrize("argv", [(), ("old",)])
def test_shardings_of_a_mesh_reach_parameters_moments_and_batch(script, argv):
    """Also of scripts that are compiled ahead of time, and with meshes as jax made them before 0.9."""
    name = script(MODEL + SHARDED, width=4096)
    found = capture(name, argv, auto_axes=bool(argv))
    specs = {
        path: sharding.spec
        for path, sharding in zip(names(found.traced), argument_shardings(found.traced))
        if sharding is not None and len(sharding.device_set) == 8
    }
    wanted = P(None, "data")
    assert specs["params['w']"] == specs["state[0].mu['w']"] == specs["state[0].nu['w']"] == wanted
    assert specs["x"] == specs["y"] == P("data")
    report = memory.analyze(found.traced, target="cpu:8")
    assert 2**20 < report.predicted_bytes < 2**25  # one array of the hidden layer has 2**26 bytes over all devices


def test_gradients_without_an_update_are_the_program_if_nothing_else_is(script):
    update = """
    gradient = jax.jit(jax.value_and_grad(loss))
    params = init(jax.random.key(0))
    state = optimizer.init(params)
    for _ in range(2):
        value, grads = gradient(params, jnp.ones((16, 64)), jnp.ones((16, 8)))
        {update}
    """
    eager = "updates, state = optimizer.update(grads, state, params); params = optax.apply_updates(params, updates)"
    found = capture(script(MODEL + textwrap.dedent(update).format(update=eager)), ())
    assert found.name == "loss" and not found.updates
    inner = "params, state, value = jax.jit(update)(params, state, jnp.ones((16, 64)), jnp.ones((16, 8)))"
    found = capture(script(MODEL + textwrap.dedent(update).format(update=inner)), ())
    assert found.name == "update" and found.updates
    assert capture("train.py", (), step="init").name == "init"


@pytest.mark.parametrize(
    ("text", "argv", "line", "message"),
    [
        ("print(1)", (), None, "calls no jitted function"),
        (MODEL + "init(jax.random.key(0))\n", (), None, "it calls init (train.py:"),
        ("import argparse\np = argparse.ArgumentParser()\np.add_argument('--a', required=True)\np.parse_args()", (), 4,
         "exits with 2 before its step: give its arguments after --"),
        ("\nopen('data/text.txt')", (), 2, "FileNotFoundError"),
        ("import numpy\nimport no_such_data\nraise ValueError('no data')", (), 3, "ValueError: no data"),
        ("import jax, no_such_ops\n@jax.jit\ndef f(x):\n    return no_such_ops.relu(x)\nf(1.0)", (), 4,
         "install the package no_such_ops"),
    ],
)  # fmt: skip
def test_what_is_missing_is_listed_with_its_line(script, text, argv, line, message):
    with pytest.raises(MissingPiece) as missing:
        capture(script(text), argv)
    place, found = missing.value.pieces[0]
    assert message in found and (place.line if place else None) == line


def test_a_package_of_the_computation_must_be_installed(script, monkeypatch):
    from bytescope.memory.program import stand_ins

    monkeypatch.setattr(stand_ins, "NEEDED", frozenset({"no_such_layers"}))
    with pytest.raises(MissingPiece, match="no_such_layers is not installed"):
        capture(script("import no_such_layers"), ())
    # An import that the script guards stays missing.
    guarded = (
        "try:\n    import no_such_wandb\nexcept ImportError:\n    no_such_wandb = None\nassert no_such_wandb is None\n"
    )
    assert not capture(script(guarded + MODEL + TRAIN), ()).packages


ARGUMENTS = """
import numpy as np
from absl import app, flags

flags.DEFINE_integer("batch", 4, "")
tokens = np.memmap("data/train.bin", dtype=np.uint16, mode="r")

def main(_):
    starts = np.random.randint(0, len(tokens) - 64, flags.FLAGS.batch)
    x = np.stack([tokens[start : start + 64] for start in starts]).astype(np.float32)
    params = init(jax.random.key(0))
    jax.jit(update)(params, optimizer.init(params), x, x[:, :8])

if __name__ == "__main__":
    app.run(main)
"""


def test_flags_of_absl_and_a_missing_token_file(script):
    import subprocess
    import sys

    name = script(MODEL + ARGUMENTS)
    # absl's flags belong to a process.
    code = (
        "from bytescope.memory.program.script_capture import capture; found = capture('train.py', ['--batch=12']); "
        "print(found.traced.jaxpr.in_avals[-2].shape, [what for _, what in found.assumptions])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert child.stdout.startswith("(12, 64) ['reads the missing file data/train.bin"), child.stderr
    assert name == "train.py"


LIBRARIES = {
    "nnx": """
        from flax import nnx
        model = nnx.Linear(64, 4096, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        @nnx.jit
        def train_step(model, optimizer, x):
            grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
            optimizer.update(model, grads)
        train_step(model, optimizer, jnp.ones((8, 64)))
        """,
    "linen": """
        from flax import linen as nn
        from flax.training.train_state import TrainState
        model = nn.Dense(4096)
        params = model.init(jax.random.key(0), jnp.ones((1, 64)))
        state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
        @jax.jit
        def train_step(state, x):
            grads = jax.grad(lambda params: jnp.mean(state.apply_fn(params, x) ** 2))(state.params)
            return state.apply_gradients(grads=grads)
        train_step(state, jnp.ones((8, 64)))
        """,
    "equinox": """
        import equinox as eqx
        model = eqx.nn.MLP(64, 8, 4096, 2, key=jax.random.key(0))
        state = optimizer.init(eqx.filter(model, eqx.is_array))
        @eqx.filter_jit
        def train_step(model, state, x):
            grads = eqx.filter_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
            updates, state = optimizer.update(grads, state, model)
            return eqx.apply_updates(model, updates), state
        train_step(model, state, jnp.ones((8, 64)))
        """,
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_steps_of_libraries(script, library):
    found = capture(script(MODEL + textwrap.dedent(LIBRARIES[library])), ())
    assert found.name == "train_step" and found.updates
    elements = sum(aval.size for aval in found.traced.jaxpr.in_avals)
    assert elements > 3 * 64 * 4096  # parameters and two moments


@pytest.mark.parametrize("text", ["int32", "int32[8", "x:int32[8],int32[8]", "no_type[8]", ""])
def test_values_that_cannot_be_read(text):
    with pytest.raises(ReportError, match="is not a value"):
        parse_value(text)


def test_values():
    assert parse_value(" 32000") == 32000
    assert parse_value("bfloat16[]").dtype == jax.numpy.bfloat16
    image, label = parse_value("uint8[8,32,32,3], int32[8]")
    assert image.shape == (8, 32, 32, 3) and label.shape == (8,)
