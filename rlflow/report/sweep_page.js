"use strict";
const {plans, rejected} = figures;
const priced = figures.cost === "price";
// More names than these would cover each other.
const NAMES = 12;
const ofPage = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function drawHead() {
  document.title = `${plans.length} plans of ${figures.name}`;
  at("title").textContent = document.title;
  at("shared").textContent = figures.shared.length ? `All with ${figures.shared.join(" ")}` : "";
  at("frontier-note").textContent = `A plan is on the frontier if no other one is at least as short and as cheap (${figures.cost}) in total.`;
}

function drawPlans() {
  const text = (value, cell) => cell.append(value);
  sortable(at("plans"), plans, [
    {title: "sweep", value: plan => plan.label, show: (plan, cell) => {
      plan.page ? make("a", cell, plan.label, {href: plan.page}) : text(plan.label, cell);
    }},
    {title: "fits", value: plan => plan.verdict, show: (plan, cell) => make("span", cell, plan.verdict, {class: `verdict ${plan.verdict}`})},
    {title: "GPUs used", value: plan => plan.used_gpus, number: true, show: (plan, cell) => text(`${plan.used_gpus} of ${plan.gpus}`, cell)},
    {title: "step", value: plan => plan.step_seconds, number: true, show: (plan, cell) => text(plan.step, cell)},
    {title: "run", value: plan => plan.hours, number: true, show: (plan, cell) => text(plan.run, cell)},
    {title: "GPU-hours", value: plan => plan.gpu_hours, number: true, show: (plan, cell) => text(plan.gpu_hours_text, cell)},
    ...(priced ? [{title: "price", value: plan => plan.price, number: true, show: (plan, cell) => text(plan.price.toFixed(2), cell)}] : []),
    {title: "headroom, GiB", value: plan => plan.headroom_gib, number: true, show: (plan, cell) => text(plan.headroom_gib?.toFixed(1) ?? "", cell)},
    {title: "frontier", value: plan => plan.frontier ? "yes" : "no"},
  ], 3);
}

function drawRejected() {
  if (!rejected.length) return at("rejected-section").remove();
  for (const {label, reason} of rejected) {
    const row = make("tr", at("rejected"));
    make("th", row, label, {scope: "row"});
    make("td", row, reason);
  }
}

// Draw each plan as a point with its name, full on the frontier.
function drawChart(title, x, y, xName) {
  const box = make("div", at("charts"), "", {class: "chart"});
  make("h3", box, title);
  const sorted = [...plans].sort((a, b) => a[x] - b[x] || a[y] - b[y]);
  const axis = {stroke: ofPage("--faint"), grid: {stroke: ofPage("--line"), width: 1}, ticks: {stroke: ofPage("--line")}};
  const series = fill => ({stroke: ofPage("--accent"), paths: () => null, points: {show: true, size: 9, width: 2, fill}});
  const column = onFrontier => sorted.map(plan => plan.frontier === onFrontier ? plan[y] : null);
  const width = Math.min(360, document.documentElement.clientWidth - 60);
  const range = (_, low, high) => [0, 1.2 * high || 1];
  function drawNames(chart) {
    const {ctx} = chart, dot = devicePixelRatio;
    ctx.font = `${11 * dot}px system-ui, sans-serif`;
    ctx.fillStyle = ofPage("--text");
    ctx.textAlign = "center";
    for (const plan of sorted) {
      const [left, top] = [chart.valToPos(plan[x], "x", true), chart.valToPos(plan[y], "y", true)];
      ctx.fillText(plan.label.replaceAll(/\w+=/g, ""), left, top - 9 * dot);
    }
  }
  new uPlot({width, height: 260, legend: {show: false}, cursor: {show: false}, scales: {x: {time: false, range}, y: {range}},
    hooks: sorted.length <= NAMES ? {draw: [drawNames]} : {}, axes: [{...axis, label: xName, labelSize: 20}, {...axis, size: 60}],
    series: [{}, series(ofPage("--accent")), series(ofPage("--panel"))]}, [sorted.map(plan => plan[x]), column(true), column(false)], box);
  const text = sorted.map(plan => `${plan.label}: ${Number(plan[x].toPrecision(3))}, ${Number(plan[y].toPrecision(3))}`).join("; ");
  describe(box, `${title} by ${xName}. ${text}`);
}

drawHead();
drawPlans();
drawRejected();
key(at("points"), "on the frontier", "var(--accent)");
key(at("points"), "other plans", "var(--panel)");
drawChart("Hours of the run", "cost", "hours", figures.cost);
drawChart("Step, s", "gpus", "step_seconds", "GPUs of the cluster");
drawChart("GPU-hours of the run", "gpus", "gpu_hours", "GPUs of the cluster");
if (priced) drawChart("Price of the run", "gpus", "price", "GPUs of the cluster");
