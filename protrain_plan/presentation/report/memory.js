// Memory of each tier over the step, and in the overview.

const hidden = new Set(); // kinds of bytes
const device = tiers[0];
const sizes = (tier, kind, i) => tier.kinds[kind][tier.kinds[kind].length === 1 ? 0 : i];
const kindsOf = (tier, isHidden = false) => Object.keys(tier.kinds).filter((kind) => hidden.has(kind) === isHidden);
const total = (tier, i, kinds = Object.keys(tier.kinds)) => kinds.reduce((sum, kind) => sum + sizes(tier, kind, i), 0);

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

const drawTier = ({ tier, top, size }, layer) => {
  const kinds = kindsOf(tier), without = kindsOf(tier, true);
  const first = indexAt(tier.time, view.from), last = indexAt(tier.time, view.to);
  const most = tier.time.reduce((found, _, i) => Math.max(found, total(tier, i, kinds)), 1);
  // With kinds hidden, the line is at what the budget leaves for the others: no line where that
  // changes over time. A budget that is far away would press everything to the bottom.
  const constant = without.every((kind) => tier.kinds[kind].length === 1);
  const budget = tier.budget - total(tier, 0, without);
  const near = constant && budget <= 1.6 * most;
  const ceiling = (near ? Math.max(budget, most) : most) * 1.06;
  const y = (value) => round(top + size - value / ceiling * size);
  const labels = [
    label(0, top + 11, tier.name, null, "name"),
    label(0, top + 26, `peak ${bytes(tier.peak)}`),
    label(0, top + 40, `of ${bytes(tier.budget)}`),
  ];
  const gap = 2 ** Math.ceil(Math.log2(ceiling / Math.max(2, size / 40)));
  for (let value = gap; y(value) > top + 8; value += gap) {
    layer.append(line("grid", LEFT, y(value), width - RIGHT, y(value)));
    if (y(value) > top + 46) labels.push(label(LEFT - 6, y(value) + 4, bytes(value).replace(/\.0+ /, " "), "end"));
  }
  let bottoms = new Array(last - first + 1).fill(0);
  for (const kind of kinds) {
    const tops = bottoms.map((bottom, i) => bottom + sizes(tier, kind, first + i));
    layer.append(svg("path", { "data-c": kind, "data-area": tier.name, d: outline(tier.time, first, last, bottoms, tops, y) }));
    bottoms = tops;
  }
  if (near) layer.append(line("budget", LEFT, y(budget), width - RIGHT, y(budget)));
  if (tier === device) {
    const peak = data.peak_slot, middle = x((slots.begin[peak] + slotEnd(peak)) / 2);
    layer.append(svg("path", { class: "peak", d: `M${round(middle)} ${y(total(tier, peak, kinds)) - 2}l-4 -7h8z` }));
    if (recorded && recorded.slot_bytes.length) layer.append(drawMeasured(y));
  }
  layer.append(rect(LEFT, top, plot(), size, { class: "frame" }));
  return labels;
};

// Recorded bytes count tensors: they stand on the predicted context, without what is hidden.
const drawMeasured = (y) => {
  const context = (slot) => device.kinds.context ? sizes(device, "context", slot) : 0;
  const path = recorded.slot_bytes.map((size, slot) => {
    const height = size + context(slot) - total(device, slot, kindsOf(device, true));
    return `${slot ? "L" : "M"}${round(x(slots.begin[slot]))} ${y(height)}H${round(x(slotEnd(slot)))}`;
  });
  return svg("path", { class: "measured", d: path.join("") });
};

const drawOverview = ({ top, size }, layer) => {
  const y = (value) => round(top + size - value / (device.peak * 1.05) * size);
  const steps = device.time.map((t, i) =>
    `L${round(inAll(t))} ${y(total(device, i))}H${round(inAll(i + 1 < device.time.length ? device.time[i + 1] : STEP))}`);
  const left = inAll(view.from), right = inAll(view.to);
  layer.append(
    svg("path", { class: "total", d: `M${LEFT} ${top + size}${steps.join("")}V${top + size}Z` }),
    rect(LEFT, top, round(left - LEFT), size, { class: "shade" }),
    rect(round(right), top, round(width - RIGHT - right), size, { class: "shade" }),
    rect(round(left), top, round(Math.max(2, right - left)), size, { class: "select", id: "window", rx: 3 }),
  );
  return [label(0, top + 19, "whole step")];
};

const memoryLegend = () => {
  const kinds = [...new Set(tiers.flatMap((tier) => Object.keys(tier.kinds)))];
  byId("legend").replaceChildren(...kinds.map((kind) => {
    const button = el("button", { type: "button", "data-kind": kind, "aria-pressed": "true" }, [swatch(kind), kind]);
    button.addEventListener("click", () => {
      if (!hidden.delete(kind)) hidden.add(kind);
      button.setAttribute("aria-pressed", String(!hidden.has(kind)));
      redraw();
    });
    return button;
  }), entry(null, "budget", "line"), ...(recorded && recorded.slot_bytes.length ? [entry(null, "recorded", "mark")] : []));
};
