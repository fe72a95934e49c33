// The decisions: a strip with a column per unit, of which one can be followed, and a table.

const strip = byId("strip");
const CELL = 24, DECIDED = { activations: "activations", states: "model states" };
let picked = null; // the unit that is followed

const columnOf = (wide) => (wide - LEFT - RIGHT) / units.length;
const drawStrip = () => {
  const wide = widthOf(strip), cell = columnOf(wide);
  const marks = Object.values(DECIDED).map((name, n) => label(0, n * (CELL + 2) + 16, name, null, "name"));
  const every = [1, 2, 5, 10, 20, 50, 100].find((n) => n * cell > 34) || 200;
  units.forEach((unit, i) => {
    const left = LEFT + i * cell;
    Object.keys(DECIDED).forEach((what, n) =>
      marks.push(rect(round(left), n * (CELL + 2) + 1, round(cell - (cell > 5 ? 1 : 0)), CELL - 1, {
        ...colours.get(unit[what]), "data-unit": i, class: i === picked ? "picked" : null, rx: cell > 8 ? 2 : 0,
      })));
    if (i % every === 0) marks.push(label(round(left + cell / 2), 2 * CELL + 18, `${i}`, "middle"));
  });
  drawn(strip, wide, 2 * CELL + 24, marks);
};
const redrawStrip = later(drawStrip);

const unitAt = (event) => {
  const box = strip.getBoundingClientRect(), wide = widthOf(strip);
  const i = Math.floor(((event.clientX - box.left) / box.width * wide - LEFT) / columnOf(wide));
  return i >= 0 && i < units.length ? i : null;
};
const unitTip = (i) => {
  const unit = units[i];
  return [el("b", {}, unit.words), pairs([
    ...Object.entries(DECIDED).map(([what, name]) => pair(name, unit[what], unit[what])),
    pair("bytes of states", bytes(unit.state_bytes)),
    pair("activations if kept", bytes(unit.keep_bytes)),
  ])];
};
const pick = (i) => {
  picked = i;
  redrawStrip();
  redraw();
  say(i == null ? "" : `${units[i].words}: ${units[i].activations}, ${units[i].states}`);
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
const pickBy = (by) => () => {
  pick(picked == null ? 0 : between(0, picked + by, units.length - 1));
  const box = strip.getBoundingClientRect(), wide = widthOf(strip);
  showTip(unitTip(picked), box.left + (LEFT + (picked + 0.5) * columnOf(wide)) / wide * box.width, box.bottom - 20);
};
onKeys(strip, { ArrowLeft: pickBy(-1), ArrowRight: pickBy(1), Escape: () => { pick(null); hideTip(); } });

// Runs of units with the same decisions. Parts that happen to follow one another are no run.
const SCHEDULE = ["forward_lead", "backward_lead", "swap_lead", "swap_drain", "update_drain"];
const decidedAlike = (one, other) => (one.kind === "part" ? one === other : other.kind !== "part")
  && ["activations", "states", "update_late", ...SCHEDULE].every((what) => one[what] === other[what]);
const decisionsTable = () => {
  const runs = [];
  for (const unit of units) {
    const run = runs[runs.length - 1];
    if (run && decidedAlike(run[0], unit)) run.push(unit); else runs.push([unit]);
  }
  byId("decisions-count").textContent = `${runs.length} rows, in a box that scrolls.`;
  const lead = (value) => value === 0 ? "" : `${round(value)}`;
  const drain = (value, moves) => !moves ? "" : value == null ? "end" : `${round(value)}`;
  table("decisions-table", ["units", ...Object.values(DECIDED), ...SCHEDULE.map((name) => name.replace("_", " "))],
    runs.map((run) => {
      const one = run[0], end = run[run.length - 1].words;
      return [
        run.length === 1 ? one.words : `${one.words} to ${end.slice(end.lastIndexOf(".") + 1)}`,
        one.activations, one.states, lead(one.forward_lead), lead(one.backward_lead), lead(one.swap_lead),
        drain(one.swap_drain, one.activations.startsWith("swap")), drain(one.update_drain, one.states !== "persistent"),
      ];
    }), [0, 1, 2]);
  for (const [what, name] of Object.entries(DECIDED)) {
    const counts = new Map();
    for (const unit of units) counts.set(unit[what], (counts.get(unit[what]) || 0) + 1);
    byId(`${what}-legend`).replaceChildren(muted(name), ...[...counts].map(([text, n]) => entry(text, `${text} (${n})`)));
  }
};
