"use strict";
const plan = figures;
const roles = Object.keys(plan.roles);
// Dark enough for white text, and apart for colour-blind eyes.
const COLOURS = ["#0b62a8", "#a3476b", "#1d7a5f", "#8a5a00", "#5b4bb5", "#a0402b"];
const NO_ROLE = "#59636e";
const colourOf = role => role === null ? NO_ROLE : COLOURS[roles.indexOf(role) % COLOURS.length];
// The purposes of memory, with colours that colour-blind eyes can tell apart (Okabe and Ito), and the planner's terms.
const PURPOSES = [
  ["weights", "#0072b2", ["weights"]],
  ["optimizer", "#e69f00", ["optimizer", "step"]],
  ["gradients", "#d55e00", ["gradients", "buckets"]],
  ["activations and logits", "#009e73", ["activations", "logits"]],
  ["KV cache", "#56b4e9", ["kv"]],
  ["engine", "#f0e442", ["engine", "graphs"]],
  ["weights in transit", "#cc79a7", ["gathered", "buffer", "engine buffer"]],
  ["idle roles", "repeating-linear-gradient(45deg, #6e7781 0 2px, #d1d9e0 2px 5px)", ["idle roles"]],
];
const OTHER = ["contexts, NCCL, fragmentation", "#6e7781", []];
const purposeOf = term => PURPOSES.find(([, , terms]) => terms.includes(term)) ?? OTHER;
// Hosts beyond these are folded.
const HOSTS = 16;

const gib = value => `${value.toFixed(1)} GiB`;
const sum = values => values.reduce((total, value) => total + value, 0);
const percent = share => `${share > 0 ? "+" : ""}${(100 * share).toFixed(0)}%`;

function drawSummary() {
  document.title = `${plan.name} on ${plan.cluster}`;
  at("title").textContent = `${document.title} `;
  make("span", at("title"), plan.verdict ?? "PLACED", {class: `verdict ${plan.verdict ?? "FITS"}`});
  at("where").textContent = `Experiment ${plan.fingerprint}`;
  drawBoxes(at("summary"), plan.summary);
}

function drawBoxes(into, values) {
  into.replaceChildren();
  for (const [name, value] of Object.entries(values)) {
    const box = make("div", into);
    make("dt", box, name);
    make("dd", box, value, {class: name === "verdict" ? `verdict ${value}` : ""});
  }
}

function drawRemarks() {
  const lines = Object.entries(plan.remarks).flatMap(([kind, texts]) => texts.map(text => [kind, text]));
  if (!lines.length) return at("remarks-section").remove();
  for (const [kind, text] of lines) {
    const row = make("tr", at("remarks"));
    make("th", row, kind, {scope: "row"});
    make("td", row, text);
  }
}

// Return a role's memory by purpose at the moment when a GPU of it is fullest, of which ``peak`` GiB are in use.
function atPeak(role, peak) {
  const {phase, phases} = plan.roles[role];
  const moments = [phases[phase] ?? {}, phases.sync ?? {}].map(terms => [sum(Object.values(terms)), terms]);
  const [total, terms] = moments[0][0] >= moments[1][0] ? moments[0] : moments[1];
  return {...terms, "idle roles": Math.max(0, peak - total)};
}

function drawTerms(bar, terms, scale) {
  const byPurpose = new Map([...PURPOSES, OTHER].map(([name, background]) => [name, {background, gib: 0}]));
  for (const [term, value] of Object.entries(terms)) byPurpose.get(purposeOf(term)[0]).gib += value;
  for (const [name, {background, gib: value}] of byPurpose) {
    if (value > 0) make("span", bar, "", {title: `${name}: ${gib(value)}`, style: {background, width: `${100 * value / scale}%`}});
  }
}

function drawGpu(host, gpu, into) {
  const here = roles.filter(role => plan.roles[role].workers[host.name]?.[gpu] !== undefined);
  const peaks = here.map(role => plan.roles[role].peak_gib[host.name]?.[gpu] ?? 0);
  const peak = Math.max(0, ...peaks);
  const off = host.reserved || !host.usable.includes(gpu);
  const words = here.map((role, n) => `${role} ${plan.roles[role].workers[host.name][gpu]}`
    + (peaks[n] ? `: ${gib(peaks[n])} in ${plan.roles[role].phase}` : ""));
  const title = `${host.name} ${plan.unit} ${gpu}\n${off ? "not available" : words.join("\n") || "unused"}`;
  const state = off ? " not available" : here.length ? "" : " unused";
  const box = make("div", into, `${gpu}${state}`, {class: off ? "gpu off" : "gpu", title});
  for (const role of here) {
    const worker = plan.roles[role].workers[host.name][gpu];
    make("div", box, `${role} ${worker}`, {class: "stripe", style: {background: colourOf(role)}});
  }
  if (host.memory_gib && peak) drawTerms(make("div", box, "", {class: "bar"}), atPeak(here[peaks.indexOf(peak)], peak), host.memory_gib);
}

function drawHost(host, into) {
  const line = make("div", into, "", {class: "host"});
  const label = make("div", line, host.name);
  const memory = host.memory_gib ? `, ${host.memory_gib.toFixed(0)} GiB each` : "";
  make("div", label, host.reserved ? "reserved" : `${host.gpus} x ${host.kind}${memory}`, {class: "faint"});
  const gpus = make("div", line, "", {class: "gpus"});
  for (let gpu = 0; gpu < host.gpus; gpu++) drawGpu(host, gpu, gpus);
}

function drawPlacement() {
  for (const role of roles) key(at("roles"), `${role}: ${plan.roles[role].engine}, ${plan.roles[role].layout}`, colourOf(role));
  for (const host of plan.hosts.slice(0, HOSTS)) drawHost(host, at("hosts"));
  if (plan.hosts.length <= HOSTS) return;
  const rest = make("details", at("hosts"));
  make("summary", rest, `${plan.hosts.length - HOSTS} more hosts`);
  for (const host of plan.hosts.slice(HOSTS)) drawHost(host, rest);
}

function drawMemory() {
  const sizes = plan.hosts.map(host => host.memory_gib).filter(Boolean);
  if (!sizes.length) {
    at("placement-note").textContent = "The numbers are the workers of the roles.";
    return at("memory-section").remove();
  }
  const size = Math.min(...sizes);
  at("memory-note").textContent = `Hatched is beyond the ${size.toFixed(0)} GiB of a GPU. A line with two ends is the range around a`
    + " prediction in which nine of ten measured runs lie; an engine takes exactly what it is given.";
  const rows = roles.flatMap(role => Object.keys(plan.roles[role].phases).map(phase => {
    const {phase: largest, phases, band_gib: band, peak_gib: peaks} = plan.roles[role];
    const peak = Math.max(0, ...Object.values(peaks).flatMap(Object.values));
    const terms = phase === largest ? {...phases[phase], "idle roles": Math.max(0, peak - sum(Object.values(phases[phase])))} : phases[phase];
    return {role, phase, terms, total: sum(Object.values(terms)), band: phase === largest ? band : null};
  }));
  const scale = Math.max(size, ...rows.map(row => Math.max(row.total, row.band?.[1] ?? 0))) * 1.02;
  const names = new Set(rows.flatMap(row => Object.entries(row.terms).filter(([, value]) => value).map(([term]) => purposeOf(term)[0])));
  for (const [name, background] of [...PURPOSES, OTHER]) if (names.has(name)) key(at("purposes"), name, background);
  for (const {role, phase, terms, total, band} of rows) {
    const row = make("div", at("memory"), "", {class: "row"});
    make("div", row, `${role}, ${phase}`);
    const bar = make("div", row, "", {class: "bar"});
    drawTerms(bar, terms, scale);
    make("span", bar, "", {class: "limit", style: {left: `${100 * size / scale}%`}});
    if (band) make("span", bar, "", {class: "range", style: {left: `${100 * band[0] / scale}%`, width: `${100 * (band[1] - band[0]) / scale}%`}});
    make("div", row, gib(total) + (band ? ` (${band[0].toFixed(0)} to ${band[1].toFixed(0)})` : ""));
  }
  const cells = rows.flatMap(({role, phase, terms}) => Object.entries(terms).filter(([, value]) => value > 0)
    .map(([term, value]) => ({role, phase, term, value})));
  sortable(at("terms"), cells, [
    {title: "role", value: each => each.role},
    {title: "phase", value: each => each.phase},
    {title: "term", value: each => each.term},
    {title: "GiB", value: each => each.value, number: true, show: (each, cell) => cell.append(each.value.toFixed(2))},
  ], 0);
}

function drawGraph() {
  const WIDTH = 150, HEIGHT = 40, COLUMN = 195, ROW = 56;
  const {boxes, lines, columns, rows} = plan.graph;
  const svg = at("graph").appendChild(document.createElementNS("http://www.w3.org/2000/svg", "svg"));
  const label = `${boxes.length} nodes; the table below lists them with what they read.`;
  const [width, height] = [(columns - 1) * COLUMN + WIDTH + 2, rows * ROW];
  for (const [name, value] of Object.entries({role: "img", "aria-label": label, width, height, viewBox: `0 0 ${width} ${height}`})) {
    svg.setAttribute(name, value);
  }
  const middle = row => row * ROW + HEIGHT / 2 + 1;
  for (const points of lines) {
    let path = "";
    points.forEach(([column, row], index) => {
      const [left, right, y] = [column * COLUMN + 1, column * COLUMN + WIDTH + 1, middle(row)];
      if (index) path += `C${left - 22},${middle(points[index - 1][1])} ${left - 22},${y} ${left},${y}`;
      path += index ? (index < points.length - 1 ? `L${right},${y}` : "") : `M${right},${y}`;
    });
    make("path", svg, "", {d: path});
  }
  for (const box of boxes) {
    const group = make("g", svg, "", {transform: `translate(${box.column * COLUMN + 1} ${box.row * ROW + 1})`});
    make("rect", group, "", {width: WIDTH, height: HEIGHT, rx: 5, fill: colourOf(box.role)});
    make("text", group, box.name, {class: "name", x: 8, y: 17});
    make("text", group, box.role ? `${box.kind}, ${box.role}` : box.kind, {x: 8, y: 33});
  }
  sortable(at("nodes"), boxes, [
    {title: "node", value: box => box.name},
    {title: "kind", value: box => box.kind},
    {title: "role", value: box => box.role ?? ""},
    {title: "reads", value: box => box.reads.join(", ")},
    {title: "output per step", value: box => box.bytes, number: true, show: (box, cell) => cell.append(box.size)},
  ], 0);
}

function drawStep() {
  const end = Math.max(plan.step_seconds, ...plan.nodes.map(node => node.start + node.seconds)) || 1;
  const pools = [...plan.pools.keys(), null];
  for (const pool of pools) {
    const nodes = plan.nodes.filter(node => node.pool === pool);
    if (!nodes.length) continue;
    const {roles: names, gpus, idle_share: idle} = plan.pools[pool] ?? {};
    const heading = make("h3", at("step"), pool === null ? "CPUs of the hosts" : names.join(" + "));
    if (pool !== null) make("span", heading, ` on ${gpus} ${plan.unit}${gpus === 1 ? "" : "s"}, idle for ${(100 * idle).toFixed(0)}% of a step`, {class: "faint"});
    for (const node of nodes) {
      const row = make("div", at("step"), "", {class: node.critical ? "row critical" : "row", "data-node": node.name});
      make("div", row, node.name);
      const style = {left: `${100 * node.start / end}%`, width: `${100 * node.seconds / end}%`, background: colourOf(node.role)};
      make("span", make("div", row, "", {class: "track"}), "", {style});
      make("div", row, node.time);
    }
  }
  const row = make("div", at("step"), "", {class: "row", "aria-hidden": true});
  make("div", row);
  const ticks = make("div", row, "", {class: "ticks"});
  make("div", row);
  const [size, unit] = timeUnit(end);
  const length = end / size;
  const rough = 10 ** Math.floor(Math.log10(length / 4));
  const between = rough * [1, 2, 5, 10].find(factor => factor * rough >= length / 6);
  for (let n = 0; n * between <= length; n++) {
    const place = n * between / length;
    make("span", ticks, `${Number((n * between).toPrecision(3))} ${unit}`, {class: place > 0.9 ? "end" : "", style: {left: `${100 * place}%`}});
  }
}

function drawSizes() {
  const {axes, points} = plan.sizes;
  if (!axes.length) return at("sizes-section").remove();
  const inputs = axes.map((axis, n) => {
    const box = make("div", at("axes"));
    const label = make("label", box, axis.label, {for: `size-${n}`});
    axis.output = make("output", label, "", {for: `size-${n}`});
    const input = make("input", box, "", {type: "range", id: `size-${n}`, min: 0, max: axis.values.length - 1});
    input.value = axis.own;
    const stops = make("div", box, "", {class: "stops", "aria-hidden": true});
    for (const value of axis.values) make("span", stops, value);
    input.addEventListener("input", show);
    return input;
  });
  function show() {
    const places = inputs.map(input => Number(input.value));
    places.forEach((place, n) => {
      axes[n].output.textContent = axes[n].values[place];
      inputs[n].setAttribute("aria-valuetext", axes[n].values[place]);
    });
    const own = places.every((place, n) => place === axes[n].own);
    at("own").disabled = own;
    const point = points[places.reduce((index, place, n) => index * axes[n].values.length + place, 0)];
    drawBoxes(at("size-summary"), point.summary);
    at("size-reason").textContent = point.reason;
    at("size-memory").replaceChildren();
    for (const [role, peak] of Object.entries(point.peak_gib)) {
      const row = make("div", at("size-memory"), "", {class: "row", "data-role": role});
      make("div", row, role);
      const bar = make("div", row, "", {class: "bar"});
      make("span", bar, "", {style: {width: `${100 * peak / plan.gpu_gib}%`, background: colourOf(role)}});
      const before = plan.sizes.own.peak_gib[role];
      make("div", row, gib(peak) + (own || !before ? "" : ` (${percent(peak / before - 1)})`));
    }
  }
  at("own").addEventListener("click", () => {
    inputs.forEach((input, n) => { input.value = axes[n].own; });
    show();
  });
  show();
}

function drawAlternatives() {
  if (!plan.alternatives.length) return at("alternatives-section").remove();
  sortable(at("alternatives"), plan.alternatives, [
    {title: `${plan.unit}s shared by`, value: each => each.what},
    {title: "step", value: each => each.step_seconds, number: true, show: (each, cell) => cell.append(each.time)},
    {title: "instead of this plan", value: each => each.loses},
  ], 1);
}

for (const each of document.querySelectorAll(".unit")) each.textContent = plan.unit;
drawSummary();
drawRemarks();
drawPlacement();
drawMemory();
drawGraph();
drawStep();
drawSizes();
drawAlternatives();
at("recipe").textContent = plan.recipe;
