"""More than a hundred wrong command lines: one line on stderr, exit code 2, no traceback, nothing compiled."""

import json
import os
import sys

import pytest

from bytescope.memory import cli
from bytescope.memory.commands.registry import COMMANDS
from bytescope.memory.records.report_record import ReportRecord
from support.command_line import called
from support.models.mistakes import LONE, LONG, OF_MODELS

pytestmark = pytest.mark.quick

# What `bytescope calibrate` wrote on an H200.
CURVE = "[[1000.0, 1e12]]"
WIDTHS = f'{{"128": {CURVE}}}'
RATES = f"""{{"format": 1, "source": "measured", "peak_flops": {{"bf16": 1e15}}, "products": {{"bf16": {CURVE}}},
"attention": {{"forward": {WIDTHS}, "forward_causal": {WIDTHS}, "backward": {WIDTHS}, "backward_causal": {WIDTHS}}},
"memory": {CURVE}, "floor_seconds": 1e-6, "host_link_bytes_per_s": 1e10, "measured": {{"device": "NVIDIA H200"}}}}"""
# Mistakes with it, of every command that predicts.
OF_RATES = [
    ("--rates=", "the name is empty"),
    ("--rates=missing.json", "missing.json: No such file"),
    ("--rates=notes.md", "notes.md is not JSON"),
    ("--rates=cut.json", "cut.json is not JSON"),
    ("--rates=foreign.json", "foreign.json: the rates have format None"),
    ("--rates=old.json", "reads format 1"),
    ("--rates=no_memory.json", "memory is"),
    (f"--rates={LONE}", "give the file that bytescope calibrate wrote"),
]
# Mistakes with a folder of weights, of every command that takes a config.
OF_WEIGHTS = [
    ("hf:", "is empty"),
    ("hf:missing", "no folder missing: give a folder with config.json and model.safetensors, as hf download OWNER/mis"),
    ("hf:SmolLM2-135M", "as hf download OWNER/SmolLM2-135M --local-dir=SmolLM2-135M writes it"),
    ("hf:notes.md", "notes.md is a file"),
    ("hf:.", "no 'config.json'"),
    ("hf:~nobody-here/x", "no folder ~nobody-here/x"),
    (f"hf:{LONG}", "no folder"),
    (f"hf:{LONE}", "no folder"),
    ("hf:experts", "experts/config.json: the key num_local_experts"),
    ("hf:meta-llama/Llama-3.1-8B", "as hf download meta-llama/Llama-3.1-8B --local-dir=Llama-3.1-8B writes it"),
    ("hf:dynamic", "of the kind 'dynamic'"),
    ("hf:cut", "config.json is damaged"),
    ("hf:missing", "no folder"),
]
# Mistakes with files and folders of the user's own runs.
OF_RUNS = [
    ("", "the name of a file or folder of runs is empty"),
    ("good.csv,", "the name of a file or folder of runs is empty"),
    ("good.csv,good.csv", "good.csv:2 is given twice"),
    ("missing", "missing: No such file"),
    ("experts", "contains no run of bytescope train"),
    ("short_run", "short_run has 0 measured rows after its first 2 updates, but 3 are needed"),
    ("no_report", "no_report has no config or no memory report"),
    (f"{LONE}.csv", "give a CSV file or run directories"),
    ("notes.md", "is neither a column nor a config key"),
    ("no_target.csv", "no_target.csv has no column target: add it"),
    ("no_figure.csv", "no_figure.csv has no column seconds or bytes: add it"),
    ("no_rows.csv", "no_rows.csv has no runs"),
    ("misspelt.csv", "'second' is neither a column nor a config key: did you mean seconds?"),
    ("key.csv", "'model.layers' is neither a column nor a config key: did you mean"),
    ("twice.csv", "has the column target 2 times"),
    ("cells.csv", "cells.csv line 2 has not as many cells as the first line has columns (3)"),
    ("text.csv", "text.csv line 2: seconds=soon is not valid: give measured seconds"),
    ("zero.csv", "zero.csv line 3: seconds=0 is not valid"),
    ("nothing.csv", "nothing.csv line 2 has neither seconds nor bytes"),
    ("size.csv", "size.csv line 2: bytes=72 is not valid: give measured peak memory"),
    ("place.csv", "place.csv line 2: unknown target 'h101': did you mean h100"),
    ("nowhere.csv", "nowhere.csv line 2: target '' names no chip"),
    ("here.csv", "here.csv line 2: target 'local' names no chip"),
    ("cpus.csv", "cpus.csv line 2: target 'cpu:0' is not valid"),
    ("config.csv", "config.csv line 2: config=tinny is neither a shipped config"),
    ("value.csv", "value.csv line 2: model.n_layers=two has the wrong type"),
    ("refused.csv", "refused.csv line 2: "),
    ("code.csv", "code.csv line 2: config=evil.py is neither a shipped config, a run directory nor hf:FOLDER"),
    ("dotted.csv", "dotted.csv line 2: config=./evil is neither"),
    ("experts.csv", "experts.csv line 2: config=experts is neither"),
]
OTHER_DEVICE = ("measured on NVIDIA H200, but", "leave --rates out")
STEPS = """
import jax, jax.numpy as jnp

WIDE = 2**40

def leave(state):
    raise SystemExit(3)

def exits():
    return leave, (jnp.ones(3),)

def update():
    return lambda state: state + 1, (jnp.ones(3),)

def huge():
    return lambda state: state + 1, (jax.ShapeDtypeStruct((WIDE, WIDE), jnp.float32),)

def widened():
    return lambda state: jax.jit(lambda s: s[0] * jnp.zeros((WIDE, WIDE)))(state).sum(), (jnp.ones(3),)
"""
FILES = {
    "good.csv": "config,target,seconds\ntiny,h100,0.5\n",
    "two_chips.csv": "config,target,seconds\ntiny,h100,0.5\ntiny,a100-80g,0.5\n",
    "only_bytes.csv": "config,target,bytes\ntiny,h100,2GiB\n",
    "no_target.csv": "config,seconds\ntiny,0.5\n",
    "no_figure.csv": "config,target\ntiny,h100\n",
    "no_rows.csv": "config,target,seconds\n",
    "misspelt.csv": "config,target,second\ntiny,h100,0.5\n",
    "key.csv": "config,target,seconds,model.layers\ntiny,h100,0.5,2\n",
    "twice.csv": "config,target,seconds,target\ntiny,h100,0.5,h100\n",
    "cells.csv": "config,target,seconds\ntiny,h100,0.5,more\n",
    "text.csv": "config,target,seconds\ntiny,h100,soon\n",
    "zero.csv": "config,target,seconds\ntiny,h100,1\ntiny,h100,0\n",
    "nothing.csv": "config,target,seconds,bytes\ntiny,h100,,\n",
    "size.csv": "config,target,seconds,bytes\ntiny,h100,1,72\n",
    "place.csv": "config,target,seconds\ntiny,h101,1\n",
    "nowhere.csv": "config,target,seconds\ntiny,,1\n",
    "here.csv": "config,target,seconds\ntiny,local,1\n",
    "cpus.csv": "config,target,seconds\ntiny,cpu:0,1\n",
    "config.csv": "config,target,seconds\ntinny,h100,1\n",
    "value.csv": "config,target,seconds,model.n_layers\ntiny,h100,1,two\n",
    "refused.csv": "config,target,seconds,remat.policy\ntiny,h100,1,ful\n",
    "code.csv": "config,target,seconds\nevil.py,h100,1\n",
    "dotted.csv": "config,target,seconds\n./evil,h100,1\n",
    "experts.csv": "config,target,seconds\nexperts,h100,1\n",
    "evil.py": "raise SystemExit('a row of a table was executed')\n",
    "no_report/metrics.jsonl": "",
    "short_run/config.json": '{"config": {"model.d_ff": 384}, "global_rows": 8, "data": "a"}',
    "short_run/metrics.jsonl": '{"step": 1, "loss": 1, "step_time_s": 1.0}\n',
    "short_run/memory.json": json.dumps(ReportRecord(1, 1, {}, target={"name": "local", "platform": "cpu"}).to_json()),
    "budgets.toml": '[tool.bytescope.budgets]\nmlp = { program = "a:b", target = "cpu" }\n',
    "exits.py": "import sys\nsys.exit(7)\ndef get_config(): ...\n",
    "interrupts.py": "raise KeyboardInterrupt\ndef get_config(): ...\n",
    "empty.py": "",
    "three.py": "def get_config():\n    return 3\n",
    "syntax.py": "def f(:\n",
    "imports.py": "import no_such_module\ndef get_config(): ...\n",
    "two_lines.py": "raise RuntimeError('two\\nlines [/b]')\ndef get_config(): ...\n",
    "recursion.py": "def get_config():\n    get_config()\n",
    "step.py": STEPS,
    "notes.md": "# not a config\n",
    "step.hlo.txt": "HloModule jit_step\n",
    "text.txt": "some text\n" * 50,
    "records.jsonl": '{"body": "x"}\n',
    "experts/config.json": '{"model_type": "llama", "num_local_experts": 8}',
    "cut/config.json": '{"model_type": ',
    "dynamic/config.json": """{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 64,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}""",
    "bad.npy": "not an array",
    "foreign.json": "{}",
    "rates.json": RATES,
    "cut.json": RATES[:200],
    "no_memory.json": RATES.replace('"memory": [[1000.0, 1e12]]', '"memory": []'),
    "old.json": RATES.replace('"format": 1', '"format": 0'),
    "inf.json": '{"schema": 1, "peak_bytes": 1, "allocated_bytes": 1, "breakdown": {}, "limit_bytes": Infinity}',
}

HUGE = 10**30
# Command -> an integer flag of each kind, with a count that no run reaches.
COUNTS = {
    "report": ("tiny --generate --sequences", "tiny --processes-per-node"),
    "generate": ("missing --prompt=x --max-tokens", "missing --prompt=x --top-k", "missing --prompt=x --tensor"),
    "train": ("tiny --processes", "tiny --process"),
    "prepare": ("--source=text.txt --out=o --shard-tokens", "--source=text.txt --out=o --skip-bad"),
    "quantize": ("missing out --awq=text.txt --samples",),
    "fit": ("tiny cpu --batch-tokens", "tiny cpu --max-compiles"),
    "front": ("tiny cpu --budgets",),
    "compare": ("tiny cpu --jobs",),
    "estimate": ("llama_8b --micro-batches=4 --stages",),
}
# The same, with counts that their flags refuse further below.
LARGE_COUNTS = {
    "report": (
        ("tiny --generate --sequences=99999", "--sequences=99999 is too large: give at most 65536"),
        ("tiny --generate --tensor=5000", "--tensor=5000 is too large: give at most 4096"),
        ("tiny --processes-per-node=5000", "--processes-per-node=5000 is out of range"),
        ("tiny cpu:999999", "target 'cpu:999999' has 999,999 devices: give at most 4,096"),
        ("tiny h100:99999x8", "target 'h100:99999x8' has 799,992 devices: give at most 65,536"),
        (
            "tiny h100:4 --config.mesh.stage=4 --config.batch.mode=scan --config.batch.accumulation=99999",
            "a pipeline of 4 stages x 99999 micro-batches x 1 chunks is too large: give fewer",
        ),
        ("tiny --config.model.n_layers=99999", "model.n_layers=99999 is too large: give at most 65536"),
        ("tiny --config.data.workers=9999", "data.workers=9999 is too large: give at most 4096"),
        ("tiny --config.data.prefetch=99999", "data.prefetch=99999 is too large: give at most 65536"),
        (
            "tiny --config.batch.accumulation=9999999",
            "9999999 micro-steps per update (batch.accumulation) are too many",
        ),
        (
            "tiny --config.batch.tokens=549755813888",
            "micro-steps per update (batch.accumulation) are too many: give at",
        ),
        ("tiny --config.batch.tokens=2000000000000", "is too large: give at most 1099511627776"),
    ),
    "fit": (
        ("tiny cpu --batch-tokens=999999999999", "is not a multiple of the sequence length 128"),
        (
            "tiny cpu --batch-tokens=1099511627776 --config.batch.micro=8",
            "needs more than 1048576 micro-batches per update: give at most 1073741824",
        ),
    ),
    "generate": (
        ("missing --prompt=x --top-k=5000000000", "--top-k=5000000000 is too large: give at most 2147483647"),
    ),
    "front": (("tiny cpu --budgets=9999", "--budgets=9999 is out of range: give at least 2 and at most 1000"),),
    "calibrate": (("--seconds=1e30", "--seconds=1e+30 is out of range"),),
}
# Command -> its mistakes: the words after it, and what the line has to mention.
MISTAKES = {
    "": [
        ("", "no command"),
        ("reprot", "unknown command 'reprot': did you mean report?"),
        ("xyzzy", "choose one of report, explain, "),
        ("REPORT", "did you mean report?"),
        ("trane", "did you mean train?"),
        (LONE, "unknown command"),
        ("--jobs", "no command"),
        ("--versoin", "unknown flag '--versoin': did you mean --version?"),
        ("completion bash", "completion is gone: use bytescope --print-completion bash"),
        ("--print-completion=bsh", "did you mean bash?"),
        ("--print-completion", "choose one of bash, zsh, tcsh"),
        ("pipeline --stages=4", "pipeline is gone: use bytescope estimate SUBJECT TARGET --stages=P"),
        ("validate --set=jax", "validate is gone: use bytescope calibrate --runs=FILE|DIRECTORY"),
    ],
    "report": [
        ("tiny --tensor=2", "--tensor=2 is only valid with --generate"),
        ("tiny --kv=int8", "--kv=int8 is only valid with --generate"),
        ("tiny --generate --run", "--run cannot be used with --generate"),
        ("tiny --generate --allocators", "--allocators cannot be used with --generate"),
        ("tiny cpu --allocators", "cpu:1 has none of jax's GPU allocators: compile for a GPU"),
        ("tiny --generate --formulas", "--formulas cannot be used with --generate"),
        ("tiny --generate --export=x", "--export cannot be used with --generate"),
        ("--generate", "no config"),
        ("tiny --generate --weights=int4", "--weights"),
        ("tiny --weights=int4_g32", "--weights=int4_g32 is only valid with --generate"),
        ("tiny_moe --generate --weights=int4_g32", "a model with experts can only be read unquantized"),
        ("tiny --generate --weights=int4_g64 --config.model.d_ff=96", "cannot be split into blocks of 64"),
        ("tiny --generate --kv=int4", "did you mean int8?"),
        ("a:b --generate", "--generate cannot be used with a:b"),
        ("tiny --generate --tensor=0", "--tensor=0"),
        ("", "no config"),
        ("llama8b", "did you mean llama_8b?"),
        ("notes.md", "not a config"),
        ("three.py", "returns int"),
        ("syntax.py", "SyntaxError"),
        ("recursion.py", "RecursionError"),
        (".", "is a folder"),
        (LONG, "no config file"),
        ("~nobody-here/x", "there is no file or folder ~nobody-here/x"),
        (LONE, "no config file"),
        ("a\x1b[31m", "no config file"),
        ("[/b]", "there is no file or folder [/b]: give a path that exists"),
        ("h100:8", "this is a target, which follows a config"),
        ("tiny h10", "did you mean h100"),
        ("tiny h100:", "after the colon"),
        ("tiny h100:0", "count such as 8"),
        ("tiny h100:9", "h100:2x8"),
        ("tiny h100:2x2x2", "a host has at most"),
        ("tiny v5e:3x3", "2 axes"),
        ("tiny local:2", "no count"),
        ("tiny cpu:2x2", "have a count and no shape"),
        (f"tiny {LONE}", "unknown target"),
        ("tiny h100 more", "unrecognized arguments: more"),
        ("tiny more h100", "unrecognized arguments: more; see bytescope report --help"),
        ("tiny --config=char", "bytescope report has no --config: give the config as the first word"),
        ("tiny batch.mico=4", "batch.mico is an unknown key: did you mean batch.micro?"),
        ("tiny h100:8 -- batch.micro=4", "the words after -- are arguments of a script"),
        ("tiny h100 h200", "h200 is a second target: give one; to compare targets, run bytescope compare SUBJECT"),
        ("./tiny", "there is no file or folder ./tiny: did you mean tiny?"),
        ("gpt:7e9", "gpt:7e9 has only formulas: run bytescope estimate gpt:7e9"),
        ("step.py:", "step.py: names nothing after the colon: write step.py:NAME"),
        ("foreign.json h100", "h100 cannot be used with a saved report, which has a target: leave it out"),
        ("short_run h100:8", "h100:8 cannot be used with a saved report, which has a target: leave it out"),
        ("short_run batch.micro=2", "batch.micro=2 cannot be used with short_run, which is written already"),
        ("tiny h100 --config.model.num_layer=2", "did you mean model.n_layers?"),
        ("tiny h100 --config.modl.n_layers=2", "did you mean model.n_layers?"),
        ("tiny h100 --config.learning_rate=2", "did you mean optimizer.learning_rate?"),
        ("tiny h100 --config.model=2", "is a group"),
        ("tiny h100 --config.model.n_layers", "has no value"),
        ("tiny h100 --config.model.n_layers=", "give a value of type int"),
        ("tiny h100 --config.=2", "unknown key"),
        (f"tiny h100 --config.{LONE}=2", "unknown key"),
        (f"tiny h100 --config.train.steps={'9' * 5000}", "give a value of type int"),
        ("tiny h100 --target=h200", "has no --target: give the target after the subject"),
        ("tiny --hmtl=x", "--html"),
        ("tiny --json=/no/such/folder/x.json", "no folder"),
        ("tiny h100 --export=notes.md", "notes.md is a file; give a new or existing folder"),
        ("tiny h100 --export=notes.md/x", "notes.md is a file"),
        ("dump:notes.md --export=x --json=x", "--json and --export both name x"),
        ("tiny --json=.", "is a folder"),
        ("tiny --json=", "--json"),
        ("tiny --html=~nobody-here/x", "names a user that does not exist"),
        ("tiny --budget=3GiB", "--budget=3GiB: bytescope fit --budget=SIZE searches within a budget"),
        ("--budget", "--budget: bytescope fit --budget=SIZE searches"),
        ("h100:8 tiny", "h100:8 is a target, which follows the config: write tiny h100:8"),
        *((f"tiny {name}", "did you mean h100:8?") for name in ("H100x8", "8xh100", "h100-8", "h1008")),
        ("tiny h10:2x8@0.9", "did you mean h100:2x8@0.9"),
        ("tiny qqq", "unknown target 'qqq': give the name of a chip. Targets: local, cpu, h200"),
        ("tiny h100@2", "@2 is not a fraction of a GPU's memory; give more than 0 and at most 1"),
        ("tiny h100@half", "@half is not a fraction"),
        ("tiny cpu@0.5", "@ sets the memory fraction of a GPU that is not present; leave @0.5 out"),
        ("tiny h100 --host-memory=72Gb", "'72Gb' is a number of bits, not bytes: write 72GB for bytes"),
        ("tiny h100 --width=3", "did you mean --config.model.d_model?"),
        ("three:get_config --width=3", "--width=3; see bytescope report --help"),
        ("missing.pb", "no file"),
        ("dump:notes.md", "not an HloProto"),
        ("dump:.", "no *after_optimizations.hlo.pb in"),
        ("step.hlo.txt", "HLO as text"),
        ("dump:", "dump: names nothing after the colon: write dump:NAME"),
        (f"dump:{LONG}", "x...x"),
        ("tiny dump:notes.md", "unknown target"),
        ("exits", "no config file"),
        (f"{LONG}:f", "x...x"),
        (f"{LONE}:f", "no config file"),
        ("a\x1b[31m:f", "no config file"),
        ("notes.md:f", "there is no module notes"),
        ("missing.py:f", "the file missing.py does not exist"),
        ("no_such_module:f", "no module no_such_module"),
        ("exits:f", "SystemExit: 7"),
        ("syntax.py:f", "SyntaxError"),
        ("imports.py:f", "no_such_module"),
        ("two_lines.py:f", "two"),
        ("recursion.py:get_config", "RecursionError"),
        ("three.py:get_config", "returns int"),
        ("three:get_confg", "did you mean get_config?"),
        ("step:exits", "the step cannot be compiled: SystemExit: 3 (step.py:"),
        ("step:huge", "an array of 1099511627776 x 1099511627776 float32 is too large for XLA"),
        ("step:widened", "an array of 1099511627776 x 1099511627776 float32 is too large for XLA"),
        (
            "tiny --config.model.d_ff=2147483647 --config.model.d_model=2147483520",
            "an array of 4 x 2147483647 x 2147483520 float32 is too large for XLA",
        ),
        ("tiny --config.model.vocab_size=2147483647", "give at most 2147483520"),
        ("--program=three:get_config", "give MODULE:FUNCTION or FILE.py:FUNCTION as the first word"),
        ("three:get_config tiny", "unknown target 'tiny'"),
        ("three:get_config h2000", "did you mean h200?"),
        ("three:get_config --formulas", "needs a config"),
        ("three:get_config --config.train.steps=3", "three:get_config has no parameter train.steps"),
        ("--hlo=notes.md", "give the dump, a file or a folder, as the first word"),
        ("tiny h100 --seq-len=64", "did you mean --config.data.seq_len?"),
        ("dump:notes.md h2000", "did you mean h200?"),
        ("dump:notes.md --run", "needs a config"),
        ("dump:notes.md --try-remedies", "--try-remedies cannot be used with notes.md"),
        ("dump:notes.md --config.train.steps=3", "notes.md, which is compiled already: leave it out"),
    ],
    "names": [
        ("", "no config"),
        ("tyni", "did you mean tiny?"),
        ("tiny h100 --json=/no/such/folder/x", "no folder"),
        ("tiny h100 --formulas", "unrecognized"),
        ("tiny a:b", "unknown target"),
        ("step.py:exits train.steps=1", "step.py:exits has no parameter train.steps"),
        ("step.py:exits cpu", "step.py:exits: SystemExit: 3"),
        ("step.py:update cpu", "step.py:update: the loss must return a scalar"),
    ],
    "diff": [
        ("", "required"),
        ("foreign.json", "required"),
        ("missing.json foreign.json", "cannot read"),
        ("notes.md notes.md", "not JSON"),
        ("foreign.json foreign.json", "not a memory report"),
        ("inf.json inf.json", "Infinity"),
        (". .", "cannot read"),
        (f"{LONG} foreign.json", "cannot read"),
        (f"{LONE} foreign.json", "cannot read"),
        ("a b --fail-above=-5", "0 or more"),
        ("a b --fail-above=nan", "--fail-above"),
        ("a b --fail-above=five", "--fail-above"),
        ("/dev/zero foreign.json", "cannot read /dev/zero: It is a device"),
        ("a b --githib", "did you mean --github?"),
        ("a b --github=x", "--github"),
        ("a b --fail-above=", "--fail-above"),
        ("a b c", "unrecognized"),
        ("a b --config.train.steps=1", "takes no"),
    ],
    "explain": [
        ("missing.log", "cannot read"),
        (".", "cannot read .: Is a directory"),
        (LONG, "cannot read"),
        (LONE, "cannot read"),
        ("/dev/zero", "cannot read /dev/zero: It is a device"),
        ("notes.md --json=/no/such/folder/x", "no folder"),
        ("notes.md --html=.", "is a folder"),
        ("notes.md report:missing.json", "cannot read"),
        ("notes.md report:notes.md", "not JSON"),
        ("notes.md tyni", "did you mean tiny?"),
        ("notes.md --target=h100", "has no --target: give the target after the log and the subject"),
        ("notes.md tiny h10o", "did you mean h100"),
        ("notes.md tiny --config.model.n_layer=2", "did you mean model.n_layers?"),
        ("notes.md --config.model.n_layers=2", "needs a config"),
        ("notes.md --program=x", "bytescope explain LOG SUBJECT TARGET"),
        ("notes.md --jsn=x", "did you mean --json?"),
        ("notes.md more.log", "no config file 'more.log'"),
        ("notes.md -- true", "cannot be combined"),
        ("--", "no command is given after --"),
        ("-- /no/such/program", "cannot run /no/such/program"),
    ],
    "trace": [
        ("--trace=missing", "required"),
        ("missing.xplane.pb", "there is no file or folder missing.xplane.pb: write a trace with"),
        ("foreign.json --trace=notes.md", "not a profiler trace"),
        ("foreign.json --trace=.", "no *.xplane.pb"),
        (f"foreign.json --trace={LONG}", "no file or folder"),
        (f"foreign.json --trace={LONE}", "no file or folder"),
        ("missing.xplane.pb --json=/no/such/folder/x", "no folder"),
        ("missing.xplane.pb --config.train.steps=1", "report --trace takes no"),
    ],
    "saved": [
        ("foreign.json", "not a memory report"),
        ("foreign.json --html=", "the name is empty"),
        ("foreign.json --html=/no/such/folder/x", "no folder"),
        (
            "foreign.json --config.train.steps=1",
            "train.steps=1 cannot be used with foreign.json",
        ),
    ],
    "estimate": [
        ("", "no config"),
        ("gpt:", "gpt: has no number of parameters"),
        ("gpt:nan", "gpt:nan has"),
        ("gpt:inf", "gpt:inf has"),
        ("gpt:-3", "gpt:-3 has"),
        ("gpt:1e400", "gpt:1e400"),
        ("gpt:7x", "gpt:7x has"),
        ("gpt:7e9 model.n_layers=0", "model.n_layers=0"),
        ("gpt:7e9 model.n_layers=many", "model.n_layers=many has the wrong type"),
        ("gpt:7e9 model.vocab_size=0", "rows of the vocabulary: 0 is out of range"),
        (
            "gpt:7e9 model.n_layers=2 model.d_model=64",
            "gpt:7e9 contradicts model.n_layers, model.d_model: a model of this shape",
        ),
        ("gpt:7e9 model.d_model=3", "gpt:7e9 with model.d_model=3 makes 64,814,815 layers: give at most 65,536"),
        ("gpt:7e9 model.n_heads=50000", "has 32,801,218,560 parameters; give gpt:32801218560, or leave a key out"),
        ("gpt:7e9 model.vocab_size=900000000", "gpt:7e9 contradicts model.vocab_size"),
        ("gpt:7e9 model.d_model=4096 model.n_heads=3", "n_heads=3 does not divide model.d_model=4096: give a divisor"),
        ("gpt:7e9 optimizer.name=adam", "optimizer.name='adam' has no formula"),
        ("gpt:7e9 precision.preset=", "precision.preset='' has no formula"),
        ("tiny --params=7e9", "estimate has no --params: give gpt:N as the first word"),
        ("tiny h100:8 mesh.fsdp=2", "the mesh of tiny has 2 devices, but h100:8 has 8"),
        ("tiny h100 more", "unrecognized arguments: more; see bytescope estimate --help"),
        ("tiny more", "unknown target 'more'"),
        ("gpt:7e9 --html=.", "is a folder"),
        ("gpt:7e9 train.stops=1", "did you mean train.steps?"),
        (f"gpt:{LONE}", "gpt:"),
    ],
    "compare": [
        ("", "no config"),
        ("tiny --remat=none,foo", "choose one of none"),
        ("tiny --remat=none,ful", "did you mean full"),
        ("tiny --config.remat.layers=0-2:q_rott", "did you mean q_rot"),
        ("tiny --remat=", "--remat="),
        ("tiny --remat=none,,full", "--remat=none,,full has an empty policy: write --remat=P1,P2"),
        ("tiny --remat=custom()", "custom() is not a remat policy: write"),
        ("tiny --remat=custom(v)+save(q)", "custom(v)+save(q) is not a remat policy: write"),
        ("tiny --remat=custom(q_rott)", "did you mean q_rot"),
        ("tiny --remat=custom(", "custom"),
        ("tiny --remat=full(q_rot)", "custom(NAME,NAME)"),
        ("tiny --grid=", "--grid="),
        ("tiny --grid=train.steps", "--grid=KEY=V1,V2"),
        ("tiny --grid=data.seq_len=", "--grid=data.seq_len="),
        ("tiny --grid=data.seqlen=64", "did you mean data.seq_len"),
        ("tiny --grid=data.seq_len=64,many", "give a value of type int"),
        ("--grid=config=tyni,char", "did you mean tiny"),
        ("tiny --grid=target=h100,h2000", "did you mean h200"),
        ("tiny --grid=optimizer.name=adamw,adam", "did you mean adamw"),
        ("tiny --grid=precision.preset=fp23", "did you mean fp32"),
        ("tiny --jobs=0", "--jobs=0"),
        ("tiny --jobs=", "--jobs"),
        ("three:get_config --width=3,4", "did you mean --grid=width=3,4?"),
        ("tiny h100 --measure", "is another machine"),
        ("tiny --html=/no/x/y", "no folder"),
        ("tiny --config.mesh.strategy=zero4", "did you mean zero"),
        ("tiny --config.model.attention=nave", "did you mean naive"),
    ],
    "levers": [
        ("", "no config"),
        ("tiny --savings=", "--savings="),
        ("tiny --savings=,", "unknown saving ''"),
        ("tiny --savings=bf17", "unknown saving 'bf17': did you mean bf16? Else choose one of fp32"),
        ("tiny --savings=full --config.remat.policy=none", "no saving can be applied: full: --config.remat.policy"),
        ("tiny --savings=bf16,bf16", "twice"),
        ("tiny --jobs=-1", "--jobs=-1"),
        ("h100:8", "this is a target, which follows a config"),
        ("tiny h10", "did you mean h100"),
        ("tiny --config.optimizer.name=loin", "did you mean lion"),
    ],
    "front": [
        ("", "no config"),
        ("tiny --budgets=1", "--budgets=1 is out of range"),
        ("tiny --budgets=many", "--budgets"),
        ("tiny --from=nan", "--from"),
        ("tiny --from=inf", "--from"),
        ("tiny --to=-3GiB", "--to"),
        ("tiny --to=", "--to"),
        ("tiny --to=1e999GiB", "--to"),
        (f"tiny --to={'9' * 400}GiB", "--to"),
        ("tiny --from=0", "--from=0 is too small: give more than 0"),
        ("tiny --to=much", "--to: 'much' is not a valid size"),
        ("tiny --from=3GiB --to=2GiB", "--from=3GiB is more than --to=2GiB"),
        ("tiny --cost=tme", "did you mean time?"),
        ("tiny --config.remat.policy=full", "chooses the remat plan"),
        ("tiny --jobs=0", "--jobs=0"),
    ],
    "fit": [
        ("", "no config"),
        ("tiny --vary=", "--vary="),
        ("tiny --vary=,", "--vary=,"),
        ("tiny --lora --config.lora.rank=0", "leave one out"),
        ("tiny --vary=remt", "did you mean remat?"),
        ("tiny --budget=nan", "--budget"),
        ("tiny --budget=inf", "--budget"),
        ("tiny --budget=-3GiB", "--budget"),
        ("tiny --budget=", "--budget"),
        ("tiny h100 --budget=0", "--budget=0 is out of range: a device has 72.78 GiB available; give more than 0"),
        ("tiny h100 --budget=100GiB", "--budget=100GiB is out of range: a device has 72.78 GiB available"),
        ("tiny --budget=72Gi", "--budget"),
        ("tiny --budget=72Gb", "--budget: '72Gb' is a number of bits, not bytes: write 72GB for bytes"),
        ("tiny --budget=72Gib", "write 72GiB for bytes"),
        (f"tiny --budget={'9' * 400}GiB", "--budget"),
        ("tiny --batch-tokens=0", "--batch-tokens=0"),
        (
            "tiny --batch-tokens=7",
            "--batch-tokens=7 is not a multiple of the sequence length 128: give a multiple of 128",
        ),
        (
            "tiny h100 --batch-tokens=256 --config.batch.micro=8",
            "over 1 ranks with batch.micro=8: give --batch-tokens=1024",
        ),
        (
            "tiny h100 --measure",
            "--measure runs on this machine, but target h100 is another machine: leave the target out",
        ),
        ("tiny --max-compiles=0", "--max-compiles=0"),
        ("tiny --max-seconds=nan", "--max-seconds=nan"),
        ("tiny --max-seconds=-1", "--max-seconds=-1"),
        ("tiny --jobs=0", "--jobs=0"),
        ("tiny --config.optimizer.name=adam", "did you mean adamw"),
    ],
    "list": [
        ("--grep=qqq", "no row"),
        ("key", "did you mean keys?"),
        ("keys --grep=qqq", "no row that bytescope list keys prints contains this word"),
        ("keys --grep", "expected one argument"),
        ("configs tiny", "unrecognized"),
        (f"configs --grep={LONE}", "contains this word"),
        ("configs --grep=[/b]", "--grep=[/b]"),
        ("configs --config.train.steps=1", "takes no"),
        ("targets --gerp=x", "did you mean --grep?"),
    ],
    "audit": [
        ("", "no config: give"),
        ("tiny step.pb", "unknown target"),
        ("steps.py", "there is no file or folder steps.py: give a path that exists"),
        ("tiny h100 --stict", "did you mean --strict?"),
        ("step.pb --passes", "--passes cannot be used with step.pb"),
        ("tiny --fix", "report has no --fix: edit the source as the report's finding says"),
        ("tiny --fix-sharding", "add the sharding constraint that"),
        ("tiny --small=model.n_layers=2", "report has no --small"),
        ("tiny --write", "report has no --write"),
        ("tiny --json=missing/a.json", "there is no folder missing"),
        ("maxtext:llama2-7b --config.train.steps=1", "train.steps=1 is not a key of the trainer with its value: write"),
    ],
    "mcp": [
        ("--skills", "did you mean --skill?"),
        ("stdio", "unrecognized"),
        ("--config.data.seq_len=8", "takes the config in each call"),
    ],
    "train": [
        ("tyni", "did you mean tiny?"),
        ("notes.md", "not a config"),
        ("exits.py", "SystemExit: 7"),
        ("interrupts.py", "KeyboardInterrupt"),
        ("empty.py", "empty.py is a script: bytescope train takes a config; bytescope report empty.py reports on it"),
        ("step.py:update", "step.py:update is a function: bytescope train takes a config"),
        ("short_run", "short_run is a run directory: continue the run with bytescope train --workdir=short_run"),
        ("step.hlo.txt", "step.hlo.txt is an HLO dump, which is compiled already"),
        ("imports.py", "no_such_module"),
        ("two_lines.py", "two lines [/b]"),
        ("config:", "config: names nothing after the colon"),
        ("tiny h100:8", "h100:8 is a target, which bytescope train does not take: leave it out"),
        ("h100:8", "h100:8 is a target, which bytescope train does not take: leave it out"),
        ("tiny --target=h100", "bytescope train has no --target: it trains on the devices of this machine"),
        ("tiny char", "unrecognized"),
        ("tiny --workdir=", "--workdir"),
        ("tiny --workdir=~nobody-here/x", "names a user that does not exist"),
        ("tiny --profile=x", "--profile=x"),
        ("tiny --profile=5-3", "ends before"),
        ("tiny --budget=3GiB", "is only valid with --fit"),
        ("tiny --workdir=a/[run1]", "characters * ? [,"),
        ("tiny --workdir=a\udcff", "is not valid UTF-8"),
        ("tiny --wrokdir=x", "did you mean --workdir?"),
        ("--steps=3", "did you mean --config.train.steps?"),
        ("tiny --batch-size=3", "did you mean --config.batch.micro?"),
        ("tiny --config.model.width=3", "did you mean model.d_model?"),
        ("tiny --config.data.format=chats", "did you mean chat?"),
        ("tiny --config.data.skip_bad=-1", "0 or more"),
        ("tiny --config.data.loss_on=answers", "data.loss_on"),
        ("tiny --config.data.too_long=cat", "did you mean cut?"),
        ("tiny --show-data --config.data.source=missing", "not a file or folder"),
        ("tiny --show-data --config.data.format=chat", "has no records"),
        ("tiny --show-data=x", "--show-data"),
        (
            "tiny --show-data --config.data.format=pairs --config.data.source=records.jsonl",
            'line 1: "prompt" is missing',
        ),
        ("tiny --show-data --config.remat.policy=ful", "did you mean full?"),
        ("tiny --config.data.special_tokens=parsed", "did you mean parse?"),
        ("tiny --config.train.stepz=3", "did you mean train.steps?"),
        ("tiny --config.train.steps=many", "give a value of type int"),
        ("tiny --config.remat.policy=ful", "choose one of none, full"),
        ("tiny --config.model.attention=cudnn", "not on cpu"),
        ("tiny --config.mesh.data=3", "mesh.data=3 does not divide"),
        ("tiny --config.data.seq_len=4097", "model.max_seq_len="),
        ("tiny --config.model.vocab_size=100", "model.vocab_size"),
        ("tiny --config.data.source=/nowhere", "/nowhere"),
        ("tiny --config.data.tokenizer=/nowhere.json", "/nowhere.json"),
        ("tiny --process=0", "missing"),
        *(
            (f"tiny --coordinator={text} --process=0 --processes=2", f"--coordinator={text} is not an address")
            for text in ("1:2:3", "[node1]:4567", "a/b:1", "::1", "node1:٣")
        ),
        ("tiny --timeout=nan", "--timeout"),
        ("[/b]", "there is no file or folder [/b]: give a path that exists"),
    ],
    "prepare": [
        ("", "required"),
        ("--source=text.txt", "required"),
        ("--source=missing --out=o", "not a file or folder"),
        ("--source= --out=o", "not a file"),
        ("--source=~nobody-here/x --out=o", "not a file"),
        (f"--source={LONG} --out=o", "x...x"),
        (f"--source={LONE} --out=o", "not a file"),
        ("--source=bad.npy --out=o", "shards already"),
        ("--source=text.txt --out=", "--out"),
        ("--source=text.txt --out=notes.md", "is a file"),
        ("--source=text.txt --out=experts", "--out=experts already contains config.json: give a new or empty folder"),
        ("--source=text.txt --out=notes.md/x", "Not a directory"),
        (f"--source=text.txt --out={LONG}", "File name too long"),
        ("--source=text.txt --out=~nobody-here/x", "names a user that does not exist"),
        ("--source=text.txt --out=o --tokenizer=missing", "--tokenizer"),
        ("--source=text.txt --out=o --special-tokens=pars", "--special-tokens"),
        ("--source=records.jsonl --out=o", "records.jsonl line 1: the field 'text'"),
        ("--source=records.jsonl --out=o --skip-bad=-1", "--skip-bad=-1"),
        ("--source=records.jsonl --out=o --skip-bad=few", "--skip-bad"),
        ("--source=text.txt --out=o --tokenizer=~nobody-here/x", "--tokenizer"),
        (f"--source=text.txt --out=o --tokenizer={LONG}", "--tokenizer"),
        ("--source=text.txt --out=o --tokenizer=notes.md", "--tokenizer"),
        ("--source=text.txt --out=o --shard-tokens=0", "--shard-tokens=0"),
        ("--source=text.txt --out=o --shard-tokens=many", "--shard-tokens"),
        ("--sauce=text.txt --out=o", "--source"),
        ("--source=text.txt --out=o --config.train.steps=1", "unrecognized"),
    ],
    **OF_MODELS,
}
for command in ("report", "compare", "levers", "front", "fit"):
    MISTAKES[command] += [(f"tiny h200 {words}", message) for words, message in OF_RATES]
    MISTAKES[command] += [
        (f"tiny {target} --rates=rates.json", message)
        for target in ("h100:8", "cpu:2", "v5e:2x2")
        for message in OTHER_DEVICE
    ]
for command in ("report", "names", "estimate", "compare", "levers", "front", "fit", "train"):
    MISTAKES[command] += OF_WEIGHTS
for command, words in (
    ("report", "tiny"),
    ("explain", "notes.md"),
    ("estimate", "tiny"),
    ("compare", "tiny"),
    ("levers", "tiny"),
    ("front", "tiny"),
    ("fit", "tiny"),
    ("fit", "step.py:update"),
    ("audit", "tiny"),
):
    MISTAKES[command] += [(f"{words} --json=same --html=./same", "--json and --html both name ")]
MISTAKES["compare"] += [("--grid=config=tiny,hf:missing", "no folder missing")]
MISTAKES["compare"] += [("tiny --grid=target=h200,h100 --rates=rates.json", "measured on NVIDIA H200, but h100")]
MISTAKES["trace"] += [(f"missing.xplane.pb {words}", message) for words, message in OF_RATES]
MISTAKES["train"] += [(f"tiny {words}", message) for words, message in OF_RATES]
MISTAKES["train"] += [
    ("--config=char", "bytescope train has no --config: give the config as the first word"),
    ("tiny h100:8", "h100:8 is a target, which bytescope train does not take"),
    (
        "batch.micro=4",
        "batch.micro=4 is the first word, which is the config: write a config such as tiny before it, or "
        "--config.batch.micro=4",
    ),
    ("tiny --config.train.eval_prompts=missing", "train.eval_prompts is an unknown key, because it is gone"),
    ("tiny --config.init.adapter=missing", "init.adapter=missing cannot be used without init.folder"),
]
MISTAKES["train"] += [("tiny --config.train.steps=1 --rates=rates.json", message) for message in OTHER_DEVICE]
MISTAKES["calibrate"] = [
    ("--from-runs=good.csv", "calibrate has no --from-runs: write --runs=FILE|DIRECTORY"),
    ("--seconds=0", "--seconds=0"),
    ("--seconds=nan", "--seconds=nan"),
    ("--seconds=inf", "--seconds=inf"),
    ("--seconds=-1", "--seconds=-1"),
    ("--seconds=long", "--seconds"),
    ("--out=/no/such/folder/x", "no folder"),
    ("--out=.", "is a folder"),
    ("--out=", "the name is empty"),
    ("--out=same --json=same", "--json and --out both name same: give two different files"),
    ("tiny", "unrecognized"),
    ("--secnds=3", "did you mean --seconds?"),
    ("--rates=rates.json", "only valid with --runs"),
    ("--config.train.steps=1", "takes no --config.train.steps"),
    ("--runs=missing.csv", "missing.csv: No such file"),
    ("--runs=two_chips.csv", "runs on a100-80g and h100, but rates are of one chip"),
    ("--runs=only_bytes.csv", "no run with measured seconds"),
    ("--runs=good.csv --rates=rates.json", "measured on NVIDIA H200, but h100"),
    ("--runs=good.csv --rates=notes.md", "notes.md is not JSON"),
    ("--runs=good.csv --out=/no/such/folder/x", "no folder"),
    *[(f"--runs={words}", message) for words, message in OF_RUNS],
]
MISTAKES["estimate"] += [
    ("llama_8b --stages=0", "--stages=0"),
    ("llama_8b --stages=four", "four"),
    ("llama_8b --micro-batches=4", "no effect without pipeline stages"),
    ("llama_8b --stages=4 --micro-batches=4 --schedule=1f1bb", "did you mean 1f1b?"),
    ("llama_8b --stages=4 --micro-batches=4 --schedule=gpipe", "gpipe is gone: set pipeline.schedule=1f1b"),
    ("llama_8b --stages=4 --micro-batches=6 --schedule=interleaved", "set batch.accumulation=8"),
    ("llama_8b --stages=64 --micro-batches=64", "32 layers cannot be divided among 64 virtual stages"),
    ("llama_8b --stages=9999 --micro-batches=9999", "is too large: give fewer"),
    ("llama_8b --stages=4 --micro-batches=8 --html=e.html", "--html=e.html has no pipeline stages"),
]
MISTAKES["check"] = [
    ("", "there is no pyproject.toml in "),
    ("--pyproject=notes.md", "notes.md has no budgets"),
    ("--pyproject=text.txt", "text.txt is not TOML"),
    ("--pyproject=missing.toml", "cannot read missing.toml: No such file"),
    ("--pyproject=/dev/zero", "cannot read /dev/zero: It is a device"),
    ("--pyproject=.", "cannot read "),
    ("--pyproject=", "the name is empty"),
    ("--pyproject=budgets.toml budgets.toml", "for a file, give --pyproject=budgets.toml"),
    ("--pyproject=budgets.toml mpl", "there is no budget mpl: did you mean mlp?"),
    ("--pyproject=budgets.toml --baseline=foreign.json", "the baseline foreign.json has another layout"),
    ("--pyproject=budgets.toml --baseline=notes.md", "the baseline notes.md is not JSON"),
    ("--pyproject=budgets.toml --baseline=/dev/zero", "It is a device"),
    ("--pyproject=budgets.toml --update-baseline", "no budget has a baseline to update"),
    ("--pyproject=budgets.toml --update-baseline --baseline=b.json", "leave out --baseline"),
    ("--pyproject=budgets.toml --jobs=0", "give 1 or more"),
    ("--pyproject=budgets.toml --json=/no/such/folder/x", "no folder"),
    ("--pyproject=budgets.toml --config.train.steps=1", "takes no --config.train.steps"),
    ("--pyproject=budgets.toml --githib", "did you mean --github?"),
]
MISTAKES["init-program"] = [
    ("step.py --save-program=/no/such/folder/x.py", "there is no folder /no/such/folder"),
    ("step.py --save-program=notes.md", "notes.md exists and bytescope did not write it"),
    ("step.py --value=40", "--value=40 names no line"),
    ("step.py h101", "did you mean h100"),
    ("step.py --timeout=soon", "soon"),
    ("step.py --valeu=train.py:1=int32[8]", "did you mean --value?"),
    ("step.py --config.train.steps=1", "unrecognized arguments"),
]
for command, flags in COUNTS.items():
    MISTAKES[command] += [(f"{words}={HUGE}", f"{HUGE} is too large: give at most 1099511627776") for words in flags]
for command, rows in LARGE_COUNTS.items():
    MISTAKES[command] += rows
ROWS = [(command, words, message) for command, rows in MISTAKES.items() for words, message in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the mistakes name."""
    found = tmp_path_factory.mktemp("mistakes")
    sys.modules.pop("step", None)  # a test of this process may have imported a file of the same name
    for name, text in FILES.items():
        (found / name).parent.mkdir(exist_ok=True)
        (found / name).write_text(text)
    return found


def written(folder):
    """The names of all files and folders in `folder` except the bytecode of what was imported."""
    return sorted(set(os.listdir(folder)) - {"__pycache__"})


@pytest.mark.parametrize(
    ("command", "words", "message"), ROWS, ids=[f"{command} {ascii(words)[1:40]}" for command, words, _ in ROWS]
)
def test_a_mistake_is_one_line(command, words, message, folder, monkeypatch, capsys):
    from bytescope.memory.compare import worker_pool

    monkeypatch.setattr(worker_pool.Pool, "__init__", lambda *_, **__: pytest.fail("a worker was started"))
    monkeypatch.chdir(folder)
    before = written(folder)
    given = words.split(" ") if words else []
    code = cli.main(called(command, given) if command else words.split(" "))
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and err.startswith("error: ") and err.endswith("\n")
    assert len(err.splitlines()) == 1 and len(err) < 1000 and message in err, err
    assert written(folder) == before


def test_there_are_enough_of_them():
    assert len(ROWS) > 200 and set(MISTAKES) - {""} == set(COMMANDS)
