// The calculator of guide/will_it_hide. The formulas are those of benchmarks/will_it_hide.py: a test
// compares them. Everything is in bytes, seconds, bytes/s and FLOP/s.
"use strict";

const ADAM_BYTES = 28;

function predict(x) {
  const n = x.parameters;
  const step = x.step_s || ((x.recompute ? 8 : 6) * n * x.tokens) / x.flops;
  const forward = step / (x.recompute ? 4 : 3);
  const backward = step - forward;
  const shard = n / x.ranks;
  const state = shard * x.state_bytes;
  const stage = state / x.link;
  const write = state / x.storage;
  const behind = Math.max(0, stage - step);
  const cost = { blocking: stage + write, at_once: x.reads ? stage : behind, in_turn: behind }[x.way];
  const interval = Math.max(stage + write, Math.sqrt(2 * cost * x.failure_s));
  const load = (x.layer_parameters * x.gather_bytes) / x.link;
  const update = (x.layer_parameters * ADAM_BYTES) / x.adam;
  const sent = (x.ranks - 1) / x.ranks;
  const gather = (n * x.gather_bytes * sent) / x.peer;
  const reduce = (n * x.reduce_bytes * sent) / x.peer;
  const exposed = x.ranks > 1
    ? Math.max(0, gather - forward) + Math.max(0, gather + reduce - backward) + (gather + reduce) / x.units
    : 0;
  const cast = shard * (4 + x.gather_bytes);
  const copies = (2 * (cast + 2 * shard * x.gather_bytes + 2 * n * x.gather_bytes)
    + n * (x.gather_bytes + x.reduce_bytes) + 2 * shard * x.reduce_bytes) / x.memory;
  const full = shard * (x.state_bytes + 4);
  return {
    step_s: step,
    state_bytes: state,
    stage_s: stage,
    write_s: write,
    cost_s: cost,
    interval_s: interval,
    kept: 1 - cost / interval,
    load_s: state / Math.min(x.read, x.link),
    first_save_s: cost + state / x.lock,
    ridge_forward: (x.gather_bytes * x.flops) / (2 * x.link),
    ridge_backward: (x.gather_bytes * x.flops) / (4 * x.link),
    ridge_recompute: (x.gather_bytes * x.flops) / (6 * x.link),
    streamed_s: Math.max(forward, load, update) + Math.max(backward, load),
    streamed_in_backward_s: Math.max(step, 2 * load, update),
    exposed_s: exposed,
    copies_s: copies,
    fsdp2_s: Math.max(x.host_s, step + copies + exposed),
    no_collectives_s: Math.max(x.host_s, step + copies),
    in_place_s: Math.max(x.host_s, step + cast / x.memory + exposed),
    peak_bytes: Math.max(full, state + x.activation_bytes * x.tokens),
  };
}

const three = (value) => (value === 0 ? "0" : String(Number(value.toPrecision(3))));
const seconds = (s) => s >= 3600 ? `${three(s / 3600)} h` : s >= 60 ? `${three(s / 60)} min`
  : s >= 1 ? `${three(s)} s` : s === 0 ? "0 s" : s >= 1e-3 ? `${three(s * 1e3)} ms` : `${three(s * 1e6)} µs`;
const gigabytes = (b) => `${three(b / 1e9)} GB`;
const share = (value) => `${three(value * 100)} %`;
const count = (value) => Math.round(value).toLocaleString("en");

const LINES = [
  ["A step without any transfer", (y) => seconds(y.step_s)],
  ["State of a rank: as much pinned memory", (y) => gigabytes(y.state_bytes)],
  ["Staged in", (y) => seconds(y.stage_s)],
  ["Written in", (y) => seconds(y.write_s)],
  ["A save costs training", (y) => seconds(y.cost_s)],
  ["Save every", (y) => `${seconds(y.interval_s)}, ${count(Math.ceil(y.interval_s / y.step_s))} steps`],
  ["Throughput kept at that", (y) => share(y.kept)],
  ["The first save, nothing prepared, costs", (y) => seconds(y.first_save_s)],
  ["Loaded in", (y) => seconds(y.load_s)],
  ["Tokens from which a streamed layer hides: forward", (y) => count(y.ridge_forward)],
  ["– backward", (y) => count(y.ridge_backward)],
  ["– backward with recomputation", (y) => count(y.ridge_recompute)],
  ["A step with layers and Adam on the host, gradients clipped", (y) => seconds(y.streamed_s)],
  ["– not clipped, updated in backward", (y) => seconds(y.streamed_in_backward_s)],
  ["Gathers and reductions exposed, a step", (y) => seconds(y.exposed_s)],
  ["FSDP2's copies, a step", (y) => seconds(y.copies_s)],
  ["A step of FSDP2", (y) => seconds(y.fsdp2_s)],
  ["– in place, without its copies", (y) => seconds(y.in_place_s)],
  ["Memory of a rank", (y) => gigabytes(y.peak_bytes)],
];

function verdict(x, y) {
  const save = y.cost_s < 0.02 * y.step_s
    ? "The copy of a save hides behind one step."
    : `A save costs ${seconds(y.cost_s)}, ${three(y.cost_s / y.step_s)} steps.`;
  const layer = x.tokens >= y.ridge_forward
    ? "A streamed layer hides."
    : x.tokens >= y.ridge_recompute
      ? "A streamed layer hides in a backward that recomputes, not in forward."
      : "A streamed layer does not hide.";
  return `${save} ${layer}`;
}

function start(form) {
  const presets = JSON.parse(document.getElementById("hide-presets").textContent);
  const fields = [...form.elements].filter((field) => field.name);
  const numbers = fields.filter((field) => field.dataset.unit);
  const note = document.getElementById("hide-note");
  const out = document.querySelector("#hide-out tbody");
  const set = (name, value) => {
    const field = form.elements[name];
    field.value = field.dataset.unit ? String(Number((value / Number(field.dataset.unit)).toPrecision(4))) : value;
  };

  const add = (select, name, label) => select.add(new Option(label || name, name));
  for (const name of Object.keys(presets.machines)) add(form.elements.machine, name);
  for (const name of Object.keys(presets.sheets)) add(form.elements.machine, name, `${name} (data sheet)`);
  for (const name of Object.keys(presets.models)) add(form.elements.model, name);

  function takePreset(field) {
    if (field.name === "machine" && field.value) {
      const sheet = presets.sheets[field.value];
      const rates = sheet ? { flops: sheet[0], memory: sheet[1], link: sheet[2], peer: sheet[3] } : presets.machines[field.value];
      Object.entries(rates).forEach(([name, value]) => set(name, value));
    } else if (field.name === "model" && field.value) {
      Object.entries(presets.models[field.value]).forEach(([name, value]) => set(name, value));
    }
  }

  function read() {
    const x = {};
    for (const field of fields) {
      if (field.type === "checkbox") x[field.name] = field.checked;
      else if (field.name === "way") x.way = field.value;
      else x[field.name] = Number(field.value) * Number(field.dataset.unit || 1);
    }
    return x;
  }

  function show() {
    let wrong = null;
    for (const field of numbers) {
      const value = Number(field.value);
      const good = field.value.trim() !== "" && value >= 0 && (value > 0 || ["step_s", "host_s", "activation_bytes"].includes(field.name));
      field.setAttribute("aria-invalid", String(!good));
      if (!good) wrong = wrong || field;
    }
    if (wrong) {
      note.textContent = `${wrong.closest("label").firstChild.textContent.trim()}: a number above 0, please.`;
      return;
    }
    const data = form.elements.machine.value in presets.sheets;
    note.textContent = data ? "Rates from a data sheet are upper limits: expect about seven tenths of its compute." : "";
    const x = read();
    const y = predict(x);
    document.getElementById("hide-verdict").textContent = verdict(x, y);
    out.replaceChildren(...LINES.map(([words, write]) => {
      const row = document.createElement("tr");
      const [name, value] = [document.createElement("th"), document.createElement("td")];
      name.scope = "row";
      name.textContent = words;
      value.className = "result-value";
      value.textContent = write(y);
      row.append(name, value);
      return row;
    }));
  }

  function remember() {
    const state = new URLSearchParams();
    for (const field of fields) state.set(field.name, field.type === "checkbox" ? String(field.checked) : field.value);
    history.replaceState(null, "", `?${state}`);
  }

  for (const [name, value] of new URLSearchParams(location.search)) {
    const field = form.elements[name];
    if (!field) continue;
    if (field.type === "checkbox") field.checked = value === "true";
    else field.value = value;
  }
  form.addEventListener("input", (event) => {
    takePreset(event.target);
    if (event.target.dataset.unit) {
      const from = event.target.closest("fieldset").querySelector("select");
      if (["machine", "model"].includes(from.name)) from.value = "";
    }
    show();
    remember();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
}

if (document.getElementById("hide")) start(document.getElementById("hide"));
