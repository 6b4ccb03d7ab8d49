"use strict";
const {plans, rejected} = figures;
const priced = figures.cost === "price";
const hours = `${figures.unit}-hours`;
const ofPage = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function drawHead() {
  document.title = `${plans.length} plans of ${figures.name}`;
  at("title").textContent = document.title;
  figures.shared.length ? at("shared").append(`All with ${figures.shared.join(" ")}`) : at("shared").remove();
  at("frontier-note").textContent = `A plan is on the frontier if no other one is at least as short and as cheap (${figures.cost}) in total.`
    + (priced ? ` Prices are ${figures.price_unit}.` : "");
}

function drawPlans() {
  const text = (value, cell) => cell.append(value);
  sortable(at("plans"), plans, [
    {title: "sweep", value: plan => plan.label, show: (plan, cell) => {
      plan.page ? make("a", cell, plan.label, {href: plan.page}) : text(plan.label, cell);
    }},
    {title: "fits", value: plan => plan.verdict, show: (plan, cell) => make("span", cell, plan.verdict, {class: `verdict ${plan.verdict}`})},
    {title: `${figures.unit}s used`, value: plan => plan.used_gpus, number: true, show: (plan, cell) => text(`${plan.used_gpus} of ${plan.gpus}`, cell)},
    {title: "step", value: plan => plan.step_seconds, number: true, show: (plan, cell) => text(plan.step, cell)},
    {title: "run", value: plan => plan.hours, number: true, show: (plan, cell) => text(plan.run, cell)},
    {title: hours, value: plan => plan.gpu_hours, number: true, show: (plan, cell) => text(plan.gpu_hours_text, cell)},
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

// Return the place of a name beside its point where it covers no other name and no point; null without any.
function freePlace(size, [x, y], taken, [width, height]) {
  const [middle, above, beside] = [x - size[0] / 2, y - 7 - size[1], y - size[1] / 2];
  const places = [[middle, above], [middle, y + 7], [x + 9, beside], [x - 9 - size[0], beside],
    [x + 4, above], [x - 4 - size[0], above], [x + 4, y + 7], [x - 4 - size[0], y + 7]];
  const isFree = ([left, top]) => left >= 0 && top >= 0 && left + size[0] <= width && top + size[1] <= height
    && !taken.some(each => left < each.right && left + size[0] > each.left && top < each.bottom && top + size[1] > each.top);
  return places.find(isFree) ?? null;
}

// Mark each plan, those on the frontier in front. Names that find no place are shown under the pointer.
function drawPoints(chart, x, y) {
  const area = [chart.over.clientWidth, chart.over.clientHeight];
  const inOrder = [...plans].sort((a, b) => b.frontier - a.frontier);
  const places = new Map(inOrder.map(plan => [plan, [chart.valToPos(plan[x], "x"), chart.valToPos(plan[y], "y")]]));
  const taken = [...places.values()].map(([left, top]) => ({left: left - 5, right: left + 5, top: top - 5, bottom: top + 5}));
  for (const plan of inOrder) {
    const [left, top] = places.get(plan);
    make("span", chart.over, "", {class: plan.frontier ? "point frontier" : "point", style: {left: `${left}px`, top: `${top}px`}});
    const name = make("span", chart.over, plan.label.replaceAll(/\w+=/g, ""), {class: "name"});
    const size = [name.offsetWidth, name.offsetHeight];
    const free = freePlace(size, [left, top], taken, area);
    if (free) taken.push({left: free[0] - 2, right: free[0] + size[0] + 2, top: free[1], bottom: free[1] + size[1]});
    else name.classList.add("crowded");
    const within = [Math.max(0, Math.min(left - size[0] / 2, area[0] - size[0])), top < size[1] + 8 ? top + 8 : top - size[1] - 8];
    [name.style.left, name.style.top] = (free ?? within).map(each => `${each}px`);
  }
}

function drawChart(title, x, y, xName) {
  const box = make("div", at("charts"), "", {class: "chart"});
  make("h3", box, title);
  const sorted = [...plans].sort((a, b) => a[x] - b[x] || a[y] - b[y]);
  const [faint, line] = ["--faint", "--line"].map(name => () => ofPage(name));
  const axis = {stroke: faint, grid: {stroke: line, width: 1}, ticks: {stroke: line}};
  const width = Math.min(570, document.documentElement.clientWidth - 60);
  const scale = name => ({time: false, range: [0, 1.2 * Math.max(...plans.map(plan => plan[name])) || 1]});
  const chart = new uPlot({width, height: 320, legend: {show: false}, cursor: {show: false}, scales: {x: scale(x), y: scale(y)},
    hooks: {ready: [chart => drawPoints(chart, x, y)]}, axes: [{...axis, label: xName, labelSize: 20}, {...axis, size: 60}],
    series: [{}, {paths: () => null, points: {show: false}}]}, [sorted.map(plan => plan[x]), sorted.map(plan => plan[y])], box);
  // The canvas has the colours of the moment when it was drawn; paper is light.
  for (const media of ["print", "(prefers-color-scheme: dark)"]) matchMedia(media).addEventListener("change", () => chart.redraw(false));
  const text = sorted.map(plan => `${plan.label}: ${Number(plan[x].toPrecision(3))}, ${Number(plan[y].toPrecision(3))}`).join("; ");
  describe(box, `${title} by ${xName}. ${text}`);
}

drawHead();
drawPlans();
drawRejected();
key(at("points"), "on the frontier", "var(--accent)");
key(at("points"), "other plans", "var(--panel)");
drawChart("Hours of the run", "cost", "hours", figures.cost);
const devices = `${figures.unit}s of the cluster`;
const [second, unit] = timeUnit(Math.max(...plans.map(plan => plan.step_seconds)));
for (const plan of plans) plan.step_length = plan.step_seconds / second;
drawChart(`Step, ${unit}`, "gpus", "step_length", devices);
drawChart(`${hours} of the run`, "gpus", "gpu_hours", devices);
if (priced) drawChart("Price of the run", "gpus", "price", devices);
