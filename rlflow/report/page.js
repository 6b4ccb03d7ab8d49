"use strict";
// What the scripts of all pages share.
const figures = JSON.parse(document.getElementById("figures").textContent);
const at = id => document.getElementById(id);

// Append an element with a text and properties to another element, and return it.
function make(tag, into, text = "", properties = {}) {
  const element = document.createElementNS(into.namespaceURI, tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(properties)) {
    name === "style" ? Object.assign(element.style, value) : element.setAttribute(name, value);
  }
  return into.appendChild(element);
}

// Append a colour with its name to a legend.
function key(into, name, background) {
  const item = make("li", into);
  make("span", item, "", {class: "key", style: {background}});
  item.append(name);
}

// Give the drawing of a chart a text for readers who do not see it.
function describe(box, text) {
  for (const [name, value] of Object.entries({role: "img", "aria-label": text})) box.querySelector("canvas").setAttribute(name, value);
}

// Return the unit of an axis up to this many seconds: its own seconds, and its name.
function timeUnit(seconds) {
  return [[86400, "days"], [3600, "hours"], [60, "minutes"]].find(([size]) => seconds >= Math.max(600, 2 * size)) ?? [1, "s"];
}

// Fill a table that its column headings sort. A column has a title, a value to sort by, whether it is a number, and how
// a cell shows it (its text, or a function that fills it). Missing values come last.
function sortable(table, rows, columns, first) {
  const headings = make("tr", make("thead", table)), body = make("tbody", table);
  function sort(column, sign) {
    const compare = (a, b) => (a === null) - (b === null) || (a === null ? 0 : sign * (column.number ? a - b : a.localeCompare(b)));
    const sorted = [...rows].sort((a, b) => compare(column.value(a), column.value(b)));
    body.replaceChildren(...sorted.map(row => lines.get(row)));
    for (const each of columns) each.heading.removeAttribute("aria-sort");
    column.heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  }
  for (const column of columns) {
    column.heading = make("th", headings, "", {scope: "col", ...(column.number && {class: "number"})});
    make("button", column.heading, column.title, {type: "button"}).addEventListener("click", () => {
      sort(column, column.heading.getAttribute("aria-sort") === "ascending" ? -1 : 1);
    });
  }
  const lines = new Map(rows.map(row => {
    const line = make("tr", body);
    for (const column of columns) {
      const cell = make("td", line, "", column.number ? {class: "number"} : {});
      column.show ? column.show(row, cell) : cell.append(column.value(row) ?? "");
    }
    return [row, line];
  }));
  sort(columns[first], 1);
}
