// What all panels use: the data in seconds, words and numbers, elements, colours, the tip.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const { slots, tiers, lanes, waits, units, recording: recorded } = data;
const numUnits = units.length;
slots.name = slots.begin.map((_, i) => i === 2 * numUnits ? "update on the device"
  : i < numUnits ? `forward of ${units[i].words}` : `backward of ${units[2 * numUnits - 1 - i].words}`);

const inSeconds = (ticks) => ticks.map((tick) => tick * data.tick_seconds);
const allBars = [...lanes.map((lane) => lane.bars), ...Object.values(recorded ? recorded.lanes : {})];
for (const bars of allBars) bars.kind = bars.kind.map((number) => data.kinds[number]);
for (const spans of [...allBars, waits, slots]) {
  spans.start = inSeconds(spans.start);
  spans.end = inSeconds(spans.end);
}
slots.begin = inSeconds(slots.begin);
for (const tier of tiers) tier.time = inSeconds(tier.time);
const STEP = data.step_seconds;
const END = Math.max(STEP, recorded ? recorded.step_seconds : 0);

// --- Words and numbers ---------------------------------------------------------------------------

const bytes = (size) => {
  let unit = "B";
  for (const next of ["KiB", "MiB", "GiB", "TiB", "PiB"]) {
    if (Math.abs(size) < 1023.995) break;
    size /= 1024;
    unit = next;
  }
  return unit === "B" ? `${size} B` : `${size.toFixed(2)} ${unit}`;
};

const time = (s) => {
  if (s >= 59.95) {
    const all = Math.round(s), hours = Math.floor(all / 3600), two = (n) => String(n).padStart(2, "0");
    const minutes = Math.floor((all % 3600) / 60);
    return hours ? `${hours} h ${two(minutes)} min` : `${minutes} min ${two(all % 60)} s`;
  }
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]]) {
    const value = s / scale;
    if (value >= 0.9995) return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${unit}`;
  }
  return s ? `${(s * 1e9).toFixed(0)} ns` : "0 s";
};

const percent = (fraction) => `${(100 * fraction).toFixed(fraction < 0.1 ? 2 : 1)} %`;
const round = (value) => Math.round(value * 100) / 100;
const between = (low, value, high) => Math.min(Math.max(low, value), high);

// --- Elements ------------------------------------------------------------------------------------

const fill = (element, attributes, children = []) => {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...[].concat(children));
  return element;
};
const el = (name, attributes, children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes, children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
const rect = (x, y, width, height, more) => svg("rect", { x, y, width, height, ...more });
const line = (name, x1, y1, x2, y2) => svg("line", { class: name, x1, x2, y1, y2 });
const label = (x, y, words, anchor, name) => svg("text", { class: name, x, y, "text-anchor": anchor }, words);

const table = (id, head, rows, texts = [0]) => {
  const cell = (name) => (content, i) =>
    el(name, { class: texts.includes(i) ? "text" : null, scope: name === "th" ? "col" : null }, content);
  byId(id).replaceChildren(
    el("thead", {}, el("tr", {}, head.map(cell("th")))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell("td"))))),
  );
};

// A chart's width, and a drawing of a height that does not depend on it.
const widthOf = (target) => Math.max(320, target.getBoundingClientRect().width || 900);
const drawn = (target, wide, height, marks) =>
  fill(target, { viewBox: `0 0 ${wide} ${height}`, height }).replaceChildren(...marks);
const later = (draw) => {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; draw(); });
  };
};

// --- Colours -------------------------------------------------------------------------------------

// The decisions of one family are shades of its colour.
const family = (text) => {
  const tier = text.includes("to disk") ? "disk" : "host", word = text.split(" ")[0];
  if (["keep", "recompute", "persistent", "shard"].includes(word)) return word;
  return `${text.includes("keep gathered") ? "gathered" : word} ${tier}`;
};
const colours = new Map();
for (const text of units.flatMap((unit) => [unit.activations, unit.states])) {
  const alike = [...colours.keys()].filter((other) => family(other) === family(text));
  if (!alike.includes(text)) colours.set(text, { "data-c": family(text), "data-shade": alike.length || null });
}
const swatch = (colour, kind) =>
  el("span", { class: `swatch ${kind || ""}`, ...(colours.get(colour) || { "data-c": colour }) });
const entry = (colour, words, kind) => el("span", {}, [swatch(colour, kind), words]);
const muted = (words) => el("span", { class: "muted" }, words);

// --- The tip -------------------------------------------------------------------------------------

const tip = byId("tip");
const showTip = (children, px, py) => {
  tip.replaceChildren(...children);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = px + 18 + box.width > innerWidth - 8 ? px - 18 - box.width : px + 18;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${between(8, py + 14, innerHeight - box.height - 8)}px`;
};
const hideTip = () => { tip.hidden = true; };
const say = (words) => { byId("said").textContent = words; };
const pairs = (rows) => el("table", {}, el("tbody", {}, rows));
const pair = (name, value, colour, sum) =>
  el("tr", { class: sum ? "sum" : null }, [
    el("td", {}, colour ? [swatch(colour), name] : [name]), el("td", {}, value),
  ]);

// Keys of a chart that has the focus, by their names; without those that the browser has.
const onKeys = (target, keys) => target.addEventListener("keydown", (event) => {
  if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  keys[event.key](event);
  event.preventDefault();
});
