"""Commands and flags that are gone, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SAME = "the same flag there"
_SUBJECT = {
    "--config": "give the config as the first word",
    "--target": "give the target after the subject",
    "--mem-fraction": "write TARGET@FRACTION, such as h100:8@0.9",
    "--program": "give MODULE:FUNCTION or FILE.py:FUNCTION as the first word",
    "--hlo": "give the dump, a file or a folder, as the first word",
}
_LIMIT = {"--limit": "write --budget=SIZE"}
_CHUNK = {
    "--chunk": "leave it out: the prompt tokens of a step follow from the device",
    "--kernel": "leave it out: attention reads the pages in blocks",
}
_SOURCE = {
    "--fix --write": "edit the source as the report's finding says: no command writes to your source",
    "--fix-sharding --small": "add the sharding constraint that the report's finding names, and report again",
}
_PERPLEXITY = "leave it out: bytescope generate FOLDER --score=TEXT has the perplexity of each folder"
_LIST = {"": "use bytescope list {command}", "--grep --json": _SAME}

# Command -> flags, separated by spaces -> what to write instead. The flags "" stand for the command itself.
MOVED: Mapping[str, Mapping[str, str]] = {
    # ---- commands that stay
    "train": {
        "--config": _SUBJECT["--config"],
        "--target": "it trains on the devices of this machine: bytescope report CONFIG TARGET has the memory of others",
    },
    "generate": _LIMIT
    | _CHUNK
    | {
        "--min-p": "use --top-p, which also drops unlikely tokens",
        "--stop": "leave it out: an answer ends with its end-of-text token or after --max-tokens",
        "--ignore-end": "leave it out: an answer ends with its end-of-text token",
    },
    "export": {"--held-out": _PERPLEXITY},
    "report": _SUBJECT | _CHUNK | _SOURCE,
    "explain": {
        "--config --program --hlo --report": "give the subject after the log: bytescope explain LOG SUBJECT TARGET",
        "--target": "give the target after the log and the subject",
    },
    "estimate": {key: _SUBJECT[key] for key in ("--config",)}
    | {
        "--params": "give gpt:N as the first word, such as gpt:7e9",
        "--layers --heads --kv-heads": "write model.n_{name}=N",
        "--d-model --d-head --d-ff --experts --experts-per-token --d-expert --shared-experts --dense-layers "
        "--moe-every --mla-q-rank --mla-d-rope --mla-d-value": "write model.{name}=N",
        "--mla-kv-rank": "write model.attention_kind=mla model.mla_kv_rank=N",
        "--vocabulary": "write model.vocab_size=N",
        "--gated": "write model.mlp=swiglu",
        "--untied": "write model.tie_embeddings=False",
        "--dropout": "write model.dropout=0.1",
        "--qk-norm --post-norms": "write model.{name}=True",
        "--capacity": "write model.capacity_factor=N",
        "--expert-slots": "write model.moe_kernel=capacity",
        "--sequence": "write data.seq_len=N",
        "--length": "write data.seq_len=N",
        "--batch": "write batch.micro=N",
        "--logit-tokens": "write loss.kind=chunked loss.chunk=N, or loss.kind=full for all tokens",
        "--mlp-tokens": "write model.mlp_chunk=N, the positions of a sequence",
        "--width": "write model.d_model=N",
        "--head-width": "write model.d_head=N",
        "--mlp-width": "write model.d_ff=N",
        "--zero": "write mesh.strategy=ddp, zero1, zero2 or zero3",
        "--data": "give a target with as many devices, such as h100:8, or write mesh.fsdp=N",
        "--expert-parallel": "write mesh.expert=N",
        "--tensor": "write mesh.tensor=N",
        "--sequence-parallel --no-sequence-parallel": "write mesh.sequence_parallel=True or False",
        "--optimizer": "write optimizer.name=NAME",
        "--precision": "write precision.preset=NAME",
        "--attention": "write model.attention=naive, or chunked for a kernel that stores no scores",
        "--offload": "write offload.optimizer=True or offload.params=True",
        "--lora-rank --lora-targets --lora-base": "write lora.KEY=VALUE, such as lora.rank=16",
        "--fused --no-fused": "write optimizer.fused_backward=True or False",
    },
    "compare": {key: now for key, now in _SUBJECT.items() if key != "--hlo"},
    "fit": {key: now for key, now in _SUBJECT.items() if key != "--hlo"}
    | {
        "--levers": "write --vary=L,L",
        "--timeout": "write --max-seconds=SECONDS",
    },
    "calibrate": {"--from-runs": "write --runs=FILE|DIRECTORY"},
    # ---- commands that are parts of others
    "score": {
        "": "use bytescope generate RUN_OR_FOLDER --score=FILE",
        "--text": "put the text in a file: --score=FILE",
        "--texts": "--score=FILE",
        "--out": "--json=FILE has the same rows",
        "--step --dtype --tensor --fsdp --sequences --length --kv --budget --json": _SAME,
    }
    | _LIMIT
    | _CHUNK,
    "quantize": {
        "": "use bytescope export FOLDER OUT --awq=TEXT; bytescope export writes a run as a folder",
        "--held-out": _PERPLEXITY,
        "--step": "bytescope export RUN FOLDER --step=N, then quantize FOLDER",
        "--target --plan": "leave it out: one layer is on the device at a time, and the bytes are printed first",
        "--html": "--json=FILE has the figures",
        "--calibrate": "--awq=TEXT",
        "--bits": "leave it out: weights have 4 bits",
        "--method": "leave it out: rounding without scales is only compared in our benchmarks",
        "--group --format --samples --length --dtype --budget --shard-size --json --force": _SAME,
    }
    | _LIMIT,
    "init-program": {
        "": "use bytescope report SCRIPT.py TARGET; --save-program=FILE writes the program",
        "--out": "--save-program=FILE",
        "--value --without --auto-axes --function --timeout": _SAME,
    },
    "trace": {
        "": "use bytescope report TRACE, or bytescope report RUN --trace=TRACE for both together",
        "--report": "give the report as the subject, and the trace with --trace=TRACE",
        "--html": "bytescope report RUN --html=FILE shows the trace of a run",
        "--rates --json": _SAME,
    },
    "page": {
        "": "use bytescope report RUN --html=FILE, and bytescope diff RUN OTHER for two runs",
        "--html": _SAME,
    },
    "names": {"": "use bytescope report SUBJECT TARGET --names", "--json": _SAME}
    | {key: now for key, now in _SUBJECT.items() if key != "--hlo"},
    "audit": {
        "": "use bytescope report SUBJECT TARGET --audit",
        "--strict --passes --xla --json --html": _SAME,
    }
    | _SOURCE
    | _SUBJECT,
    "levers": {
        "": "use bytescope compare SUBJECT TARGET --levers",
        "--stages": "--savings=S,S",
        "--savings": _SAME,
        "--no-cache --rates --jobs --json --html": _SAME,
    }
    | {key: now for key, now in _SUBJECT.items() if key not in ("--program", "--hlo")},
    "front": {
        "": "use bytescope fit SUBJECT TARGET --budgets=N",
        "--points": "--budgets=N",
        "--offload": "--auto-offload",
        "--from --to --cost --auto-offload --lora --no-cache --rates --jobs --json --html": _SAME,
    }
    | {key: now for key, now in _SUBJECT.items() if key not in ("--program", "--hlo")},
    "pipeline": {
        "": "use bytescope estimate SUBJECT TARGET --stages=P",
        "--stages --micro-batches --schedule --virtual --layers --json": _SAME,
        "--html": "the lines are on the terminal and in --json=FILE",
    },
    "validate": {
        "": "use bytescope calibrate --runs=FILE|DIRECTORY for your own runs",
        "--runs --rates --json": _SAME,
        "--jobs": "leave it out: one program at a time is compiled",
        "--set --gpus --only --folder": "published runs are compared by tests/bench/validation in the repository",
        "--template": "bytescope calibrate --help lists the columns",
        "--html": "--json=FILE has the figures",
    },
    "configs": _LIST,
    "targets": _LIST,
    "keys": _LIST,
    "policies": _LIST,
    "completion": {"": "use bytescope --print-completion bash, zsh or tcsh"},
    # ---- gone
    "bisect": {
        "": "use git bisect run bytescope check, or a loop over versions: see the guide memory/guides/what_changed.md",
        "--jax --python --install --all --records": "a loop over versions of jax",
        "--git": "git bisect run bytescope check",
        "--xla-flags": "bytescope report SUBJECT TARGET --xla=FLAG=VALUE, and bytescope diff of two reports",
        "--keys": "bytescope compare SUBJECT TARGET --grid=KEY=V,V",
        "--diff --function": "bytescope report of both files, and bytescope diff of the reports",
        "--bytes --flops --step-seconds --of": "budget and fail_above of an entry that bytescope check reads",
        "--no-cache --rates --json": _SAME,
    }
    | {key: now for key, now in _SUBJECT.items() if key != "--hlo"},
}


def moved_flags(command: str) -> dict[str, str]:
    """Returns flag -> what to write instead, for each moved flag of a command."""
    answers = {}
    for flags, now in MOVED.get(command, {}).items():
        for flag in flags.split():
            answers[flag] = now.replace("{name}", flag.removeprefix("--").replace("-", "_"))
    return answers


def moved_command(command: str, arguments: Sequence[str] = ()) -> str:
    """Returns a sentence that says what to write instead of a command and of its given flags; "" if the command has not
    moved."""
    answer = MOVED.get(command, {}).get("")
    if answer is None:
        return ""
    parts = [f"bytescope {command} is gone: {answer.replace('{command}', command)}"]
    flags = moved_flags(command)
    for flag in dict.fromkeys(argument.partition("=")[0] for argument in arguments):
        if flags.get(flag, _SAME) != _SAME:
            parts.append(f"{flag}: {flags[flag]}")
    return "; ".join(parts)


def moved_flag(command: str, flag: str) -> str:
    """Returns a sentence that says what to write instead of a flag; "" if the command does not have this moved flag."""
    now = moved_flags(command).get(flag)
    return f"bytescope {command} has no {flag}: {now}" if now else ""
