"use strict";
// The formulas of memory/formulas in JavaScript, for the page of the calculator. They use the tables of the Python
// code.
//
//   charts.formulas(data)       data: the tables from the page's data; returns functions of the inputs `q`
charts.formulas = (data) => {
  const sum = (values) => values.reduce((total, value) => total + value, 0);

  // ---- the model: layers by kind, each kind as a model with only these layers -------------------------
  const routedLayers = (q) => (q.experts && q.layers > q.dense_layers
    ? Math.floor((q.layers - q.dense_layers) / q.moe_every) : 0);
  const byKind = (q) => {
    const routed = routedLayers(q);
    return [{ ...q, layers: q.layers - routed, experts: 0 }, { ...q, layers: routed, dense_layers: 0, moe_every: 1 }]
      .filter((kind) => kind.layers);
  };
  const overLayers = (q, of) => sum(byKind(q).map((kind) => kind.layers * of(kind)));
  const expertWidth = (q) => q.d_expert || q.mlp_width;
  const mlpWidth = (q) => (q.experts ? q.shared_experts * expertWidth(q) : q.mlp_width);
  const scoreWidth = (q) => q.head_width + (q.mla_kv_rank ? q.mla_d_rope : 0);
  const valueWidth = (q) => (q.mla_kv_rank ? q.mla_d_value : q.head_width);
  const attention = (q) => {
    const queries = q.heads * scoreWidth(q), keys = q.kv_heads * q.head_width, context = q.heads * valueWidth(q);
    if (!q.mla_kv_rank) return { q: [q.width, queries], k: [q.width, keys], v: [q.width, keys], o: [queries, q.width] };
    const found = q.mla_q_rank ? { q_down: [q.width, q.mla_q_rank], q_up: [q.mla_q_rank, queries] }
      : { q: [q.width, queries] };
    return { ...found, kv_down: [q.width, q.mla_kv_rank + q.mla_d_rope], o: [context, q.width],
      k_up: [q.mla_kv_rank, q.heads * q.head_width], v_up: [q.mla_kv_rank, context] };
  };
  const matrices = (q) => {
    const mlp = mlpWidth(q), found = attention(q);
    if (!mlp) return found;
    return { ...found, up: [q.width, mlp], down: [mlp, q.width], ...(q.gated ? { gate: [q.width, mlp] } : {}) };
  };
  const targetsOf = (q) => q.lora_targets.split(",");
  const adapted = (q) => Object.keys(matrices(q)).filter((name) => q.lora_rank && targetsOf(q).includes(name));
  const adaptedAnywhere = (q) => byKind(q).flatMap(adapted);
  const adapterCount = (q) => q.lora_rank * overLayers(q, (kind) => sum(adapted(kind).map((name) => sum(matrices(kind)[name]))));
  const expertSize = (q) => (q.gated ? 3 : 2) * q.width * expertWidth(q);
  const routedCount = (q) => routedLayers(q) * q.experts * expertSize(q);
  const idleCount = (q) => routedLayers(q) * (q.experts - q.experts_per_token) * expertSize(q);
  const layerCount = (kind) => sum(Object.values(matrices(kind)).map(([rows, columns]) => rows * columns))
    + kind.experts * (kind.width + expertSize(kind));
  const tableCount = (q) => (q.tied ? 1 : 2) * q.vocabulary * q.width;
  const matrixCount = (q) => overLayers(q, layerCount);
  const parameterCount = (q) => matrixCount(q) + tableCount(q);
  const activeShare = (q) => 1 - idleCount(q) / parameterCount(q);

  // ---- activations -------------------------------------------------------------------------------------
  // Expert rows of a device with this number of tokens.
  const rowsOf = (q, tokens) => {
    const chosen = tokens * q.experts_per_token, own = q.experts / q.expert_parallel;
    if (q.slots) return q.experts * Math.max(8 * Math.ceil(Math.floor(chosen * (q.capacity || 1) / q.experts) / 8), 8);
    let room = tokens * q.expert_parallel * Math.min(q.experts_per_token, own);
    if (q.capacity && q.expert_parallel > 1) room = Math.min(Math.floor(q.capacity * chosen), room);
    if (!data.padded) return Math.ceil(room);
    const mean = Math.max(Math.floor(chosen * q.expert_parallel / q.experts), 1), [least, most] = data.tiles;
    const tile = Math.min(Math.max(2 ** Math.floor(Math.log2(mean)), least), most);
    return (Math.ceil(room / tile) + own) * tile;
  };
  const tokenSizes = (q) => ({
    adapters: q.lora_rank * adapted(q).length, width: q.width, queries: q.heads * scoreWidth(q),
    keys: q.kv_heads * scoreWidth(q), values: q.kv_heads * valueWidth(q), context: q.heads * valueWidth(q),
    scores: q.heads * q.sequence, heads: q.heads, mlp: mlpWidth(q), vocabulary: q.vocabulary, experts: q.experts,
    routed: q.width, routed_mlp: expertWidth(q), query_latent: q.mla_q_rank, latent: q.mla_kv_rank });
  const ONLY = { adapters: "lora_rank", latent: "mla_kv_rank" };
  const tensorBytes = (tensor, q, tokens) => {
    if (tensor.only && !q[ONLY[tensor.only] || tensor.only]) return 0;
    const byRow = data.by_row.includes(tensor.size);
    if (byRow && !q.experts) return 0;
    if (q.lora_rank && tensor.weights.length && !tensor.weights.some((name) => adapted(q).includes(name))) return 0;
    const row = data.precisions[q.precision];
    const split = tensor.split === "tensor" || (tensor.split && q.sequence_parallel) ? q.tensor : 1;
    return tokenSizes(q)[tensor.size] * (byRow ? rowsOf(q, tokens) : tokens)
      * (tensor.itemsize || (tensor.operand && row.operand) || row.activation) / split;
  };
  const keptByLayer = (policy, q) => {
    if (policy === "full") return [data.block_input];
    if (q.attention === "flash") return [...data.layer.filter((tensor) => !tensor.core), data.flash];
    return data.layer.filter((tensor) => policy === "none" || !tensor.core);
  };
  const layerBytes = (policy, q) => sum(keptByLayer(policy, q).filter((tensor) => !(q.mlp_tokens && tensor.tiled))
    .map((tensor) => tensorBytes(tensor, q, q.sequence * q.batch)));
  const tileBytes = (q) => sum(data.layer.filter((tensor) => tensor.tiled)
    .map((tensor) => tensorBytes(tensor, q, Math.min(q.mlp_tokens, q.sequence * q.batch))));
  const outsideBytes = (q) => {
    const tokens = q.sequence * q.batch;
    return sum(data.outside.map((tensor) => tensorBytes(tensor, q, tokens)))
      + tensorBytes(data.logits, q, q.logit_tokens ? Math.min(q.logit_tokens, tokens) : tokens);
  };

  // ---- state -------------------------------------------------------------------------------------------
  // The fraction of some parameters that a device holds. routed: the fraction of them that is in routed experts.
  const held = (q, sharded, routed) => {
    const ranks = sharded ? q.data : 1;
    return ((1 - routed) / ranks + routed / Math.max(ranks, q.expert_parallel)) / q.tensor;
  };
  const routedShare = (q) => routedCount(q) / parameterCount(q);
  const frozenBytes = (q) => {
    const row = data.bases[q.lora_base], tables = Math.min(tableCount(q), q.parameters);
    const columns = overLayers(q, (kind) => sum(Object.values(matrices(kind)).map((shape) => shape[1]))
      + kind.experts * ((kind.gated ? 2 : 1) * expertWidth(kind) + kind.width));
    const wide = data.precisions[q.precision].activation;
    const size = (row.element || wide) * (q.parameters - tables) + row.column * columns + wide * tables;
    return size * held(q, data.zero[q.zero].includes("params"), routedShare(q));
  };
  const perParameter = (q) => {
    const row = data.precisions[q.precision], kind = data.optimizers[q.optimizer];
    const whole = { params: row.params, gradients: row.gradients, master: row.master,
      moments: kind.states * (kind.itemsize || row.state) }, out = { host: 0 };
    if (q.fused) {
      const one = q.vocabulary * q.width, layer = Math.max(...byKind(q).map(layerCount));
      whole.gradients *= q.lora_rank ? 1 / q.layers : (one + Math.max(layer, q.tied ? 0 : one)) / q.parameters;
    }
    const wide = whole.master ? "master" : "params", routed = q.lora_rank ? 0 : routedShare(q);
    const away = data.offloads[q.offload].filter((part) => !(q.fused && part === "gradients"))
      .map((part) => (part === "master" ? wide : part));
    for (const [role, parts] of Object.entries(data.parts)) {
      out[role] = 0;
      for (const part of parts)
        out[away.includes(part) ? "host" : role] += whole[part] * held(q, data.zero[q.zero].includes(role), routed);
    }
    return out;
  };

  // ---- the whole estimate ------------------------------------------------------------------------------
  const flops = (q) => {
    const sequences = q.batch * q.data, tokens = sequences * q.sequence, active = matrixCount(q) - idleCount(q);
    const core = 2 * q.layers * tokens * q.sequence * q.heads * (scoreWidth(q) + valueWidth(q));
    const layers = 2 * (active + adapterCount(q)) * tokens + core;
    const frozen = q.lora_rank ? 2 * (active + q.width * q.vocabulary) * tokens : 0;
    const model = 3 * (layers + 2 * q.width * q.vocabulary * tokens) - frozen;
    const products = 1 + (q.gated ? 1 : 0) + (q.post_norms ? 1 : 0);
    const tiles = q.mlp_tokens ? 2 * q.width * q.mlp_width * products * q.layers * tokens : 0;
    return { model, none: model + tiles, selective: model + (q.attention === "flash" ? 0 : core) + tiles,
      full: model + layers };
  };
  const estimate = (q) => {
    const { host, ...state } = perParameter(q), all = flops(q), policies = {}, kinds = byKind(q);
    const trained = (q.lora_rank ? adapterCount(q) : q.parameters) / q.parameters;
    for (const role of Object.keys(state)) state[role] *= trained;
    if (q.lora_rank) state.frozen = frozenBytes(q) / q.parameters;
    for (const policy of Object.keys(data.recompute)) {
      const out = {};
      for (const role of Object.keys(state)) out[role] = state[role] * q.parameters;
      Object.assign(out, { kept: overLayers(q, (kind) => layerBytes(policy, kind)),
        recomputed: Math.max(...kinds.map((kind) => layerBytes("none", kind) - layerBytes(policy, kind) + tileBytes(kind))),
        outside: outsideBytes(q) });
      out.total = sum(Object.values(out));
      policies[policy] = { ...out, host: host * trained * q.parameters, hardware_flops: all[policy] };
    }
    return { parameters: { total: q.parameters, active: q.parameters * activeShare(q) }, per_parameter: state, policies,
      model_flops: all.model };
  };
  const shapeFor = (parameters) => {
    const step = data.aspect, exact = (parameters * step / 12) ** (1 / 3);
    const width = Math.max(step, step * Math.floor(exact / step + 0.5)), heads = Math.max(1, Math.floor(width / 128));
    return { layers: Math.max(1, Math.floor(parameters / 12 / width ** 2 + 0.5)), width, heads, kv_heads: heads,
      head_width: width / heads, mlp_width: 4 * width, gated: false, tied: true, qk_norm: false, post_norms: false,
      experts: 0, mla_kv_rank: 0 };
  };
  return { estimate, parameterCount, shapeFor, adapted: adaptedAnywhere, targetsOf, routedLayers };
};
