"""The gallery's programs, and what a person who read them says should be found in them, and why it is true.

`READ` is written from the programs, not from what the rules answer: `expected` tells a program's findings on a target
by their kinds. A finding that is not here is one that nobody has read, or a false one; one that is here and is not
found was missed.
"""

from collections.abc import Mapping

# Program -> whether it is one for several devices: those are compiled for eight too.
PROGRAMS = {
    "linen_models:mnist": False,
    "linen_models:resnet50": False,
    "linen_models:gpt": False,
    "linen_models:seq2seq": False,
    "linen_models:vae": False,
    "linen_models:decode": False,
    "linen_sharded:fsdp": True,
    "nnx_models:transformer": False,
    "nnx_models:functional": False,
    "equinox_models:mlp": False,
    "equinox_models:gpt": False,
    "equinox_models:neural_ode": False,
    "haiku_models:transformer": False,
    "haiku_models:resnet18": False,
    "plain_jax:linear": False,
    "plain_jax:rnn": False,
    "plain_jax:decode": False,
    "plain_jax:decode_kept": False,
    "plain_jax:dqn": False,
    "plain_jax:gan": False,
    "plain_jax:accumulate": False,
    "plain_jax:solver": False,
    "parallel:pmap": True,
    "parallel:tensor_parallel": True,
    "parallel:ring": True,
    "parallel:data_parallel": True,
    "parallel:tensor_parallel_decode": True,
    "pallas_kernels:softmax": False,
    "pallas_kernels:gated": False,
    "numpyro_models:svi": False,
    "numpyro_models:nuts": False,
    "numpyro_models:chains": False,
    "mctx_search:muzero": False,
    "graph_networks:interaction": False,
    "model_libraries:qwen3_train": True,
    "model_libraries:qwen3_decode": False,
    "model_libraries:vit": False,
}
TARGETS, SHARDED = ("cpu", "h200"), ("h100:8",)

_STATE = "the step returns new state, and jit was not told to donate the old"
_LOGITS = "the loss takes all logits of a batch at once, in float32"
_SCORES = "attention's scores are kept in float32, the rest of the model computes in bfloat16"
_REMAT = "every layer is recomputed, and the device has room for what that would save"
_WIDE_CPU = "the CPU computes bfloat16 in float32, and keeps what it computed"

# Program -> target, or "*" for all -> kind -> why.
READ: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "linen_models:mnist": {"*": {"not_donated": _STATE}},
    "linen_models:resnet50": {"cpu": {"wide_activations": _WIDE_CPU}},
    "linen_models:gpt": {"*": {"full_logits": _LOGITS}, "h200": {"spare_memory": _REMAT}},
    "linen_models:seq2seq": {"*": {"not_donated": _STATE}},
    "linen_models:vae": {"*": {"not_donated": _STATE}},
    "linen_sharded:fsdp": {
        "*": {"full_logits": _LOGITS},
        "h200": {"spare_memory": _REMAT},
        "h100:8": {
            "spare_memory": _REMAT,
            "audit_sharding": "activations are gathered for logits whose vocabulary is sharded, and for the gradient "
            "of the embedding",
        },
    },
    "nnx_models:transformer": {
        "*": {"full_logits": _LOGITS, "not_donated": _STATE},
        "h200": {"wide_activations": _SCORES},
        "cpu": {"wide_activations": _WIDE_CPU},
    },
    "nnx_models:functional": {
        "*": {"full_logits": _LOGITS},
        "h200": {"wide_activations": _SCORES},
        "cpu": {"wide_activations": _WIDE_CPU},
    },
    "equinox_models:mlp": {"*": {"not_donated": _STATE}},
    "equinox_models:gpt": {"*": {"full_logits": _LOGITS}},
    "haiku_models:transformer": {"*": {"full_logits": _LOGITS, "not_donated": _STATE}},
    "plain_jax:linear": {"*": {"not_donated": _STATE}},
    "plain_jax:rnn": {"cpu": {"not_donated": _STATE}},
    "plain_jax:decode_kept": {"*": {"not_donated": "the cache comes back, and jit was not told to donate the old one"}},
    "plain_jax:gan": {"*": {"not_donated": _STATE}},
    "parallel:pmap": {
        "h100:8": {
            "whole_state": "pmap keeps all parameters and the momentum on each of eight devices, "
            "and sums the gradients over them"
        }
    },
    "parallel:ring": {"h100:8": {"large_collective": "the block that goes round is a seventh of the peak"}},
    "parallel:tensor_parallel": {"*": {"not_donated": _STATE}, "cpu": {"wide_activations": _WIDE_CPU}},
    "parallel:data_parallel": {
        "*": {"not_donated": _STATE},
        "h100:8": {"whole_state": "data parallelism keeps all parameters and moments on each of eight devices"},
    },
    "model_libraries:qwen3_train": {
        "cpu": {
            "full_logits": _LOGITS,
            "audit_checkpoint": "XLA's CPU compiler of jax 0.10.2 merges the recomputation of unrolled layers",
        },
        "h200": {"full_logits": _LOGITS, "spare_memory": _REMAT},
        "h100:8": {
            "full_logits": _LOGITS,
            "spare_memory": _REMAT,
            "large_collective": "tunix, traced on a CPU, constrains no activation: the logits are gathered",
            "audit_sharding": "the gathered logits, and their gradient",
        },
    },
    "model_libraries:vit": {"*": {"not_donated": _STATE}},
}

# As `READ`, for what is true where one version of the compiler makes it so and another does not.
OF_SOME_COMPILERS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "plain_jax:rnn": {"h200": {"not_donated": "the state is a hundredth of the peak, and by some peaks a little less"}},
    "linen_sharded:fsdp": {
        "h100:8": {"replicated_activations": "all activations are gathered for logits whose vocabulary is sharded"}
    },
    "parallel:tensor_parallel": {
        "h100:8": {
            "large_collective": "one psum sums the whole activation, an eighth of the "
            "peak; from jax 0.11 on in the product's own place"
        }
    },
}


def expected(program: str, target: str) -> Mapping[str, str]:
    """Kind of a finding -> why it is true of a program on a target; {} for those that are not of the list."""
    return _told(READ, program, target)


def accepted(program: str, target: str) -> Mapping[str, str]:
    """As `expected`, for findings that need not be there: `OF_SOME_COMPILERS`."""
    return _told(OF_SOME_COMPILERS, program, target)


def _told(table: Mapping[str, Mapping[str, Mapping[str, str]]], program: str, target: str) -> Mapping[str, str]:
    if program not in PROGRAMS or target not in (*TARGETS, *SHARDED):
        return {}
    own = table.get(program, {})
    return {**own.get("*", {}), **own.get(target, {})}
