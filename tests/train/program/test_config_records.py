"""Shipped configs as records: what their docstrings state holds together, runs as written, and is what compiles."""

import ast
import dataclasses
import importlib.metadata
import re
import shlex

import pytest

from bytescope.memory import cli
from bytescope.memory.analysis import report_of
from bytescope.memory.devices import targets
from bytescope.memory.units import human, parse_bytes
from bytescope.train.launch.runtime import TRAIN_FRACTION
from bytescope.train.program.config_files import flatten, load
from bytescope.train.program.program import build
from bytescope.train.source import ConfigPath, find_source, shipped

NAMES = [path.stem for path in shipped()]
TRAINED = ["char", "gpt2_small", "tiny", "tiny_moe"]  # what two cores can train for a while, the GPT-2 shrunk
SIZE, VERSION, DATE = r"([\d.]+ [KMG]iB)", r"(\d[\w.]*\w)", r"20\d\d-\d\d-\d\d\."
MEMORY = re.compile(
    rf"Memory: peak {SIZE}, allocated {SIZE}, predicted in use {SIZE} per device"
    rf"(?:, of {SIZE} available)?; (?:CPU, )?jax {VERSION}, jaxlib {VERSION}"
    rf"(?:, cuDNN {VERSION})?, {DATE}"
)
LOSS = re.compile(
    r"([\d.]+) nats per byte on [\d,]+ held-out bytes .+ after ([\d,]+) updates of ([\d,]+) tokens; "
    rf"two CPU cores, .+; jax {VERSION}, {DATE}"
)
# The code for a CPU differs with the processor, and its buffers may.
CPU_TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True)
class Record:
    """What a docstring states. `sizes`: peak, allocated, predicted and, of GPUs, limit, in the words of a report;
    `versions`: distribution -> version that the sizes were compiled with."""

    commands: list[list[str]]
    hardware: str
    sizes: dict[str, str]
    versions: dict[str, str]
    loss: str

    def of(self, command: str) -> list[list[str]]:
        """The command lines of a command, as `cli.parse` takes them."""
        return [words[1:] for words in self.commands if words[1] == command]

    @property
    def target(self) -> targets.Target:
        """What the sizes were compiled for."""
        return targets.parse(cli.parse(self.of("report")[0]).target, TRAIN_FRACTION)


def read(name: str) -> Record:
    """The record of a shipped config, from its docstring alone."""
    text = ast.get_docstring(ast.parse(find_source(name, ConfigPath).path.read_text()))
    commands = re.findall(r"^    (bytescope .+)$", re.sub(r"\\\n\s*", "", text), re.M)
    prose = " ".join(text.split())
    memory = MEMORY.search(prose)
    assert memory, f"{name}: 'Memory:' lacks peak, allocated, predicted, versions or date"
    *sizes, jax, jaxlib, cudnn = memory.groups()
    versions = {"jax": jax, "jaxlib": jaxlib, "nvidia-cudnn-cu13": cudnn}
    return Record(
        [shlex.split(line) for line in commands],
        prose.partition("Hardware: ")[2].partition("Memory: ")[0].strip(),
        {what: size for what, size in zip(("peak", "allocated", "predicted", "limit"), sizes) if size},
        {package: version for package, version in versions.items() if version},
        prose.partition("Loss: ")[2],
    )


def other_versions(record: Record) -> list[str]:
    """What of the record's versions is not what is installed here."""
    found = {package: importlib.metadata.version(package) for package in record.versions}
    return [
        f"{package} {version}, here {found[package]}"
        for package, version in record.versions.items()
        if not f"{found[package]}.".startswith(f"{version}.")
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_record_is_whole(name):
    record = read(name)
    sizes = [parse_bytes(size) for size in record.sizes.values()]
    assert sizes == sorted(sizes) and record.hardware and len(record.of("report")) == 1 and record.of("train")
    if record.target.is_described:
        assert record.sizes["limit"] == human(record.target.limit_bytes) and "nvidia-cudnn-cu13" in record.versions
        count = "one" if record.target.n_devices == 1 else str(record.target.n_devices)
        assert record.hardware.startswith(f"{count} ")
    assert bool(LOSS.search(record.loss)) == (name in TRAINED)
    assert name in TRAINED or record.loss.startswith("not trained yet")


@pytest.mark.parametrize("name", NAMES)
def test_commands_of_a_record_are_of_its_config(name):
    for words in read(name).commands:
        args = cli.parse(words[1:])
        assert words[0] == "bytescope" and args.subject.name == name
        load(args.subject.name, args.subject.keys)


@pytest.mark.parametrize("name", TRAINED)
def test_a_loss_belongs_to_the_command_before_it(name):
    """The last command that trains is the one whose updates and tokens the loss states."""
    record = read(name)
    loss, updates, tokens = (float(figure.replace(",", "")) for figure in LOSS.search(record.loss).groups()[:3])
    args = cli.parse(record.of("train")[-1])
    config = load(args.config, args.overrides)
    assert updates == config.train.steps
    assert tokens == config.batch.micro * config.batch.accumulation * config.data.seq_len
    assert 0 < loss < 5.55  # nats of a guess: ln 256


@pytest.mark.parametrize(
    "name", ["tiny", pytest.param("llama_1b", marks=(pytest.mark.oracle("cuda"), pytest.mark.exhaustive))]
)
def test_the_recorded_bytes_are_the_compilers(name):
    record = read(name)
    if others := other_versions(record):
        pytest.skip(f"recorded with {', '.join(others)}")
    config, target = load(name), record.target
    report = report_of(
        build(config, target.devices()).compile_for_report(exact=True, pool_bytes=target.pool_bytes),
        target=target,
        config=flatten(config),
    )
    found = {"peak": report.peak_bytes, "allocated": report.allocated_bytes}
    if target.is_described:
        assert {what: record.sizes[what] for what in found} == {what: human(size) for what, size in found.items()}
    else:
        stated = {what: parse_bytes(record.sizes[what]) for what in found}
        assert found == pytest.approx(stated, rel=CPU_TOLERANCE)
