"""Every config key with its meaning and its default.

A config file returns `get_config()`. On the command line the first word chooses the file and `--config.KEY=VALUE`
overrides a key. `bytescope list keys` lists all keys. The comment at a key is its documentation. Keys that are not
listed in this file are refused.
"""

from ml_collections import ConfigDict

# Values of the group `model` for two families of architectures.
GPT2 = {"norm": "layernorm", "mlp": "gelu", "position": "learned", "bias": True, "tie_embeddings": True}
LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False}


def get_config() -> ConfigDict:
    """Returns the base config: a small Llama-like model trained on bytes. Other configs start from it and change some
    keys."""
    config = ConfigDict({name: group() for name, group in GROUPS.items()})
    config.seed = 0  # random seed of parameters, data order and dropout
    return config


def _model_group() -> ConfigDict:
    model = ConfigDict()
    model.d_model = 256  # width of the residual stream
    model.n_layers = 4  # transformer blocks
    model.n_heads = 4  # query heads
    model.n_kv_heads = 4  # key and value heads; fewer than n_heads is grouped-query attention
    model.d_head = 64  # width of one head
    model.d_ff = 768  # width of the MLP
    model.vocab_size = 256  # tokens of the vocabulary
    model.vocab_multiple = 128  # rows of the token table are padded to a multiple of this, for mesh.tensor
    model.max_seq_len = 1024  # longest sequence that the model accepts
    model.norm = LLAMA["norm"]  # rmsnorm | layernorm | rmsnorm_offset (Gemma: the stored scale is the scale minus 1)
    model.mlp = LLAMA["mlp"]  # swiglu | geglu (gated, tanh approximation) | gelu (tanh approximation) | gelu_exact
    model.position = LLAMA["position"]  # position encoding: rope | learned | none
    model.bias = LLAMA["bias"]  # biases in attention, MLP and layernorm
    model.qkv_bias = False  # biases of queries, keys and values, as in Qwen2; already included if bias is set
    model.qk_norm = False  # RMSNorm of each head's queries and keys before their rotation, as in Qwen3
    model.tie_embeddings = LLAMA["tie_embeddings"]  # the output head shares the token table
    model.logits_softcap = 0.0  # bounds logits z by c: c tanh(z / c), as in Gemma 2; 0: no bound
    model.norm_eps = 1e-5  # added to the variance in norms
    model.post_norms = False  # also normalize the outputs of attention and MLP, as in Gemma 2
    model.embed_scale = 1.0  # factor of the token embedding, rounded to the compute dtype; Gemma: sqrt(d_model)
    model.rope_theta = 10_000.0  # base of the rotary frequencies
    # (): no scaling; (factor,): linear; (factor, low_freq, high_freq, original_positions): Llama 3.1;
    # (factor, beta_fast, beta_slow, original_positions, attention_factor): YaRN
    model.rope_scaling = ()
    model.rope_local_theta = 0.0  # Gemma 3: base of local layers, which use no rope_scaling; 0: rope_theta
    model.global_every = 0  # every N-th layer is global and uses rope_theta, all others are local; 0: no local layers
    model.init_std = 0.02  # standard deviation of the initial weights
    model.scan = True  # loop one compiled block over stacked parameters; False: unroll, every layer compiled separately
    model.unroll = 1  # layers per iteration of the loop; must divide each range of remat.layers, or be all layers
    model.dropout = 0.0  # rate on the embedding, on attention probabilities and on both residual branches
    model.attention = "auto"  # kernel: auto | naive | chunked | cudnn; auto chooses by device and length
    model.attention_chunk = 512  # positions per block of the chunked kernel
    model.attention_scale = 0.0  # factor of the attention scores; 0: 1 / sqrt(d_head)
    model.attention_softcap = 0.0  # bounds scores s by c: c tanh(s / c), as in Gemma 2; 0: no bound
    model.attention_kind = "gqa"  # gqa: grouped queries | mla: multi-head latent attention (DeepSeek-V2)
    model.mla_q_rank = 0  # mla: width of the query latent; 0: queries are projected from the input directly
    model.mla_kv_rank = 512  # mla: width of the key-value latent
    model.mla_d_rope = 64  # mla: rotary dimensions of a head; all heads share the rotary part of the key
    model.mla_d_value = 128  # mla: width of a value head; d_head is then the width of the dimensions without rotation
    model.experts = 0  # routed experts of a block; 0: none, every MLP is dense
    model.experts_per_token = 2  # routed experts per token
    model.d_expert = 0  # width of one routed or shared expert; 0: d_ff
    model.shared_experts = 0  # experts that every token uses, computed as one MLP with the sum of their widths
    model.dense_layers = 0  # number of first layers with a dense MLP
    model.moe_every = 1  # of the layers after them, every N-th has experts, the others are dense
    model.router = "softmax"  # scores of experts: softmax | sigmoid
    model.router_renormalize = True  # the weights of a token's chosen experts sum to 1
    model.router_scale = 1.0  # factor of the weights of a token's experts
    model.router_bias = False  # bias per expert for the choice, not for the weight; updates move it toward balance
    model.router_groups = 1  # groups of experts; a token chooses experts only from its best router_top_groups groups
    model.router_top_groups = 1  # number of groups that a token may choose from
    model.moe_kernel = "auto"  # auto | grouped (Pallas kernels) | capacity | ragged | scan | dense (the reference)
    model.capacity_factor = 0.0  # limit on rows per expert (fixed slots) or device over the mean; 0: none (slots: 1.25)
    model.mlp_chunk = 0  # positions whose MLP is computed at a time, per device; always recomputed; 0: all
    return model


def _init_group() -> ConfigDict:
    init = ConfigDict()
    init.folder = ""  # folder with config.json and safetensors to start from; empty: random weights
    # folder of peft adapters to start from; with lora.rank=0 rank, alpha and targets are read from it
    init.adapter = ""
    return init


def _lora_group() -> ConfigDict:
    # Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): all other parameters are frozen.
    lora = ConfigDict()
    lora.rank = 0  # rank of the adapters; 0: no adapters, all parameters are trained
    lora.alpha = 16.0  # the output of an adapter is multiplied by alpha / rank
    lora.targets = ("q", "k", "v", "o", "gate", "up", "down")  # matrices of the blocks that have an adapter
    lora.dropout = 0.0  # dropout rate on the input of adapters
    lora.base = "bf16"  # how frozen weights of the blocks are stored: bf16 | nf4 (QLoRA, 4.127 bits) | int8
    return lora


def _loss_group() -> ConfigDict:
    loss = ConfigDict()
    loss.kind = "chunked"  # chunked: never holds the whole logits array | full
    loss.balance = 0.01  # coefficient of the experts' load-balance loss of a micro-batch (Switch, arXiv 2101.03961)
    # separate: one balance loss per layer, then the mean | pooled: one loss from loads and scores averaged over the
    # layers of a micro-batch, as in transformers; hf:FOLDER sets it
    loss.balance_layers = "separate"
    loss.router_z = 0.0  # coefficient of the router z-loss, a mean over unmasked targets (ST-MoE, arXiv 2202.08906)
    loss.chunk = 2048  # chunked: tokens per chunk, on each data-parallel rank
    return loss


def _precision_group() -> ConfigDict:
    # An empty dtype means the dtype of the preset. bf16: computes in bf16, float32 master parameters. bf16_grads: also
    # gradients and a copy of the parameters in bf16, 16 bytes per parameter with Adam. fp32_grads: bf16_grads with
    # float32 sums over micro-batches, 20 bytes. bf16_params: no float32 master parameters, stochastic rounding of
    # updates. fp16: dynamic loss scale. fp8: bf16 with float8_e4m3fn operands in the weight matmuls of the blocks, one
    # scale per 1x128 tile of an activation and per 128x128 tile of a weight.
    precision = ConfigDict()
    precision.preset = "bf16"  # a row of dtypes: bf16 | fp32 | bf16_grads | fp32_grads | bf16_params | fp16 | fp8
    precision.param = ""  # float32 | bfloat16: parameters between steps; updates are computed in float32
    precision.compute = ""  # float32 | bfloat16 | float16: matrix products and activations
    precision.reduce = ""  # as_made | float32 | bfloat16 | float16: gradients before the update, and their reduction
    precision.accumulator = ""  # float32 | bfloat16: sum of the gradients of micro-batches, in both batch modes
    precision.norm = ""  # float32 | bfloat16: inside norms
    precision.logits = ""  # float32 | bfloat16 | float16: stored logits; products accumulate in float32
    precision.rounding = ""  # nearest | stochastic: rounding of updated parameters to bfloat16
    precision.cast = ""  # layer: cast master parameters as a layer reads them | step: once per step, copy kept
    precision.loss_scale = ""  # none | dynamic: halved, and the update skipped, when a gradient overflows
    precision.loss_scale_init = 65536.0  # initial loss scale
    precision.loss_scale_growth_every = 2000  # the loss scale doubles after this number of updates without overflow
    return precision


def _remat_group() -> ConfigDict:
    remat = ConfigDict()
    # a policy of bytescope list policies | custom (remat.save, remat.offload) | auto (the least recomputation within
    # remat.budget)
    remat.policy = "none"
    remat.budget = ""  # auto: maximum bytes that the step allocates per device, such as 72GiB; empty: the limit
    remat.cost = "time"  # auto minimizes: time (predicted, transfers included) | flops (recomputed)
    remat.auto_offload = True  # auto: may offload tensors to pinned host memory, if the device has it
    remat.save = ()  # custom: checkpoint names to save (model/names.py)
    remat.offload = ()  # custom: checkpoint names to save in pinned host memory; all others are recomputed
    remat.layers = ()  # another policy, or names to save, for ranges of layers: 0-8:none,8-12:q_rot+v+block_in@host
    remat.granularity = "block"  # block: attention and MLP are checkpointed together | parts: separately
    remat.xla_pass = False  # enable XLA's own rematerialization pass, which acts if a program exceeds the device
    return remat


def _data_group() -> ConfigDict:
    data = ConfigDict()
    data.source = "stdlib"  # stdlib | file | folder | glob; text, records, or .bin/.npy token shards
    data.eval_source = ""  # held-out data; empty: one twentieth of the source, chosen by file name or record content
    data.format = "text"  # text | chat: records of messages | pairs: records of prompt and completion
    data.field = "text"  # text: field of a record that contains the document
    data.skip_bad = 0  # maximum number of malformed records that are skipped; one more is an error
    data.tokenizer = "bytes"  # bytes | path of a Hugging Face tokenizer.json
    data.special_tokens = "text"  # special tokens written in a text: text (encoded as text) | parse (the token)
    data.chat_template = ""  # chat: path of a Jinja template; empty: the template of the tokenizer, or ChatML
    data.loss_on = "assistant"  # chat, pairs: assistant (loss on answers and completions only) | all
    data.packing = True  # chat, pairs: examples share rows, without attention between them; False: one per row
    data.too_long = "cut"  # chat, pairs: what happens to examples longer than seq_len: cut | drop
    data.dtype = "uint16"  # dtype of .bin shards without an index.json
    data.seq_len = 256  # tokens per sequence
    data.prefetch = 4  # number of batches read ahead
    data.workers = 2  # number of reader threads
    return data


def _batch_group() -> ConfigDict:
    batch = ConfigDict()
    batch.micro = 8  # sequences per data-parallel rank and micro-step
    batch.accumulation = 1  # micro-steps per optimizer update
    batch.tokens = 0  # tokens per update, which sets the accumulation (leave batch.accumulation at 1); 0: not set
    batch.mode = "multisteps"  # multisteps: optax.MultiSteps, one call per micro-step | scan: a loop inside the step
    return batch


def _optimizer_group() -> ConfigDict:
    # The best learning rate relative to adamw: lion about a tenth, adagrad ten times, momentum a hundred times or more,
    # others the same. A fused backward pass updates a layer before the global gradient norm is known, so it needs
    # clip_norm=0 or clip="layer".
    optimizer = ConfigDict()
    # adamw | adamw_bf16 (first moment) | adamw_8bit (both) | adafactor | adagrad | rmsprop | momentum | lion | muon
    optimizer.name = "adamw"
    optimizer.learning_rate = 3e-4  # peak learning rate, reached at the end of warm-up
    optimizer.warmup_steps = 100  # updates of linear warm-up
    optimizer.end_fraction = 0.1  # final learning rate of the cosine decay, as a fraction of the peak
    optimizer.b1 = 0.9  # decay of the first moment: adamw*, lion, and muon for parameters that are not matrices
    optimizer.b2 = 0.95  # decay of the second moment, also of rmsprop
    optimizer.momentum = 0.95  # decay of the velocity: momentum, muon
    optimizer.eps = 1e-8  # added to the root of the second moment; unused by lion, momentum and adafactor
    optimizer.weight_decay = 0.1  # weight decay of matrices, times the learning rate; norms and biases are not decayed
    optimizer.router_bias_rate = 0.001  # step of model.router_bias per update (DeepSeek-V3, arXiv 2412.19437)
    optimizer.clip_norm = 1.0  # maximum norm of the gradient; 0: no clipping
    optimizer.fused_backward = False  # update layers inside the backward pass: one layer's gradient exists at a time
    optimizer.freeze = ()  # patterns of parameters that are not trained: blocks.attention.w_q, w_token, *norm*
    optimizer.clip = "global"  # global: clip the norm of all gradients | layer: clip each layer's norm on its own
    return optimizer


def _offload_group() -> ConfigDict:
    # To offload activations, see remat.policy.
    offload = ConfigDict()
    offload.optimizer = False  # moments in host memory, read and written once per update
    offload.params = False  # master parameters in host memory; gradients pass through host memory too
    return offload


def _mesh_group() -> ConfigDict:
    mesh = ConfigDict()
    mesh.strategy = "zero3"  # ddp | zero1: masters and moments sharded | zero2: gradients too | zero3: parameters too
    mesh.stage = 1  # pipeline stages, each with a range of layers
    mesh.data = 1  # replicas of the sharded state, such as one per host
    mesh.fsdp = -1  # devices over which optimizer state, gradients and parameters are sharded
    mesh.expert = 1  # devices over which experts are sharded; for everything else they are data-parallel like fsdp
    mesh.context = 1  # devices over which a sequence is sharded (ring attention)
    mesh.tensor = 1  # devices over which heads, MLP width and vocabulary are sharded (tensor parallelism)
    mesh.sequence_parallel = False  # also shard norms and residual stream along the sequence, over the tensor axis
    # how rows reach their experts' devices: auto | all_to_all (moe_kernel=capacity) | ragged_all_to_all | allgather
    mesh.dispatch = "auto"
    mesh.prefetch = 0  # layers whose parameters GPUs gather in advance: hides collectives, costs memory
    return mesh


def _pipeline_group() -> ConfigDict:
    # Pipelines need batch.mode=scan.
    pipeline = ConfigDict()
    pipeline.schedule = "1f1b"  # 1f1b | interleaved | v: bytescope estimate --stages=P compares them
    pipeline.virtual = 1  # chunks of layers per stage: several for interleaved, two for v
    return pipeline


def _xla_group() -> ConfigDict:
    # From O1 on, XLA pipelines collectives and hides their latency. On several GPUs these levels cannot be combined
    # with model.attention=chunked, because XLA (jaxlib 0.10 to 0.12) aborts.
    xla = ConfigDict()
    xla.optimization_level = ""  # O0 | O1 | O2 | O3: effort that XLA spends on speed
    xla.latency_hiding = ""  # on | off: latency-hiding scheduler, which overlaps collectives and copies with compute
    xla.command_buffers = ""  # CUDA graphs: off | kernels (only XLA's own kernels) | loops (also loops over layers)
    xla.gemm = ""  # cublas: no Triton matrix products | triton: no cuBLAS where Triton can be used
    # Temporary buffers may use this percentage of the memory that arguments and results leave free (XLA's default: 95).
    xla.memory_slop = ""  # a smaller value makes XLA trade speed for memory earlier
    # Buffers of at least this size, such as 64MiB, are freed at the same collective as in the schedule with the least
    # memory: barriers for the latency-hiding scheduler (xla#45929).
    xla.memory_fence = ""  # needs jaxlib 0.12 or newer
    xla.flags = ""  # other options of XLA, separated by spaces: FLAG=VALUE FLAG=VALUE; they override the keys above
    xla.autotune_level = ""  # 0: choose no kernel by timing | ... | 4: choose all by timing and compare their results
    return xla


def _train_group() -> ConfigDict:
    train = ConfigDict()
    train.steps = 1000  # optimizer updates
    train.log_every = 10  # updates between log lines
    train.eval_every = 250  # updates between evaluations on held-out data
    train.eval_sequences = 0  # held-out sequences per evaluation; 0: all
    train.checkpoint_every = 250  # updates between checkpoints
    train.keep = 3  # number of newest checkpoints to keep, in addition to the one with the best held-out loss
    train.stall_timeout = 120.0  # seconds without a step until the log names a straggler; 0: never
    train.deterministic = False  # bit-identical reruns on GPUs, at a cost in speed
    # tokens generated at the end of the run; 0: none, as with pipeline stages or experts on several devices
    train.sample_tokens = 200
    # prompt of the sample, for chats a user message; only its last data.seq_len tokens are used; empty: the beginning
    # of a held-out document, or a held-out prompt for chats and pairs
    train.sample_prompt = ""
    train.sample_temperature = 0.8  # sampling temperature; 0: always the most likely token
    train.wandb = ""  # project at Weights & Biases that also gets the rows; empty: none
    train.cache_dir = ""  # folder of the compilation cache; empty: $XDG_CACHE_HOME/bytescope/xla; none: no cache
    return train


GROUPS = {
    "model": _model_group,
    "init": _init_group,
    "lora": _lora_group,
    "loss": _loss_group,
    "precision": _precision_group,
    "remat": _remat_group,
    "data": _data_group,
    "batch": _batch_group,
    "optimizer": _optimizer_group,
    "offload": _offload_group,
    "mesh": _mesh_group,
    "pipeline": _pipeline_group,
    "xla": _xla_group,
    "train": _train_group,
}
