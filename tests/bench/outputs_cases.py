"""The cases of outputs.py: groups of commands, each group in a working directory of its own, from first to last.

A case may read what an earlier case of its group wrote. Models are small and targets are described devices or few CPU
devices, so that a case takes seconds. Every command of a README that runs on a CPU has a case of its kind.
"""

import dataclasses
import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

ONE_DEVICE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Case:
    """A command.

    Attributes:
        argv: `bytescope` and its arguments, or `python`, a function of outputs_library.py and its arguments.
        columns: the width of its output, 0 for outputs.COLUMNS. Wide where measured values stand in prose, which
            would wrap at another word.
        widths: further widths at which the same command runs again.
        needs_package: the case is left out if the package is not installed.
    """

    name: str
    argv: tuple[str, ...]
    columns: int = 0
    widths: tuple[int, ...] = ()
    stdin: str = ""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs_package: str = ""


def case(name: str, line: str, **options) -> Case:
    words = shlex.split(line)
    start = () if words[0] == "python" else ("bytescope",)
    return Case(name, (*start, *words), **options)


# ---- files that each working directory has

SMALL = '''"""A small Llama."""

from bytescope.configs import base


def get_config():
    config = base.get_config()
    config.model.update(d_model=512, n_layers=4, n_heads=8, n_kv_heads=4, d_head=64, d_ff=1024, vocab_size=4096)
    config.data.seq_len = 1024
    config.batch.micro = 4
    return config
'''
EXPERTS = '''"""A small mixture of experts."""

from bytescope.configs import base


def get_config():
    config = base.get_config()
    config.model.update(d_model=256, n_layers=3, n_heads=4, n_kv_heads=4, d_head=64, d_ff=512, vocab_size=1024)
    config.model.update(experts=8, experts_per_token=2, d_expert=256, shared_experts=1, dense_layers=1)
    config.data.seq_len = 256
    config.batch.micro = 2
    return config
'''
MINE = '''"""A model of 30,000 parameters that reads texts/."""

from bytescope.configs import base


def get_config():
    config = base.get_config()
    config.model.update(d_model=64, n_layers=2, n_heads=2, n_kv_heads=2, d_head=32, d_ff=128, max_seq_len=128)
    config.precision.preset = "fp32"
    config.remat.policy = "dots_no_batch"
    config.data.update(source="texts/", seq_len=64)
    config.batch.micro = 4
    config.optimizer.update(learning_rate=3e-3, warmup_steps=2)
    config.train.update(steps=6, log_every=2, eval_every=3, checkpoint_every=3)
    return config
'''
SENTENCE = "a step of the model keeps what every byte of memory is and the compiler reads it from first to last"
WORDS = SENTENCE.split()
MESSAGES = [
    {"messages": [{"role": "user", "content": f"Add {i} and 2."}, {"role": "assistant", "content": f"It is {i + 2}."}]}
    for i in range(40)
]
PAIRS = [{"prompt": f"{i} + 2 =", "completion": f" {i + 2}"} for i in range(40)]
QUESTIONS = [{"text": "the model"}, {"text": "every byte", "seed": 5}, {"tokens": [97, 98, 99]}]
# Rates as `calibrate` writes them, so that seconds on this machine are predicted and not measured.
CPU_RATES = {
    "format": 1,
    "source": "measured on 1 x cpu on 2026-01-01, bytescope 0.1.0, jax 0.10.2, jaxlib 0.10.2",
    "peak_flops": {"fp32": 5e10},
    "products": {"fp32": [[512.0, 5e10]]},
    "attention": {
        "forward": {"64": [[256.0, 4e10]]},
        "forward_causal": {"64": [[256.0, 2e10]]},
        "backward": {"64": [[256.0, 2e10]]},
        "backward_causal": {"64": [[256.0, 1e10]]},
    },
    "memory": [[41943040.0, 1e11]],
    "floor_seconds": 1e-7,
    "host_link_bytes_per_s": 7e9,
    "host_link_seconds": 2e-4,
    "collectives": [],
    "hop_seconds": 0.0,
    "network_hop_seconds": 0.0,
    "cores": 0,
    "sources": {"call": "15.2 us from one call of a short program to the next"},
    "measured": {
        "device": "cpu",
        "platform": "cpu",
        "devices": "1",
        "date": "2026-01-01",
        "bytescope": "0.1.0",
        "jax": "0.10.2",
        "jaxlib": "0.10.2",
    },
}


def write_input_files(work: Path, inputs: Path | None) -> None:
    """Writes the files that cases read; `inputs`: measured ones, which are copied to inputs/."""
    work.mkdir(parents=True)
    for name, text in (("small.py", SMALL), ("experts.py", EXPERTS), ("mine.py", MINE)):
        (work / name).write_text(text)
    for name in ("plain_jax.py", "parallel.py"):
        shutil.copyfile(ONE_DEVICE / "programs" / name, work / name)
    (work / "rates.json").write_text(json.dumps(CPU_RATES))
    (work / "texts").mkdir()
    for i in range(20):
        lines = [" ".join(WORDS[(i * 7 + j * k) % len(WORDS)] for k in range(12)) for j in range(30)]
        (work / "texts" / f"{i:02}.txt").write_text("\n".join(lines) + "\n")
    shutil.copyfile(work / "texts" / "03.txt", work / "text.txt")
    for name, rows in (("talks", MESSAGES), ("pairs", PAIRS), ("questions", QUESTIONS)):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "garbage.hlo.pb").write_bytes(b"no proto")
    if inputs is not None:
        shutil.copytree(inputs, work / "inputs")


# ---- measured inputs: their figures change from run to run, so that both sides of a comparison need the same

INPUTS = [
    case(
        "profiled", "train mine.py --workdir=run --config.train.eval_every=1000 --profile=2 --rates=rates.json"
    ),
    case("other", "train mine.py --workdir=other --config.optimizer.learning_rate=1e-3 --rates=rates.json"),
]  # fmt: skip
INPUT_FOLDERS = ("run", "other")
NEEDS_INPUTS = "measured"  # the group that reads them

# ---- groups

COMMANDS = (
    *("train", "prepare", "generate", "score", "quantize", "export"),
    *("report", "trace", "page", "names", "diff", "estimate", "calibrate"),
    *("compare", "levers", "front", "fit"),
    *("list", "configs", "targets", "keys", "policies"),
)
HELP = [
    case("bytescope", "--help", widths=(80,)),
    case("version", "--version"),
    *(case(name, f"{name} --help", widths=(80,)) for name in COMMANDS),
]  # fmt: skip

LISTS = [
    case("configs", "configs", widths=(80, 120)),
    case("configs_grep", "configs --grep=llama"),
    case("targets", "targets", widths=(80, 120)),
    case("targets_grep", "targets --grep=H100"),
    case("keys", "keys", widths=(80, 120)),
    case("keys_grep", "keys --grep=remat"),
    case("policies", "policies", widths=(80, 120)),
    case("policies_grep", "policies --grep=offload"),
    case("bash", "--print-completion bash"),
    case("zsh", "--print-completion zsh"),
    case("fish", "--print-completion fish"),
    case("estimate_params", "estimate gpt:7e9 --json=params.json --html=params.html", widths=(80, 120)),
    case("estimate_config", "estimate llama_8b h100:8 --json=config.json --html=config.html"),
    case("estimate_lora", "estimate llama_8b lora.rank=16 lora.base=nf4 --json=lora.json"),
    case(
        "estimate_experts",
        "estimate gpt:47b h100:8 model.experts=8 mesh.expert=8 mesh.strategy=zero3 "
        "--json=experts.json --html=experts.html",
    ),
    case("estimate_latent", "estimate deepseek_v3 mesh.tensor=4 optimizer.name=adamw_8bit offload.optimizer=True"),
    case("estimate_stages", "estimate llama_8b --stages=4 --micro-batches=8 --schedule=v", widths=(80, 120)),
]  # fmt: skip

ERRORS = [
    case(name, line)
    for name, line in {
        "command": "reprot tiny",
        "flag": "report tiny --htlm=a.html",
        "config": "report llama_9b",
        "target": "report tiny h1000:8",
        "too_many": "report tiny h100:8 third",
        "twice": "report tiny cpu cpu",
        "key": "report tiny --config.model.d_modle=3",
        "choice": "report tiny cpu --config.remat.policy=fulll",
        "type": "report tiny cpu --config.model.n_layers=many",
        "value": "train tiny --config.batch.micro=0",
        "custom_name": "report tiny cpu --config.remat.policy=custom --config.remat.save=q_rott",
        "layers": "report tiny cpu --config.remat.layers=0-9:none",
        "mesh": "report small.py h100:8 --config.mesh.tensor=3",
        "dropout": "report small.py h100:8 --config.mesh.context=8 --config.mesh.fsdp=1 --config.model.dropout=0.1",
        "fused": "report small.py h100 --config.optimizer.fused_backward=True --config.batch.accumulation=4",
        "stages": "report small.py h100:8 --config.mesh.stage=4",
        "no_compiler": "report small.py v100",
        "hlo": "report garbage.hlo.pb",
        "no_hlo": "report absent/",
        "program": "report absent.py:step",
        "program_function": "report plain_jax.py:absent",
        "rates": "report tiny cpu --rates=texts/00.txt",
        "diff": "diff absent.json other.json",
        "diff_kind": "diff rates.json rates.json",
        "grid": "compare tiny cpu --grid=remat.polcy=none",
        "budget": "fit tiny cpu --budget=72",
        "levers": "fit tiny cpu --vary=remat,magic",
        "savings": "levers tiny cpu --savings=fp32,magic",
        "points": "front tiny cpu --budgets=many",
        "params": "estimate gpt:seven",
        "schedule": "estimate llama_8b --stages=2 --micro-batches=4 --schedule=2f2b",
        "grep": "keys --grep=zzzz",
        "shell": "--print-completion csh",
        "trace": "trace absent/",
        "page": "page absent/",
        "export": "export absent/ out/",
        "generate": "generate absent/ --prompt=a",
        "score": "score texts/ --text=a",
        "quantize": "quantize absent/ out/ --calibrate=text.txt",
        "calibrate": "calibrate --seconds=-1",
        "prepare": "prepare --source=absent/ --out=shards/",
        "no_data": "train mine.py --config.data.source=absent/",
        "no_weights": "train hf:absent",
        "profile": "train mine.py --profile=5-2",
    }.items()
]  # fmt: skip


def report(name: str, line: str, **options) -> Case:
    return case(name, f"report {line} --json={name}.json --html={name}.html", **options)


def reports(*cases: Case) -> list[Case]:
    """The cases, then their reports at 80 and 120 columns, as tables, and in a notebook."""
    return [*cases, case("views", "python views")]


REPORTS_CPU = reports(
    report("tiny", "tiny cpu --rates=rates.json --formulas"),
    report("measured", "mine.py cpu"),
    report("micro", "tiny cpu --rates=rates.json --config.batch.micro=24 --config.remat.policy=none"),
    report("experts", "experts.py cpu:4 --rates=rates.json --config.mesh.expert=4"),
    report("gpt", "char cpu:2 --rates=rates.json --config.model.n_layers=2 --config.mesh.strategy=zero1"),
    report("run", "mine.py cpu --rates=rates.json --run"),
    report("generate", "mine.py cpu --generate --rates=rates.json"),
    case("export", "report mine.py cpu --rates=rates.json --export=xprof/"),
    case("github", "report mine.py cpu --rates=rates.json --github", env={"GITHUB_STEP_SUMMARY": "summary.md"}),
    case("diff", "diff tiny.json micro.json", widths=(80, 120)),
    case("diff_fails", "diff tiny.json micro.json --fail-above=2 --github"),
    case("diff_equal", "diff tiny.json tiny.json --fail-above=2"),
    case("names", "names tiny cpu --json=names.json", widths=(80,)),
)

REPORTS_GPU = reports(
    report("small", "small.py h100 --formulas"),
    report("full", "small.py h100 --config.remat.policy=full --config.model.scan=False --config.precision.preset=fp32"),
    report("lora", "small.py rtx4090 --config.lora.rank=8 --config.lora.base=nf4"),
    report("lora_int8", "small.py a100-80g --config.lora.rank=8 --config.lora.base=int8 --config.lora.targets=q,v"),
    report("offload", "small.py h100 --config.offload.optimizer=True --config.remat.policy=offload"),
    report("offload_params", "small.py h200 --config.offload.params=True --config.optimizer.fused_backward=True "
           "--config.optimizer.clip=layer"),
    report("fp8", "small.py h100 --config.precision.preset=fp8 --config.model.d_ff=1536"),
    report("fp16", "small.py t4 --config.precision.preset=fp16 --config.optimizer.name=adamw_8bit"),
    report("auto", "small.py h100 --config.remat.policy=auto --config.remat.budget=700MiB"),
    report("layers", "small.py h100 --config.remat.policy=full "
           "--config.remat.layers=0-2:none,2-3:q_rot+v+block_in@host"),
    report("exceeds", "llama_8b rtx4090 --config.model.n_layers=2 --config.data.seq_len=4096"),
    report("chunks", "small.py b200 --config.model.mlp_chunk=256 --config.loss.kind=full --config.model.dropout=0.1"),
    report("latent", "small.py h200 --config.model.attention_kind=mla --config.model.n_kv_heads=8 "
           "--config.model.mla_kv_rank=128 --config.model.mla_d_value=64"),
    report("generate", "small.py h100 --generate --sequences=8 --length=1024"),
    report("generate_int4", "small.py h100 --generate --weights=int4_g64 --kv=int8 --sequences=8 --length=1024"),
    case("quantize", "quantize small.py h100", widths=(80,)),
    case("names", "names small.py h200:8 --json=names.json", widths=(80,)),
)  # fmt: skip

REPORTS_GPUS = reports(
    report("zero3", "small.py h100:8 --formulas"),
    report("zero2", "small.py h100:8 --config.mesh.strategy=zero2 --config.batch.accumulation=2"),
    report("zero1", "small.py h100:8 --config.mesh.strategy=zero1 --config.batch.mode=scan "
           "--config.batch.accumulation=2"),
    report("ddp", "small.py a100-40g:4 --config.mesh.strategy=ddp"),
    report("hybrid", "small.py h100:2x8 --config.mesh.data=2 --config.mesh.prefetch=1"),
    report("tensor", "small.py h100:8 --config.mesh.tensor=4 --config.mesh.sequence_parallel=True"),
    report("context", "small.py h100:8 --config.mesh.context=8 --config.mesh.fsdp=1"),
    report("pipeline", "small.py h200:8 --config.mesh.stage=4 --config.mesh.fsdp=2 --config.batch.mode=scan "
           "--config.batch.accumulation=8 --config.batch.micro=1"),
    report("pipeline_v", "small.py h200:2 --config.mesh.stage=2 --config.batch.mode=scan "
           "--config.batch.accumulation=4 --config.batch.micro=1 --config.pipeline.schedule=v "
           "--config.remat.policy=full"),
    report("experts", "experts.py h100:8 --config.mesh.expert=8 --config.model.router_bias=True"),
    report("experts_capacity", "experts.py h100:4 --config.mesh.expert=4 --config.model.moe_kernel=capacity "
           "--config.mesh.dispatch=all_to_all"),
    report("tpu", "small.py v5e:2x2", needs_package="libtpu"),
    case("diff", "diff zero3.json zero1.json"),
)  # fmt: skip

OTHER_PROGRAMS = reports(
    report("linear", "plain_jax.py:linear h200"),
    report("rnn", "plain_jax:rnn cpu --rates=rates.json", env={"PYTHONPATH": "."}),
    report("decode", "plain_jax.py:decode_kept a100-80g"),
    report("pmap", "parallel.py:pmap h100:4"),
    report("tensor", "parallel.py:tensor_parallel h100:8"),
    case("dump", "python dump", env={"XLA_FLAGS": "--xla_dump_to=dump --xla_dump_hlo_as_proto"}),
    report("folder", "dump/"),
    case("config_github", "report small.py h100 --github", env={"GITHUB_STEP_SUMMARY": "summary.md"}),
)

PLANS = [
    case("compare", "compare mine.py cpu:2 --remat=none,full,dots --formulas --rates=rates.json --json=compare.json "
         "--html=compare.html --jobs=1", widths=(80, 120)),
    case("compare_grid", "compare small.py h100:8 --grid=data.seq_len=512,1024 --grid=mesh.strategy=zero1,zero3 "
         "--json=grid.json --html=grid.html --jobs=1", widths=(80, 120)),
    case("compare_custom", "compare small.py h200 --remat='none,custom(q_rot,v),custom(attn_out)+offload(block_in)' "
         "--json=custom.json --jobs=1"),
    case("compare_targets", "compare --grid=config=small.py,mine.py --grid=target=h100:2,rtx4090 "
         "--json=targets.json --html=targets.html --jobs=1"),
    case("levers", "levers small.py h200 --savings=fp32,bf16,loss,full,adamw_8bit,offload --json=levers.json "
         "--html=levers.html --jobs=1", widths=(80, 120)),
    case("front", "front small.py h100 --budgets=3 --json=front.json --html=front.html --jobs=1", widths=(80, 120)),
    case("front_flops", "front small.py h100 --budgets=2 --cost=flops --auto-offload --jobs=1"),
    case("fit", "fit small.py h100:2 --batch-tokens=65536 --budget=2GiB --max-compiles=6 --json=fit.json "
         "--html=fit.html --jobs=1"),
    case("fit_levers", "fit small.py rtx4090 --vary=micro --json=fit_levers.json --jobs=1", widths=(80, 120)),
    case("fit_nothing", "fit llama_8b rtx4090 --budget=1GiB --vary=remat --max-compiles=2 --jobs=1 "
         "--config.model.n_layers=2 --json=nothing.json --html=nothing.html"),
    case("fit_lora", "fit small.py l4 --lora --max-compiles=2 --jobs=1"),
]  # fmt: skip

RUN = "train mine.py --workdir=run --rates=rates.json"
TRAINING = [
    case("train", f"{RUN} --verbose", columns=200),
    case("again", RUN, columns=200),
    case("extend", f"{RUN} --config.train.steps=8 --extend", columns=200),
    case("changed", f"{RUN} --config.optimizer.learning_rate=1e-2", columns=200),
    case("fsdp", "train mine.py --workdir=fsdp --rates=rates.json --config.mesh.strategy=zero3",
         columns=200, env={"JAX_NUM_CPU_DEVICES": "2"}),
    case("stages", "train mine.py --workdir=stages --rates=rates.json --config.mesh.stage=2 --config.batch.mode=scan "
         "--config.batch.accumulation=4 --config.batch.micro=1", columns=200, env={"JAX_NUM_CPU_DEVICES": "2"}),
    case("experts", "train mine.py --workdir=experts --rates=rates.json --config.model.experts=4 "
         "--config.model.d_expert=64 --config.batch.accumulation=2", columns=200),
    case("show_data", "train mine.py --config.data.source=talks.jsonl --config.data.format=chat --show-data",
         columns=200),
    case("pairs", "train mine.py --workdir=pairs --config.data.source=pairs.jsonl --config.data.format=pairs "
         "--config.model.mlp=gelu --config.model.norm=layernorm --config.optimizer.name=muon --rates=rates.json",
         columns=200),
    case("prepare", "prepare --source=texts/ --out=shards/ --shard-tokens=20000", columns=200),
    case("shards", "train mine.py --workdir=shards_run --config.data.source=shards/ --config.train.steps=2 "
         "--rates=rates.json", columns=200),
    case("page", "page run --html=run.html", columns=200),
    case("page_two", "page run fsdp --html=two.html", columns=200),
    case("diff_runs", "diff run fsdp", columns=200),
    case("export", "export run exported/ --dtype=float32", columns=200),
    case("export_step", "export run step3/ --step=3 --dtype=bfloat16 --shard-size=100kB", columns=200),
    case("export_again", "export run exported/", columns=200),
    case("generate", "generate run --prompt='the model' --max-tokens=16 --seed=1", columns=200),
    case("generate_rows", "generate exported/ --prompts=questions.jsonl --out=answers.jsonl --max-tokens=12 "
         "--temperature=0", columns=200),
    case("generate_typed", "generate exported/ --max-tokens=8 --temperature=0", columns=200, stdin="the\n\n"),
    case("score", "score run --texts=text.txt --out=scores.jsonl", columns=200),
    case("score_text", "score exported/ --text='the model keeps'", columns=200),
    case("report_folder", "report hf:exported h100 --json=folder.json"),
    case("quantize", "quantize exported/ awq/ --group=32 --calibrate=text.txt --length=64 --samples=8 "
         "--json=quantize.json", columns=200),
    case("generate_awq", "generate awq/ --prompt='the model' --max-tokens=8 --temperature=0", columns=200),
    case("lora", "train hf:exported --lora --config.lora.rank=4 --config.data.source=texts/ --config.data.seq_len=64 "
         "--config.train.steps=2 --config.train.eval_every=2 --config.batch.micro=2 --workdir=lora "
         "--rates=rates.json", columns=200),
    case("export_lora", "export lora adapters/", columns=200),
    case("export_merged", "export lora merged/ --merge", columns=200),
    case("adapters", "train hf:exported --config.init.adapter=adapters/ --config.data.source=texts/ "
         "--config.data.seq_len=64 --config.train.steps=1 --workdir=adapters_run --rates=rates.json", columns=200),
]  # fmt: skip

MEASURED = [
    case("trace", "trace inputs/run/profile --json=trace.json", widths=(80, 120)),
    case("trace_report", "trace inputs/run/profile --report=inputs/run/memory.json --rates=rates.json --json=both.json "
         "--html=both.html"),
    case("page", "page inputs/run --html=run.html"),
    case("page_two", "page inputs/run inputs/other --html=two.html"),
    case("diff", "diff inputs/run inputs/other"),
]  # fmt: skip

LIBRARY = [case(name, f"python {name}") for name in (
    "public", "analyze", "guard", "targets", "compile", "watch", "plan_remat", "pytest_fixtures"
)]  # fmt: skip

# Long groups first: they run at the same time as the short ones.
GROUPS: Mapping[str, list[Case]] = {
    "plans": PLANS,
    "training": TRAINING,
    "gpu": REPORTS_GPU,
    "gpus": REPORTS_GPUS,
    "cpu": REPORTS_CPU,
    "programs": OTHER_PROGRAMS,
    "library": LIBRARY,
    "measured": MEASURED,
    "errors": ERRORS,
    "help": HELP,
    "lists": LISTS,
}
