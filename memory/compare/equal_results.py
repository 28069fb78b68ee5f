"""Runs two versions of a program on the CPU at small sizes, and compares their results: loss, gradients, new state.

The arguments get seeded random values. Two versions of a correct program differ only by the rounding of floats. How
much rounding changes a result is measured: the program runs again with every float argument changed by one rounding
error. Two results are equal if the norm of their difference is at most `_NOISE` times this measured change, or at most
a tolerance times the norm of the result. The tolerance is the square root of the machine epsilon of the least precise
float dtype in the program, but at most `_MAX_TOLERANCE`.

    before, after = run_small(load_factory("steps.py:program")({"layers": "2"}, target)), run_small(...)
    compare_results(before, after)       # Equality("equal", 3.1e-07, "[1]['w']", "all 12 results are equal ...")
    compare_with_remat_off(make)         # does the step compute the same without jax.checkpoint?

`run_version` runs a version in its own process, because a module that is imported once keeps its old code.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bytescope.memory.compare.patched_program import run_changed
from bytescope.memory.compare.prepared_program import PreparedProgram
from bytescope.memory.compare.program_factory import load_factory
from bytescope.memory.devices import platform, targets
from bytescope.memory.errors import ReportError, one_line
from bytescope.memory.jaxprs import distinct_jaxprs
from bytescope.memory.program import program_arguments, user_program
from bytescope.memory.program.roles import WEIGHTS
from bytescope.memory.remat.step_loss import without_remat

EQUAL, DIFFERS, NOT_CHECKED = "equal", "differs", "not checked"
# Random integers are smaller than this number, so that they are token ids of any vocabulary.
_INTEGERS = 8
# A difference of at most this multiple of the measured effect of rounding counts as rounding.
_NOISE = 4.0
# Maximum relative difference that counts as rounding without a measurement; it applies to bfloat16.
_MAX_TOLERANCE = 0.01
# Roles of arguments that are set to zeros, as at the first step: random optimizer moments would hide the gradients.
_ZERO = ("optimizer", "accumulator")


@dataclasses.dataclass(frozen=True)
class Equality:
    """The result of comparing the results of two versions of a program.

    Fields:
        outcome: "equal" (up to rounding), "differs", or "not checked" if the results could not be compared.
        difference: the largest relative difference of all results: norm of the difference, divided by the norm of the
            result of the first version. Results that differ by more than the tolerance only because of the measured
            effect of rounding are left out. 0 if nothing was compared.
        path: pytree path of the result with the largest difference, such as "[0].params['w']"; "" if the step returns a
            single array.
        sentence: one sentence for the user that says what was compared and how large the difference is.
    """

    outcome: str
    difference: float
    path: str
    sentence: str


@dataclasses.dataclass(frozen=True)
class SmallRun:
    """The results of running a program at small sizes with random arguments.

    Fields:
        values: pytree path of a result -> its value. Floats are stored as float64, complex numbers as complex128,
            integers as int64, random keys as their uint32 key data.
        rounding: pytree path of a float result -> norm of the change of this result when each float argument is changed
            by one rounding error.
        epsilon: machine epsilon of the least precise float dtype in the program; 0 if the program has no floats.
        repeats: True if a second run with the same arguments gave the same results.
    """

    values: Mapping[str, np.ndarray[Any, Any]]
    rounding: Mapping[str, float]
    epsilon: float
    repeats: bool = True


def compare_results(before: SmallRun, after: SmallRun) -> Equality:
    """Compares the results of two versions of a program, each of which was run with `run_small`, and returns whether
    they are equal up to rounding. The outcome is "not checked" if a version gives different results on each run, if
    the results of the two versions have different pytree paths or shapes, or if a result of `before` is NaN or
    infinite. `before`: the unchanged program. `after`: the changed program."""
    if words := _obstacle(before, after):
        return Equality(NOT_CHECKED, 0.0, "", f"the results cannot be compared: {words}")
    found = []
    for path, value in before.values.items():
        norm, distance = _norm(value), _norm(after.values[path] - value)
        tolerated, noise = 0.0, 0.0
        if path in before.rounding:
            tolerated = norm * min(math.sqrt(max(before.epsilon, after.epsilon)), _MAX_TOLERANCE)
            noise = _NOISE * before.rounding[path]
        relative = distance / norm if norm else float(distance > 0)
        differs = not distance <= max(tolerated, noise)  # a NaN differs
        # A result that is only noise, such as a gradient that is 0 without rounding, says nothing about the difference.
        found.append((differs, differs or distance <= tolerated, relative, path))
    _, _, worst, path = max(found)
    different = sum(differs for differs, *_ in found)
    words = f"the largest relative difference is {worst:.1e}, in {path or 'the result of the step'}"
    if different:
        return Equality(
            DIFFERS, worst, path, f"{different} of {len(found)} results differ by more than rounding: {words}"
        )
    return Equality(EQUAL, worst, path, f"all {len(found)} results are equal up to rounding: {words}")


def _obstacle(before: SmallRun, after: SmallRun) -> str:
    """Returns why the results of two versions of a program cannot be compared; "" if they can."""
    if not before.values:
        return "the program has no results"
    if not before.repeats or not after.repeats:
        return "a program gives different results on each run; draw random numbers from a key"
    shapes = [{path: value.shape for path, value in run.values.items()} for run in (before, after)]
    if shapes[0] != shapes[1]:
        return "the changed program returns a pytree with other paths or shapes"
    for path, value in before.values.items():
        if not np.all(np.isfinite(value)):
            return f"the result {path} has NaN or infinite values at small sizes; choose other sizes"
    return ""


def _norm(value: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(value.ravel()))


def compare_with_remat_off(make: Callable[[], PreparedProgram]) -> Equality:
    """Compares the results of a program with the results of the same program without `jax.checkpoint`, in which the
    backward pass recomputes nothing. Returns whether the results are equal up to rounding.

    make: function that returns the program, prepared for CPU devices. It is called twice.

    Raises ReportError if the program cannot be compiled for the CPU or fails.
    """
    with without_remat():
        before = run_small(make())
    return compare_results(before, run_small(make()))


def run_small(program: PreparedProgram) -> SmallRun:
    """Compiles a program for CPU devices of this process, and runs it three times with random arguments from fixed
    seeds. The first two runs have the same arguments and show whether the program is deterministic. In the third run,
    each float argument is changed by one rounding error (up or down at random), to measure how much rounding changes
    the results. Returns the results of the first run with both measurements. If the first run has NaN or infinite
    results, all runs use the absolute values of the float arguments.

    Raises ReportError if the program cannot be compiled for the CPU or fails.
    """
    import jax
    import jax.numpy as jnp

    compilation, _ = program.compile()
    compiled = compilation.executable
    infos, tree = jax.tree.flatten(compiled.args_info)
    places = jax.tree.leaves(compiled.input_shardings, is_leaf=lambda node: node is None)  # None: an unused argument
    roles = program_arguments.read(
        compilation.program, signature=compilation.signature, extra=program.roles or ()
    ).roles
    leaves = compilation.signature.arguments if compilation.signature else ()
    paths = [(leaf.path, roles.get(leaf.parameter, "")) for leaf in leaves]
    if len(paths) != len(infos):
        paths = [(f"argument {number}", "") for number in range(len(infos))]
    epsilon = _epsilon(compilation.jaxpr)

    signed = True

    def run(rounding: float = 0.0) -> dict[str, np.ndarray[Any, Any]]:
        arrays = []
        for info, place, (path, role) in zip(infos, places, paths):
            values = _random_array(info, path, role, rounding)
            if not signed and jnp.issubdtype(info.dtype, jnp.floating):
                values = abs(values)
            arrays.append(jax.device_put(values, place))
        args, kwargs = jax.tree.unflatten(tree, arrays)
        results, _ = jax.tree_util.tree_flatten_with_path(compiled(*args, **kwargs))
        return {jax.tree_util.keystr(path): _as_numpy(result) for path, result in results}

    with user_program.one_line_errors(f"{program.name}: the step fails at small sizes"):
        values = run()
        if not all(np.isfinite(value).all() for value in values.values()):
            signed = False  # the step may take a root or a logarithm of an argument
            values = run()
        second, rounded = run(), run(epsilon)
    repeats = all(np.array_equal(values[path], second[path], equal_nan=True) for path in values)
    floats = [path for path, value in values.items() if value.dtype.kind in "fc"]
    noise = {path: _norm(rounded[path] - values[path]) for path in floats}
    return SmallRun(values, noise, epsilon, repeats)


def _epsilon(jaxpr: Any) -> float:
    import jax.numpy as jnp

    found = {0.0}
    for inner in distinct_jaxprs(jaxpr) if jaxpr is not None else ():
        for equation in inner.eqns:
            for result in equation.outvars:
                dtype = getattr(result.aval, "dtype", None)
                if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
                    found.add(float(jnp.finfo(dtype).eps))
    return max(found)


def _as_numpy(array: Any) -> np.ndarray[Any, Any]:
    import jax
    import jax.numpy as jnp

    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(array))
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return np.asarray(array, np.complex128)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return np.asarray(array).astype(np.float64)
    return np.asarray(array).astype(np.int64)


def _random_array(info: Any, path: str, role: str, rounding: float) -> Any:
    """Returns a numpy array of random numbers (or jax random keys) for one argument of the program. The numbers depend
    only on the path, shape, dtype and role. Optimizer moments and gradient accumulators are zeros, and weights are
    scaled so that activations stay near 1.

    Args:
        info: object with the shape and dtype of the argument.
        path: pytree path of the argument, which seeds the random numbers.
        role: role of the argument, such as "optimizer"; "" if unknown.
        rounding: each float value is multiplied by 1 + rounding or 1 - rounding, at random. For one rounding error,
            give the machine epsilon; 0 leaves the values as they are.
    """
    import jax
    import jax.numpy as jnp

    random = np.random.default_rng(zlib.crc32(path.encode()))
    shape, dtype = info.shape, info.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0, impl=dtype._impl.name), shape)
    if role in _ZERO:
        return np.zeros(shape, dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return random.random(shape) < 0.5
    if not jnp.issubdtype(dtype, jnp.inexact):
        return random.integers(0, min(_INTEGERS, 2 ** (jnp.iinfo(dtype).bits - 1)), shape).astype(dtype)
    values = random.normal(size=shape)
    if role in WEIGHTS and len(shape) > 1:
        values /= math.sqrt(shape[-2])
    elif role in WEIGHTS or not shape:
        values = 1 + 0.1 * values  # scales of norms, biases, learning rates
    return (values * (1 + rounding * random.choice((-1, 1), shape))).astype(dtype)


# ---- a version of the source files, run in a process of its own ----------------------------------------------------


def run_version(
    reference: str, small: Mapping[str, str], changed: Mapping[Path, str] = {}, devices: int = 1
) -> SmallRun:
    """Runs a user's program at small sizes in a child process, on simulated CPU devices. Returns the results of the
    program.

    Args:
        reference: the program: `module:function` or `file.py:function`. The object may also be a
            `ProgramFactory`, such as the factory of a trainer's configs.
        small: parameter of the program's function, or key of the factory -> its value as text. The values make the
            program small.
        changed: path of a source file -> the text that is imported instead of it; {} runs the program unchanged.
        devices: number of simulated devices.

    Raises ReportError with a one-line message if the program cannot be imported, compiled for the CPU, or run.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "results.pickle")
        words = [reference, json.dumps(dict(small)), str(devices), str(out)]
        run_changed(__spec__.name, words, changed, out, {"JAX_PLATFORMS": "cpu"})
        return pickle.loads(out.read_bytes())


def main() -> None:
    """Entry point of the child process of `run_version`. Its arguments are the program, the JSON of the values that
    make the program small, the number of devices, and the file to which the results are written."""
    # The class that the other process unpickles, which is not that of the module __main__.
    from bytescope.memory.compare import equal_results

    reference, small, devices, out = sys.argv[1:]
    target = f"cpu:{devices}"
    platform.simulate_devices([target])
    try:
        run = equal_results.run_small(load_factory(reference)(json.loads(small), targets.parse(target)))
    except ReportError as error:
        sys.exit(f"error: {one_line(error, 300)}")
    Path(out).write_bytes(pickle.dumps(run))


if __name__ == "__main__":
    main()
