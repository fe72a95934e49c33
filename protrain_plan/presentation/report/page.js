"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const recorded = data.recording;
  const { slots, tiers, lanes, waits, units } = data;
  const numUnits = units.length;
  for (const unit of units) unit.words ??= unit.name;
  slots.name = slots.begin.map((_, i) => i === 2 * numUnits ? "update on the device"
    : i < numUnits ? `forward of ${units[i].words}` : `backward of ${units[2 * numUnits - 1 - i].words}`);
  // From here on, times are nanoseconds.
  const inNs = (ticks) => ticks.map((tick) => tick * data.tick_seconds * 1e9);
  const allBars = [...lanes.map((lane) => lane.bars), ...Object.values(recorded ? recorded.lanes : {})];
  for (const bars of allBars) bars.kind = bars.kind.map((number) => data.kinds[number]);
  for (const spans of [...allBars, waits, slots]) {
    spans.start = inNs(spans.start);
    spans.end = inNs(spans.end);
  }
  slots.begin = inNs(slots.begin);
  for (const tier of tiers) tier.time = inNs(tier.time);
  const STEP = data.step_seconds * 1e9;
  const END = Math.max(STEP, recorded ? recorded.step_seconds * 1e9 : 0) || 1;

  // --- Words and numbers -------------------------------------------------------------------------

  const bytes = (size) => {
    let unit = "B";
    for (const next of ["KiB", "MiB", "GiB", "TiB", "PiB"]) {
      if (Math.abs(size) < 1023.995) break;
      size /= 1024;
      unit = next;
    }
    return unit === "B" ? `${size} B` : `${size.toFixed(2)} ${unit}`;
  };

  const time = (ns) => {
    const s = Math.abs(ns) / 1e9;
    if (s >= 59.95) {
      const all = Math.round(s), hours = Math.floor(all / 3600);
      const minutes = Math.floor((all % 3600) / 60), rest = String(all % 60).padStart(2, "0");
      return hours ? `${hours} h ${String(minutes).padStart(2, "0")} min` : `${minutes} min ${rest} s`;
    }
    for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]]) {
      const value = s / scale;
      if (value >= 0.9995) return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${unit}`;
    }
    return s ? `${(s * 1e9).toFixed(0)} ns` : "0 s";
  };

  const percent = (fraction) => `${(100 * fraction).toFixed(fraction < 0.1 ? 2 : 1)} %`;

  // What a bar says of its unit, and the colour it has.
  const DOES = {
    "forward": (u) => `forward of ${u}`,
    "backward": (u) => `backward of ${u}`,
    "update on the device": () => "update on the device",
    "fetch": (u) => `parameters of ${u} arrive`,
    "all-gather": (u) => `parameters of ${u} are gathered`,
    "all-reduce": (u) => `gradients of ${u} are summed`,
    "reduce-scatter": (u) => `gradients of ${u} are summed`,
    "swap in": (u) => `activations of ${u} return`,
    "swap out": (u) => `activations of ${u} leave`,
    "spill gradients": (u) => `gradients of ${u} leave`,
    "add gradients": (u) => `gradients of ${u} are added up`,
    "read states": (u) => `optimizer states of ${u} are read`,
    "update": (u) => `${u} is updated`,
    "write states": (u) => `new states of ${u} are written`,
  };
  const COLOUR = {
    "forward": "forward", "backward": "backward", "update on the device": "update",
    "fetch": "buffers", "all-gather": "buffers", "all-reduce": "gradients",
    "reduce-scatter": "gradients", "swap in": "activations", "swap out": "activations",
    "spill gradients": "gradients", "add gradients": "gradients",
    "read states": "states", "write states": "states", "update": "update",
  };
  const LANE_COLOURS = {
    forward: "forward", backward: "backward", buffers: "parameters", activations: "activations",
    gradients: "gradients", states: "optimizer states", update: "update",
  };
  const does = (bars, i) => DOES[bars.kind[i]](units[bars.unit[i]].words);

  // The decisions of one family are shades of its colour.
  const family = (text) => {
    const tier = text.includes("to disk") ? "disk" : "host";
    const word = text.split(" ")[0];
    if (["keep", "recompute", "persistent", "shard"].includes(word)) return word;
    return `${text.includes("keep gathered") ? "gathered" : word} ${tier}`;
  };
  const colours = new Map();
  for (const text of units.flatMap((unit) => [unit.activations, unit.states])) {
    const alike = [...colours.keys()].filter((other) => family(other) === family(text));
    if (!alike.includes(text)) colours.set(text, { "data-c": family(text), "data-shade": alike.length || null });
  }

  // --- Elements ----------------------------------------------------------------------------------

  const fill = (element, attributes, children) => {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === true) element.setAttribute(name, "");
      else if (value !== false && value != null) element.setAttribute(name, value);
    }
    for (const child of [].concat(children == null ? [] : children)) {
      element.append(child);
    }
    return element;
  };
  const el = (name, attributes, children) =>
    fill(document.createElement(name), attributes, children);
  const svg = (name, attributes, children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
  const swatch = (colour, kind) =>
    el("span", { class: `swatch ${kind || ""}`, ...(colours.get(colour) || { "data-c": colour }) });

  const table = (target, head, rows, texts = [0]) => {
    const cell = (name) => (content, i) =>
      el(name, { class: texts.includes(i) ? "text" : null, scope: name === "th" ? "col" : null }, content);
    target.replaceChildren(
      el("thead", {}, el("tr", {}, head.map(cell("th")))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell("td"))))),
    );
  };

  const later = (draw) => {
    let asked = false;
    return () => {
      if (asked) return;
      asked = true;
      requestAnimationFrame(() => { asked = false; draw(); });
    };
  };

  // --- What is shown -----------------------------------------------------------------------------

  const view = { from: 0, to: END };
  const hidden = new Set();
  let at = null; // the time under the pointer or the keyboard's cursor
  let picked = null; // the unit that is followed

  const LEFT = 148, RIGHT = 14;
  const GAP = 12, OVERVIEW = 30, DEVICE = 230, TIER = 76, LANE = 22, RAN = 8, AXIS = 22;
  const chart = byId("time");
  const sizes = (tier, kind, i) => {
    const list = tier.kinds[kind];
    return list.length === 1 ? list[0] : list[i];
  };
  const shown = (tier) => Object.keys(tier.kinds).filter((kind) => !hidden.has(kind));
  const total = (tier, i, kinds) => kinds.reduce((sum, kind) => sum + sizes(tier, kind, i), 0);
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
  place({ type: "overview" }, OVERVIEW, 20);
  tiers.forEach((tier, i) => place({ type: "tier", tier }, i ? TIER : DEVICE, i + 1 < tiers.length ? GAP : GAP + 4));
  for (const lane of lanes) {
    const ran = recorded && recorded.lanes[lane.name];
    place({ type: "lane", lane, ran }, LANE + (ran ? RAN : 0), 4);
  }
  place({ type: "axis" }, AXIS, 0);
  const firstLane = rows.find((row) => row.type === "lane");

  let width = 900;
  const plot = () => width - LEFT - RIGHT;
  const x = (t) => LEFT + (t - view.from) / (view.to - view.from) * plot();
  const timeAt = (px) => view.from + (px - LEFT) / plot() * (view.to - view.from);
  const inAll = (t) => LEFT + t / END * plot();
  const round = (value) => Math.round(value * 100) / 100;

  const look = (from, to) => {
    const least = Math.max(END * 1e-5, 10);
    let span = Math.min(END, Math.max(least, to - from));
    const middle = (from + to) / 2;
    from = Math.min(Math.max(0, middle - span / 2), END - span);
    view.from = from;
    view.to = from + span;
    redraw();
  };
  const zoom = (factor, around) => {
    const t = around == null ? (view.from + view.to) / 2 : around;
    const span = view.to - view.from, share = (t - view.from) / span;
    const wide = Math.min(END, span * factor);
    look(t - share * wide, t + (1 - share) * wide);
  };
  const move = (fraction) => {
    const by = (view.to - view.from) * fraction;
    look(view.from + by, view.to + by);
  };

  // --- Memory and lanes --------------------------------------------------------------------------

  // The outline of steps: along the tops, and back along the bottoms.
  const outline = (times, first, last, bottoms, tops, y) => {
    const edge = (i) => round(x(i + 1 < times.length ? times[i + 1] : STEP));
    let path = `M${round(x(times[first]))} ${y(tops[0])}`, back = "";
    for (let i = first; i <= last; i++) {
      path += `V${y(tops[i - first])}H${edge(i)}`;
      back = `H${edge(i)}V${y(bottoms[i - first])}` + back;
    }
    return `${path}${back}H${round(x(times[first]))}Z`;
  };

  const drawTier = (row, layer) => {
    const { tier, top, size } = row, kinds = shown(tier);
    const first = indexAt(tier.time, view.from), last = indexAt(tier.time, view.to);
    const most = tier.time.reduce((found, _, i) => Math.max(found, total(tier, i, kinds)), 1);
    // With kinds hidden, the line is at what the budget leaves for the others: no line where that
    // changes over time. A budget that is far away would press everything to the bottom.
    const without = Object.keys(tier.kinds).filter((kind) => hidden.has(kind));
    const constant = without.every((kind) => tier.kinds[kind].length === 1);
    const budget = tier.budget - total(tier, 0, without);
    const near = constant && budget <= 1.6 * most;
    const ceiling = (near ? Math.max(budget, most) : most) * 1.06;
    const y = (value) => round(top + size - value / ceiling * size);
    const labels = [
      svg("text", { class: "name", x: 0, y: top + 11 }, tier.name),
      svg("text", { x: 0, y: top + 26 }, `peak ${bytes(tier.peak)}`),
      svg("text", { x: 0, y: top + 40 }, `of ${bytes(tier.budget)}`),
    ];
    const gap = 2 ** Math.ceil(Math.log2(ceiling / Math.max(2, size / 40)));
    for (let value = gap; y(value) > top + 8; value += gap) {
      layer.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
      if (y(value) > top + 46) {
        labels.push(svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, bytes(value).replace(/\.0+ /, " ")));
      }
    }
    let bottoms = new Array(last - first + 1).fill(0);
    for (const kind of kinds) {
      const tops = bottoms.map((bottom, i) => bottom + sizes(tier, kind, first + i));
      layer.append(svg("path", { "data-c": kind, "data-area": tier.name, d: outline(tier.time, first, last, bottoms, tops, y) }));
      bottoms = tops;
    }
    if (near) layer.append(svg("line", { class: "budget", x1: LEFT, x2: width - RIGHT, y1: y(budget), y2: y(budget) }));
    if (tier.name === "device") {
      const peak = data.peak_slot, middle = x((slots.begin[peak] + slotEnd(peak)) / 2);
      const edge = y(total(tier, peak, kinds));
      layer.append(svg("path", { class: "peak", d: `M${round(middle)} ${edge - 2}l-4 -7h8z` }));
      if (recorded && recorded.slot_bytes.length) layer.append(drawMeasured(y));
    }
    layer.append(svg("rect", { class: "frame", x: LEFT, y: top, width: plot(), height: size }));
    return labels;
  };

  // Recorded bytes count tensors: they stand on the predicted context, without what is hidden.
  const drawMeasured = (y) => {
    const device = tiers[0];
    let path = "";
    recorded.slot_bytes.forEach((size, slot) => {
      const context = device.kinds.context ? sizes(device, "context", slot) : 0;
      const without = Object.keys(device.kinds).filter((kind) => hidden.has(kind));
      const height = size + context - total(device, slot, without);
      path += `${slot ? "L" : "M"}${round(x(slots.begin[slot]))} ${y(height)}H${round(x(slotEnd(slot)))}`;
    });
    return svg("path", { class: "measured", d: path });
  };

  const drawBars = (layer, bars, top, size, name) => {
    let drawn = -1;
    for (let i = 0; i < bars.start.length; i++) {
      if (bars.end[i] < view.from || bars.start[i] > view.to) continue;
      const left = Math.max(LEFT - 2, x(bars.start[i])), right = Math.min(width, x(bars.end[i]));
      if (right - left < 0.7 && right < drawn + 0.7) continue; // under the bar before it
      drawn = right;
      const wide = Math.max(0.7, right - left - (right - left > 3 ? 0.6 : 0));
      const colour = COLOUR[bars.kind[i]];
      const other = picked != null && (bars.unit[i] !== picked || bars.kind[i] === "update on the device");
      layer.append(svg("rect", {
        class: `${name}${other ? " dim" : ""}`, "data-c": colour,
        x: round(left), y: top, width: round(wide), height: size, rx: wide > 6 ? 2 : 0,
      }));
      const label = bars.kind[i] === "update on the device" ? "update" : units[bars.unit[i]].words;
      const room = Math.floor((Math.min(right, width - RIGHT) - Math.max(left, LEFT) - 8) / 6);
      if (size > 12 && room >= Math.min(label.length, 6) && !other) {
        const light = colour === "update" || colour === "states" || colour === "backward" ? " light" : "";
        layer.append(svg("text", { class: `on${light}`, x: Math.max(left, LEFT) + 4, y: top + size / 2 + 4 },
          label.length > room ? `${label.slice(0, room - 1)}…` : label));
      }
    }
  };

  const drawLane = (row, layer) => {
    const { lane, top, size } = row;
    layer.append(svg("rect", { class: "row", x: LEFT, y: top, width: plot(), height: size }));
    drawBars(layer, lane.bars, top, LANE, "bar-mark");
    if (row.ran) drawBars(layer, row.ran, top + LANE + 1, RAN - 2, "ran");
    if (lane.name === "compute") drawWaits(layer, top);
    return [
      svg("text", { class: "name", x: 0, y: top + 15 }, lane.name),
      svg("text", { x: LEFT - 8, y: top + 15, "text-anchor": "end" }, percent(lane.utilisation)),
    ];
  };

  const drawWaits = (layer, top) => {
    waits.start.forEach((start, i) => {
      const left = Math.max(LEFT, x(start)), right = Math.min(width - RIGHT, x(waits.end[i]));
      if (right <= LEFT || left >= width - RIGHT) return;
      layer.append(svg("rect", { class: "wait", fill: "url(#waits)", x: round(left), y: top, width: round(Math.max(1, right - left)), height: LANE }));
      const text = `waits for ${waits.cause[i]}`;
      if (right - left > 5.8 * text.length + 20) {
        layer.append(svg("rect", { class: "label", x: left + 3, y: top + 3, width: 5.5 * text.length + 8, height: LANE - 6, rx: 3, fill: "var(--panel)" }));
        layer.append(svg("text", { class: "name", x: left + 7, y: top + 15 }, text));
      }
    });
  };

  const drawAxis = (row, layer) => {
    const span = view.to - view.from;
    const rough = span / Math.max(2, plot() / 110);
    const ten = 10 ** Math.floor(Math.log10(rough));
    const gap = [1, 2, 5, 10].map((n) => n * ten).find((n) => n >= rough);
    const [unit, scale] = [["s", 1e9], ["ms", 1e6], ["us", 1e3], ["ns", 1]].find(([, one]) => gap * 10 >= one) || ["ns", 1];
    const digits = Math.max(0, Math.ceil(-Math.log10(gap / scale) - 1e-9));
    for (let t = Math.ceil(view.from / gap) * gap; t <= view.to + 1; t += gap) {
      layer.append(svg("line", { class: "grid", x1: round(x(t)), x2: round(x(t)), y1: rows[1].top, y2: row.top + 4 }));
      const anchor = x(t) > width - RIGHT - 24 ? "end" : "middle";
      layer.append(svg("text", { x: round(x(t)), y: row.top + 17, "text-anchor": anchor }, `${(t / scale).toFixed(digits)} ${unit}`));
    }
  };

  // Where forward ends and backward, and where the update begins.
  const drawPhases = (layer) => {
    const turn = slots.begin[numUnits], end = slots.begin[2 * numUnits];
    const phases = [["forward", 0, turn], ["backward", turn, end], ["update and end", end, STEP]];
    const bottom = rows[rows.length - 1].top;
    for (const [name, from, to] of phases) {
      const left = Math.max(LEFT, x(from)), right = Math.min(width - RIGHT, x(to));
      if (from && from >= view.from && from <= view.to) {
        layer.append(svg("line", { class: "phase", x1: round(x(from)), x2: round(x(from)), y1: rows[1].top - 4, y2: bottom }));
      }
      if (right - left > 7 * name.length + 8) {
        layer.append(svg("text", { x: left, y: rows[1].top - 6 }, name));
      }
    }
  };

  const drawOverview = (row, layer) => {
    const device = tiers[0], kinds = Object.keys(device.kinds);
    const y = (value) => round(row.top + row.size - value / (device.peak * 1.05) * row.size);
    let path = `M${LEFT} ${row.top + row.size}`;
    device.time.forEach((t, i) => {
      const next = i + 1 < device.time.length ? device.time[i + 1] : STEP;
      path += `L${round(inAll(t))} ${y(total(device, i, kinds))}H${round(inAll(next))}`;
    });
    layer.append(svg("path", { class: "total", d: `${path}V${row.top + row.size}Z` }));
    const left = inAll(view.from), right = inAll(view.to);
    layer.append(svg("rect", { class: "shade", x: LEFT, y: row.top, width: round(left - LEFT), height: row.size }));
    layer.append(svg("rect", { class: "shade", x: round(right), y: row.top, width: round(width - RIGHT - right), height: row.size }));
    layer.append(svg("rect", { class: "select", id: "window", x: round(left), y: row.top, width: round(Math.max(2, right - left)), height: row.size, rx: 3 }));
    return [svg("text", { x: 0, y: row.top + 19 }, "whole step")];
  };

  const cursor = svg("g");
  const selection = svg("rect", { class: "select", visibility: "hidden" });

  const draw = () => {
    width = Math.max(320, chart.getBoundingClientRect().width || 900);
    chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
    chart.setAttribute("height", height);
    const clipped = svg("g", { "clip-path": "url(#plot)" });
    const outside = svg("g");
    const hatch = svg("pattern", { id: "waits", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      svg("rect", { width: 2, height: 5, fill: "var(--warn)" }));
    const clip = svg("clipPath", { id: "plot" }, svg("rect", { x: LEFT, y: 0, width: plot(), height }));
    drawAxis(rows[rows.length - 1], outside);
    for (const row of rows) {
      if (row.type === "overview") outside.append(...drawOverview(row, outside));
      if (row.type === "tier") outside.append(...drawTier(row, clipped));
      if (row.type === "lane") outside.append(...drawLane(row, clipped));
    }
    drawPhases(clipped);
    chart.replaceChildren(svg("defs", {}, [hatch, clip]), outside, clipped, selection, cursor);
    drawCursor();
    byId("range").textContent = `${time(view.from)} to ${time(view.to)}`;
  };
  const redraw = later(draw);

  const drawCursor = () => {
    cursor.replaceChildren();
    if (at == null || at < view.from || at > view.to) return;
    const slot = slotAt(at), bottom = rows[rows.length - 1].top;
    const left = Math.max(LEFT, x(slots.begin[slot])), right = Math.min(width - RIGHT, x(slotEnd(slot)));
    cursor.append(svg("rect", { class: "slot", x: round(left), y: rows[1].top, width: round(Math.max(1, right - left)), height: bottom - rows[1].top }));
    cursor.append(svg("line", { class: "cross", x1: round(x(at)), x2: round(x(at)), y1: rows[1].top, y2: bottom }));
  };

  // --- The tip -----------------------------------------------------------------------------------

  const tip = byId("tip");
  const showTip = (children, px, py) => {
    tip.replaceChildren(...children);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = px + 18 + box.width > innerWidth - 8 ? px - 18 - box.width : px + 18;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${Math.max(8, Math.min(py + 14, innerHeight - box.height - 8))}px`;
  };
  const hideTip = () => { tip.hidden = true; };
  const pairs = (rows) => el("table", {}, el("tbody", {}, rows));
  const pair = (name, value, colour, sum) =>
    el("tr", { class: sum ? "sum" : null }, [
      el("td", {}, colour ? [swatch(colour), name] : [name]), el("td", {}, value),
    ]);

  const running = (bars, t) => {
    for (let i = 0; i < bars.start.length; i++) if (bars.start[i] <= t && t < bars.end[i]) return i;
    return -1;
  };
  const barText = (bars, i) => {
    const parts = [does(bars, i)];
    if (bars.bytes[i]) parts.push(bytes(bars.bytes[i]));
    if (bars.pieces[i] > 1) parts.push(`${bars.pieces[i]} pieces`);
    return parts.join(", ");
  };

  const timeTip = (t, row) => {
    const slot = slotAt(t), tier = row && row.type === "tier" ? row.tier : tiers[0];
    const i = indexAt(tier.time, t);
    const head = el("div", {}, [el("b", {}, slots.name[slot]), el("div", { class: "muted" },
      `slot ${slot} of ${slots.name.length - 1}, at ${time(t)}; computes ${time(slots.end[slot] - slots.start[slot])}`)]);
    const found = [];
    const wait = waits.start.findIndex((start, n) => start <= t && t < waits.end[n]);
    if (wait >= 0) found.push(el("li", { class: "bad" }, `compute waits ${time(waits.end[wait] - waits.start[wait])} for ${waits.cause[wait]} (${waits.waited_for[wait]})`));
    for (const lane of lanes) {
      const n = lane.name === "compute" ? -1 : running(lane.bars, t);
      if (n >= 0) found.push(el("li", {}, [swatch(COLOUR[lane.bars.kind[n]]), `${lane.name}: ${barText(lane.bars, n)}`]));
    }
    const kinds = shown(tier).filter((kind) => sizes(tier, kind, i)).reverse();
    const sum = total(tier, i, kinds);
    const body = kinds.map((kind) => pair(kind, bytes(sizes(tier, kind, i)), kind));
    body.push(pair(hidden.size ? `${tier.name}, shown` : tier.name, bytes(sum), null, true));
    if (!hidden.size) body.push(pair("free", bytes(tier.budget - sum)));
    if (recorded && tier.name === "device" && recorded.slot_bytes.length) body.push(pair("recorded tensors", bytes(recorded.slot_bytes[slot])));
    return [head, pairs(body), ...(found.length ? [el("ul", {}, found)] : [])];
  };

  const laneTip = (t, row) => {
    const bars = row.lane.bars, i = running(bars, t);
    if (i < 0) return timeTip(t, row);
    const length = bars.end[i] - bars.start[i];
    const rows = [pair("on", row.lane.name), pair("from", time(bars.start[i])), pair("takes", time(length))];
    if (bars.bytes[i]) {
      rows.push(pair("moves", bytes(bars.bytes[i])));
      if (length) rows.push(pair("at", `${bytes(bars.bytes[i] / length * 1e9)}/s`));
    }
    if (bars.pieces[i] > 1) rows.push(pair("pieces", `${bars.pieces[i]}`));
    rows.push(pair("slot", slots.name[bars.slot[i]]));
    return [el("b", {}, does(bars, i)), pairs(rows)];
  };

  const pointAt = (event) => {
    const box = chart.getBoundingClientRect();
    return { px: (event.clientX - box.left) / box.width * width, py: (event.clientY - box.top) / box.height * height };
  };
  const rowAt = (py) => rows.find((row) => py >= row.top && py < row.top + row.size + 4);

  const hover = (event) => {
    const { px, py } = pointAt(event), row = rowAt(py);
    if (px < LEFT || px > width - RIGHT || !row || row.type === "overview") {
      at = null;
      hideTip();
    } else {
      at = Math.min(timeAt(px), STEP - 1);
      const children = row.type === "lane" ? laneTip(at, row) : timeTip(at, row);
      showTip(children, event.clientX, event.clientY);
    }
    drawCursor();
  };

  // --- Pointer and keys --------------------------------------------------------------------------

  let drag = null; // {from: px, moved: bool, overview: bool}
  chart.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const { px, py } = pointAt(event), row = rowAt(py);
    if (px < LEFT || px > width - RIGHT || !row) return;
    drag = { from: px, moved: false, overview: row.type === "overview" };
    chart.setPointerCapture(event.pointerId);
    if (drag.overview) centre(px);
  });
  const centre = (px) => {
    const t = (px - LEFT) / plot() * END, half = (view.to - view.from) / 2;
    look(t - half, t + half);
  };
  chart.addEventListener("pointermove", (event) => {
    if (!drag) return hover(event);
    const { px } = pointAt(event);
    drag.moved = drag.moved || Math.abs(px - drag.from) > 4;
    if (drag.overview) return centre(px);
    if (!drag.moved) return;
    hideTip();
    const [left, right] = [drag.from, px].map((p) => Math.min(Math.max(p, LEFT), width - RIGHT)).sort((a, b) => a - b);
    fill(selection, { x: left, y: rows[1].top, width: right - left, height: rows[rows.length - 1].top - rows[1].top });
    selection.setAttribute("visibility", "visible");
  });
  chart.addEventListener("pointerup", (event) => {
    const { px } = pointAt(event);
    if (drag && drag.moved && !drag.overview) {
      const [left, right] = [timeAt(drag.from), timeAt(px)].sort((a, b) => a - b);
      look(left, right);
    }
    drag = null;
    selection.setAttribute("visibility", "hidden");
  });
  chart.addEventListener("pointercancel", () => { drag = null; selection.setAttribute("visibility", "hidden"); });
  chart.addEventListener("pointerleave", () => { at = null; hideTip(); drawCursor(); });
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
    if (at < view.from || at > view.to) {
      const half = (view.to - view.from) / 2;
      look(at - half, at + half);
    }
    drawCursor();
    const box = chart.getBoundingClientRect(), device = tiers[0];
    showTip(timeTip(at, rows[1]), box.left + x(at) / width * box.width, box.top + firstLane.top * box.height / height / 3);
    const sum = total(device, slot, Object.keys(device.kinds));
    byId("said").textContent = `${slots.name[slot]}, ${time(at)}: ${bytes(sum)} of ${bytes(device.budget)} on the device`;
  };
  chart.addEventListener("keydown", (event) => {
    const last = slots.begin.length - 1, now = at == null ? null : slotAt(at);
    const keys = {
      ArrowLeft: () => event.shiftKey ? move(-0.2) : goTo(now == null ? data.peak_slot : Math.max(0, now - 1)),
      ArrowRight: () => event.shiftKey ? move(0.2) : goTo(now == null ? data.peak_slot : Math.min(last, now + 1)),
      Home: () => goTo(0),
      End: () => goTo(last),
      "+": () => zoom(0.5, at), "=": () => zoom(0.5, at), "-": () => zoom(2, at),
      0: () => look(0, END),
      Escape: () => { at = null; hideTip(); drawCursor(); },
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    keys[event.key]();
    event.preventDefault();
  });
  chart.addEventListener("blur", () => { at = null; hideTip(); drawCursor(); });
  byId("zoom-in").addEventListener("click", () => zoom(0.5));
  byId("zoom-out").addEventListener("click", () => zoom(2));
  byId("zoom-fit").addEventListener("click", () => look(0, END));

  // --- The strip of decisions --------------------------------------------------------------------

  const strip = byId("strip");
  const CELL = 24;
  const stripWidth = () => Math.max(320, strip.getBoundingClientRect().width || 900);
  const drawStrip = () => {
    const wide = stripWidth(), cell = (wide - LEFT - RIGHT) / units.length;
    strip.setAttribute("viewBox", `0 0 ${wide} ${2 * CELL + 24}`);
    strip.setAttribute("height", 2 * CELL + 24);
    const marks = [
      svg("text", { class: "name", x: 0, y: 16 }, "activations"),
      svg("text", { class: "name", x: 0, y: CELL + 18 }, "model states"),
    ];
    const every = [1, 2, 5, 10, 20, 50, 100].find((n) => n * cell > 34) || 200;
    units.forEach((unit, i) => {
      const left = LEFT + i * cell, gap = cell > 5 ? 1 : 0;
      ["activations", "states"].forEach((what, n) => {
        marks.push(svg("rect", {
          ...colours.get(unit[what]), "data-unit": i, class: i === picked ? "picked" : null,
          x: round(left), y: n * (CELL + 2) + 1, width: round(cell - gap), height: CELL - 1, rx: cell > 8 ? 2 : 0,
        }));
      });
      if (i % every === 0) marks.push(svg("text", { x: round(left + cell / 2), y: 2 * CELL + 18, "text-anchor": "middle" }, `${i}`));
    });
    strip.replaceChildren(...marks);
  };
  const redrawStrip = later(drawStrip);
  const unitAt = (event) => {
    const box = strip.getBoundingClientRect(), wide = stripWidth();
    const px = (event.clientX - box.left) / box.width * wide;
    const i = Math.floor((px - LEFT) / ((wide - LEFT - RIGHT) / units.length));
    return i >= 0 && i < units.length ? i : null;
  };
  const unitTip = (i) => {
    const unit = units[i];
    return [el("b", {}, unit.words), pairs([
      pair("activations", unit.activations, unit.activations),
      pair("model states", unit.states, unit.states),
      pair("bytes of states", bytes(unit.state_bytes)),
      pair("activations if kept", bytes(unit.keep_bytes)),
    ])];
  };
  const pick = (i) => {
    picked = i;
    redrawStrip();
    redraw();
    byId("said").textContent = i == null ? "" : `${units[i].words}: ${units[i].activations}, ${units[i].states}`;
  };
  strip.addEventListener("pointermove", (event) => {
    const i = unitAt(event);
    if (i == null) hideTip(); else showTip(unitTip(i), event.clientX, event.clientY);
  });
  strip.addEventListener("pointerleave", hideTip);
  strip.addEventListener("blur", hideTip);
  strip.addEventListener("click", (event) => {
    const i = unitAt(event);
    pick(i === picked ? null : i);
  });
  strip.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) {
      pick(picked == null ? 0 : Math.min(units.length - 1, Math.max(0, picked + step)));
      const box = strip.getBoundingClientRect();
      const share = (LEFT + (picked + 0.5) * (stripWidth() - LEFT - RIGHT) / units.length) / stripWidth();
      showTip(unitTip(picked), box.left + share * box.width, box.bottom - 20);
    } else if (event.key === "Escape") {
      pick(null);
      hideTip();
    } else return;
    event.preventDefault();
  });

  // --- What does not move ------------------------------------------------------------------------

  const legend = () => {
    const kinds = [...new Set(tiers.flatMap((tier) => Object.keys(tier.kinds)))];
    byId("legend").replaceChildren(...kinds.map((kind) => {
      const button = el("button", { type: "button", "data-kind": kind, "aria-pressed": "true" }, [swatch(kind), kind]);
      button.addEventListener("click", () => {
        if (hidden.has(kind)) hidden.delete(kind); else hidden.add(kind);
        button.setAttribute("aria-pressed", String(!hidden.has(kind)));
        redraw();
      });
      return button;
    }), el("span", {}, [swatch(null, "line"), "budget"]),
    ...(recorded && recorded.slot_bytes.length ? [el("span", {}, [swatch(null, "mark"), "recorded"])] : []));
    const onLanes = new Set(lanes.flatMap((lane) => lane.bars.kind.map((kind) => COLOUR[kind])));
    const marks = Object.entries(LANE_COLOURS).filter(([colour]) => onLanes.has(colour));
    byId("lane-legend").replaceChildren(
      ...marks.map(([colour, name]) => el("span", {}, [swatch(colour), name])),
      ...(waits.start.length ? [el("span", {}, [swatch(null, "waits"), "compute waits"])] : []),
      ...(recorded ? [el("span", { class: "muted" }, "thin bars: recorded")] : []),
    );
    for (const what of ["activations", "states"]) {
      const counts = new Map();
      for (const unit of units) counts.set(unit[what], (counts.get(unit[what]) || 0) + 1);
      byId(`${what}-legend`).replaceChildren(
        el("span", { class: "muted" }, what === "states" ? "model states" : what),
        ...[...counts].map(([text, count]) => el("span", {}, [swatch(text), `${text} (${count})`])),
      );
    }
  };

  const figures = () => {
    const figure = (name, value, note, fraction) => {
      const gauge = fraction == null ? [] : [el("div", { class: "gauge" }, el("i"))];
      if (gauge.length) gauge[0].firstChild.style.width = `${Math.min(100, 100 * fraction)}%`;
      return el("div", {}, [el("dt", {}, name), el("dd", {}, [value, el("small", {}, note)]), ...gauge]);
    };
    const expected = data.expected_seconds ? `${data.expected_seconds.map((s) => time(s * 1e9)).join(" to ")}; ` : "";
    const list = [
      figure("Predicted step", time(data.predicted_step_seconds * 1e9),
        `${expected}at most ${percent(data.gap)} above ${data.fastest}`),
      figure("Compute waits", time(data.stall_seconds * 1e9), `${percent(data.stall_seconds / data.step_seconds)} of ${data.part || "the step"}, ${time(data.step_seconds * 1e9)}`),
      ...tiers.map((tier) => figure(`Peak on the ${tier.name}`, bytes(tier.peak), `of ${bytes(tier.budget)}`, tier.peak / tier.budget)),
      figure("Results", data.exactness, data.allowed.length ? `by leave: ${data.allowed.join(", ")}`
        : data.exactness === "bitwise" ? "bits of plain PyTorch" : "by updates on the host"),
    ];
    byId("figures").replaceChildren(...list);
  };

  const tables = () => {
    byId("words").replaceChildren(...data.words.map((words) => el("li", {}, words)));
    const causes = Object.entries(data.stall_by_cause);
    if (causes.length) {
      table(byId("waits-table"), ["compute waits for", "seconds", "of the step"],
        causes.map(([cause, s]) => [cause, time(s * 1e9), percent(s / data.step_seconds)]));
    }
    table(byId("lanes-table"), ["lane", "busy", "of the step", "bytes", "moves"], lanes.map((lane) =>
      [lane.name, time(lane.busy_seconds * 1e9), percent(lane.utilisation), lane.bytes ? bytes(lane.bytes) : "", `${lane.num_moves}`]));
    const slots = (value) => `${Math.round(value * 100) / 100}`;
    const lead = (value) => value === 0 ? "" : slots(value);
    const drain = (value, moves) => !moves ? "" : value == null ? "end" : slots(value);
    byId("decisions-count").textContent = `${data.decisions.length} rows, in a box that scrolls.`;
    table(byId("decisions-table"),
      ["units", "activations", "model states", "forward lead", "backward lead", "swap lead", "swap drain", "update drain"],
      data.decisions.map((run) => {
        const first = units[run.first].words, last = units[run.last].words;
        return [
          run.first === run.last ? first : `${first} to ${last.slice(last.lastIndexOf(".") + 1)}`,
          run.activations, run.states, lead(run.forward_lead), lead(run.backward_lead), lead(run.swap_lead),
          drain(run.swap_drain, run.activations.startsWith("swap")), drain(run.update_drain, run.states !== "persistent"),
        ];
      }), [0, 1, 2]);
  };

  const comparison = () => {
    if (!recorded) return;
    byId("recorded").hidden = false;
    const seconds = (s) => time(s * 1e9);
    const ratio = (predicted, found) => predicted ? (found / predicted).toFixed(2) : "";
    const row = (name, predicted, found, show) => [name, show(predicted), show(found), ratio(predicted, found)];
    const rows = [row("step", data.step_seconds, recorded.step_seconds, seconds)];
    for (const lane of lanes) {
      if (lane.name in recorded.busy_seconds) rows.push(row(`${lane.name}, busy`, lane.busy_seconds, recorded.busy_seconds[lane.name], seconds));
    }
    const verdict = byId("recorded-verdict");
    if (recorded.slot_bytes.length) {
      const device = tiers[0], kinds = Object.keys(device.kinds).filter((kind) => kind !== "context");
      const promised = slots.name.map((_, slot) => total(device, slot, kinds));
      rows.push(row("device peak, tensors", Math.max(...promised), Math.max(...recorded.slot_bytes), bytes));
      const above = recorded.slots_above;
      verdict.textContent = above.length
        ? `${above.length} of ${slots.name.length} slots held more than predicted: ${above.slice(0, 5).map((slot) => slots.name[slot]).join(", ")}${above.length > 5 ? ", …" : ""}`
        : `No slot of ${slots.name.length} held more than predicted.`;
      verdict.className = above.length ? "bad" : "good";
    } else verdict.textContent = "Bytes were not recorded.";
    table(byId("recorded-table"), ["", "predicted", "recorded", "ratio"], rows);
  };

  const drawFront = () => {
    const points = data.front.map((point) => [point.device_bytes, point.step_seconds * 1e9, point.gap]);
    if (!points.length) return;
    byId("front").hidden = false;
    const target = byId("front-chart"), wide = Math.max(320, target.getBoundingClientRect().width || 900), high = 250;
    const here = [tiers[0].peak, data.predicted_step_seconds * 1e9], all = [...points, here];
    const low = Math.min(...all.map((p) => p[0])), most = Math.max(...all.map((p) => p[0]));
    const slowest = Math.max(...all.map((p) => p[1])) * 1.08;
    const px = (size) => 70 + (most > low ? (size - low) / (most - low) : 0.5) * (wide - 150);
    const py = (ns) => 10 + (1 - ns / slowest) * (high - 44);
    const marks = [];
    for (let n = 0; n <= 4; n++) {
      const ns = slowest * n / 4.32, size = low + (most - low) * n / 4;
      marks.push(svg("line", { class: "grid", x1: 64, x2: wide - 60, y1: py(ns), y2: py(ns) }));
      marks.push(svg("text", { x: 58, y: py(ns) + 4, "text-anchor": "end" }, time(ns)));
      marks.push(svg("text", { x: px(size), y: high - 12, "text-anchor": "middle" }, bytes(size)));
    }
    const path = points.map(([size, ns], i) => i ? `H${round(px(size))}V${round(py(ns))}` : `M${round(px(size))} ${round(py(ns))}`).join("");
    marks.push(svg("path", { class: "curve", d: path }));
    for (const [size, ns, gap] of points) {
      marks.push(svg("circle", { class: "dot", cx: round(px(size)), cy: round(py(ns)), r: 4 },
        svg("title", {}, `${bytes(size)}: ${time(ns)}, at most ${percent(gap)} above the fastest`)));
    }
    marks.push(svg("circle", { class: "here", cx: px(here[0]), cy: py(here[1]), r: 6 }, svg("title", {}, `this plan: ${bytes(here[0])}, ${time(here[1])}`)));
    marks.push(svg("text", { class: "name", x: px(here[0]) + 10, y: py(here[1]) - 8 }, "this plan"));
    target.setAttribute("viewBox", `0 0 ${wide} ${high}`);
    target.setAttribute("height", high);
    target.replaceChildren(...marks);
    table(byId("front-table"), ["device memory", "step", "gap"], points.map(([size, ns, gap]) => [bytes(size), time(ns), percent(gap)]));
  };

  const head = () => {
    document.title = `${data.model}: ${data.workload}`;
    byId("model").textContent = data.model;
    byId("workload").textContent = `${data.workload}; ${data.optimizer} on ${data.hardware}`;
    const part = data.part ? ` What is shown: ${data.part}.` : "";
    byId("foot").textContent = `${data.program}. Plan ${data.plan_fingerprint}, of the ${data.profile_method} profile ${data.profile_fingerprint}.`
      + ` Peaks are upper bounds, seconds are estimates.${part}`;
  };

  for (const choice of document.querySelectorAll("input[name=theme]")) {
    choice.addEventListener("change", () => { document.documentElement.dataset.theme = choice.value; });
  }

  head();
  figures();
  legend();
  tables();
  comparison();
  new ResizeObserver(() => { redraw(); redrawStrip(); drawFront(); }).observe(document.querySelector("main"));
  draw();
  drawStrip();
  drawFront();
  /* stages.js */
})();
