"use strict";
// What the scripts of all pages share.
const figures = JSON.parse(document.getElementById("figures").textContent);
const at = id => document.getElementById(id);

// Append an element with a text and properties to another element, and return it.
function make(tag, into, text = "", properties = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(properties)) {
    name === "style" ? Object.assign(element.style, value) : element.setAttribute(name, value);
  }
  return into.appendChild(element);
}
