"""Every key there is, with its meaning, and the values most experiments share.

A config file returns `get_config()`; on the command line `--config=FILE` chooses it and `--config.KEY=VALUE` overrides
a key; `bytescope keys` lists them. A key that is not here does not exist. The comment at a key is its documentation.
"""

from ml_collections import ConfigDict

# Architectures as rows of `model` values.
GPT2 = {"norm": "layernorm", "mlp": "gelu", "position": "learned", "bias": True, "tie_embeddings": True}
LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False}


def get_config() -> ConfigDict:
    """The base: a Llama-shaped byte model; experiments change what differs."""
    config = ConfigDict({name: group() for name, group in GROUPS.items()})
    config.seed = 0  # random seed of parameters, data order and dropout
    return config


def _model() -> ConfigDict:
    """The architecture. With mlp_chunk no remat policy keeps mlp_norm, gate, up, act or mlp_out.

    With experts the MLP of a block is a mixture (model/experts); dense_layers and moe_every say which blocks keep the
    dense MLP of width d_ff. The auxiliary losses have their coefficients in the group loss.
    """
    model = ConfigDict()
    model.d_model = 256  # width of the residual stream
    model.n_layers = 4  # transformer blocks
    model.n_heads = 4  # query heads
    model.n_kv_heads = 4  # key/value heads; fewer than n_heads is grouped-query attention
    model.d_head = 64  # width of one head
    model.d_ff = 768  # width of the MLP
    model.vocab_size = 256  # tokens of the vocabulary
    model.vocab_multiple = 128  # rows of the token table are padded to a multiple of this, for mesh.tensor
    model.max_seq_len = 1024  # longest sequence that the model accepts
    model.norm = LLAMA["norm"]  # rmsnorm | layernorm | rmsnorm_offset: Gemma's, the scale stored less 1
    model.mlp = LLAMA["mlp"]  # swiglu | geglu (gated by the tanh form of GELU) | gelu (its tanh form) | gelu_exact
    model.position = LLAMA["position"]  # position encoding: rope | learned | none
    model.bias = LLAMA["bias"]  # biases in attention, MLP and layernorm
    model.qkv_bias = False  # biases of queries, keys and values alone, as in Qwen2; bias has them too
    model.qk_norm = False  # RMSNorm of each head's queries and keys before their rotation, as in Qwen3
    model.tie_embeddings = LLAMA["tie_embeddings"]  # the output head shares the token table
    model.logits_softcap = 0.0  # bounds logits z by c: c tanh(z / c), as in Gemma 2; 0: no bound
    model.norm_eps = 1e-5  # added to the variance in norms
    model.post_norms = False  # what attention and MLP add to the residual stream is normed too, as in Gemma 2
    model.embed_scale = 1.0  # factor of the token embedding, rounded to the compute dtype; Gemma: sqrt(d_model)
    model.rope_theta = 10_000.0  # base of the rotary frequencies
    # (): no scaling; (factor,): linear; (factor, low_freq, high_freq, original_positions): Llama 3.1;
    # (factor, beta_fast, beta_slow, original_positions, attention_factor): YaRN
    model.rope_scaling = ()
    model.rope_local_theta = 0.0  # Gemma 3: base of local layers, without rope_scaling; 0: rope_theta in all layers
    model.global_every = 0  # with it: each so manieth layer is global, with rope_theta, and all others are local
    model.init_std = 0.02  # standard deviation of the initial weights
    model.scan = True  # one compiled block looped over stacked parameters; False: every layer compiled on its own
    model.unroll = 1  # layers per iteration of that loop; divides the layers of each remat.layers range, or is all
    model.dropout = 0.0  # rate on the embedding, on attention probabilities and on both residual branches
    model.attention = "auto"  # kernel: auto | naive | chunked | cudnn; auto chooses by device and length
    model.attention_chunk = 512  # positions per block of the chunked kernel
    model.attention_scale = 0.0  # factor of the products of queries and keys; 0: 1 / sqrt(d_head)
    model.attention_softcap = 0.0  # bounds scores s by c: c tanh(s / c), as in Gemma 2; 0: no bound
    model.attention_kind = "gqa"  # gqa: grouped queries | mla: multi-head latent attention (DeepSeek-V2)
    model.mla_q_rank = 0  # mla: width of the queries' latent; 0: queries are projected from the input
    model.mla_kv_rank = 512  # mla: width of the latent of keys and values
    model.mla_d_rope = 64  # mla: width of a head that carries the rotary position, shared by all keys
    model.mla_d_value = 128  # mla: width of a head's values; d_head is that of queries and keys without rotation
    model.experts = 0  # routed experts of a block; 0: none, every MLP is dense
    model.experts_per_token = 2  # routed experts that a token goes to
    model.d_expert = 0  # width of one routed or shared expert; 0: d_ff
    model.shared_experts = 0  # experts that every token goes to, computed as one MLP of their widths' sum
    model.dense_layers = 0  # first layers whose MLP stays dense
    model.moe_every = 1  # of the layers after those, each so manieth has experts, all others are dense
    model.router = "softmax"  # scores of experts: softmax | sigmoid
    model.router_renormalize = True  # the weights of a token's chosen experts sum to 1
    model.router_scale = 1.0  # factor of those weights
    model.router_bias = False  # a bias per expert that picks and does not weigh, moved toward balance after each update
    model.router_groups = 1  # groups of experts; a token chooses from its best router_top_groups of them
    model.router_top_groups = 1  # groups that a token may choose from
    model.moe_kernel = "auto"  # auto | grouped (Pallas kernels) | capacity | ragged | scan | dense (the reference)
    model.capacity_factor = 0.0  # rows held per expert over the mean, more are dropped; 0: none dropped, capacity: 1.25
    model.mlp_chunk = 0  # positions per device whose MLP exists at once, always recomputed; 0: all
    return model


def _init() -> ConfigDict:
    """Where the parameters begin."""
    init = ConfigDict()
    init.folder = ""  # folder of weights (config.json, safetensors) that training begins from; empty: random weights
    # folder of adapters as peft saves them that training begins from; lora.rank=0: rank, alpha and targets are theirs
    init.adapter = ""
    return init


def _lora() -> ConfigDict:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): they alone are trained, all other parameters are frozen."""
    lora = ConfigDict()
    lora.rank = 0  # rank of the adapters; 0: none, all parameters are trained
    lora.alpha = 16.0  # what adapters add is multiplied by alpha / rank
    lora.targets = ("q", "k", "v", "o", "gate", "up", "down")  # matrices of the blocks that have an adapter
    lora.dropout = 0.0  # rate on what adapters read
    lora.base = "bf16"  # how frozen weights of the blocks are stored: bf16 | nf4 (QLoRA, 4.127 bits) | int8
    return lora


def _loss() -> ConfigDict:
    """Cross-entropy over the vocabulary."""
    loss = ConfigDict()
    loss.kind = "chunked"  # full | chunked; chunked never holds the whole logits array
    loss.balance = 0.01  # coefficient of the experts' load-balance loss (Switch, arXiv 2101.03961)
    # separate: one balance loss per layer, then the mean | pooled: one loss from loads and scores averaged over the
    # layers of a micro-batch, as in transformers; hf:FOLDER sets it
    loss.balance_layers = "separate"
    loss.router_z = 0.0  # coefficient of the router z-loss (ST-MoE, arXiv 2202.08906)
    loss.chunk = 2048  # tokens per data-parallel rank whose logits exist at once
    return loss


def _precision() -> ConfigDict:
    """Dtypes by role (model/precision.py); "" is the preset's own.

    Presets: bf16 computes over float32 master parameters. bf16_grads has gradients and a copy of the parameters in
    bf16 too, 16 bytes per parameter; fp32_grads the same with float32 sums over micro-batches, 20 bytes. bf16_params
    has no float32 master and rounds stochastically. fp16 scales the loss dynamically. fp8 is bf16, but products of the
    blocks have float8_e4m3fn operands, one scale per 1x128 of an activation and per 128x128 of a weight.
    """
    precision = ConfigDict()
    precision.preset = "bf16"  # a row of dtypes: bf16 | fp32 | bf16_grads | fp32_grads | bf16_params | fp16 | fp8
    precision.param = ""  # float32 | bfloat16: parameters between steps; updates are computed in float32
    precision.compute = ""  # float32 | bfloat16 | float16: matrix products and activations
    precision.reduce = ""  # as_made | float32 | bfloat16 | float16: gradients until the update, and their reduction
    precision.accumulator = ""  # float32 | bfloat16: sum of the gradients of micro-batches, in both batch modes
    precision.norm = ""  # float32 | bfloat16: inside norms
    precision.logits = ""  # float32 | bfloat16 | float16: logits as stored; they are summed in float32
    precision.rounding = ""  # nearest | stochastic: rounding of updated parameters to bfloat16
    precision.cast = ""  # layer | step: cast the masters as each layer reads them, or all once per step (copy kept)
    precision.loss_scale = ""  # none | dynamic: halved, and the update skipped, when a gradient overflows
    precision.loss_scale_init = 65536.0  # initial loss scale
    precision.loss_scale_growth_every = 2000  # updates without overflow after which the loss scale doubles
    return precision


def _remat() -> ConfigDict:
    """What blocks keep for the backward pass; `bytescope policies` and `bytescope names` list the choices."""
    remat = ConfigDict()
    # none | full | selective | megatron | minimal | dots | dots_no_batch | sqrt | offload | offload_dots | custom
    # (remat.save, remat.offload) | auto (the least recomputation within remat.budget)
    remat.policy = "none"
    remat.budget = ""  # auto: bytes that the step may allocate per device, such as 72GiB; empty: all that is available
    remat.cost = "time"  # auto minimizes: time (predicted, transfers included) | flops (recomputed)
    remat.auto_offload = True  # auto: tensors may be offloaded to pinned host memory, where there is one
    remat.save = ()  # custom: checkpoint names to keep (model/names.py)
    remat.offload = ()  # custom: checkpoint names to keep in pinned host memory; everything else is recomputed
    remat.layers = ()  # ranges with their own policy or kept names: 0-8:none,8-12:q_rot+v+block_in@host; (): none
    remat.granularity = "block"  # block | parts: attention and MLP are checkpointed together or separately
    remat.xla_pass = False  # XLA's own rematerialization when a program exceeds the device
    return remat


def _data() -> ConfigDict:
    """What is read."""
    data = ConfigDict()
    data.source = "stdlib"  # stdlib | file | folder | glob; text, records, or .bin/.npy token shards
    data.eval_source = ""  # held-out data; empty: a twentieth of the source, files by name, records by content
    data.format = "text"  # text | chat: records of messages | pairs: records of prompt and completion
    data.field = "text"  # text: the field of a record that holds the document
    data.skip_bad = 0  # malformed records that are left out; one more is refused
    data.tokenizer = "bytes"  # bytes | path of a Hugging Face tokenizer.json
    data.special_tokens = "text"  # written in a text: text, encoded as any other | parse, they become the token
    data.chat_template = ""  # chat: path of a Jinja template; empty: the tokenizer's own, or ChatML
    data.loss_on = "assistant"  # chat, pairs: assistant, answers and completions alone | all
    data.packing = True  # chat, pairs: several examples per row, which do not see each other; False: one, padded
    data.too_long = "cut"  # chat, pairs: examples longer than seq_len: cut at their end | drop
    data.dtype = "uint16"  # dtype of .bin shards without an index.json
    data.seq_len = 256  # tokens per sequence
    data.prefetch = 4  # batches read ahead
    data.workers = 2  # reader threads
    return data


def _batch() -> ConfigDict:
    """The batch of one update."""
    batch = ConfigDict()
    batch.micro = 8  # sequences per data-parallel rank and micro-step
    batch.accumulation = 1  # micro-steps per optimizer update
    batch.tokens = 0  # tokens per update: sets the accumulation, whose own key stays 1 then; 0: batch.accumulation
    batch.accumulation_schedule = ()  # update:accumulation pairs, small batches first: 0:1,1000:4; (): constant
    batch.mode = "multisteps"  # multisteps: optax.MultiSteps, one call per micro-step | scan: a loop inside the step
    return batch


def _optimizer() -> ConfigDict:
    """The update.

    The best learning rate differs: lion wants about a tenth of adamw's, adagrad ten times, momentum a hundred times and
    more; muon, adafactor and the other adamw rows want adamw's. A fused update cannot know the global norm beforehand:
    there clip_norm is 0, or clip is "layer".
    """
    optimizer = ConfigDict()
    # adamw | adamw_bf16 (first moment) | adamw_8bit (both) | adafactor | adagrad | rmsprop | momentum | lion | muon
    optimizer.name = "adamw"
    optimizer.learning_rate = 3e-4  # learning rate at the end of warm-up; taken as it is by every optimizer
    optimizer.batch_scaling = "none"  # learning rate over tokens / base_batch_tokens: none | sqrt | linear
    optimizer.base_batch_tokens = 0  # tokens per update for which the learning rate was tuned
    optimizer.warmup_steps = 100  # updates of linear warm-up
    optimizer.end_fraction = 0.1  # where the cosine decay ends, as a fraction of the learning rate
    optimizer.b1 = 0.9  # decay of the first moment: adamw*, lion, and the parameters that muon leaves to AdamW
    optimizer.b2 = 0.95  # decay of the second moment, rmsprop's included
    optimizer.momentum = 0.95  # decay of the velocity: momentum, muon
    optimizer.eps = 1e-8  # added to the root of the second moment; lion, momentum and adafactor have none
    optimizer.weight_decay = 0.1  # of matrices, times the learning rate; norms and biases are never decayed
    optimizer.router_bias_rate = 0.001  # step of model.router_bias per update (DeepSeek-V3, arXiv 2412.19437)
    optimizer.clip_norm = 1.0  # largest norm of a gradient; 0: no clipping
    optimizer.fused_backward = False  # update layers inside the backward pass: one layer's gradient at a time
    optimizer.freeze = ()  # patterns of parameters that are not trained: blocks.attention.w_q, w_token, *norm*
    optimizer.clip = "global"  # norm to clip: global (all gradients) | layer (each layer's, and all others')
    return optimizer


def _offload() -> ConfigDict:
    """Training state in pinned host memory, streamed to the device layer by layer; activations: remat.policy."""
    offload = ConfigDict()
    offload.optimizer = False  # moments in host memory, read and written once per update
    offload.params = False  # master parameters in host memory; their gradients pass through it too
    return offload


def _mesh() -> ConfigDict:
    """Devices by use; one size may be -1: all that remain."""
    mesh = ConfigDict()
    mesh.strategy = "zero3"  # ddp | zero1: masters and moments sharded | zero2: gradients too | zero3: parameters too
    mesh.stage = 1  # stages of a pipeline: each holds a range of layers
    mesh.data = 1  # replicas of what the other axes share, such as one per host
    mesh.fsdp = -1  # devices that share optimizer state, gradients and parameters
    mesh.expert = 1  # devices that share the experts; to all else they are data-parallel ranks, as those of fsdp
    mesh.context = 1  # devices that share a sequence (ring attention)
    mesh.tensor = 1  # devices that share heads, MLP width and vocabulary
    mesh.sequence_parallel = False  # norms and residual stream sharded along the sequence in the tensor group
    # how rows reach their experts' devices: auto | all_to_all (moe_kernel=capacity) | ragged_all_to_all | allgather
    mesh.dispatch = "auto"
    mesh.prefetch = 0  # layers whose parameters GPUs gather ahead of use; hides collectives, costs their bytes
    return mesh


def _pipeline() -> ConfigDict:
    """How the stages of mesh.stage run the micro-batches of batch.accumulation, with batch.mode=scan."""
    pipeline = ConfigDict()
    pipeline.schedule = "1f1b"  # gpipe | 1f1b | interleaved | v | zero_bubble: bytescope pipeline draws them
    pipeline.virtual = 1  # chunks of layers per stage; interleaved has several, v has two
    return pipeline


def _xla() -> ConfigDict:
    """Options of XLA's GPU compiler (train/parallel/xla_options.py), refused elsewhere; "" is the compiler's choice.

    From O1 on collectives are pipelined and scheduled by latency. That is refused over several GPUs with
    model.attention=chunked: XLA itself (0.10 to 0.12) aborts then.
    """
    xla = ConfigDict()
    xla.optimization_level = ""  # O0 | O1 | O2 | O3: effort spent on execution time; refused where XLA would abort
    xla.latency_hiding = ""  # on | off: the scheduler that moves collectives and copies behind compute
    xla.command_buffers = ""  # CUDA graphs: off | kernels (XLA's own kernels alone) | loops (loops over layers too)
    xla.gemm = ""  # cublas: no Triton kernels for products | triton: no cuBLAS where Triton can
    xla.autotune_level = ""  # 0: no kernel is chosen by timing, to 4: all are, on initialized buffers, results compared
    return xla


def _train() -> ConfigDict:
    """Length, cadence and records of a run."""
    train = ConfigDict()
    train.steps = 1000  # optimizer updates
    train.log_every = 10  # updates between lines of the log
    train.eval_every = 250  # updates between evaluations on held-out data
    train.eval_sequences = 0  # held-out sequences per evaluation; 0: all
    train.checkpoint_every = 250  # updates between checkpoints
    train.keep = 3  # newest checkpoints kept; the one with the best held-out loss is kept besides
    train.stall_timeout = 120.0  # seconds without a step until a straggler is named (if silent, a quarter); 0: never
    train.deterministic = False  # bit-identical reruns on GPUs too, at a cost in speed
    train.sample_tokens = 200  # tokens generated at the end of the run; 0: none
    # the text that the sample begins with; for chats, a user's message; if it is longer than data.seq_len, its end is
    # read; if it is empty, "def ", or for chats and pairs a held-out prompt
    train.sample_prompt = ""
    train.sample_temperature = 0.8  # sampling temperature; 0: the likeliest token each time
    train.eval_prompts = ""  # JSON lines with text that every evaluation answers, into answers.jsonl; empty: none
    train.tensorboard = True  # write TensorBoard event files
    train.wandb = ""  # project of Weights & Biases that gets the same rows; empty: none
    train.cache_dir = ""  # folder of compiled programs; empty: $XDG_CACHE_HOME/bytescope/xla; none: no cache
    return train


GROUPS = {
    "model": _model,
    "init": _init,
    "lora": _lora,
    "loss": _loss,
    "precision": _precision,
    "remat": _remat,
    "data": _data,
    "batch": _batch,
    "optimizer": _optimizer,
    "offload": _offload,
    "mesh": _mesh,
    "pipeline": _pipeline,
    "xla": _xla,
    "train": _train,
}
