"""A program that is arithmetic, for tests of fits: real `Trials` and searches over a pool without a compiler.

One layer makes two tensors, `a` and `b`, at 50 TFLOP each a sequence, and hands on 1/4 GiB; parameters, Adam's state
and gradients are 4, 8 and 4 GiB. Under adapters these are a thousandth a rank, over 8 GiB of frozen weights in 16 bits;
8 and 4 bits take half and a quarter, and 100 ms a micro-batch. Activations grow with the sequence. Beside its
sequences a micro-batch moves memory for 250 ms at the data sheet's rate. Stages share the state, hold 2 - 1/P of what
layers keep, in a V all of it once, and wait for (P-1)/(vM) of their time.
"""

import dataclasses
import queue
import re
from types import SimpleNamespace

from bytescope.memory.compare.search_limits import Limits
from bytescope.memory.devices import targets
from bytescope.memory.records import schedule_records
from bytescope.memory.records.schedule_records import TO_DEVICE, TO_HOST, ScheduledKernel, Start, Wait
from bytescope.memory.remat.layer_graph import GraphStep, LayerGraph
from bytescope.train.plan import trials
from bytescope.train.plan.fit import fit_result, fit_space
from bytescope.train.plan.fit import fit_walk as walks

GIB = 2**30
LAYERS, SEQ = 4, 1024
KEPT = {"a": 1.0, "b": 2.0, "block_in": 0.25}
NONE, STATE, WORKSPACE = 4.0, {"params": 4.0, "optimizer": 8.0, "gradients": 4.0}, 1.0
FLOPS, OVERHEAD = 5e13, 0.25
# A product that reaches what the device can.
LARGE = (1, 8192, 8192, 8192)
FLAT = {
    "model.n_heads": 8,
    "model.n_kv_heads": 8,
    "data.seq_len": SEQ,
    "batch.micro": 1,
    "batch.tokens": 0,
    "model.experts": 0,
    "mesh.expert": 1,
    "batch.accumulation": 8,
    "batch.mode": "scan",
    "precision.preset": "bf16",
    "optimizer.name": "adamw",
    "lora.rank": 0,
    "lora.base": "bf16",
    "model.max_seq_len": 8 * SEQ,
    "optimizer.fused_backward": False,
    "optimizer.clip": "global",
    "offload.optimizer": False,
    "offload.params": False,
    "remat.policy": "none",
    "remat.layers": "()",
    "remat.save": "()",
    "remat.offload": "()",
    "mesh.data": 1,
    "mesh.fsdp": -1,
    "mesh.context": 1,
    "mesh.tensor": 1,
    "mesh.strategy": "zero3",
    "mesh.sequence_parallel": False,
    "mesh.stage": 1,
    "pipeline.schedule": "1f1b",
    "pipeline.virtual": 1,
    "model.n_layers": LAYERS,
    "model.scan": False,
    "model.moe_every": 1,
    "xla.memory_slop": "",
    "xla.latency_hiding": "",
}


def block(micro, split):
    """The layer as the search sees it, of so many sequences on a device."""
    sizes = {name: round(gib * GIB * micro / split) for name, gib in KEPT.items()}
    steps = []
    for number, name in enumerate("ab"):
        made, named = 2 * number, 2 * number + 1
        steps.append(
            GraphStep(
                (made,),
                (made - 1,) if number else (),
                "",
                (round(FLOPS * micro),),
                round(FLOPS * micro),
                "bf16",
                (sizes[name],),
            )
        )
        steps.append(GraphStep((named,), (made,), name, (0,), 0, "", (sizes[name],)))
    return LayerGraph(LAYERS, tuple(steps), (1, 3), sizes["block_in"], round(NONE * GIB * micro / split))


def plan_of(flat):
    """For each layer: (names on the device, names in host memory), None where nothing is recomputed."""
    ranges = re.findall(r"(\d+)-(\d+):([^,()]+)", flat["remat.layers"])
    out = []
    for start, stop, text in ranges or [(0, LAYERS, flat["remat.policy"])]:
        names = {"full": [], "offload": ["block_in@host"]}.get(text, text.split("+"))
        kept = {name for name in names if "@" not in name}
        out += (int(stop) - int(start)) * [
            None if text == "none" else (kept, {name.partition("@")[0] for name in names} - kept)
        ]
    return out


def answer(flat, target):
    """What a worker would say of a config: its bytes, its work and its schedule, by the sums above."""
    space = fit_space.Space(flat, frozenset(), frozenset(), target.n_devices, target.devices_per_host, 0)
    axes, micro, steps = space.axes({}), int(flat["batch.micro"]), int(flat["batch.accumulation"])
    shares = {"params": ("zero3",), "gradients": ("zero2", "zero3"), "optimizer": ("zero1", "zero2", "zero3")}
    small = {
        "params": 0.5 if flat["precision.preset"] == "bf16_params" else 1.0,
        "optimizer": {"adamw_8bit": 0.25, "adafactor": 0.0}.get(flat["optimizer.name"], 1.0),
        "gradients": 0.0 if flat["optimizer.fused_backward"] else 1.0,
    }
    rank, base = int(flat["lora.rank"]), flat["lora.base"]
    if rank:
        small = dict.fromkeys(small, rank / 1000)
    stages = axes["stage"]
    each = axes["tensor"] * stages
    state = {
        name: gib * small[name] / each / (axes["fsdp"] if axes["strategy"] in shares[name] else 1)
        for name, gib in STATE.items()
    }
    host = sum(state[name] for name in ("params", "optimizer") if flat["offload." + name])
    state = {name: gib for name, gib in state.items() if not flat.get("offload." + name)}
    here = away = again = 0.0
    for layer in plan_of(flat):
        kept, moved = layer or ({"a", "b"}, ())
        here += NONE + KEPT["block_in"] if layer is None else sum(KEPT[n] for n in {*kept, "block_in"} - set(moved))
        away += sum(KEPT[name] for name in moved)
        again += sum(name not in kept and name not in moved for name in "ab")
    if rank:
        state["frozen"] = 8 * {"bf16": 1.0, "int8": 0.5, "nf4": 0.25}[base] / stages
    scale = micro * int(flat["data.seq_len"]) / SEQ / axes["tensor"]
    overhead = OVERHEAD + (0.1 if rank and base != "bf16" else 0.0)
    flops = FLOPS * scale * axes["tensor"] * axes["data"] * axes["fsdp"] / target.n_devices * steps
    stash = 1.0 if axes["schedule"] in ("", "v") else 2 - 1 / stages
    chunks = 1 if axes["schedule"] == "v" else int(flat["pipeline.virtual"])
    flops *= 1 + (stages - 1) / (chunks * steps)
    workspace = WORKSPACE - 0.25 * (flat["xla.memory_slop"] != "") - 0.5 * (flat["xla.latency_hiding"] == "off")
    sums = {**state, "residuals": here * scale * stash, "workspace": workspace}
    breakdown = {name: round(gib * GIB) for name, gib in sums.items()}
    model = 3 * 2 * LAYERS * FLOPS
    moving = round(away * scale * GIB * steps)
    work = {
        "forward": {
            "flops": {"bf16": 2 * LAYERS * flops},
            "to_host_bytes": moving,
            "other_bytes": overhead * steps * target.hbm_bytes_per_s,
        },
        "recompute": {"flops": {"bf16": again * flops}},
        "backward": {"flops": {"bf16": 4 * LAYERS * flops}, "to_device_bytes": moving},
        "optimizer": {"to_host_bytes": round(host * GIB), "to_device_bytes": round(host * GIB)},
    }
    return {
        "status": "ok",
        "allocated_bytes": sum(breakdown.values()),
        "breakdown": breakdown,
        "peak_bytes": sum(breakdown.values()),
        "residual_bytes": breakdown["residuals"],
        "host_bytes": round((away * scale + host) * GIB),
        "recompute_flops_fraction": again * FLOPS / model,
        "model_flops": model,
        "calls_per_update": 1,
        "tokens_per_update": int(flat["data.seq_len"]) * micro * steps * axes["data"] * axes["fsdp"],
        "work": work,
        "schedule": schedule_records.to_json(schedule_of(work, overhead * target.hbm_bytes_per_s, steps)),
        "target": target.to_json(),
    }


def schedule_of(work, overhead, steps):
    """A schedule that does this work: a large product for each phase, `overhead` bytes moved in each of `steps`
    micro-batches, transfers beside the compute of their phase."""
    out = []
    for phase, part in work.items():
        sent = [(kind, part.get(key, 0)) for kind, key in ((TO_HOST, "to_host_bytes"), (TO_DEVICE, "to_device_bytes"))]
        names = [f"{kind} {phase}" for kind, size in sent if size]
        out += [Start(f"{kind} {phase}", kind, phase, size) for kind, size in sent if size]
        out += [
            ScheduledKernel("product", phase, 0, round(flops), "bfloat16", LARGE)
            for flops in part.get("flops", {}).values()
            if flops
        ]
        if part.get("other_bytes"):
            out.append(ScheduledKernel("memory", phase, round(overhead), times=steps))
        out += map(Wait, names)
    return tuple(out)


class Pool:
    """Answers at once. `broken(flat)`: why a config cannot run, "" for one that can."""

    def __init__(self, target, broken=lambda flat: ""):
        self.answers, self.jobs, self._target, self._broken = queue.SimpleQueue(), [], target, broken

    def submit(self, jobs):
        for job in jobs:
            self.answers.put((job, None))
            self.jobs.append(job)
            self.answers.put((job, self._answer(job)))

    def _answer(self, job):
        if why := self._broken(job.resolved):
            return {"status": why}
        if not job.method:
            return answer(job.resolved, self._target)
        micro, tensor = int(job.resolved["batch.micro"]), int(job.resolved["mesh.tensor"])
        described = dataclasses.asdict(block(micro, tensor)) | {"bound": {}}
        return {
            "status": "ok",
            "block": described,
            "micro_steps": int(job.resolved["batch.accumulation"]),
            "policies": {},
            "moving": {},
            "ranges": 1 if int(job.resolved["mesh.stage"]) > 1 else 2,
        }


def walk(
    budget,
    levers="remat,micro,accumulation",
    *,
    devices="h100",
    host=0.0,
    broken=lambda flat: "",
    most=1e9,
    given=(),
    told=None,
    progress=lambda labels, done: None,
    **flat,
):
    """A finished walk within `budget` GiB. `host`: GiB of one device's share of host memory, 0 for plenty.

    given: pairs of the command line; flat: keys of the config with a `_` for the first dot.
    """
    target = targets.parse(devices)
    if host:
        target = dataclasses.replace(target, host_memory_bytes=round(host * GIB) * target.devices_per_host)
    base = {**FLAT, **{key.replace("_", ".", 1): value for key, value in flat.items()}}

    def config(name, pairs):
        return {
            **base,
            **{key: text == "true" if isinstance(base[key], bool) else type(base[key])(text) for key, text in pairs},
        }

    factory = SimpleNamespace(
        reference="none:none",
        resolve=lambda keys: config("x", [pair for pair in keys.items() if pair[0] != "config"]),
        sources=lambda: [],
        choosing_sources=lambda resolved: [],
    )
    one = trials.Trials("x", target, given, Pool(target, broken), None, progress, limits=Limits(most), factory=factory)
    space = fit_space.space_of(
        config("x", given),
        [key for key, _ in given],
        fit_space.choose_levers(levers),
        target.n_devices,
        target.devices_per_host,
        None,
    )
    out = walks.Walk(one, space, round(budget * GIB), *([told] if told else []))
    out.run()
    return out


def as_json(done, reach=None):
    """The JSON of a walk, and of what adapters reach."""
    flags = lambda keys: " ".join(f"--config.{key}={text}" for key, text in keys.items())  # noqa: E731
    return {**fit_result.to_json(done, flags, reach=reach), "versions": {"jax": "9"}}
