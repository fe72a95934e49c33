// What the step is compared with: the recorded one, and plans with more and less memory.

const comparison = () => {
  if (!recorded) return;
  byId("recorded").hidden = false;
  const row = (name, predicted, found, show) =>
    [name, show(predicted), show(found), predicted ? (found / predicted).toFixed(2) : ""];
  const compared = [row("step", STEP, recorded.step_seconds, time)];
  for (const { name, busy_s } of lanes) {
    if (name in recorded.busy_seconds) compared.push(row(`${name}, busy`, busy_s, recorded.busy_seconds[name], time));
  }
  const verdict = byId("recorded-verdict");
  if (recorded.slot_bytes.length) {
    const kinds = Object.keys(device.kinds).filter((kind) => kind !== "context");
    const promised = slots.name.map((_, slot) => total(device, slot, kinds));
    compared.push(row("device peak, tensors", Math.max(...promised), Math.max(...recorded.slot_bytes), bytes));
    const above = recorded.slots_above.map((slot) => slots.name[slot]);
    verdict.textContent = above.length
      ? `${above.length} of ${slots.name.length} slots held more than predicted: ${above.slice(0, 5).join(", ")}${above.length > 5 ? ", …" : ""}`
      : `No slot of ${slots.name.length} held more than predicted.`;
    verdict.className = above.length ? "bad" : "good";
  } else verdict.textContent = "Bytes were not recorded.";
  table("recorded-table", ["", "predicted", "recorded", "ratio"], compared);
};

const drawFront = () => {
  if (!data.front.length) return;
  byId("front").hidden = false;
  const target = byId("front-chart"), wide = widthOf(target), high = 250;
  const here = { device_bytes: device.peak, step_seconds: data.predicted_step_seconds };
  const all = [...data.front, here], memory = all.map((one) => one.device_bytes);
  const low = Math.min(...memory), most = Math.max(...memory);
  const slowest = Math.max(...all.map((one) => one.step_seconds)) * 1.08;
  const px = (size) => 70 + (most > low ? (size - low) / (most - low) : 0.5) * (wide - 150);
  const py = (s) => 10 + (1 - s / slowest) * (high - 44);
  const marks = [];
  for (let n = 0; n <= 4; n++) {
    const s = slowest * n / 4.32, size = low + (most - low) * n / 4;
    marks.push(
      line("grid", 64, py(s), wide - 60, py(s)), label(58, py(s) + 4, time(s), "end"), label(px(size), high - 12, bytes(size), "middle"),
    );
  }
  const points = data.front.map((one) => ({ ...one, x: round(px(one.device_bytes)), y: round(py(one.step_seconds)) }));
  const path = points.map((one, i) => i ? `H${one.x}V${one.y}` : `M${one.x} ${one.y}`).join("");
  const dot = (name, cx, cy, r, words) => svg("circle", { class: name, cx, cy, r }, svg("title", {}, words));
  marks.push(svg("path", { class: "curve", d: path }));
  for (const one of points) {
    const words = `${bytes(one.device_bytes)}: ${time(one.step_seconds)}, at most ${percent(one.gap)} above the fastest`;
    marks.push(dot("dot", one.x, one.y, 4, words));
  }
  const x = px(here.device_bytes), y = py(here.step_seconds);
  marks.push(dot("here", x, y, 6, `this plan: ${bytes(here.device_bytes)}, ${time(here.step_seconds)}`));
  marks.push(label(x + 10, y - 8, "this plan", null, "name"));
  drawn(target, wide, high, marks);
  table("front-table", ["device memory", "step", "gap"],
    data.front.map((one) => [bytes(one.device_bytes), time(one.step_seconds), percent(one.gap)]));
};
