// The head, the key figures and what limits the step; then all panels are drawn.

const figure = (name, value, note, fraction) => {
  const gauge = fraction == null ? [] : [el("div", { class: "gauge" }, el("i"))];
  if (gauge.length) gauge[0].firstChild.style.width = `${Math.min(100, 100 * fraction)}%`;
  return el("div", {}, [el("dt", {}, name), el("dd", {}, [value, el("small", {}, note)]), ...gauge]);
};
const expected = data.expected_seconds ? `${data.expected_seconds.map(time).join(" to ")}; ` : "";
const results = data.allowed.length ? `by leave: ${data.allowed.join(", ")}`
  : data.exactness === "bitwise" ? "bits of plain PyTorch" : "by updates on the host";
byId("figures").replaceChildren(
  figure("Predicted step", time(data.predicted_step_seconds), `${expected}at most ${percent(data.gap)} above ${data.fastest}`),
  figure("Compute waits", time(data.stall_seconds), `${percent(data.stall_seconds / STEP)} of ${data.part || "the step"}, ${time(STEP)}`),
  ...tiers.map((tier) => figure(`Peak on the ${tier.name}`, bytes(tier.peak), `of ${bytes(tier.budget)}`, tier.peak / tier.budget)),
  figure("Results", data.exactness, results),
);
document.title = `${data.model}: ${data.workload}`;
byId("model").textContent = data.model;
byId("workload").textContent = `${data.workload}; ${data.optimizer} on ${data.hardware}`;
byId("words").replaceChildren(...data.words.map((words) => el("li", {}, words)));
byId("foot").textContent = `${data.program}. Plan ${data.plan_fingerprint}, of the ${data.profile_method} profile ${data.profile_fingerprint}.`
  + ` Peaks are upper bounds, seconds are estimates.${data.part ? ` What is shown: ${data.part}.` : ""}`;
for (const choice of document.querySelectorAll("input[name=theme]")) {
  choice.addEventListener("change", () => { document.documentElement.dataset.theme = choice.value; });
}

memoryLegend();
laneTables();
decisionsTable();
comparison();
new ResizeObserver(() => { redraw(); redrawStrip(); drawFront(); }).observe(document.querySelector("main"));
draw();
drawStrip();
drawFront();
