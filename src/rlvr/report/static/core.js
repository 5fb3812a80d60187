"use strict";
// Elements, numbers, colours, the tooltip. Text only ever reaches the page as a text node.

const SVG = "http://www.w3.org/2000/svg";
// The colours --s0 to --s7 of report.css; a ninth run has the colour of the first.
const SERIES = 8;
const VERDICTS = {
  correct: "--good", partial: "--part", wrong: "--bad", unparsable: "--odd", timeout: "--late", error: "--broken",
  "not verified": "--s7",
};

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function draw(tag, attributes = {}, text = null) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  return element;
}

const color = (number) => `var(--s${number % SERIES})`;
const verdictColor = (status) => `var(${VERDICTS[status] || "--s7"})`;
const known = (value) => typeof value === "number" && Number.isFinite(value);

function show(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  // Four digits, never an exponent; metrics.jsonl has all digits.
  if (size >= 1e6) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 1e-3) return size < 1e-6 ? (value > 0 ? "<0.000001" : ">-0.000001") : value.toFixed(6).replace(/0+$/, "");
  return String(Number(value.toPrecision(4)));
}

// Three digits, for cards and tables; all digits of a whole part.
function brief(value) {
  if (!known(value) || Number.isInteger(value) || Math.abs(value) < 1e-3) return show(value);
  return Math.abs(value) >= 1000 ? show(Math.round(value)) : String(Number(value.toPrecision(3)));
}

// A share as 98.0 %; a score outside of 0 to 1 as it is.
function percent(value) {
  return known(value) && value >= 0 && value <= 1 ? `${(100 * value).toFixed(1)} %` : brief(value);
}

// The same beside an axis, whose values are round: 50 %.
function shortPercent(value) {
  return percent(value).replace(".0 %", " %");
}

// Text with `names` in backticks set as code.
function prose(text) {
  return String(text).split("`").map((part, i) => (i % 2 ? make("code", {}, part) : part));
}

function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  // Rounded first: 119.6 s is 2 min 0 s, not 1 min 60 s.
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const tip = {
  show(event, text) {
    const box = document.getElementById("tip");
    box.textContent = text;
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    // 16 px right of and 12 px below the pointer, so that the box is not under it; on the left where the window ends.
    const left = event.clientX + 16 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 16;
    box.style.left = `${Math.max(4, left)}px`;
    box.style.top = `${Math.min(event.clientY + 12, innerHeight - height - 4)}px`;
  },
  hide() { document.getElementById("tip").hidden = true; },
};

function legend(parts) {
  return make("div", { class: "legend" }, ...parts.map((part) =>
    make("span", {}, make("i", { class: "swatch", style: `background:${part.color}` }), part.label)));
}

function ticks(low, high, count = 4) {
  // Steps of 1, 2 or 5 times a power of ten, the smallest that gives no more than `count` intervals.
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) || rough;
  const found = [];
  // The tolerance keeps a tick that rounding puts just outside of the range.
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}

async function unpack() {
  const packed = atob(document.getElementById("data").textContent.trim());
  const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function setUpTheme() {
  const root = document.documentElement;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
}
