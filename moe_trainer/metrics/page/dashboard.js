"use strict";
// Draws the page of moe_trainer/metrics/dashboard.py. All values come from the element #data; `dashboard` exposes the charts to tests.
const dashboard = { data: JSON.parse(document.getElementById("data").textContent), charts: {} };
(() => {
  const data = dashboard.data, records = data.records, last = records[records.length - 1] || {};
  const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d"];
  const element = (id) => document.getElementById(id);
  function number(value, digits = 4) {
    if (value == null) return "-";
    if (Math.abs(value) >= 1e4) return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: digits }).format(value);
    return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(2) : String(+value.toPrecision(digits));
  }
  const known = (name) => records.some((record) => record[name] != null);
  const column = (name, factor = 1) => records.map((record) => record[name] == null ? null : record[name] * factor);

  function card(parent, title, note) {
    const box = document.createElement("div"), head = document.createElement("h3"), more = document.createElement("span");
    box.className = "card";
    head.textContent = title + " ";
    more.className = "note";
    more.textContent = note || "";
    head.append(more);
    box.append(head);
    element(parent).append(box);
    return box;
  }

  // events of the run: {iteration, text, color}; a dashed line in every chart over iterations
  const events = [];
  for (const each of data.events) {
    if (each.resumed_from != null) events.push({ iteration: each.resumed_from, text: "resumed after iteration " + each.resumed_from, color: "#4d4d4d" });
    for (const skip of each.rejected || []) events.push({ iteration: skip.iteration, text: "iteration " + skip.iteration + " skipped: " + skip.because, color: "#d55e00" });
  }
  dashboard.events = events;
  function drawEvents(plot) {
    const paint = plot.ctx, { left, top, width, height } = plot.bbox;
    paint.save();
    paint.lineWidth = window.devicePixelRatio || 1;
    paint.setLineDash([4 * paint.lineWidth, 4 * paint.lineWidth]);
    for (const { iteration, color } of events) {
      const at = plot.valToPos(iteration, "x", true);
      if (at < left || at > left + width) continue;
      paint.strokeStyle = color;
      paint.beginPath();
      paint.moveTo(at, top);
      paint.lineTo(at, top + height);
      paint.stroke();
    }
    paint.restore();
  }
  // the legend shows the newest values until the mouse points at others
  const showNewest = (plot) => { if (plot.cursor.idx == null) plot.setLegend({ idx: plot.data[0].length - 1 }, false); };

  // series: [{label, values, color?, points?, width?}]; x and every list of values are equally long
  function chart(name, parent, title, note, x, series, legend = true) {
    const box = card(parent, title, note);
    const lines = series.map((each, at) => ({
      label: each.label, stroke: each.color || COLORS[at % COLORS.length], width: each.width || 1.5, spanGaps: true,
      points: each.points ? { show: true, size: 9, fill: each.color || COLORS[at % COLORS.length] } : { show: x.length < 40 },
      paths: each.points ? () => null : undefined, value: (plot, value) => number(value, 5),
    }));
    const options = {
      width: contentWidth(box), height: 220, legend: { show: legend, live: legend },
      hooks: { draw: [drawEvents], setCursor: [showNewest], ready: [showNewest] },
      scales: { x: { time: false } }, cursor: { drag: { x: true, y: false } },
      axes: [{ label: "iteration", labelSize: 18, size: 34, font: "11px system-ui" },
        { size: 62, font: "11px system-ui", values: (plot, marks) => marks.map((mark) => number(mark)) }],
      series: [{ label: "iteration" }, ...lines],
    };
    const plot = dashboard.charts[name] = new uPlot(options, [x, ...series.map((each) => each.values)], box);
    window.addEventListener("resize", () => plot.setSize({ width: contentWidth(box), height: 220 }));
  }
  const contentWidth = (box) => Math.max(200, box.clientWidth - 26);

  function figure(value, name) {
    const box = document.createElement("div"), strong = document.createElement("b"), label = document.createElement("span");
    box.className = "figure";
    strong.textContent = value;
    label.textContent = name;
    box.append(strong, label);
    element("figures").append(box);
  }

  // one line below the figures, with the newest events
  function describeEvents(events) {
    return (events.length > 5 ? "... " : "") + events.slice(-5).map((each) => each.text).join("; ");
  }

  function head() {
    element("title").textContent = data.title || "moe-trainer";
    const total = data.train_iters ? " of " + data.train_iters : "", ranks = data.world_size ? ", " + data.world_size + " ranks" : "";
    element("state").textContent = "iteration " + (last.iteration ?? 0) + total + ranks + (data.done ? ", ended; " : "; ") + "written " + data.written;
    figure(number(last["lm loss"], 5), "lm loss at iteration " + (last.iteration ?? 0));
    const check = data.validations.filter((each) => each.validation !== "test").pop();
    if (check) figure(number(check["lm loss"], 5), "validation loss at iteration " + check.iteration);
    figure(number(last.tokens_per_s), "tokens/s");
    figure(number(last.tflops_per_gpu), "TFLOP/s per rank");
    if (last.mfu != null) figure(number(last.mfu * 100, 3) + " %", "MFU");
    figure(number(last.grad_norm), "gradient norm");
    figure(number(last.max_memory_mb / 1024, 3) + " GiB", "peak memory of the last rank");
    element("events").textContent = describeEvents(events);
    for (const [name, value] of Object.entries(data.settings || {})) {
      const row = element("settings").insertRow();
      row.insertCell().textContent = name;
      row.insertCell().textContent = typeof value === "object" ? JSON.stringify(value) : String(value);
    }
    const follow = element("follow");
    follow.checked = location.hash === "#follow";
    follow.disabled = data.done;
    follow.onchange = () => { location.hash = follow.checked ? "follow" : ""; };
    setInterval(() => { if (follow.checked && !data.done) location.reload(); }, 30000);
  }

  function losses(x) {
    const main = Object.keys(last).filter((name) => name === "lm loss" || /^mtp_\d+ loss$/.test(name));
    const kinds = [...new Set(data.validations.map((each) => each.validation))];
    const tables = [[x, ...main.map((name) => column(name))]], series = main.map((label) => ({ label }));
    for (const kind of kinds) {
      const found = new Map(data.validations.filter((each) => each.validation === kind).map((each) => [each.iteration, each["lm loss"]]));
      tables.push([[...found.keys()], [...found.values()]]);
      series.push({ label: kind, points: true });
    }
    const joined = uPlot.join(tables);
    chart("loss", "charts", "Loss", "", joined[0], series.map((each, at) => ({ ...each, values: joined[at + 1] })));
    const others = Object.keys(last).filter((name) => /_loss$|_loss |indexer loss/.test(name) && !main.includes(name) && column(name).some((value) => value));  // Megatron-LM logs 0 for a loss that is not used
    if (others.length) chart("auxiliary", "charts", "Auxiliary losses", "before scaling by their coefficients", x, others.map((name) => ({ label: name, values: column(name) })));
  }

  function iterationCharts() {
    const x = records.map((record) => record.iteration);
    losses(x);
    chart("throughput", "charts", "Throughput", "tokens per second, all ranks", x, [{ label: "tokens/s", values: column("tokens_per_s") }]);
    chart("tflops", "charts", "Model FLOP/s", "TFLOP/s per rank", x, [{ label: "TFLOP/s", values: column("tflops_per_gpu") }]);
    if (known("mfu")) chart("mfu", "charts", "MFU", "% of the device's dense bf16 peak", x, [{ label: "MFU", values: column("mfu", 100) }]);
    chart("learning_rate", "charts", "Learning rate", "", x, [{ label: "learning rate", values: column("learning_rate") }]);
    if (known("grad_norm")) chart("grad_norm", "charts", "Gradient norm", "before clipping", x, [{ label: "norm", values: column("grad_norm") }]);
    chart("memory", "charts", "Peak memory", "GiB, of the last rank", x, [{ label: "GiB", values: column("max_memory_mb", 1 / 1024) }]);
    chart("batch", "charts", "Global batch size", "samples", x, [{ label: "samples", values: column("global_batch_size") }]);
    if (known("own_time_ms")) {
      chart("own_time", "charts", "Compute time of the ranks", "ms per iteration, excluding waits", x,
        ["max", "median", "min"].map((name) => ({ label: name, values: records.map((record) => record.own_time_ms?.[name] ?? null) })));
    }
    const problems = ["skipped_iterations", "nan_iterations", "repeated_iterations", "dropped_tokens"].filter((name) => records.some((record) => record[name] > 0));
    if (problems.length) chart("trouble", "charts", "Skipped, NaN, repeated and dropped", "since the previous record", x, problems.map((name) => ({ label: name.replace("_", " "), values: column(name) })));
  }

  const HEALTH = [
    ["load_max_over_mean", "Fullest expert", "load of the fullest expert over the mean; 1 is balanced"],
    ["load_entropy", "Load entropy", "over its maximum; 1 is balanced"],
    ["dead_experts", "Dead experts", "experts that no token chose"],
    ["drop_rate", "Drop rate", "fraction of the chosen (token, expert) pairs that were dropped"],
    ["clone_rate", "Clone rate", "fraction of those pairs that clones of hot experts computed"],
    ["bias_drift", "Bias drift", "largest distance of an expert bias from the mean bias"],
    ["rank_max_over_mean", "Fullest expert-parallel rank", "its load over the mean; 1 is balanced"],
    ["rank_max_over_mean_before_cloning", "Fullest expert-parallel rank before cloning", "its load over the mean without clones; 1 is balanced"],
  ];
  // from violet (first layer) to yellow (last), as in viridis
  const depth = (share) => {
    const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [220, 200, 30]], at = share * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    return "rgb(" + stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * (at - low))).join(",") + ")";
  };

  function health() {
    const x = data.layers.map((each) => each.iteration), layers = data.layers[0].layers;
    chart("straggler_cost", "routing-charts", "Expected straggler cost", "% more compute time, because every layer waits for its fullest rank", x,
      [{ label: "cost", values: data.layers.map((each) => each.straggler_cost * 100) }]);
    for (const [name, title, note] of HEALTH) {
      if (["bias_drift", "drop_rate", "clone_rate"].includes(name) && !data.layers.some((each) => each[name]?.some((value) => value > 0))) continue;
      if (name === "rank_max_over_mean_before_cloning" && !data.layers.some((each) => each.clone_rate?.some((value) => value > 0))) continue;
      if (name === "rank_max_over_mean" && data.layers.every((each) => each[name].every((value) => value === 1))) continue;
      chart(name, "routing-charts", title, note, x, layers.map((layer, at) => ({
        label: "layer " + layer, color: depth(layers.length > 1 ? at / (layers.length - 1) : 0.5), width: 1.2, values: data.layers.map((each) => each[name]?.[at] ?? null),
      })), layers.length <= 8);
    }
    const newest = data.layers[data.layers.length - 1];
    element("straggler").textContent = layers.length + " MoE layers, dark to light from the first to the last. Current expected straggler cost: "
      + number(newest.straggler_cost * 100, 3) + " % (a lower bound: single microbatches are less balanced than the iteration).";
  }

  // blue below the mean, white at the mean, red above, saturated at a factor of four; black: no token
  function heat(ratio) {
    if (ratio === 0) return "#000";
    const far = Math.max(-1, Math.min(1, Math.log2(ratio) / 2)), end = far < 0 ? [33, 102, 172] : [178, 24, 43];
    return "rgb(" + end.map((value) => Math.round(247 + (value - 247) * Math.abs(far))).join(",") + ")";
  }

  function heatMap() {
    const canvas = element("map"), box = element("map-box"), hint = element("hint"), moment = element("moment"), left = 42, foot = 30;
    let shown = null, wide = 1, high = 1;
    function draw(at) {
      shown = data.loads[at];
      const loads = shown.tokens_per_expert, experts = loads[0].length, dense = window.devicePixelRatio || 1;
      wide = Math.max(3, Math.min(80, (box.clientWidth - left - 4) / experts));
      high = Math.max(7, Math.min(26, 480 / loads.length));
      canvas.style.width = left + wide * experts + "px";
      canvas.style.height = high * loads.length + foot + "px";
      canvas.width = (left + wide * experts) * dense;
      canvas.height = (high * loads.length + foot) * dense;
      const paint = canvas.getContext("2d");
      paint.scale(dense, dense);
      paint.font = "11px system-ui";
      paint.textBaseline = "middle";
      const step = Math.ceil(14 / high), across = Math.ceil(34 / wide);
      loads.forEach((row, layer) => {
        const mean = row.reduce((sum, load) => sum + load, 0) / experts || 1;
        row.forEach((load, expert) => {
          paint.fillStyle = heat(load / mean);
          paint.fillRect(left + expert * wide, layer * high, wide + 0.5, high - (high > 9 ? 1 : 0));
        });
        paint.fillStyle = "#5b6570";
        if (layer % step === 0) paint.fillText(String(shown.layers[layer]), 14, (layer + 0.5) * high);
      });
      paint.fillStyle = "#5b6570";
      for (let expert = 0; expert < experts; expert += across) paint.fillText(String(expert), left + expert * wide, high * loads.length + 9);
      paint.fillText("expert", left, high * loads.length + 22);
      paint.save();
      paint.translate(6, high * loads.length / 2);
      paint.rotate(-Math.PI / 2);
      paint.textAlign = "center";
      paint.fillText("layer", 0, 0);
      paint.restore();
      element("when").textContent = "at iteration " + shown.iteration + ", relative to the mean of the layer";
      dashboard.map = { iteration: shown.iteration, left, wide, high };
    }
    canvas.onmousemove = (event) => {
      const layer = Math.floor(event.offsetY / high), expert = Math.floor((event.offsetX - left) / wide), row = shown.tokens_per_expert[layer];
      hint.hidden = !row || row[expert] === undefined;
      if (hint.hidden) return;
      const mean = row.reduce((sum, load) => sum + load, 0) / row.length || 1;
      hint.textContent = "layer " + shown.layers[layer] + ", expert " + expert + ": " + row[expert] + " tokens, " + number(row[expert] / mean, 3) + " x the mean";
      hint.style.left = Math.min(event.offsetX + 12, box.clientWidth - 240) + "px";
      hint.style.top = event.offsetY + 14 + "px";
    };
    canvas.onmouseleave = () => { hint.hidden = true; };
    moment.max = data.loads.length - 1;
    moment.value = data.loads.length - 1;
    moment.oninput = () => draw(+moment.value);
    draw(data.loads.length - 1);
    scale();
  }

  function scale() {
    const paint = element("scale").getContext("2d");
    paint.font = "11px system-ui";
    for (let at = 0; at <= 300; at++) {
      paint.fillStyle = heat(2 ** (at / 75 - 2));
      paint.fillRect(42 + at, 2, 1.5, 12);
    }
    paint.fillStyle = "#5b6570";
    ["1/4 or less", "1/2", "mean", "2 x", "4 x or more"].forEach((text, at) => paint.fillText(text, 42 + at * 75 - (at ? 8 : 0), 28));
    paint.fillStyle = "#000";
    paint.fillRect(440, 2, 12, 12);
    paint.fillStyle = "#5b6570";
    paint.fillText("dead: no token", 458, 12);
  }

  head();
  if (records.length) iterationCharts();
  if (data.layers.length) {
    element("routing").hidden = false;
    health();
    heatMap();
  }
})();
