  // --- Stages of a pipeline ----------------------------------------------------------------------

  const { pipeline } = data, STAGE = 26, BOX = 24;
  const { stages } = pipeline;
  const boxes = stages.map(({ spans }) => spans.kind.map((kind, i) => ({
    kind, number: spans.micro_batch[i], chunk: spans.chunk[i],
    start: spans.start_seconds[i] * 1e9, end: spans.end_seconds[i] * 1e9,
  })));
  let box = null; // that the keyboard is at: [stage, number]

  const drawStages = () => {
    const target = byId("stages-chart"), step = pipeline.step_seconds * 1e9;
    const wide = Math.max(target.parentElement.clientWidth, BOX * Math.max(...boxes.map((row) => row.length)));
    const high = STAGE * boxes.length + 18, px = (ns) => round(ns / step * wide);
    const marks = boxes.flatMap((row, s) => [
      svg("rect", { class: "row", x: 0, y: s * STAGE, width: wide, height: STAGE - 3 }),
      ...row.flatMap(({ kind, number, chunk, start, end }, i) => {
        const left = px(start), size = Math.max(1, px(end) - left - 0.8), label = number == null ? "" : `${number}`;
        return [
          svg("rect", {
            "data-c": kind, "data-box": `${s} ${i}`, class: `${chunk ? "next" : ""}${box && box[0] === s && box[1] === i ? " picked" : ""}`,
            x: Math.min(left, wide - size), y: s * STAGE, width: round(size), height: STAGE - 3, rx: size > 6 ? 2 : 0,
          }),
          ...(size > 6 * label.length + 2 ? [svg("text", { class: "on", x: left + size / 2, y: s * STAGE + 16, "text-anchor": "middle" }, label)] : []),
        ];
      }),
    ]);
    for (let n = 0; n <= 4; n++) {
      const anchor = ["start", "middle", "middle", "middle", "end"][n];
      marks.push(svg("text", { x: wide * n / 4, y: high - 4, "text-anchor": anchor }, time(step * n / 4)));
    }
    target.style.width = `${wide}px`;
    fill(target, { viewBox: `0 0 ${wide} ${high}`, height: high }).replaceChildren(...marks);
  };
  const redrawStages = later(drawStages);
  const boxTip = (s, i) => {
    const one = boxes[s][i], of = one.number == null ? "" : ` of micro-batch ${one.number}`;
    return [el("b", {}, `${one.kind}${of}`), pairs([
      pair("on", `stage ${s}${one.chunk ? `, chunk ${one.chunk}` : ""}`), pair("from", time(one.start)), pair("takes", time(one.end - one.start)),
    ])];
  };
  const onStages = () => {
    byId("stages-words").textContent = pipeline.words;
    byId("stages-names").replaceChildren(...stages.map((_, s) => el("div", {}, `stage ${s}`)));
    byId("stages-legend").replaceChildren(
      ...["forward", "backward", "update"].map((kind) => el("span", {}, [swatch(kind), kind])),
      el("span", { class: "muted" }, `numbers: micro-batches; empty: waits${pipeline.chunks > 1 ? "; paler: later chunks" : ""}`));
    table(byId("stages-table"), ["stage", "from", "units", "held", "a micro-batch", "waits", "device", "host", "decisions"],
      stages.map((one, s) => [`${s}`, one.first_units.join(", "), `${one.units}`, `${one.held}`, time(one.cycle_seconds * 1e9),
        percent(one.idle), bytes(one.device_bytes), bytes(one.peak_bytes.host), one.decisions]), [0, 1, 8]);
    byId("stages-below").textContent = `Below: the last micro-batch in stage ${data.stage}. For another stage: protrain report PLAN --stage N.`;
    const ofStage = [...[...document.querySelectorAll("#figures dt")].slice(1, -1), byId("decisions-title"), byId("step-title")];
    for (const title of ofStage) title.append(`, stage ${data.stage}`);
    const target = byId("stages-chart");
    const at = (event) => (event.target.dataset.box || "").split(" ").map(Number);
    const unlessKept = () => { if (!box) hideTip(); }; // scrolling moves the chart under the pointer
    target.addEventListener("pointermove", (event) => {
      const [s, i] = at(event);
      if (i == null) unlessKept(); else showTip(boxTip(s, i), event.clientX, event.clientY);
    });
    const leave = () => { box = null; hideTip(); redrawStages(); };
    target.addEventListener("pointerleave", unlessKept);
    target.addEventListener("blur", leave);
    target.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (event.key === "Escape") leave();
      if (!by) return;
      event.preventDefault();
      const s = box ? Math.min(stages.length - 1, Math.max(0, box[0] + by[0])) : 0;
      box = [s, box ? Math.min(boxes[s].length - 1, Math.max(0, box[1] + by[1])) : 0];
      drawStages();
      const found = target.querySelector(".picked");
      found.scrollIntoView({ block: "nearest", inline: "nearest" });
      const place = found.getBoundingClientRect(), tip = boxTip(...box);
      byId("said").textContent = `stage ${s}: ${tip[0].textContent}, from ${time(boxes[s][box[1]].start)}`;
      showTip(tip, place.right, place.bottom);
    });
  };

  onStages();
  new ResizeObserver(redrawStages).observe(document.querySelector("main"));
  drawStages();
