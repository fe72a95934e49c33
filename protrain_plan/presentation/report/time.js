// The chart over time: memory above, lanes below, one axis; pointer and keys.

const LEFT = 148, RIGHT = 14;
const GAP = 12, OVERVIEW = 30, DEVICE = 230, TIER = 76, LANE = 22, RAN = 8, AXIS = 22;
const chart = byId("time");
const view = { from: 0, to: END };
let at = null; // the time under the pointer or the keyboard's cursor
let width = 900;

// The last index whose time is not after t.
const indexAt = (times, t) => {
  let low = 0, high = times.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (times[middle] <= t) low = middle; else high = middle - 1;
  }
  return low;
};
const slotAt = (t) => indexAt(slots.begin, t);
const slotEnd = (slot) => slot + 1 < slots.begin.length ? slots.begin[slot + 1] : STEP;

// Where everything stands, from the top; heights do not depend on the width.
const rows = [];
let height = 2;
const place = (row, size, gap = GAP) => {
  rows.push({ ...row, top: height, size });
  height += size + gap;
};
place({ type: "overview", draw: drawOverview }, OVERVIEW, 20);
tiers.forEach((tier, i) =>
  place({ type: "tier", draw: drawTier, tier }, i ? TIER : DEVICE, i + 1 < tiers.length ? GAP : GAP + 4));
for (const lane of lanes) {
  const ran = recorded && recorded.lanes[lane.name];
  place({ type: "lane", draw: drawLane, lane, ran }, LANE + (ran ? RAN : 0), 4);
}
place({ type: "axis", draw: () => [] }, AXIS, 0);
const first = rows[1].top, bottom = rows[rows.length - 1].top;

const plot = () => width - LEFT - RIGHT;
const x = (t) => LEFT + (t - view.from) / (view.to - view.from) * plot();
const timeAt = (px) => view.from + (px - LEFT) / plot() * (view.to - view.from);
const inAll = (t) => LEFT + t / END * plot();
const inside = (px) => between(LEFT, px, width - RIGHT);

const look = (from, to) => {
  const span = between(Math.max(END * 1e-5, 1e-8), to - from, END);
  view.from = between(0, (from + to - span) / 2, END - span);
  view.to = view.from + span;
  redraw();
};
const lookAt = (t) => {
  const half = (view.to - view.from) / 2;
  look(t - half, t + half);
};
const zoom = (factor, around) => {
  const t = around ?? (view.from + view.to) / 2;
  const span = view.to - view.from, share = (t - view.from) / span, wide = Math.min(END, span * factor);
  look(t - share * wide, t + (1 - share) * wide);
};
const move = (fraction) => {
  const by = (view.to - view.from) * fraction;
  look(view.from + by, view.to + by);
};

// --- Drawing -------------------------------------------------------------------------------------

const drawAxis = (layer) => {
  const rough = (view.to - view.from) / Math.max(2, plot() / 110);
  const ten = 10 ** Math.floor(Math.log10(rough));
  const gap = [1, 2, 5, 10].map((n) => n * ten).find((n) => n >= rough);
  const units = [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]];
  const [unit, scale] = units.find(([, one]) => gap * 10 >= one) || units[3];
  const digits = Math.max(0, Math.ceil(-Math.log10(gap / scale) - 1e-9));
  for (let n = Math.ceil(view.from / gap); n * gap <= view.to + 1e-9; n++) {
    const px = round(x(n * gap)), anchor = px > width - RIGHT - 24 ? "end" : "middle";
    layer.append(line("grid", px, first, px, bottom + 4));
    layer.append(label(px, bottom + 17, `${(n * gap / scale).toFixed(digits)} ${unit}`, anchor));
  }
};

// Where forward ends and backward, and where the update begins.
const drawPhases = (layer) => {
  const turn = slots.begin[numUnits], end = slots.begin[2 * numUnits];
  for (const [name, from, to] of [["forward", 0, turn], ["backward", turn, end], ["update and end", end, STEP]]) {
    const left = Math.max(LEFT, x(from)), right = Math.min(width - RIGHT, x(to));
    if (from && from >= view.from && from <= view.to) {
      layer.append(line("phase", round(x(from)), first - 4, round(x(from)), bottom));
    }
    if (right - left > 7 * name.length + 8) layer.append(label(left, first - 6, name));
  }
};

const cursor = svg("g");
const selection = svg("rect", { class: "select", visibility: "hidden" });

const draw = () => {
  width = widthOf(chart);
  const clipped = svg("g", { "clip-path": "url(#plot)" }), outside = svg("g");
  const hatch = svg("pattern", { id: "waits", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("rect", { width: 2, height: 5, fill: "var(--warn)" }));
  const clip = svg("clipPath", { id: "plot" }, rect(LEFT, 0, plot(), height));
  drawAxis(outside);
  for (const row of rows) outside.append(...row.draw(row, row.type === "overview" ? outside : clipped));
  drawPhases(clipped);
  drawn(chart, width, height, [svg("defs", {}, [hatch, clip]), outside, clipped, selection, cursor]);
  drawCursor();
  byId("range").textContent = `${time(view.from)} to ${time(view.to)}`;
};
const redraw = later(draw);

const drawCursor = () => {
  cursor.replaceChildren();
  if (at == null || at < view.from || at > view.to) return;
  const slot = slotAt(at), left = Math.max(LEFT, x(slots.begin[slot])), right = Math.min(width - RIGHT, x(slotEnd(slot)));
  cursor.append(rect(round(left), first, round(Math.max(1, right - left)), bottom - first, { class: "slot" }));
  cursor.append(line("cross", round(x(at)), first, round(x(at)), bottom));
};

const timeTip = (t, row) => {
  const slot = slotAt(t), tier = row.tier || device, i = indexAt(tier.time, t);
  const head = el("div", {}, [el("b", {}, slots.name[slot]), el("div", { class: "muted" },
    `slot ${slot} of ${slots.name.length - 1}, at ${time(t)}; computes ${time(slots.end[slot] - slots.start[slot])}`)]);
  const kinds = kindsOf(tier).filter((kind) => sizes(tier, kind, i)).reverse(), sum = total(tier, i, kinds);
  const body = kinds.map((kind) => pair(kind, bytes(sizes(tier, kind, i)), kind));
  body.push(pair(hidden.size ? `${tier.name}, shown` : tier.name, bytes(sum), null, true));
  if (!hidden.size) body.push(pair("free", bytes(tier.budget - sum)));
  if (recorded && tier === device && recorded.slot_bytes.length) body.push(pair("recorded tensors", bytes(recorded.slot_bytes[slot])));
  return [head, pairs(body), ...atOnce(t)];
};

// --- Pointer and keys ----------------------------------------------------------------------------

const pointAt = (event) => {
  const box = chart.getBoundingClientRect();
  const px = (event.clientX - box.left) / box.width * width, py = (event.clientY - box.top) / box.height * height;
  const row = px === inside(px) && rows.find((one) => py >= one.top && py < one.top + one.size + 4);
  return { px, row };
};
const unpoint = () => { at = null; hideTip(); drawCursor(); };

const hover = (event) => {
  const { px, row } = pointAt(event);
  if (!row || row.type === "overview") return unpoint();
  at = Math.min(timeAt(px), STEP * (1 - 1e-9));
  showTip((row.lane && laneTip(at, row)) || timeTip(at, row), event.clientX, event.clientY);
  drawCursor();
};

let drag = null; // {from: px, moved: bool, overview: bool}
const drop = () => { drag = null; selection.setAttribute("visibility", "hidden"); };
const centre = (px) => lookAt((px - LEFT) / plot() * END);
chart.addEventListener("pointerdown", (event) => {
  const { px, row } = pointAt(event);
  if (event.button !== 0 || !row) return;
  drag = { from: px, moved: false, overview: row.type === "overview" };
  chart.setPointerCapture(event.pointerId);
  if (drag.overview) centre(px);
});
chart.addEventListener("pointermove", (event) => {
  if (!drag) return hover(event);
  const { px } = pointAt(event);
  drag.moved = drag.moved || Math.abs(px - drag.from) > 4;
  if (drag.overview) return centre(px);
  if (!drag.moved) return;
  hideTip();
  const [left, right] = [inside(drag.from), inside(px)].sort((a, b) => a - b);
  fill(selection, { x: left, y: first, width: right - left, height: bottom - first, visibility: "visible" });
});
chart.addEventListener("pointerup", (event) => {
  if (drag && drag.moved && !drag.overview) {
    look(...[timeAt(drag.from), timeAt(pointAt(event).px)].sort((a, b) => a - b));
  }
  drop();
});
chart.addEventListener("pointercancel", drop);
chart.addEventListener("pointerleave", unpoint);
chart.addEventListener("blur", unpoint);
chart.addEventListener("dblclick", () => look(0, END));
chart.addEventListener("wheel", (event) => {
  const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
  if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY * 0.0025), timeAt(pointAt(event).px));
  else if (Math.abs(sideways) > Math.abs(event.deltaY) || event.shiftKey) move(sideways / plot());
  else return; // the page scrolls
  event.preventDefault();
}, { passive: false });

const goTo = (slot) => {
  at = (slots.begin[slot] + slotEnd(slot)) / 2;
  if (at < view.from || at > view.to) lookAt(at);
  drawCursor();
  const box = chart.getBoundingClientRect(), below = rows.find((row) => row.type === "lane").top;
  showTip(timeTip(at, rows[1]), box.left + x(at) / width * box.width, box.top + below * box.height / height / 3);
  say(`${slots.name[slot]}, ${time(at)}: ${bytes(total(device, slot))} of ${bytes(device.budget)} on the device`);
};
const last = slots.begin.length - 1;
const goBy = (slots) => (event) => event.shiftKey ? move(0.2 * slots)
  : goTo(at == null ? data.peak_slot : between(0, slotAt(at) + slots, last));
onKeys(chart, {
  ArrowLeft: goBy(-1), ArrowRight: goBy(1), Home: () => goTo(0), End: () => goTo(last),
  "+": () => zoom(0.5, at), "=": () => zoom(0.5, at), "-": () => zoom(2, at), 0: () => look(0, END),
  Escape: unpoint,
});
byId("zoom-in").addEventListener("click", () => zoom(0.5));
byId("zoom-out").addEventListener("click", () => zoom(2));
byId("zoom-fit").addEventListener("click", () => look(0, END));
