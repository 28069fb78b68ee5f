"use strict";
// The calculator's inputs, table and chart. The inputs are stored in the address (#layers=32&zero=3), so that an
// estimate can be shared. Inputs that are not in the address have the values of the command line.
(() => {
  const { GIB, root, address, count, exact, make, plural } = base, data = base.data();
  const $ = (id) => base.$(id === "data" ? "data_ranks" : id);
  const NAMES = Object.keys(data.inputs), COUNTS = NAMES.filter((name) => typeof data.inputs[name] === "number");
  const ROWS = [["params", "parameters", "params"], ["frozen", "frozen parameters", "frozen"],
    ["gradients", "gradients", "gradients"], ["optimizer", "optimizer and master copy", "optimizer"],
    ["kept", "activations of the layers", "residuals"],
    ["recomputed", "one layer recomputed", "workspace"], ["outside", "embedding, head and logits", "logits_loss"]];
  const SUFFIX = { k: 1e3, m: 1e6, b: 1e9, g: 1e9, t: 1e12 };
  const fixed = (value) => value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
  const gb = (bytes) => fixed(bytes / 1e9) + " GB", gib = (bytes) => fixed(bytes / GIB) + " GiB";
  const { estimate, parameterCount, shapeFor, adapted, targetsOf, routedLayers } = charts.formulas(data);

  // ---- inputs ---------------------------------------------------------------------------------------
  const parse = (text) => {
    const found = /^\s*([\d._,]+(?:e[+-]?\d+)?)\s*([kmbgt]?)\s*$/i.exec(text);
    return found ? Number(found[1].replace(/[_,]/g, "")) * (SUFFIX[found[2].toLowerCase()] || 1) : NaN;
  };
  const put = (name, value) => {
    const node = $(name);
    if (node.type === "checkbox") node.checked = value === true || value === "true";
    else node.value = value;
  };
  const read = (name) => {
    const node = $(name);
    if (node.type === "checkbox") return node.checked;
    return COUNTS.includes(name) ? parse(node.value) : node.value.replace(/\s/g, "");
  };
  const WHOLE = COUNTS.filter((name) => !["parameters", "memory", "capacity"].includes(name));
  const ZERO = ["logit_tokens", "mlp_tokens", "zero", "lora_rank", "experts", "d_expert", "shared_experts",
    "dense_layers", "capacity", "mla_q_rank", "mla_kv_rank"];
  const least = (name) => (ZERO.includes(name) ? 0 : 1);
  const wrongExperts = (q) => (q.experts ? Object.entries({ experts_per_token: q.experts_per_token > q.experts,
    dense_layers: !routedLayers(q), expert_parallel: q.experts % q.expert_parallel || q.data % q.expert_parallel,
    mlp_tokens: q.mlp_tokens, capacity: q.slots && !q.capacity }) : [["expert_parallel", q.expert_parallel > 1]])
    .filter(([, mistaken]) => mistaken).map(([name]) => name);
  const wrong = (q) => COUNTS.filter((name) => !(q[name] >= least(name) && q[name] < 1e18)).concat(
    WHOLE.filter((name) => q[name] % 1), q.heads % q.kv_heads ? ["kv_heads"] : [],
    q.kv_heads % q.tensor ? ["tensor"] : [], wrongExperts(q), q.mlp_tokens % q.batch ? ["mlp_tokens"] : [],
    q.lora_rank && !(adapted(q).length
      && targetsOf(q).every((name) => data.targets.includes(name))) ? ["lora_targets"] : []);
  const options = { zero: Object.keys(data.zero), recompute: Object.keys(data.recompute), attention: data.attention,
    offload: Object.keys(data.offloads), precision: Object.keys(data.precisions),
    optimizer: Object.keys(data.optimizers), lora_base: Object.keys(data.bases) };
  const summaries = { recompute: data.recompute, precision: data.precisions, optimizer: data.optimizers, lora_base: data.bases };
  for (const [name, values] of Object.entries(options)) {
    for (const value of values) {
      const option = make("option", value.replaceAll("_", " ")), about = summaries[name] && summaries[name][value];
      option.value = value;
      if (about) option.title = about.summary || about;
      $(name).append(option);
    }
  }
  for (const name of NAMES) {
    put(name, address.has(name) ? address.get(name) : data.inputs[name]);
    if ($(name).value === "" && $(name).tagName === "SELECT") put(name, data.inputs[name]);
  }
  const SHAPE = Object.keys(data.shape).filter((name) => name !== "dropout");
  // Editing the parameter count changes the shape, and editing the shape changes the count: the last edit counts.
  const follow = (name, q) => {
    if (name === "parameters") for (const [key, value] of Object.entries(shapeFor(q.parameters))) put(key, value);
    if (SHAPE.includes(name)) put("parameters", parameterCount(q));
  };

  // ---- presets: shipped configs and chips; after an edit, no preset is selected -----------------------
  const DEVICES = ["tensor", "sequence_parallel", "data", "expert_parallel", "zero", "memory"];
  const OTHER = "as below";
  for (const [id, presets] of [["model", data.models], ["card", data.cards]])
    $(id).append(new Option(OTHER, ""), ...Object.keys(presets).map((name) => new Option(name, name)));
  const OF_SHAPE = ["parameters", ...Object.keys(data.shape)];
  const sameShape = (inputs, q) => OF_SHAPE.every((key) => inputs[key] === q[key]);
  // Returns the preset with the current inputs: the chosen preset, otherwise the first that matches.
  const presetOf = (presets, chosen, same) => (presets[chosen] && same(presets[chosen]) ? chosen
    : Object.keys(presets).find((name) => same(presets[name])) || "");
  const modelOf = (q) => presetOf(data.models, $("model").value, (inputs) => sameShape(inputs, q));
  const cardOf = (q) => presetOf(data.cards, $("card").value, (card) => card.memory === q.memory);
  const choose = (id) => {
    const model = data.models[$("model").value], card = data.cards[$("card").value];
    if (id === "model" && model)
      for (const [key, value] of Object.entries(model)) if (!DEVICES.includes(key)) put(key, value);
    if (id === "card" && card) put("memory", card.memory);
  };

  // ---- the command that gives the same figures --------------------------------------------------------
  const STATE = { none: [], optimizer: ["optimizer"], params: ["params"], both: ["optimizer", "params"] };
  const keysOf = (q) => {
    const keys = Object.fromEntries(Object.entries(data.keys).map(([name, key]) => [key, q[name]]));
    Object.assign(keys, {
      "model.mlp": q.gated ? "swiglu" : "gelu", "model.dropout": q.dropout ? 0.1 : 0,
      "model.moe_kernel": q.slots ? "capacity" : "auto", "model.attention_kind": q.mla_kv_rank ? "mla" : "gqa",
      "model.attention": q.attention === "naive" ? "naive" : "chunked", "model.mlp_chunk": q.mlp_tokens / q.batch,
      "loss.kind": q.logit_tokens ? "chunked" : "full", "mesh.fsdp": q.data / q.expert_parallel,
      "mesh.strategy": data.strategies[q.zero],
    });
    if (q.logit_tokens) keys["loss.chunk"] = q.logit_tokens;
    if (!q.mla_kv_rank) delete keys["model.mla_kv_rank"];
    for (const part of STATE.both) keys["offload." + part] = STATE[q.offload].includes(part);
    return keys;
  };
  // Keys whose value in a config may differ from the input that follows from it, and the keys on which that depends.
  const FOLLOWING = { "model.attention": ["model.dropout", "data.seq_len", "precision.preset"],
    "mesh.sequence_parallel": ["mesh.tensor"], "mesh.strategy": ["mesh.fsdp", "mesh.expert"] };
  const command = (q) => {
    const model = modelOf(q), config = data.models[model], keys = keysOf(q), known = keysOf(config || data.defaults);
    const changed = (key) => keys[key] !== known[key], sizes = config ? [] : Object.values(data.sizes);
    const given = Object.keys(keys).filter((key) => sizes.includes(key) || changed(key)
      || (config && (FOLLOWING[key] || []).some(changed)));
    return ["bytescope estimate", config ? model : "gpt:" + q.parameters, ...given.map((key) => `${key}=${keys[key]}`)];
  };

  // ---- drawing --------------------------------------------------------------------------------------
  const table = (found, chosen) => {
    const policies = Object.keys(data.recompute), head = make("tr"), body = [];
    head.append(make("th", ""), make("th", "bytes per parameter"));
    for (const policy of policies) head.append(make("th", policy, policy === chosen ? "chosen" : ""));
    const rows = ROWS.filter(([role]) => role in found.policies[chosen]);
    for (const [role, title, hue] of [...rows, ["total", "total", ""], ["host", "in host memory", ""]]) {
      if (role === "host" && !found.policies[chosen].host) continue;
      const row = make("tr", undefined, role === "total" ? "total" : ""), name = make("th"), dot = make("i", "", "dot");
      if (hue) { dot.style.background = `var(--c-${hue})`; name.append(dot); }
      name.append(title);
      const each = found.per_parameter[role];
      row.append(name, make("td", each === undefined ? "" : String(+each.toPrecision(4))));
      for (const policy of policies) {
        const cell = make("td", gib(found.policies[policy][role]), policy === chosen ? "chosen" : "");
        cell.append(make("small", gb(found.policies[policy][role])));
        cell.title = exact(found.policies[policy][role]);
        row.append(cell);
      }
      body.push(row);
    }
    const row = make("tr");
    row.append(make("th", "hardware over model FLOPs"), make("td", ""));
    for (const policy of policies) {
      row.append(make("td", (found.policies[policy].hardware_flops / found.model_flops).toFixed(3),
        policy === chosen ? "chosen" : ""));
    }
    $("figures").tHead.replaceChildren(head);
    $("figures").tBodies[0].replaceChildren(...body, row);
  };
  const bars = (found, q) => {
    const policies = Object.keys(data.recompute), x = policies.map((_, i) => i);
    const rows = ROWS.filter(([role]) => role in found.policies[q.recompute]);
    charts.xy("bars", {
      horizontal: true,
      x: { title: "on one device", suffix: " GiB", zero: true },
      y: { type: "names", names: policies },
      series: rows.map(([role, title, hue]) => ({ kind: "bar", name: title, color: `var(--c-${hue})`, x,
        y: policies.map((policy) => found.policies[policy][role] / GIB),
        tips: (i) => [policies[i], ...rows.map(([other, name, color]) => ({ name, color: `var(--c-${color})`,
          value: gib(found.policies[policies[i]][other]), strong: other === role })),
        { name: "total", value: gib(found.policies[policies[i]].total) }] })),
      limits: [{ x: q.memory, text: `${q.memory} GiB` }],
    });
  };
  // Seconds of the matrix products at the rate of the chosen chip. fp8 and 16-bit products run on separate units.
  const speed = (found, q) => {
    const card = data.cards[cardOf(q)], row = data.precisions[q.precision];
    const unit = row.activation > 2 ? ["tf32", "fp32"] : row.operand ? ["fp8", "bf16", "fp16"] : ["bf16", "fp16"];
    const rate = card && unit.map((name) => card.peak_flops[name]).find(Boolean);
    if (!rate) return [];
    const devices = q.tensor * q.data, seconds = found.policies[q.recompute].hardware_flops / devices / rate;
    const tokens = q.sequence * q.batch * q.data;
    const text = seconds < 0.1 ? (1000 * seconds).toPrecision(4) + " ms" : seconds.toPrecision(4) + " s";
    return [["micro-step, at least", text, "the products alone, on " + cardOf(q)],
    ["tokens/s, at most", count(Math.round(tokens / seconds)), "over all devices"],
    ["MFU, at most", (100 * found.model_flops / found.policies[q.recompute].hardware_flops).toFixed(1) + " %",
      "what recomputation leaves"]];
  };
  const header = (found, q) => {
    const chosen = found.policies[q.recompute], fits = chosen.total <= q.memory * GIB;
    $("verdict").className = "verdict " + (fits ? "fits" : "exceeds");
    $("verdict").textContent = fits ? `✓ fits ${q.memory} GiB` : `✕ exceeds ${q.memory} GiB`;
    const figures = [[`total, ${q.recompute === "none" ? "no" : q.recompute} recomputation`, chosen.total],
      ["state", chosen.params + (chosen.frozen || 0) + chosen.gradients + chosen.optimizer],
      ["activations", chosen.kept + chosen.recomputed + chosen.outside]];
    const boxes = [...figures.map(([name, bytes]) => [name, gib(bytes), gb(bytes)]), ...speed(found, q)];
    $("total").replaceChildren(...boxes.map(([name, text, note]) => {
      const box = make("div", undefined, "figure"), value = make("dd", text);
      value.append(make("small", note));
      box.append(make("dt", name), value);
      return box;
    }));
    $("model").value = modelOf(q);
    $("card").value = cardOf(q);
    $("what").textContent = `${modelOf(q) || "a model of your own"}, ${count(Math.round(q.parameters))} parameters`
      + `${q.experts ? `, ${count(Math.round(found.parameters.active))} of them active` : ""}, on `
      + `${plural(q.tensor * q.data, "device")} · ${count(q.batch)} × `
      + `${plural(q.sequence, "token")} per replica and micro-step · ${q.precision}, ${q.optimizer}, ZeRO ${q.zero}`;
    $("command").replaceChildren(...command(q).flatMap((word, i) => [...(i ? [" "] : []), make("span", word)]));
    $("hint").textContent = data.recompute[q.recompute]
      + (q.attention === "flash" && q.recompute === "selective" ? "; flash attention does that by itself" : "");
  };
  const draw = () => {
    const q = Object.fromEntries(NAMES.map((name) => [name, read(name)])), mistakes = wrong(q);
    for (const name of NAMES) $(name).classList.toggle("wrong", mistakes.includes(name));
    root.dataset.wrong = mistakes.join(" ");
    $("command").parentElement.hidden = mistakes.length > 0;
    if (mistakes.length) {
      $("verdict").className = "verdict unknown";
      $("verdict").textContent = "? " + mistakes.map((name) => name.replaceAll("_", " ")).join(", ") + ": not possible";
      return;
    }
    const found = estimate(q);
    table(found, q.recompute);
    header(found, q);
    bars(found, q);
    root.dataset.estimate = JSON.stringify(found);
    const out = new URLSearchParams();
    for (const name of NAMES) if (q[name] !== data.inputs[name]) out.set(name, String(q[name]));
    base.remember(out);
  };
  $("form").addEventListener("input", (event) => {
    const name = event.target.id === "data_ranks" ? "data" : event.target.id;
    choose(event.target.id);
    const q = Object.fromEntries(NAMES.map((key) => [key, read(key)]));
    if (!wrong(q).includes(name)) follow(name, q);
    draw();
  });
  $("form").addEventListener("submit", (event) => event.preventDefault());
  base.start(draw);
})();
