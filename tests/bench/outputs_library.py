"""What a user of the library sees: functions that outputs.py runs by name, with the Python of the executable.

    python outputs_library.py FUNCTION

Only the public names of `bytescope.memory` are used here.
"""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path


def views() -> None:
    """Every report of the working directory at 80 and 120 columns, as a table, as text, and in a notebook."""
    from bytescope import memory

    for path in sorted(Path().glob("*.json")):
        with contextlib.suppress(memory.ReportError):
            report = memory.load(path)
            for columns in ("80", "120"):
                os.environ["COLUMNS"] = columns
                save(f"{path.stem}.{columns}", printed(report.show))
            os.environ["COLUMNS"] = "100"
            save(f"{path.stem}.repr", f"{report!r}\n\n{report}\n\n{report.table()}")
            save_notebook(f"{path.stem}.notebook", report)
            save_notebook(f"{path.stem}.table", report.table())


def save(name: str, text: str) -> None:
    Path("views").mkdir(exist_ok=True)
    Path("views", f"{name}.txt").write_text(text)


def save_notebook(name: str, shown: object) -> None:
    """Saves what an output area shows: the HTML, and the plain text where there is a MIME bundle."""
    Path("views").mkdir(exist_ok=True)
    if hasattr(shown, "_repr_html_"):
        Path("views", f"{name}.html").write_text(shown._repr_html_())
    if hasattr(shown, "_repr_mimebundle_"):
        bundle = shown._repr_mimebundle_()
        for kind, text in (bundle[0] if isinstance(bundle, tuple) else bundle).items():
            suffix = "html" if "html" in kind else "txt"
            Path("views", f"{name}.{kind.replace('/', '_')}.{suffix}").write_text(str(text))


def printed(function, *arguments) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        function(*arguments)
    return output.getvalue()


def dump() -> None:
    """Compiles a small step under XLA_FLAGS that dump it."""
    import jax
    import jax.numpy as jnp

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    jax.jit(lambda w, x: w - 0.1 * jax.grad(loss)(w, x))(jnp.ones((256, 256)), jnp.ones((64, 256))).block_until_ready()


def step_and_arguments():
    """Returns (step, (state, batch)) of two layers under jax.checkpoint, in shapes."""
    import jax
    import jax.numpy as jnp

    def layer(x, w):
        return jnp.tanh(x @ w) @ w.T + x

    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), batch, params["layers"])
        return jnp.mean((x @ params["head"]) ** 2)

    def step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value

    shape = jax.ShapeDtypeStruct
    state = {"layers": shape((4, 512, 2048), "float32"), "head": shape((512, 64), "float32")}
    return step, loss, (state, shape((256, 512), "float32"))


def public() -> None:
    from bytescope import memory

    print(sorted(dir(memory)))
    print(memory.__all__)


def analyze() -> None:
    from bytescope import memory

    step, _, arguments = step_and_arguments()
    before = memory.analyze(step, *arguments, target="h200")
    after = memory.analyze(step, *arguments, target="h200", donate_argnums=0)
    for report in (before, after):
        print(repr(report), report, report.table(), sep="\n\n")
        print(report.table().rows[:3])
        print(report.peak_bytes, report.allocated_bytes, report.verdict, dict(report.breakdown))
        report.show()
    after.save("after.json")
    after.to_html("after.html")
    difference = memory.diff(before, "after.json")
    print(repr(difference), difference, sep="\n\n")
    for name, shown in (("report", after), ("table", after.table()), ("difference", difference)):
        save_notebook(name, shown)


def guard() -> None:
    from bytescope import memory

    step, _, arguments = step_and_arguments()
    memory.assert_fits(step, *arguments, target="h200", donate_argnums=0)
    for size in ("8MiB", 72, "seven"):
        try:
            memory.assert_fits(step, *arguments, target="h200", budget=size)
        except (memory.GuardError, memory.ReportError) as error:
            print(f"{type(error).__name__}: {error}")


def targets() -> None:
    from bytescope import memory

    print(memory.targets())
    print(memory.target("h100:8"))
    print(memory.target("h100:8").mesh(data=8))
    save_notebook("targets", memory.targets())
    try:
        memory.target("h1000")
    except memory.ReportError as error:
        print(error)


def compile() -> None:
    import jax
    import jax.numpy as jnp

    from bytescope import memory

    step, _, arguments = step_and_arguments()
    arrays = jax.tree.map(lambda each: jnp.ones(each.shape, each.dtype), arguments)
    compiled, report = memory.compile(step, *arrays, donate_argnums=0)
    print({name: report.breakdown[name] for name in report.breakdown}, report.peak_bytes)
    state, loss = compiled(*arrays)
    print(float(loss), jax.tree.map(lambda each: each.shape, state))
    elsewhere, _ = memory.compile(step, *arguments, target="h200")
    try:
        elsewhere(*arrays)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")


def watch() -> None:
    import jax
    import jax.numpy as jnp

    from bytescope import memory

    step, _, arguments = step_and_arguments()
    state, batch = jax.tree.map(lambda each: jnp.ones(each.shape, each.dtype), arguments)
    watched = memory.watch(jax.jit(step), budget="16MiB")
    try:
        watched(state, batch)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")


def plan_remat() -> None:
    from bytescope import memory

    _, loss, arguments = step_and_arguments()
    plan = memory.plan_remat(loss, arguments, target="h200", budget="100MiB")
    print(repr(plan), plan, sep="\n\n")
    save_notebook("plan", plan)
    try:
        memory.plan_remat(loss, arguments, target="h200", budget="30MiB")
    except memory.ReportError as error:
        print(error)


TEST = """
from outputs_library import step_and_arguments

step, _, arguments = step_and_arguments()


def test_fits(assert_fits):
    assert_fits(step, *arguments, target="h200", budget="1GiB")


def test_is_too_large(assert_fits):
    assert_fits(step, *arguments, target="h200", budget="8MiB")


def test_report(memory_report):
    assert memory_report(step, *arguments, target="h200").breakdown["params"] < 100
"""


def pytest_fixtures() -> None:
    """The two fixtures in a test file of a user's own: one test passes, two fail with the report."""
    Path("test_user.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "test_user.py"]
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parent))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(done.returncode, done.stdout, sep="\n")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
