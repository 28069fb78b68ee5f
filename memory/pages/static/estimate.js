"use strict";
// The arithmetic of memory/formulas over its own tables, which arrive as data. The inputs live in the address
// (#layers=32&zero=3), so an estimate can be shared; what is not in it has the value of the command's question.
(() => {
  const { root, address, count, exact, make, flags } = base, data = base.data();
  const $ = (id) => base.$(id === "data" ? "data_ranks" : id);
  const NAMES = Object.keys(data.inputs), COUNTS = NAMES.filter((name) => typeof data.inputs[name] === "number");
  const ROWS = [["params", "parameters", "params"], ["frozen", "frozen parameters", "frozen"],
    ["gradients", "gradients", "gradients"], ["optimizer", "optimizer and master copy", "optimizer"],
    ["kept", "activations of the layers", "residuals"],
    ["recomputed", "one layer recomputed", "workspace"], ["outside", "embedding, head and logits", "logits_loss"]];
  const SUFFIX = { k: 1e3, m: 1e6, b: 1e9, g: 1e9, t: 1e12 };
  const fixed = (value) => value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
  const gb = (bytes) => fixed(bytes / 1e9) + " GB", gib = (bytes) => fixed(bytes / 2 ** 30) + " GiB";
  const sum = (values) => values.reduce((total, value) => total + value, 0);

  // ---- the formulas ---------------------------------------------------------------------------------
  const matrices = (q) => {
    const queries = q.heads * q.head_width, keys = q.kv_heads * q.head_width;
    const found = { q: [q.width, queries], k: [q.width, keys], v: [q.width, keys], o: [queries, q.width],
      up: [q.width, q.mlp_width], down: [q.mlp_width, q.width] };
    return q.gated ? { ...found, gate: found.up } : found;
  };
  const adapted = (q) => Object.keys(matrices(q)).filter((name) => q.lora_rank && targetsOf(q).includes(name));
  const targetsOf = (q) => q.lora_targets.split(",");
  const adapterCount = (q) => q.lora_rank * q.layers * sum(adapted(q).map((name) => sum(matrices(q)[name])));
  const tableCount = (q) => (q.tied ? 1 : 2) * q.vocabulary * q.width;
  const frozenBytes = (q) => {
    const row = data.bases[q.lora_base], tables = Math.min(tableCount(q), q.parameters);
    const columns = q.layers * sum(Object.values(matrices(q)).map((shape) => shape[1]));
    const wide = data.precisions[q.precision].activation;
    const size = (row.element || wide) * (q.parameters - tables) + row.column * columns + wide * tables;
    return size / (q.tensor * (data.zero[q.zero].includes("params") ? q.data : 1));
  };
  const tokenSizes = (q) => ({ adapters: q.lora_rank * adapted(q).length, width: q.width, queries: q.heads * q.head_width, keys: q.kv_heads * q.head_width,
    scores: q.heads * q.sequence, heads: q.heads, mlp: q.mlp_width, vocabulary: q.vocabulary });
  const tensorBytes = (tensor, q, tokens) => {
    if (tensor.only && !q[tensor.only === "adapters" ? "lora_rank" : tensor.only]) return 0;
    if (q.lora_rank && tensor.weights.length && !tensor.weights.some((name) => adapted(q).includes(name))) return 0;
    const row = data.precisions[q.precision];
    const split = tensor.split === "tensor" || q.sequence_parallel ? q.tensor : 1;
    return tokenSizes(q)[tensor.size] * tokens * (tensor.itemsize || (tensor.operand && row.operand) || row.activation)
      / split;
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
  const perParameter = (q) => {
    const row = data.precisions[q.precision], kind = data.optimizers[q.optimizer];
    const whole = { params: row.params, gradients: row.gradients, master: row.master,
      moments: kind.states * (kind.itemsize || row.state) }, out = { host: 0 };
    if (q.fused) {
      const one = q.vocabulary * q.width;
      whole.gradients *= q.lora_rank ? 1 / q.layers
        : (one + Math.max(layerMatrices(q), q.tied ? 0 : one)) / q.parameters;
    }
    const wide = whole.master ? "master" : "params";
    const away = data.offloads[q.offload].filter((part) => !(q.fused && part === "gradients"))
      .map((part) => (part === "master" ? wide : part));
    for (const [role, parts] of Object.entries(data.parts)) {
      out[role] = 0;
      for (const part of parts) {
        const size = whole[part] / (q.tensor * (data.zero[q.zero].includes(role) ? q.data : 1));
        out[away.includes(part) ? "host" : role] += size;
      }
    }
    return out;
  };
  const layerMatrices = (q) => sum(Object.values(matrices(q)).map(([rows, columns]) => rows * columns));
  const flops = (q) => {
    const sequences = q.batch * q.data, tokens = sequences * q.sequence;
    const core = 4 * q.layers * tokens * q.sequence * q.heads * q.head_width;
    const layers = 2 * (layerMatrices(q) * q.layers + adapterCount(q)) * tokens + core;
    const frozen = q.lora_rank ? 2 * (layerMatrices(q) * q.layers + q.width * q.vocabulary) * tokens : 0;
    const model = 3 * (layers + 2 * q.width * q.vocabulary * tokens) - frozen;
    const tiles = q.mlp_tokens ? 2 * q.width * q.mlp_width * (q.gated ? 2 : 1) * q.layers * tokens : 0;
    return { model, none: model + tiles, selective: model + (q.attention === "flash" ? 0 : core) + tiles,
      full: model + layers };
  };
  const estimate = (q) => {
    const { host, ...state } = perParameter(q), all = flops(q), policies = {};
    const trained = (q.lora_rank ? adapterCount(q) : q.parameters) / q.parameters;
    for (const role of Object.keys(state)) state[role] *= trained;
    if (q.lora_rank) state.frozen = frozenBytes(q) / q.parameters;
    for (const policy of Object.keys(data.recompute)) {
      const kept = layerBytes(policy, q), out = {};
      for (const role of Object.keys(state)) out[role] = state[role] * q.parameters;
      Object.assign(out, { kept: q.layers * kept, recomputed: layerBytes("none", q) - kept + tileBytes(q),
        outside: outsideBytes(q) });
      out.total = sum(Object.values(out));
      policies[policy] = { ...out, host: host * trained * q.parameters, hardware_flops: all[policy] };
    }
    return { per_parameter: state, policies, model_flops: all.model };
  };
  const parameterCount = (q) => layerMatrices(q) * q.layers + tableCount(q);
  const shapeFor = (parameters) => {
    const step = data.aspect, exact = (parameters * step / 12) ** (1 / 3);
    const width = Math.max(step, step * Math.floor(exact / step + 0.5)), heads = Math.max(1, Math.floor(width / 128));
    return { layers: Math.max(1, Math.floor(parameters / 12 / width ** 2 + 0.5)), width, heads, kv_heads: heads,
      head_width: width / heads, mlp_width: 4 * width, gated: false, tied: true };
  };

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
  const WHOLE = COUNTS.filter((name) => !["parameters", "memory"].includes(name));
  const least = (name) => (["logit_tokens", "mlp_tokens", "zero", "lora_rank"].includes(name) ? 0 : 1);
  const wrong = (q) => COUNTS.filter((name) => !(q[name] >= least(name) && q[name] < 1e18)).concat(
    WHOLE.filter((name) => q[name] % 1), q.heads % q.kv_heads ? ["kv_heads"] : [],
    q.kv_heads % q.tensor ? ["tensor"] : [], q.lora_rank && !(adapted(q).length
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
  const SHAPE = Object.keys(data.shape_flags).filter((name) => name !== "dropout");
  // The shape follows the count and the count the shape: whichever was typed last is the one that was meant.
  const follow = (name, q) => {
    if (name === "parameters") for (const [key, value] of Object.entries(shapeFor(q.parameters))) put(key, value);
    if (SHAPE.includes(name)) put("parameters", parameterCount(q));
  };

  // ---- presets: shipped configs and chips; an input that is changed by hand belongs to none ----------
  const DEVICES = ["tensor", "sequence_parallel", "data", "zero", "memory", "recompute"];
  const OTHER = "as below";
  for (const [id, presets] of [["model", data.models], ["card", data.cards]])
    $(id).append(new Option(OTHER, ""), ...Object.keys(presets).map((name) => new Option(name, name)));
  const OF_SHAPE = ["parameters", ...Object.keys(data.shape_flags)];
  const sameShape = (inputs, q) => OF_SHAPE.every((key) => inputs[key] === q[key]);
  // The preset that the inputs are those of: the one that was chosen, or the first.
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
  const flag = (name, value) => (typeof value !== "boolean" ? `--${name}=${value}` : (value ? "--" : "--no-") + name);
  const command = (q) => {
    const model = modelOf(q), config = data.models[model], known = config || data.defaults;
    const words = ["bytescope estimate" + (config ? " " + model : "")];
    if (!config) {
      words.push("--params=" + q.parameters);
      for (const [name, word] of Object.entries(data.shape_flags)) {
        const yes = word === "untied" ? !q[name] : q[name];
        if (typeof q[name] !== "boolean") words.push(flag(word, q[name])); else if (yes) words.push("--" + word);
      }
    }
    for (const [name, word] of Object.entries(data.flags)) {
      if (name === "sequence_parallel" && q.tensor === 1) continue;  // there is nothing to share
      if (["lora_targets", "lora_base"].includes(name) && !q.lora_rank) continue;
      if (q[name] !== known[name]) words.push(flag(word, q[name]));
    }
    return words.join(" ");
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
        const cell = make("td", gb(found.policies[policy][role]), policy === chosen ? "chosen" : "");
        cell.append(make("small", gib(found.policies[policy][role])));
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
      x: { title: "on one device", suffix: " GB", zero: true },
      y: { type: "names", names: policies },
      series: rows.map(([role, title, hue]) => ({ kind: "bar", name: title, color: `var(--c-${hue})`, x,
        y: policies.map((policy) => found.policies[policy][role] / 1e9),
        tips: (i) => [policies[i], ...rows.map(([other, name, color]) => ({ name, color: `var(--c-${color})`,
          value: gb(found.policies[policies[i]][other]), strong: other === role })),
        { name: "total", value: gb(found.policies[policies[i]].total) }] })),
      limits: [{ x: q.memory, text: `${q.memory} GB` }],
    });
  };
  // Seconds of the products alone at the rate of a chosen chip; fp8 and 16-bit products have units of their own.
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
    const chosen = found.policies[q.recompute], fits = chosen.total <= q.memory * 1e9;
    $("verdict").className = "verdict " + (fits ? "fits" : "exceeds");
    $("verdict").textContent = fits ? `✓ fits ${q.memory} GB` : `✕ exceeds ${q.memory} GB`;
    const figures = [[`total, ${q.recompute === "none" ? "no" : q.recompute} recomputation`, chosen.total],
      ["state", chosen.params + (chosen.frozen || 0) + chosen.gradients + chosen.optimizer],
      ["activations", chosen.kept + chosen.recomputed + chosen.outside]];
    const boxes = [...figures.map(([name, bytes]) => [name, gb(bytes), gib(bytes)]), ...speed(found, q)];
    $("total").replaceChildren(...boxes.map(([name, text, note]) => {
      const box = make("div", undefined, "figure"), value = make("dd", text);
      value.append(make("small", note));
      box.append(make("dt", name), value);
      return box;
    }));
    $("model").value = modelOf(q);
    $("card").value = cardOf(q);
    $("what").textContent = `${modelOf(q) || "a model of your own"}, ${count(Math.round(q.parameters))} parameters, on `
      + `${count(q.tensor * q.data)} ${q.tensor * q.data === 1 ? "device" : "devices"} · ${count(q.batch)} × `
      + `${count(q.sequence)} tokens per replica and micro-step · ${q.precision}, ${q.optimizer}, ZeRO ${q.zero}`;
    $("command").replaceChildren(...flags(command(q)));
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
