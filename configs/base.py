"""Every key there is, with its meaning, and the values most experiments share.

A config file returns `get_config()`; on the command line `--config=FILE` chooses it and
`--config.KEY=VALUE` overrides a key. A key that is not here does not exist.
"""

from ml_collections import ConfigDict

# Architectures as rows of `model` values.
GPT2 = {"norm": "layernorm", "mlp": "gelu", "position": "learned", "bias": True, "tie_embeddings": True}
LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False}


def get_config() -> ConfigDict:
    """The base: a Llama-shaped byte model; experiments change what differs."""
    config = ConfigDict({name: group() for name, group in GROUPS.items()})
    config.seed = 0  # of parameters, data order and dropout
    return config


def _model() -> ConfigDict:
    """The architecture."""
    model = ConfigDict()
    model.d_model = 256  # width of the residual stream
    model.n_layers = 4
    model.n_heads = 4  # query heads
    model.n_kv_heads = 4  # key/value heads; fewer than n_heads is grouped-query attention
    model.d_head = 64
    model.d_ff = 768  # width of the MLP
    model.vocab_size = 256
    model.vocab_multiple = 128  # rows of the table are padded to a multiple, to divide over mesh.tensor
    model.max_seq_len = 1024  # most positions the model can be given
    model.update(LLAMA)  # norm: rmsnorm | layernorm; mlp: swiglu | gelu; position: rope | learned | none; ...
    model.norm_eps = 1e-5
    model.rope_theta = 10_000.0
    model.rope_scaling = ()  # Llama 3.1: (factor, low_freq_factor, high_freq_factor, original_positions)
    model.init_std = 0.02
    model.scan = True  # one compiled block looped over stacked parameters; False: every layer on its own
    # Layers of one turn of that loop: fewer turns and more to schedule at a time, for more to compile. It divides the
    # layers of each range of remat.layers (of sqrt: of a group), or is at least as many: no loop is left then.
    model.unroll = 1
    model.dropout = 0.0  # on embedding, attention probabilities and both residual branches
    model.attention = "auto"  # auto | naive | chunked | cudnn
    model.attention_chunk = 512  # positions per block of the chunked kernel
    # Positions on a device whose MLP exists at once, made again in the backward pass whatever the policy (which then
    # keeps no mlp_norm, gate, up, act or mlp_out); 0: all.
    model.mlp_chunk = 0
    return model


def _loss() -> ConfigDict:
    """Cross-entropy over the vocabulary."""
    loss = ConfigDict()
    loss.kind = "chunked"  # full | chunked: chunked never holds the whole logits array
    loss.chunk = 2048  # tokens per data-parallel rank whose logits exist at once
    return loss


def _precision() -> ConfigDict:
    """Dtypes by role (model/precision.py). "" is the preset's own."""
    precision = ConfigDict()
    # bf16: compute over float32 master parameters; fp32; bf16_grads (gradients and a copy of the parameters too: 16
    # bytes a parameter); fp32_grads (the same, gradients summed in float32: 20 where micro-batches are accumulated);
    # bf16_params (no float32 master: stochastic rounding); fp16 (dynamic loss scaling); fp8: bf16, but
    # products of the blocks of operands in float8_e4m3fn, one scale for 1x128 of an activation, 128x128 of a weight
    precision.preset = "bf16"
    precision.param = ""  # float32 | bfloat16: parameters between steps; updates are made in float32
    precision.compute = ""  # float32 | bfloat16 | float16: matrix products and activations
    precision.reduce = ""  # as_made | float32 | bfloat16 | float16: gradients until the update, and their reduction
    precision.accumulator = ""  # float32 | bfloat16: sum of the gradients of micro-batches, in both batch modes
    precision.norm = ""  # float32 | bfloat16: inside norms
    precision.logits = ""  # float32 | bfloat16 | float16: logits as they are held; their sums are float32
    precision.rounding = ""  # nearest | stochastic: of updated parameters to bfloat16
    precision.cast = ""  # layer | step: masters are cast as a layer reads them, or all of them once a step, kept
    precision.loss_scale = ""  # none | dynamic: halved and the update skipped when a gradient overflows
    precision.loss_scale_init = 65536.0  # scale of the mean loss at the start
    precision.loss_scale_growth_every = 2000  # updates without overflow after which the scale doubles
    return precision


def _remat() -> ConfigDict:
    """What blocks keep for the backward pass."""
    remat = ConfigDict()
    # none | full | selective | minimal | dots | dots_no_batch | sqrt | offload | offload_dots | custom
    # auto: the least recomputation within remat.budget, by name and range of layers, settled by some compiles
    remat.policy = "none"
    remat.budget = ""  # auto: bytes that the step may allocate on a device: 72GiB; empty: all that it may hand out
    remat.cost = "time"  # auto: what is least: time (by the roofline, transfers too) | flops that are recomputed
    remat.auto_offload = True  # auto: tensors may go to pinned host memory, where there is one
    remat.save = ()  # custom: checkpoint names to keep (model/names.py)
    remat.offload = ()  # custom: checkpoint names to keep in pinned host memory; the rest is recomputed
    # Ranges with a policy of their own, or with the names that they keep: 0-8:none,8-12:q_rot+v+block_in@host
    remat.layers = ()
    remat.granularity = "block"  # block | parts: attention and MLP checkpointed apart
    remat.xla_pass = False  # XLA's own rematerialization when a program exceeds the device
    return remat


def _data() -> ConfigDict:
    """What is read."""
    data = ConfigDict()
    data.source = "stdlib"  # stdlib | file | folder | glob; text, or .bin/.npy token shards
    data.eval_source = ""  # held-out data; empty: a part of the source, chosen by file
    data.tokenizer = "bytes"  # bytes | path of a Hugging Face tokenizer.json
    data.dtype = "uint16"  # of .bin shards without an index.json
    data.seq_len = 256  # tokens of one sequence
    data.prefetch = 4  # batches read ahead
    data.workers = 2  # reader threads
    return data


def _batch() -> ConfigDict:
    """The batch of one update."""
    batch = ConfigDict()
    batch.micro = 8  # sequences per data-parallel rank and micro-step
    batch.accumulation = 1  # micro-steps per optimizer update
    batch.tokens = 0  # of one update: sets the accumulation, which then stays 1 here; 0: batch.accumulation as it is
    batch.accumulation_schedule = ()  # update:accumulation, small batches first: 0:1,1000:4; (): the same throughout
    batch.mode = "multisteps"  # multisteps: optax.MultiSteps, one call a micro-step | scan: inside one step
    return batch


def _optimizer() -> ConfigDict:
    """The update."""
    optimizer = ConfigDict()
    # adamw | adamw_bf16 (first moment) | adamw_8bit (both) | adafactor | adagrad | rmsprop | momentum | lion | muon
    optimizer.name = "adamw"
    # At the end of warm-up, taken as it is by every row: lion wants about a tenth of adamw's, adagrad ten times,
    # momentum a hundred times and more; muon, adafactor and the other adamw rows want the same.
    optimizer.learning_rate = 3e-4
    # Times (tokens of an update / base_batch_tokens) to the power of 0 (none), 1/2 (sqrt) or 1 (linear).
    optimizer.batch_scaling = "none"
    optimizer.base_batch_tokens = 0  # the batch that the learning rate was found for
    optimizer.warmup_steps = 100
    optimizer.end_fraction = 0.1  # of the learning rate, where the cosine ends
    optimizer.b1 = 0.9  # decay of the first moment: adamw*, lion, and what muon leaves to AdamW
    optimizer.b2 = 0.95  # of the second, and rmsprop's
    optimizer.momentum = 0.95  # decay of the velocity: momentum, muon
    optimizer.eps = 1e-8  # beside the root of the second moment; lion, momentum and adafactor have none
    optimizer.weight_decay = 0.1  # on matrices, times the learning rate; norms and biases are never decayed
    optimizer.clip_norm = 1.0  # most that a gradient's norm may be; 0 for no clipping
    # Each layer updated inside the backward pass, so that one layer's gradient exists at a time. It cannot know the
    # global norm beforehand: clip_norm is 0, or clip "layer".
    optimizer.fused_backward = False
    optimizer.clip = "global"  # global: the norm of all gradients | layer: of each layer's, and of all others'
    return optimizer


def _offload() -> ConfigDict:
    """Training state in pinned host memory, streamed to the device layer by layer; activations: remat.policy."""
    offload = ConfigDict()
    offload.optimizer = False  # moments: read and written once an update
    offload.params = False  # master parameters; their gradients pass through host memory too
    return offload


def _mesh() -> ConfigDict:
    """Devices by use; one size may be -1: all that remain."""
    mesh = ConfigDict()
    mesh.strategy = "zero3"  # ddp | zero1 | zero2 | zero3: what the devices of fsdp and context divide
    mesh.data = 1  # replicas of all that; hosts, say, with mesh.fsdp inside each
    mesh.fsdp = -1  # devices that share optimizer state, gradients and parameters
    mesh.context = 1  # devices that share a sequence: ring attention
    mesh.tensor = 1  # devices that share heads, MLP width and vocabulary
    mesh.sequence_parallel = False  # norms and residual stream divided along the sequence in the tensor group
    mesh.prefetch = 0  # layers whose parameters GPUs gather ahead of use: hides collectives, costs their bytes
    return mesh


def _xla() -> ConfigDict:
    """What XLA's GPU compiler is told (parallel/xla_options.py); empty: its own choice. Refused on other devices."""
    xla = ConfigDict()
    # O0 | O1 | O2 | O3: effort spent on execution time. From O1 on collectives are pipelined and scheduled by latency;
    # refused over several GPUs with model.attention=chunked, on which XLA itself (0.10 to 0.12) aborts then.
    xla.optimization_level = ""
    xla.latency_hiding = ""  # on | off: the scheduler that moves collectives and copies behind compute
    # CUDA graphs, many kernels in one launch. off | kernels: XLA's own kernels alone | loops: loops over layers too
    xla.command_buffers = ""
    xla.gemm = ""  # cublas: no Triton kernels for products | triton: no cuBLAS where Triton can
    xla.autotune_level = ""  # 0: no kernel is chosen by timing, to 4: all, on initialized buffers, results compared
    return xla


def _train() -> ConfigDict:
    """Length, cadence and records of a run."""
    train = ConfigDict()
    train.steps = 1000  # optimizer updates
    train.log_every = 10
    train.eval_every = 250
    train.eval_sequences = 0  # held-out sequences per evaluation; 0: all
    train.checkpoint_every = 250
    train.keep = 3  # newest checkpoints kept, besides the one with the best held-out loss
    train.deterministic = False  # bit-equal reruns on GPUs too, at a price in speed
    train.sample_tokens = 200  # generated at the end; 0: none
    train.sample_prompt = "def "
    train.sample_temperature = 0.8
    train.tensorboard = True
    train.cache_dir = ""  # of compiled programs; empty: $XDG_CACHE_HOME/bytescope/xla; none: no cache
    return train


GROUPS = {"model": _model, "loss": _loss, "precision": _precision, "remat": _remat, "data": _data, "batch": _batch,
          "optimizer": _optimizer, "offload": _offload, "mesh": _mesh, "xla": _xla, "train": _train}
