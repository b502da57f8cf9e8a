// Sections with charts, events, samples and settings.
const AUXILIARY = /(_loss$|_loss |indexer loss|z_loss)/;
const metricOf = (each) => each.metric.split(",")[0], taskWords = (each) => [each.task, ...each.metric.split(",").slice(1)].join(", ");
function lossSection() {
  const grid = section("loss", "Loss"), main = names(/^lm loss$|^mtp_\d+ loss$/), shape = (values) => view.perplexity ? values.map((value) => isNumber(value) ? Math.exp(value) : null) : values;
  const lines = metricLines(main).map((line) => ({ ...line, values: shape(line.values) }));
  shown.forEach((run) => {
    const kinds = [...new Set((run.validations || []).map((each) => each.set))];
    kinds.forEach((kind, index) => {
      const found = run.validations.filter((each) => each.set === kind && isNumber(each["lm loss"]));
      const x = found.map((each) => view.axis === "iteration" ? each.iteration : each[view.axis] ?? place(run, each.iteration));
      lines.push({ label: label(run, kind), x, values: shape(found.map((each) => each["lm loss"])), ...styleOf(run, isMany() ? index : main.length + index), points: true });
    });
  });
  const box = card(grid, view.perplexity ? "Perplexity" : "Loss", isMany() ? "lines: training, points: validation" : "nats per token; points are validations", true);
  const below = innerHeight - (box.getBoundingClientRect().top + scrollY) - 46; // on the first screen, whole
  chart("loss", box, lines, { height: Math.max(230, Math.min(380, below)) });
  const auxiliary = names(AUXILIARY).filter((name) => !main.includes(name) && shown.some((run) => series(run, name)?.some((value) => value)));
  if (auxiliary.length) chart("auxiliary", card(grid, "Auxiliary losses", "unscaled, before their coefficients"), metricLines(auxiliary));
  // a chart per metric, of all its filters: an accuracy and a perplexity have no common axis
  for (const metric of new Set(shown.flatMap((run) => (run.tasks || []).map(metricOf)))) {
    const figuresOf = (run) => (run.tasks || []).filter((each) => metricOf(each) === metric), kinds = [...new Set(shown.flatMap((run) => figuresOf(run).map(taskWords)))];
    const lines = shown.flatMap((run) => kinds.map((kind, index) => {
      const found = figuresOf(run).filter((each) => taskWords(each) === kind);
      return { label: label(run, kind), x: found.map((each) => place(run, each.iteration)), values: found.map((each) => each.value), ...styleOf(run, index) };
    }));
    if (lines.some((line) => line.values.some(isNumber))) chart("tasks " + metric, card(grid, "Evaluation tasks: " + metric.replaceAll("_", " "), ""), lines);
  }
}
const KNOWN = {
  speed: [["tokens_per_s", "Throughput", "tokens per second, all ranks", 1], ["tflops_per_gpu", "Model FLOP/s"], ["mfu", "MFU", "% of the device's dense bf16 peak", 100], ["elapsed_ms", "Iteration time", "ms", 1], ["energy_j", "Energy", "J per iteration", 1]],
  optimizer: [["learning_rate", "Learning rate", "", 1], ["grad_norm", "Gradient norm", "before clipping", 1], ["params_norm", "Parameter norm", "", 1], ["loss_scale", "Loss scale", "", 1], ["num_zeros", "Zero gradients", "", 1], ["global_batch_size", "Global batch size", "samples", 1]],
};
const PROBLEMS = ["skipped_iterations", "nan_iterations", "repeated_iterations", "dropped_tokens"];
const UNDRAWN = /^(consumed_samples|consumed_tokens|max_memory_mb|world_size|timestamp|time)$/;
function isConstant(name) {
  return shown.every((run) => { const values = series(run, name)?.filter(isNumber) || []; return values.length < 2 || values.every((value) => value === values[0]); });
}
function metricSections() {
  const drawn = new Set(names(/^lm loss$|^mtp_\d+ loss$/));
  for (const name of names(AUXILIARY)) drawn.add(name);
  const speed = section("speed", "Speed");
  let count = 0;
  const add = (grid, name, title, note, factor) => {
    drawn.add(name);
    if (!shown.some((run) => series(run, name)) || (isConstant(name) && name !== "tokens_per_s")) return;
    if (chart(name, card(grid, title, note), metricLines([name], factor, note))) count += 1;
    else grid.lastChild.remove();
  };
  const flops = flopsUnit(shown.flatMap((run) => series(run, "tflops_per_gpu") || []));
  for (const each of KNOWN.speed) add(speed, ...(each[0] === "tflops_per_gpu" ? [...each, flops.name + " per rank", flops.factor] : each));
  shown.slice(0, 4).forEach((run, index) => {
    const parts = Object.entries(records(run).step_time_ms || {}).filter(([, values]) => values.some((value) => value > 0));
    if (!parts.length) return;
    const sums = parts[0][1].map(() => 0), lines = parts.map(([name, own], at) => ({ label: name, x: xOf(run), own, values: own.map((value, moment) => (sums[moment] += value || 0)), color: PART_COLORS[at % 8], fill: PART_COLORS[at % 8] + "b0", width: 1 })).reverse();
    const bands = lines.slice(1).map((_, at) => ({ series: [at + 1, at + 2] }));
    if (chart("step_time" + (index || ""), card(speed, label(run, "Iteration by part"), "ms, stacked"), lines, { stacked: true, bands, events: eventMarks([run]) })) count += 1;
  });
  if (!count) drop("speed");
  count = 0;
  const optimizer = section("optimizer", "Optimizer");
  for (const each of KNOWN.optimizer) add(optimizer, ...each);
  const problems = PROBLEMS.filter((name) => shown.some((each) => series(each, name)?.some((value) => value > 0)));
  PROBLEMS.forEach((name) => drawn.add(name));
  if (problems.length && chart("problems", card(optimizer, "Skipped, NaN, repeated iterations and dropped tokens", "since the previous record"), metricLines(problems))) count += 1;
  if (!count) drop("optimizer");
  const rest = names(/./).filter((name) => !drawn.has(name) && !UNDRAWN.test(name) && !isConstant(name));
  if (!rest.length) return;
  const other = section("other", "Other");
  for (const name of rest) if (!chart(name, card(other, name.replaceAll("_", " "), ""), metricLines([name]))) other.lastChild.remove();
}
function median(values) {
  const sorted = values.filter(isNumber).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : null; // of two ranks the faster: the slow one is red
}
function rankSection() {
  const found = shown.filter((run) => run.ranks?.iteration?.length && (run.ranks.time_ms?.length || run.ranks.memory_mb?.length));
  const memory = names(/^max_memory_mb$/).length && !found.some((run) => run.ranks.memory_mb?.length);
  if (!found.length && !memory) return;
  const grid = section("ranks", "Ranks");
  if (memory && !isConstant("max_memory_mb")) chart("memory", card(grid, "Peak memory", "GiB, of the last rank"), metricLines(["max_memory_mb"], 1 / 1024));
  for (const run of found) {
    const ranks = run.ranks, rows = ranks.ranks.map(String), columns = ranks.iteration.map(String), key = run.at ? "_" + run.at : "";
    if (ranks.time_ms?.length) {
      const middles = ranks.time_ms.map(median), box = card(grid, label(run, "Compute time of the ranks"), "relative to the median rank of the iteration, without waits for others", true);
      heatMap("rank_time" + key, box, { rows, columns, rowTitle: "rank", columnTitle: "iteration", scale: ratios(2), value: (row, column) => middles[column] ? ranks.time_ms[column][row] / middles[column] : null, words: (row, column) => `rank ${rows[row]}, iteration ${columns[column]}: ${number(ranks.time_ms[column][row])} ms, ${number(ranks.time_ms[column][row] / middles[column], 3)} x the median`, numbers: () => [["iteration", ...rows.map((row) => "rank " + row)], columns.map((column, at) => [column, ...ranks.time_ms[at]])] });
    }
    if (ranks.memory_mb?.some((row) => row.some(isNumber))) {
      const all = ranks.memory_mb.flat().filter(isNumber), box = card(grid, label(run, "Peak memory of the ranks"), "GiB", true);
      heatMap("rank_memory" + key, box, { rows, columns, rowTitle: "rank", columnTitle: "iteration", scale: sequential(Math.min(...all) / 1024, Math.max(...all) / 1024), value: (row, column) => isNumber(ranks.memory_mb[column][row]) ? ranks.memory_mb[column][row] / 1024 : null, words: (row, column) => `rank ${rows[row]}, iteration ${columns[column]}: ${number(ranks.memory_mb[column][row] / 1024)} GiB`, numbers: () => [["iteration", ...rows.map((row) => "rank " + row)], columns.map((column, at) => [column, ...ranks.memory_mb[at]])] });
    }
  }
  if (!grid.childNodes.length) drop("ranks");
}
const HEALTH = [
  ["load_max_over_mean", "Max/mean expert load", "1 is balanced", "ratio"],
  ["load_entropy", "Normalized load entropy", "1 is balanced", "share"],
  ["dead_experts", "Dead experts", "experts that no token chose", "count"],
  ["drop_rate", "Dropped tokens", "% of the chosen (token, expert) pairs", "percent"],
  ["clone_rate", "Tokens of clones", "% of the pairs that copies of hot experts computed", "percent"],
  ["bias_drift", "Bias drift", "largest distance of an expert bias from their mean", "count"],
  ["rank_max_over_mean", "Max/mean load of expert-parallel ranks", "1 is balanced", "ratio"],
  ["rank_max_over_mean_before_cloning", "The same before cloning", "1 is balanced", "ratio"],
];
function routingSection() {
  const found = shown.filter((run) => run.routing?.iteration?.length);
  if (!found.length) return;
  const grid = section("routing", "Routing"), first = found[0];
  for (const run of found) {
    const worst = (run.routing.findings || []).slice(0, 3);
    if (worst.length) card(grid, label(run, "Worst layers"), "", true).append(...worst.map((each) => make("p", { text: each.text })));
  }
  if (found.some((run) => run.routing.straggler_cost?.some((value) => value > 0))) chart("straggler_cost", card(grid, "Straggler cost", "% more compute time, as layers wait for their busiest rank; a lower bound"), found.map((run) => ({ label: label(run, "cost"), x: run.routing.iteration.map((each) => place(run, each)), values: run.routing.straggler_cost.map((value) => value * 100), color: colorOf(run.at) })));
  const offered = HEALTH.filter(([name]) => found.some((run) => run.routing.metrics?.[name]?.some((row) => row.some((value) => isNumber(value) && value !== run.routing.metrics[name][0][0]))));
  if (!offered.some(([name]) => name === view.health)) view.health = offered[0]?.[0] ?? null;
  const healthBoxes = make("div", { class: "grid wide" });
  if (offered.length) {
    const select = make("select", { "aria-label": "metric of the layers" }, ...offered.map(([name, title]) => make("option", { value: name, text: title, selected: name === view.health })));
    select.id = "health";
    select.onchange = () => { view.health = select.value; fill(); };
    grid.append(make("div", { class: "card wide", id: "layers" }, make("div", { class: "tools" }, make("label", {}, "Layers over time: ", select)), healthBoxes));
    fill();
  } else grid.id = "layers"; // where findings link to
  function fill() {
    charts = charts.filter((plot) => { const isOld = plot === dashboard.charts.health; if (isOld) plot.destroy(); return !isOld; });
    healthBoxes.replaceChildren();
    const [name, title, note, kind] = HEALTH.find(([each]) => each === view.health);
    const factor = kind === "percent" ? 100 : 1, of = (run) => run.routing.metrics?.[name];
    const spread = (run, pick) => of(run).map((row) => { const values = row.filter(isNumber).map((value) => value * factor).sort((a, b) => a - b); return values.length ? pick(values) : null; });
    const shown = found.filter(of), lines = [["max", (values) => values[values.length - 1]], ["median", (values) => (values[(values.length - 1) >> 1] + values[values.length >> 1]) / 2], ["min", (values) => values[0]]];
    const box = make("div", { class: "wide" });
    healthBoxes.append(box);
    chart("health", box, shown.flatMap((run) => lines.map(([word, pick], at) => ({ label: label(run, word + " of the layers"), x: run.routing.iteration.map((each) => place(run, each)), values: spread(run, pick), ...styleOf(run, at) }))), { description: title + " of the layers: " + note });
    for (const run of shown) {
      const rows = run.routing.layers.map(String), columns = run.routing.iteration.map(String), values = of(run), all = values.flat().filter(isNumber).map((value) => value * factor);
      const low = kind === "ratio" ? 1 : Math.min(...all, kind === "share" ? 1 : 0), high = Math.max(...all, kind === "share" ? 1 : low + 1e-9), scale = kind === "share" ? { ...sequential(low, high), color: (value) => blend(VIRIDIS, high > low ? (high - value) / (high - low) : 0), at: (share) => blend(VIRIDIS, 1 - share) } : sequential(low, high);
      const map = make("div", { class: "wide" }, make("h3", { text: label(run, title) + " " }, make("span", { class: "note", text: note + "; bright is worse" })));
      healthBoxes.append(map);
      heatMap(found.indexOf(run) ? "health_" + found.indexOf(run) : "health", map, { rows, columns, rowTitle: "layer", columnTitle: "iteration", scale, value: (row, column) => isNumber(values[column][row]) ? values[column][row] * factor : null, words: (row, column) => `layer ${rows[row]}, iteration ${columns[column]}: ${number(values[column][row] * factor)}${kind === "percent" ? " %" : ""}`, numbers: () => [["iteration", ...rows.map((row) => "layer " + row)], columns.map((column, at) => [column, ...values[at]])] });
    }
  }
  for (const run of found) {
    const loads = run.routing.loads, key = run.at ? "_" + run.at : "";
    if (loads?.iteration?.length) {
      const means = loads.tokens_per_expert.map((layers) => layers.map((row) => row.reduce((sum, load) => sum + load, 0) / row.length || 1));
      const rows = run.routing.layers.map(String), columns = loads.tokens_per_expert[0][0].map((_, at) => String(at));
      tokenMap("experts" + key, card(grid, label(run, "Load of each expert"), "relative to the mean of the layer", true), loads.iteration, loads.tokens_per_expert, means, { rows, columns, rowTitle: "layer", columnTitle: "expert", zero: "no token", where: (row, column) => `layer ${rows[row]}, expert ${column}` });
    }
    const between = run.routing.between_ranks;
    if (between?.iteration?.length) {
      const count = between.ranks_per_row || 1, ranks = between.tokens[0].map((_, at) => count > 1 ? `${at * count}-${at * count + count - 1}` : String(at)), sum = (values) => values.reduce((all, value) => all + value, 0);
      const means = between.tokens.map((rows) => Array(ranks.length).fill(sum(rows.flat()) / ranks.length ** 2 || 1)), newest = between.tokens[between.tokens.length - 1], all = sum(newest.flat());
      const stays = all > 0 ? `; newest: ${number(sum(newest.map((row, at) => row[at])) / all * 100, 3)} % stay ${count > 1 ? `within ${count} ranks` : "on their rank"}` : "";
      const box = card(grid, label(run, "Tokens between expert-parallel ranks"), "all layers, relative to the mean" + stays, true), details = make("details", {}, make("summary", { text: "Show where tokens go" }));
      box.append(details);
      details.ontoggle = () => {
        if (!details.open || details.childNodes.length > 1) return;
        const inner = make("div");
        details.append(inner);
        tokenMap("between_ranks" + key, inner, between.iteration, between.tokens, means, { rows: ranks, columns: ranks, rowTitle: "from rank", columnTitle: "to rank", zero: "none", where: (row, column) => `from rank ${ranks[row]} to rank ${ranks[column]}` });
      };
    }
  }
  if (first.routing.straggler_cost?.length) grid.append(make("p", { class: "note wide", text: "Newest straggler cost: " + number(last(first.routing.straggler_cost) * 100, 3) + " %. Single microbatches are less balanced than the iteration, so the cost is at least this." }));
}
function eventSection() {
  const all = eventMarks(shown).sort((a, b) => b.iteration - a.iteration);
  if (!all.length) return;
  const grid = section("events", "Events", plural(all.length, "event")), box = card(grid, "Newest first", "a row's button zooms the charts to its time", true);
  const rows = all.slice(0, 400).map((event) => [make("button", { type: "button", text: whole(event.iteration), "aria-label": "zoom to iteration " + event.iteration, onclick: () => { const x = xOf(event.run), span = (x[x.length - 1] - x[0]) * 0.05 || 1; setZoom(event.x - span, event.x + span); } }), ...(isMany() ? [event.run.name] : []), event.kind.replace("_", " "), isNumber(event.wall_s) ? duration(event.wall_s) : "-", event.text]);
  box.append(make("div", { class: "scroll", tabindex: 0 }, table(["iteration", ...(isMany() ? ["run"] : []), "kind", "wall time", "log line"], rows)));
}
function sampleSection() {
  const all = shown.flatMap((run) => (run.samples || []).map((sample) => ({ ...sample, run }))).sort((a, b) => b.iteration - a.iteration);
  if (!all.length) return;
  const grid = section("samples", "Samples", "texts that the model wrote");
  const box = card(grid, "Newest first", "", true), inner = make("div", { class: "scroll", tabindex: 0 });
  for (const sample of all.slice(0, 100)) inner.append(make("p", { class: "note", text: (isMany() ? sample.run.name + ", " : "") + "iteration " + sample.iteration }), make("pre", { class: "text" }, make("b", { text: sample.prompt }), sample.text));
  box.append(inner);
}
// pages that commands wrote with --report-html
function reportSection() {
  const reports = data.reports || [];
  if (!reports.length) return;
  const box = card(section("reports", "Reports"), plural(reports.length, "report"), "pages of --report-html in the folders of these runs", true);
  box.append(make("div", { class: "scroll", tabindex: 0 }, table(["report", "file"], reports.map((each) => [make("a", { href: each.url, text: each.title }), each.file]))));
}
function settingsSection() {
  const found = shown.filter((run) => run.head?.settings && Object.keys(run.head.settings).length);
  if (!found.length) return;
  const grid = section("settings", "Settings"), box = card(grid, "Settings", "", true), search = make("input", { type: "search", placeholder: "search", "aria-label": "search the settings", value: view.search }), only = make("input", { type: "checkbox" }), body = make("div", { class: "scroll", tabindex: 0 }), isDiff = found.length > 1;
  only.checked = view.changed;
  only.id = "only-changed";
  search.id = "search-settings";
  box.append(make("div", { class: "tools" }, search, make("label", {}, only, isDiff ? " only what differs" : " only what is not default")), body);
  const all = [...new Set(found.flatMap((run) => Object.keys(run.head.settings)))].sort();
  function fill() {
    const wanted = view.search.toLowerCase(), rows = [];
    for (const name of all) {
      const values = found.map((run) => name in run.head.settings ? text(run.head.settings[name]) : "-"), differs = new Set(values).size > 1;
      const isChosen = !view.changed || (isDiff ? differs : !found[0].head.changed || found[0].head.changed.includes(name));
      if (isChosen && (!wanted || (name + " " + values.join(" ")).toLowerCase().includes(wanted))) rows.push([name, ...values]);
    }
    body.replaceChildren(rows.length ? table(["setting", ...found.map((run) => isDiff ? run.name : "value")], rows) : make("p", { class: "note", text: isDiff && view.changed && !wanted ? "The settings are equal." : "None." }));
  }
  search.oninput = () => { view.search = search.value; fill(); };
  only.onchange = () => { view.changed = only.checked; fill(); };
  fill();
  const commands = found.filter((run) => run.head.command);
  if (commands.length) box.append(make("details", {}, make("summary", { text: "Command" }), ...commands.map((run) => make("pre", { class: "text", text: label(run, run.head.command) }))));
}
