"""An adapter for a trainer of a toy transformer in plain jax, whose keys are those that `bytescope fit` searches."""

import jax

from bytescope.memory.adapters.trainers import TrainerFactory
from bytescope.memory.compare.grids import CONFIG
from bytescope.memory.compare.prepared_program import prepare
from bytescope.memory.errors import ReportError
from bytescope.memory.program.user_program import UserProgram
from support.models import plain

KEYS = ("policy", "batch", "scan", "context", "mid")


class ToyFactory(TrainerFactory):
    """`policy=full` recomputes everything, `policy=custom` keeps the tensors whose key is "device"."""

    reference = "support.toy_trainer:FACTORY"
    policy_key, policies = "policy", ("full",)
    batch_key, scan_key = "batch", "scan"

    def __call__(self, overrides, target):
        self.check(overrides)
        kept = [name for name in ("context", "mid") if overrides.get(name) == "device"]
        policy = jax.checkpoint_policies.save_only_these_names(*kept)
        way = plain.scanned if overrides.get("scan", "true") == "true" else plain.repeated
        layers = way(jax.checkpoint(plain.named, policy=policy))

        def step(weights, x):
            value, grads = jax.value_and_grad(lambda weights: (layers(x, weights) ** 2).mean())(weights)
            return jax.tree.map(lambda w, g: w - g, weights, grads), value

        batch = int(overrides.get("batch", 4))
        options = {"donate_argnums": 0, "tokens": batch * plain.LENGTH}
        return prepare(UserProgram("toy", step, plain.arguments(batch), options), target)

    def check(self, overrides):
        for key in overrides:
            if key not in (*KEYS, CONFIG):
                raise ReportError(f"the toy has no key {key}")

    def keys_of_names(self, names, kept):
        if not kept:
            return {"policy": "full"}
        return {"policy": "custom", **{name: "device" if name in kept else "remat" for name in sorted(names)}}

    def names_with_keys(self, names):
        return {name for name in names if name in KEYS}

    def resolve(self, overrides):
        return dict(overrides)

    def sources(self):
        return []


FACTORY = ToyFactory()
