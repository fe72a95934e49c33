// What runs on each lane, and what compute waits for.

// The colour of a bar, and what it says of its unit.
const MOVES = {
  "forward": ["forward", (u) => `forward of ${u}`],
  "backward": ["backward", (u) => `backward of ${u}`],
  "update on the device": ["update", () => "update on the device"],
  "fetch": ["buffers", (u) => `parameters of ${u} arrive`],
  "all-gather": ["buffers", (u) => `parameters of ${u} are gathered`],
  "all-reduce": ["gradients", (u) => `gradients of ${u} are summed`],
  "reduce-scatter": ["gradients", (u) => `gradients of ${u} are summed`],
  "swap in": ["activations", (u) => `activations of ${u} return`],
  "swap out": ["activations", (u) => `activations of ${u} leave`],
  "spill gradients": ["gradients", (u) => `gradients of ${u} leave`],
  "add gradients": ["gradients", (u) => `gradients of ${u} are added up`],
  "read states": ["states", (u) => `optimizer states of ${u} are read`],
  "update": ["update", (u) => `${u} is updated`],
  "write states": ["states", (u) => `new states of ${u} are written`],
};
const LANE_COLOURS = {
  forward: "forward", backward: "backward", buffers: "parameters", activations: "activations",
  gradients: "gradients", states: "optimizer states", update: "update",
};
const colourOf = (bars, i) => MOVES[bars.kind[i]][0];
const does = (bars, i) => MOVES[bars.kind[i]][1](units[bars.unit[i]].words);
const running = (spans, t) => spans.start.findIndex((start, i) => start <= t && t < spans.end[i]);

const drawBars = (layer, bars, top, size, name) => {
  let end = -1;
  for (let i = 0; i < bars.start.length; i++) {
    if (bars.end[i] < view.from || bars.start[i] > view.to) continue;
    const left = Math.max(LEFT - 2, x(bars.start[i])), right = Math.min(width, x(bars.end[i]));
    if (right - left < 0.7 && right < end + 0.7) continue; // under the bar before it
    end = right;
    const wide = Math.max(0.7, right - left - (right - left > 3 ? 0.6 : 0));
    const colour = colourOf(bars, i), ofAll = bars.kind[i] === "update on the device";
    const other = picked != null && (bars.unit[i] !== picked || ofAll);
    layer.append(rect(round(left), top, round(wide), size, {
      class: `${name}${other ? " dim" : ""}`, "data-c": colour, rx: wide > 6 ? 2 : 0,
    }));
    const words = ofAll ? "update" : units[bars.unit[i]].words;
    const room = Math.floor((Math.min(right, width - RIGHT) - Math.max(left, LEFT) - 8) / 6);
    if (size > 12 && room >= Math.min(words.length, 6) && !other) {
      const light = ["update", "states", "backward"].includes(colour) ? " light" : "";
      layer.append(label(Math.max(left, LEFT) + 4, top + size / 2 + 4,
        words.length > room ? `${words.slice(0, room - 1)}…` : words, null, `on${light}`));
    }
  }
};

const drawLane = ({ lane, ran, top, size }, layer) => {
  layer.append(rect(LEFT, top, plot(), size, { class: "row" }));
  drawBars(layer, lane.bars, top, LANE, "bar-mark");
  if (ran) drawBars(layer, ran, top + LANE + 1, RAN - 2, "ran");
  if (lane.name === "compute") drawWaits(layer, top);
  return [label(0, top + 15, lane.name, null, "name"), label(LEFT - 8, top + 15, percent(lane.utilisation), "end")];
};

const drawWaits = (layer, top) => {
  waits.start.forEach((start, i) => {
    const left = Math.max(LEFT, x(start)), right = Math.min(width - RIGHT, x(waits.end[i]));
    if (right <= LEFT || left >= width - RIGHT) return;
    layer.append(rect(round(left), top, round(Math.max(1, right - left)), LANE, { class: "wait", fill: "url(#waits)" }));
    const words = `waits for ${waits.cause[i]}`;
    if (right - left > 5.8 * words.length + 20) {
      layer.append(
        rect(left + 3, top + 3, 5.5 * words.length + 8, LANE - 6, { class: "label", rx: 3, fill: "var(--panel)" }),
        label(left + 7, top + 15, words, null, "name"),
      );
    }
  });
};

// What runs on all lanes but compute, and what that waits for.
const atOnce = (t) => {
  const wait = running(waits, t);
  const found = wait < 0 ? [] : [el("li", { class: "bad" },
    `compute waits ${time(waits.end[wait] - waits.start[wait])} for ${waits.cause[wait]} (${waits.waited_for[wait]})`)];
  for (const { name, bars } of lanes) {
    const i = name === "compute" ? -1 : running(bars, t);
    if (i < 0) continue;
    const parts = [does(bars, i)];
    if (bars.bytes[i]) parts.push(bytes(bars.bytes[i]));
    if (bars.num_pieces[i] > 1) parts.push(`${bars.num_pieces[i]} pieces`);
    found.push(el("li", {}, [swatch(colourOf(bars, i)), `${name}: ${parts.join(", ")}`]));
  }
  return found.length ? [el("ul", {}, found)] : [];
};

const laneTip = (t, { lane: { name, bars } }) => {
  const i = running(bars, t);
  if (i < 0) return null;
  const length = bars.end[i] - bars.start[i];
  const rows = [pair("on", name), pair("from", time(bars.start[i])), pair("takes", time(length))];
  if (bars.bytes[i]) {
    rows.push(pair("moves", bytes(bars.bytes[i])));
    if (length) rows.push(pair("at", `${bytes(bars.bytes[i] / length)}/s`));
  }
  if (bars.num_pieces[i] > 1) rows.push(pair("pieces", `${bars.num_pieces[i]}`));
  rows.push(pair("slot", slots.name[bars.slot[i]]));
  return [el("b", {}, does(bars, i)), pairs(rows)];
};

const laneTables = () => {
  const there = new Set(lanes.flatMap(({ bars }) => bars.kind.map((_, i) => colourOf(bars, i))));
  byId("lane-legend").replaceChildren(
    ...Object.entries(LANE_COLOURS).filter(([colour]) => there.has(colour)).map(([colour, name]) => entry(colour, name)),
    ...(waits.start.length ? [entry(null, "compute waits", "waits")] : []),
    ...(recorded ? [muted("thin bars: recorded")] : []),
  );
  const causes = Object.entries(data.stall_by_cause);
  if (causes.length) {
    table("waits-table", ["compute waits for", "seconds", "of the step"],
      causes.map(([cause, s]) => [cause, time(s), percent(s / STEP)]));
  }
  table("lanes-table", ["lane", "busy", "of the step", "bytes", "moves"], lanes.map((lane) =>
    [lane.name, time(lane.busy_s), percent(lane.utilisation), lane.bytes ? bytes(lane.bytes) : "", `${lane.num_moves}`]));
};
