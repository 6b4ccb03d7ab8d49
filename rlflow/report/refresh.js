// The part of a served page: it fetches new figures while somebody looks at it, and draws what has changed.
const SECONDS = 3;
let shown = "";

// A resumed run has an old report while it runs. Without a lock nobody knows whether a run without a report runs.
const isOver = run => run.is_running === null ? run.report !== null : !run.is_running;

function describeLife() {
  if (!runs.every(isOver)) return `Live: ${describeAge()}.`;
  if (runs.every(run => run.report)) return runs.every(run => run.report.status === "finished") ? "Finished." : "Stopped.";
  return `No process writes here: ${describeAge()}.`;
}

function describeAge() {
  const updated = Math.max(0, ...runs.map(run => run.updated ?? 0)), age = Date.now() / 1000 - updated;
  if (!updated) return "no step yet";
  const [size, unit] = age < 120 ? [1, "seconds"] : age < 7200 ? [60, "minutes"] : [3600, "hours"];
  return `last metrics ${Math.max(0, age / size).toFixed(0)} ${unit} ago`;
}

async function refresh() {
  try {
    const answer = await fetch("figures.json", {cache: "no-store"});
    if (!answer.ok) throw new Error(await answer.text());
    const text = await answer.text();
    if (text !== shown) {
      ({ runs, differences } = JSON.parse(text));
      shown = text;
      draw();
    }
    at("live").textContent = describeLife();
  } catch (error) {
    // A browser throws TypeError where nobody answers.
    const reason = error instanceof TypeError ? "No connection." : error.message;
    at("live").textContent = `${reason} This page shows what it had last.`;
  }
}

at("live").hidden = false;
(async () => {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise(resume => setTimeout(resume, 1000 * SECONDS));
  }
})();
