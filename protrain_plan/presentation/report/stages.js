// Stages of a pipeline: a row for each, with a box for each forward and backward of a micro-batch.

const { pipeline } = data, { stages } = pipeline, STAGE = 26, BOX = 24;
const stagesChart = byId("stages-chart");
const boxes = stages.map(({ spans }) => spans.kind.map((kind, i) => ({
  kind, number: spans.micro_batch[i], chunk: spans.chunk[i], start: spans.start_seconds[i], end: spans.end_seconds[i],
})));
let box = null; // that the keyboard is at: [stage, number]

const drawStages = () => {
  const step = pipeline.step_seconds, high = STAGE * boxes.length + 18;
  const wide = Math.max(stagesChart.parentElement.clientWidth, BOX * Math.max(...boxes.map((row) => row.length)));
  const px = (s) => round(s / step * wide);
  const marks = boxes.flatMap((row, s) => [
    rect(0, s * STAGE, wide, STAGE - 3, { class: "row" }),
    ...row.flatMap(({ kind, number, chunk, start, end }, i) => {
      const left = px(start), size = Math.max(1, px(end) - left - 0.8), words = `${number ?? ""}`;
      const isPicked = box && box[0] === s && box[1] === i;
      const mark = rect(Math.min(left, wide - size), s * STAGE, round(size), STAGE - 3, {
        "data-c": kind, "data-box": `${s} ${i}`, class: `${chunk ? "next" : ""}${isPicked ? " picked" : ""}`, rx: size > 6 ? 2 : 0,
      });
      return size > 6 * words.length + 2 ? [mark, label(left + size / 2, s * STAGE + 16, words, "middle", "on")] : [mark];
    }),
  ]);
  for (let n = 0; n <= 4; n++) {
    marks.push(label(wide * n / 4, high - 4, time(step * n / 4), n === 0 ? "start" : n === 4 ? "end" : "middle"));
  }
  stagesChart.style.width = `${wide}px`;
  drawn(stagesChart, wide, high, marks);
};
const redrawStages = later(drawStages);
const boxTip = (s, i) => {
  const { kind, number, chunk, start, end } = boxes[s][i], of = number == null ? "" : ` of micro-batch ${number}`;
  return [el("b", {}, `${kind}${of}`), pairs([
    pair("on", `stage ${s}${chunk ? `, chunk ${chunk}` : ""}`), pair("from", time(start)), pair("takes", time(end - start)),
  ])];
};
const leaveBox = () => { box = null; hideTip(); redrawStages(); };
const unlessKept = () => { if (!box) hideTip(); }; // scrolling moves the chart under the pointer
stagesChart.addEventListener("pointermove", (event) => {
  const [s, i] = (event.target.dataset.box || "").split(" ").map(Number);
  if (i == null) unlessKept(); else showTip(boxTip(s, i), event.clientX, event.clientY);
});
stagesChart.addEventListener("pointerleave", unlessKept);
stagesChart.addEventListener("blur", leaveBox);
const boxBy = (down, right) => () => {
  const s = box ? between(0, box[0] + down, stages.length - 1) : 0;
  box = [s, box ? between(0, box[1] + right, boxes[s].length - 1) : 0];
  drawStages();
  const found = stagesChart.querySelector(".picked");
  found.scrollIntoView({ block: "nearest", inline: "nearest" });
  const place = found.getBoundingClientRect(), words = boxTip(...box);
  say(`stage ${s}: ${words[0].textContent}, from ${time(boxes[s][box[1]].start)}`);
  showTip(words, place.right, place.bottom);
};
onKeys(stagesChart, {
  ArrowLeft: boxBy(0, -1), ArrowRight: boxBy(0, 1), ArrowUp: boxBy(-1, 0), ArrowDown: boxBy(1, 0), Escape: leaveBox,
});

byId("stages-words").textContent = pipeline.words;
byId("stages-names").replaceChildren(...stages.map((_, s) => el("div", {}, `stage ${s}`)));
byId("stages-legend").replaceChildren(
  ...["forward", "backward", "update"].map((kind) => entry(kind, kind)),
  muted(`numbers: micro-batches; empty: waits${pipeline.chunks > 1 ? "; paler: later chunks" : ""}`));
table("stages-table", ["stage", "from", "units", "held", "a micro-batch", "waits", "device", "host", "decisions"],
  stages.map((one, s) => [`${s}`, one.first_units.join(", "), `${one.units}`, `${one.held}`, time(one.cycle_seconds),
    percent(one.idle), bytes(one.device_bytes), bytes(one.peak_bytes.host), one.decisions]), [0, 1, 8]);
byId("stages-below").textContent = `Below: the last micro-batch in stage ${data.stage}. For another stage: protrain report PLAN --stage N.`;
const ofStage = [...[...document.querySelectorAll("#figures dt")].slice(1, -1), byId("decisions-title"), byId("step-title")];
for (const title of ofStage) title.append(`, stage ${data.stage}`);
new ResizeObserver(redrawStages).observe(document.querySelector("main"));
drawStages();
