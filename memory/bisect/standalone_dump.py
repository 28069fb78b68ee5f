"""Dumps a program for a version of jax that bytescope does not support. Needs jax 0.4.30 or newer, and nothing else.

    python standalone_dump.py my_package.train:program OUT
    python standalone_dump.py path/to/train.py:program OUT --keys '{"width": 256}' --gpu h100.txt

The function returns either (step, arguments), optionally followed by a dict of options of jax.jit, or a traced or
lowered step of jax.stages. OUT then has `jaxpr.txt`, `versions.json` and a folder `dump` with XLA's files, among them
the HloProto of the compiled program with its buffer assignment. `bytescope report --hlo=OUT/dump` and `bytescope diff`
read this folder. `bytescope bisect --jax` runs this script for jax before 0.10.2. The script can be copied to another
machine.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

# Options in the dict of a program that jax.jit does not take.
OWN_OPTIONS = ("kwargs", "target", "config", "facts", "roles", "names", "tokens", "compiler_options")


def load(name: str) -> Any:
    """Imports and returns the function that `name` denotes: `module:function` or `file.py:function`."""
    where, _, function = name.rpartition(":")
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [os.getcwd(), *(path for path in sys.path if path != own)]
    if where.endswith(".py"):
        path = Path(where).resolve()
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None  # the name ends in .py
        module: ModuleType = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    found: Any = module
    for part in function.split("."):
        found = getattr(found, part)
    return found


def call(function: Any, keys: dict[str, Any]) -> Any:
    """Calls the user's function that makes the program, and returns its result. `keys`: name of a parameter -> its
    value. If a value is a string and the parameter's default is a bool or a number, the value is converted to the type
    of the default."""
    given = {}
    for key, value in keys.items():
        default = inspect.signature(function).parameters[key].default
        if isinstance(value, str) and isinstance(default, bool):
            value = value.lower() == "true"
        elif isinstance(value, str) and isinstance(default, (int, float)):
            value = type(default)(value.replace("_", ""))
        given[key] = value
    return function(**given)


def described_gpu(config: str) -> Any:
    """Returns a compile-only jax device for a GPU that is not in this machine. `config`: XLA's GpuTargetConfigProto
    as text."""
    from jax._src import xla_bridge
    from jax.experimental import topologies

    if "cuda" not in xla_bridge._backend_factories:  # jax drops the plugin on a machine without a driver
        xla_bridge._discover_and_register_pjrt_plugins()
    for plugin in ("xla_cuda13", "xla_cuda12"):
        if "cuda" not in xla_bridge._backend_factories and importlib.util.find_spec(f"jax_plugins.{plugin}"):
            importlib.import_module(f"jax_plugins.{plugin}").initialize()
    # Older versions of XLA refuse a text with fields that they do not know.
    old = re.sub(r"feature_extension: \w+|runtime_version \{[^}]*\}", "", config)
    try:
        topology = topologies.get_topology_desc("gpu", platform="cuda", topology="1x1x1", target_config=config)
    except Exception as error:
        if "GpuTargetConfigProto" not in str(error):
            raise
        topology = topologies.get_topology_desc("gpu", platform="cuda", topology="1x1x1", target_config=old)
    return topology.devices[0]


def main() -> None:
    """Command line of this script: compiles the program that the first argument names, and writes its jaxpr, the
    versions of jax and jaxlib, and XLA's dump to the folder that the second argument names."""
    parser = argparse.ArgumentParser(description="dump a program: jaxpr, HLO and buffer assignment")
    parser.add_argument("program", help="module:function or file.py:function")
    parser.add_argument("out", type=Path, help="folder for the files")
    parser.add_argument("--keys", type=json.loads, default={}, help="arguments of the function as JSON")
    parser.add_argument("--gpu", type=Path, help="compile for one GPU: file with XLA's GpuTargetConfigProto as text")
    args = parser.parse_args()
    dump = args.out / "dump"
    dump.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_dump_to={dump}", "--xla_dump_hlo_as_proto"]
    os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))

    import jax

    result = call(load(args.program), args.keys)
    jaxpr = ""
    if isinstance(result, tuple):
        step, arguments, *more = result
        options = dict(more[0]) if more else {}
        keywords = options.get("kwargs", {})
        if args.gpu is not None:
            device = described_gpu(args.gpu.read_text())
            placed = jax.sharding.SingleDeviceSharding(device)

            def place(x: Any) -> Any:
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed) if hasattr(x, "shape") else x

            arguments, keywords = jax.tree.map(place, (tuple(arguments), keywords))
        own = {key: value for key, value in options.items() if key in OWN_OPTIONS}
        is_stage = hasattr(step, "lower")
        jitted = step if is_stage else jax.jit(step, **{k: v for k, v in options.items() if k not in own})
        if hasattr(jitted, "trace"):
            traced = jitted.trace(*arguments, **keywords)
            jaxpr, lowered = str(traced.jaxpr), traced.lower()
        else:  # jax before 0.4.31
            lowered = jitted.lower(*arguments, **keywords)
        compiler_options = own.get("compiler_options")
    else:
        jaxpr = str(result.jaxpr) if hasattr(result, "jaxpr") else ""
        lowered = result if hasattr(result, "compile") else result.lower()
        compiler_options = None
    for path in dump.iterdir():  # small programs that the user's function ran
        path.unlink()
    lowered.compile(compiler_options=compiler_options)
    (args.out / "jaxpr.txt").write_text(jaxpr)
    versions = {"jax": jax.__version__, "jaxlib": importlib.import_module("jaxlib").__version__}
    (args.out / "versions.json").write_text(json.dumps(versions))
    if not list(dump.glob("*after_optimizations.hlo.pb*")):
        sys.exit(f"jax {jax.__version__} wrote no HloProto to {dump}")


if __name__ == "__main__":
    main()
