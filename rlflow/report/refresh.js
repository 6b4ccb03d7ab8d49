// The part of a served page: it fetches new figures while somebody looks at it, and draws what has changed.
const SECONDS = 3;
let shown = "";

function describeAge() {
  const updated = Math.max(0, ...runs.map(run => run.updated ?? 0)), age = Date.now() / 1000 - updated;
  if (!updated) return "no step yet";
  const [size, unit] = age < 120 ? [1, "seconds"] : age < 7200 ? [60, "minutes"] : [3600, "hours"];
  return `last metrics ${Math.max(0, age / size).toFixed(0)} ${unit} ago`;
}

async function refresh() {
  try {
    const answer = await fetch("figures.json", {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.statusText);
    const text = await answer.text();
    if (text !== shown) {
      ({ runs, differences } = JSON.parse(text));
      shown = text;
      draw();
    }
    at("live").textContent = `Live: ${describeAge()}.`;
  } catch {
    at("live").textContent = "No connection: this page shows what it had last.";
  }
}

at("live").hidden = false;
(async () => {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise(resume => setTimeout(resume, 1000 * SECONDS));
  }
})();
