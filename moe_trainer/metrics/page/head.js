// Head of the page: runs, findings, newest values.
const plural = (count, word) => whole(count) + " " + word + (count === 1 ? "" : "s");
function modelWords(model) {
  if (!model) return null;
  const parts = [];
  if (isNumber(model.total_parameters)) parts.push(number(model.total_parameters, 3) + " parameters" + (isNumber(model.active_parameters) && model.active_parameters !== model.total_parameters ? ", " + number(model.active_parameters, 3) + " active" : ""));
  if (isNumber(model.num_layers)) parts.push(plural(model.num_layers, "layer"));
  if (model.num_experts) parts.push(whole(model.num_experts) + " experts" + (model.topk ? ", top-" + model.topk : "") + (model.num_moe_layers != null && model.num_moe_layers !== model.num_layers ? " in " + plural(model.num_moe_layers, "layer") : ""));
  if (isNumber(model.hidden_size)) parts.push("hidden " + model.hidden_size);
  if (isNumber(model.seq_length)) parts.push("sequence " + whole(model.seq_length));
  return [model.name, parts.join(" · ")].filter(Boolean).join(": ");
}
function mappingWords(mapping) {
  if (!mapping) return null;
  const axes = ["tp", "cp", "pp", "vpp", "ep", "etp", "dp"].filter((name) => mapping[name] > 1).map((name) => name.toUpperCase() + " " + mapping[name]);
  return plural(mapping.world_size || 1, "rank") + (mapping.nodes > 1 ? " on " + mapping.nodes + " nodes" : "") + (axes.length ? " · " + axes.join(" · ") : "");
}
// a page that nobody rewrites still says "running" when it is opened later
function stateOf(run) {
  const isSilent = run.status === "running" && !data.live && isNumber(run.silent_at) && Date.now() > 1000 * run.silent_at;
  return isSilent ? { name: "silent", words: "no sign of life since " + run.updated } : { name: run.status, words: run.state || run.status };
}
function runCard(run, at) {
  const head = run.head || {}, progress = run.progress || {}, state = stateOf(run), share = progress.train_iters ? Math.min(1, (progress.iteration || 0) / progress.train_iters) : null;
  const box = make("div", { class: "card run" }, make("div", { class: "run-head" }, make("b", {}, make("span", { class: "swatch", style: "background:" + colorOf(at) }), run.name || "run"), state.name ? make("span", { class: "status " + state.name, text: state.words }) : null, run.updated ? make("span", { class: "note", text: "updated " + run.updated }) : null));
  if (share != null) box.append(make("div", { class: "progress", role: "progressbar", "aria-label": "progress of " + run.name, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(share * 100) }, make("i", { style: `width:${share * 100}%` })));
  const facts = [
    ["iteration", progress.iteration != null ? whole(progress.iteration) + (progress.train_iters ? " of " + whole(progress.train_iters) + ` (${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %)` : "") : null],
    ["tokens", isNumber(progress.tokens) ? number(progress.tokens) : null],
    ["ETA", state.name === "running" && isNumber(progress.eta_s) ? duration(progress.eta_s) : null],
    ["wall time", isNumber(progress.wall_s) ? duration(progress.wall_s) : null],
    ["goodput", isNumber(progress.goodput) ? (progress.goodput * 100).toFixed(1) + " %" : null],
    ["starts", head.starts && head.starts.length > 1 ? String(head.starts.length) : null],
  ].filter(([, value]) => value != null);
  box.firstChild.append(make("div", { class: "facts" }, ...facts.map(([name, value]) => make("span", {}, make("span", { class: "note", text: name + " " }), make("b", { text: value })))));
  const hardware = head.hardware && [head.hardware.device, head.hardware.hostnames?.length ? head.hardware.hostnames.slice(0, 3).join(", ") + (Math.max(head.hardware.hostnames.length, head.mapping?.nodes || 0) > 3 ? ", ..." : "") : null].filter(Boolean).join(" · ");
  const versions = head.versions && Object.entries(head.versions).filter(([, value]) => value).map(([name, value]) => name.replace("_", "-") + " " + value).join(", ");
  const chips = [modelWords(head.model), mappingWords(head.mapping), hardware, head.precision, head.global_batch_size ? "batch " + whole(head.global_batch_size) + (head.tokens_per_iteration ? " (" + number(head.tokens_per_iteration) + " tokens)" : "") : null, versions].filter(Boolean);
  const constants = Object.entries(records(run).constants || {}).filter(([name]) => !/zero|iteration$/.test(name));
  if (chips.length || constants.length) box.append(make("div", { class: "chips" }, ...chips.map((words) => make("span", { text: words })), constants.length ? make("details", {}, make("summary", { text: plural(constants.length, "value") + " never changed" }), make("div", { class: "chips constants" }, ...constants.map(([name, value]) => make("span", {}, name.replaceAll("_", " ") + " ", make("b", { text: typeof value === "number" ? number(value, 6) : text(value) }))))) : null));
  return box;
}
// of a run that was running when its page was written
const silentFinding = (run) => stateOf(run).name !== run.status ? [{ severity: "bad", card: "events", text: stateOf(run).words + " (when this page was written)" }] : [];
function findings() {
  const places = { routing: "#layers", ranks: "#ranks", loss: "#loss", events: "#events" };
  const all = data.runs.flatMap((run) => [...silentFinding(run), ...(run.findings || [])].map((finding) => ({ ...finding, run }))).sort((a, b) => (SEVERITIES[a.severity] ?? 1) - (SEVERITIES[b.severity] ?? 1));
  const lines = all.slice(0, 40).map((finding) => {
    const show = () => { if (finding.metric) { view.health = finding.metric; draw(); } };
    const link = places[finding.card] && make("a", { href: places[finding.card], text: "show", onclick: show });
    return make("div", { class: "finding " + (SEVERITIES[finding.severity] == null ? "warn" : finding.severity), role: finding.severity === "bad" ? "alert" : null }, isMany() ? make("b", { text: finding.run.name }) : null, finding.text, link ? " " : null, link && finding.severity !== "ok" ? link : null);
  });
  if (all.length > lines.length) lines.push(make("p", { class: "note", text: all.length - lines.length + " more" }));
  const bad = all.filter((finding) => finding.severity === "bad").length, others = all.filter((finding) => !["bad", "ok"].includes(finding.severity)).length;
  const words = [bad ? bad + " bad" : null, others ? others + " to look at" : null].filter(Boolean).join(", ") || "nothing unusual";
  // the table of several runs has the worst one of each
  element("findings").append(...(isMany() ? [make("details", { id: "all-findings" }, make("summary", { text: "Findings: " + words }), ...lines)] : lines));
}
function figures() {
  const run = data.runs[0], validation = run.newest_validation, tflops = last(series(run, "tflops_per_gpu")), flops = flopsUnit([tflops]);
  const memory = run.ranks?.memory_mb?.length ? Math.max(...run.ranks.memory_mb[run.ranks.memory_mb.length - 1].filter(isNumber)) : null;
  const values = [
    [number(last(series(run, "lm loss")), 5), "training loss"],
    validation ? [number(validation["lm loss"], 5), `${validation.set} loss, iteration ${validation.iteration}`] : null,
    [number(last(series(run, "tokens_per_s"))), "tokens/s"],
    [tflops == null ? "-" : number(tflops * flops.factor), `model ${flops.name} per rank`],
    series(run, "mfu") ? [number(last(series(run, "mfu")) * 100, 3) + " %", "MFU"] : null,
    [isNumber(last(series(run, "elapsed_ms"))) ? duration(last(series(run, "elapsed_ms")) / 1000) : "-", "iteration"],
    [number(last(series(run, "grad_norm"))), "gradient norm"],
    memory > 0 ? [number(memory / 1024, 3) + " GiB", "peak memory, fullest rank"] : isNumber(last(series(run, "max_memory_mb"))) ? [number(last(series(run, "max_memory_mb")) / 1024, 3) + " GiB", "peak memory, last rank"] : null,
  ].filter((each) => each && each[0] !== "-");
  element("figures").append(...values.map(([value, name]) => make("div", { class: "card figure" }, make("b", { text: value }), make("span", { text: name }))));
}
