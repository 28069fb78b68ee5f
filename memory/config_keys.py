"""Every config key that this package knows: the keys of the trainer's configs/base.py, by name, in one place.

A report reads any config that has these keys; a program without them is read all the same. A test holds every one of
them against configs/base.py.
"""

from __future__ import annotations

# Prefixes of groups, for keys that are put together (`MESH + axis`) or recognized by their group.
BATCH = "batch."
LOSS = "loss."
MESH = "mesh."
MODEL = "model."
OFFLOAD = "offload."
PRECISION = "precision."
REMAT = "remat."

BATCH_ACCUMULATION = "batch.accumulation"
BATCH_ACCUMULATION_SCHEDULE = "batch.accumulation_schedule"
BATCH_MICRO = "batch.micro"
BATCH_MODE = "batch.mode"
BATCH_TOKENS = "batch.tokens"

DATA_SEQ_LEN = "data.seq_len"

LORA_BASE = "lora.base"
LORA_RANK = "lora.rank"
LORA_TARGETS = "lora.targets"

LOSS_CHUNK = "loss.chunk"
LOSS_KIND = "loss.kind"

MESH_CONTEXT = "mesh.context"
MESH_DATA = "mesh.data"
MESH_DISPATCH = "mesh.dispatch"
MESH_EXPERT = "mesh.expert"
MESH_FSDP = "mesh.fsdp"
MESH_PREFETCH = "mesh.prefetch"
MESH_SEQUENCE_PARALLEL = "mesh.sequence_parallel"
PIPELINE_SCHEDULE = "pipeline.schedule"
PIPELINE_VIRTUAL = "pipeline.virtual"
MESH_STRATEGY = "mesh.strategy"
MESH_TENSOR = "mesh.tensor"

MODEL_ATTENTION = "model.attention"
MODEL_ATTENTION_KIND = "model.attention_kind"
MODEL_CAPACITY_FACTOR = "model.capacity_factor"
MODEL_DENSE_LAYERS = "model.dense_layers"
MODEL_DROPOUT = "model.dropout"
MODEL_D_EXPERT = "model.d_expert"
MODEL_D_FF = "model.d_ff"
MODEL_D_HEAD = "model.d_head"
MODEL_D_MODEL = "model.d_model"
MODEL_EXPERTS = "model.experts"
MODEL_EXPERTS_PER_TOKEN = "model.experts_per_token"
MODEL_MAX_SEQ_LEN = "model.max_seq_len"
MODEL_MLA_D_ROPE = "model.mla_d_rope"
MODEL_MLA_D_VALUE = "model.mla_d_value"
MODEL_MLA_KV_RANK = "model.mla_kv_rank"
MODEL_MLA_Q_RANK = "model.mla_q_rank"
MODEL_MLP = "model.mlp"
MODEL_MLP_CHUNK = "model.mlp_chunk"
MODEL_MOE_EVERY = "model.moe_every"
MODEL_MOE_KERNEL = "model.moe_kernel"
MODEL_N_HEADS = "model.n_heads"
MODEL_N_KV_HEADS = "model.n_kv_heads"
MODEL_N_LAYERS = "model.n_layers"
MODEL_POST_NORMS = "model.post_norms"
MODEL_QK_NORM = "model.qk_norm"
MODEL_ROPE_SCALING = "model.rope_scaling"
MODEL_SCAN = "model.scan"
MODEL_SHARED_EXPERTS = "model.shared_experts"
MODEL_TIE_EMBEDDINGS = "model.tie_embeddings"
MODEL_UNROLL = "model.unroll"
MODEL_VOCAB_MULTIPLE = "model.vocab_multiple"
MODEL_VOCAB_SIZE = "model.vocab_size"

OFFLOAD_OPTIMIZER = "offload.optimizer"
OFFLOAD_PARAMS = "offload.params"

OPTIMIZER_CLIP = "optimizer.clip"
OPTIMIZER_CLIP_NORM = "optimizer.clip_norm"
OPTIMIZER_FREEZE = "optimizer.freeze"
OPTIMIZER_FUSED_BACKWARD = "optimizer.fused_backward"
OPTIMIZER_NAME = "optimizer.name"

PRECISION_CAST = "precision.cast"
PRECISION_LOGITS = "precision.logits"
PRECISION_LOSS_SCALE = "precision.loss_scale"
PRECISION_PRESET = "precision.preset"
PRECISION_REDUCE = "precision.reduce"

REMAT_AUTO_OFFLOAD = "remat.auto_offload"
REMAT_BUDGET = "remat.budget"
REMAT_COST = "remat.cost"
REMAT_GRANULARITY = "remat.granularity"
REMAT_LAYERS = "remat.layers"
REMAT_OFFLOAD = "remat.offload"
REMAT_POLICY = "remat.policy"
REMAT_SAVE = "remat.save"

TRAIN_STEPS = "train.steps"

XLA_LATENCY_HIDING = "xla.latency_hiding"
