"use strict";
// Draws the page of moe_trainer/metrics/dashboard.py. All values come from the element #data, on a server also from its address.
// `dashboard` exposes charts and maps to tests.
const dashboard = { data: JSON.parse(document.getElementById("data").textContent), charts: {}, maps: {}, draws: 0 };
(() => {
  const element = (id) => document.getElementById(id);
  const RUN_COLORS = { light: ["#0b5cad", "#c2410c", "#15803d", "#a21caf", "#a16207", "#0e7490", "#4d4d4d", "#be185d"], dark: ["#6cb2ff", "#ff9a5c", "#5fd38a", "#e29bf5", "#f0c24b", "#5cd1e5", "#c9ced6", "#ff8fb8"] };
  const PART_COLORS = ["#4e79a7", "#f28e2b", "#76b7b2", "#b07aa1", "#9c9c9c", "#59a14f", "#edc948", "#e15759"];
  const EVENT_COLORS = { resume: "#7a8290", save: "#7a8290", evaluation: "#7a8290", sample: "#7a8290", skip: "#d97706", rerun: "#d97706", nan: "#d33a2f", slow_rank: "#d33a2f", other: "#7a8290" };
  const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4]];
  // what the page remembers between redraws
  const view = { axis: "iteration", smoothing: 0, logX: false, logY: false, clip: true, perplexity: false, zoom: null, health: null, theme: null, changed: true, search: "" };
  let data = dashboard.data, charts = [], isZooming = false;

  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value == null || value === false) continue;
      if (name === "text") node.textContent = value;
      else if (name === "class") node.className = value;
      else if (name.startsWith("on")) node[name] = value;
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child != null));
    return node;
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

  function number(value, digits = 4) {
    if (!isNumber(value)) return "-";
    if (Math.abs(value) >= 1e4) return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: digits }).format(value);
    return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(2) : String(+value.toPrecision(digits));
  }
  const whole = (value) => isNumber(value) ? new Intl.NumberFormat("en").format(value) : "-";
  function duration(seconds) {
    if (!isNumber(seconds)) return "-";
    if (seconds < 60) return number(seconds, 3) + " s";
    const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
    if (days) return days + " d " + (hours % 24) + " h";
    return hours ? hours + " h " + (minutes % 60) + " min" : minutes + " min " + Math.round(seconds % 60) + " s";
  }
  const text = (value) => typeof value === "object" && value !== null ? JSON.stringify(value) : String(value);

  // ------------------------------------------------------------------ values of a run
  const AXES = [["iteration", "iteration"], ["tokens", "tokens"], ["wall_s", "wall time"]];
  const records = (run) => run.records || {};
  const xOf = (run, axis = view.axis) => records(run)[axis] || records(run).iteration || [];
  const series = (run, name) => (records(run).series || {})[name];
  const last = (values) => { for (let at = (values || []).length - 1; at >= 0; at--) if (isNumber(values[at])) return values[at]; return null; };
  const names = (pattern) => [...new Set(data.runs.flatMap((run) => Object.keys(records(run).series || {})))].filter((name) => pattern.test(name));
  const colorOf = (at) => RUN_COLORS[theme()][at % 8];
  const label = (run, name) => data.runs.length > 1 ? run.name + ": " + name : name;
  // x of an iteration between records, by interpolation
  function place(run, iteration, axis = view.axis) {
    if (axis === "iteration") return iteration;
    const from = records(run).iteration || [], to = xOf(run, axis);
    if (!from.length) return null;
    let high = from.findIndex((each) => each >= iteration);
    if (high < 0) high = from.length - 1;
    const low = Math.max(0, high - 1);
    if (from[high] === from[low]) return to[high];
    return to[low] + (to[high] - to[low]) * Math.min(1, (iteration - from[low]) / (from[high] - from[low]));
  }
  // exponential moving average without the bias of its first values
  function smooth(values) {
    if (!view.smoothing) return values;
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (!isNumber(value)) return value;
      sum = view.smoothing * sum + (1 - view.smoothing) * value;
      weight = view.smoothing * weight + 1 - view.smoothing;
      return sum / weight;
    });
  }

  // ------------------------------------------------------------------ theme
  const media = window.matchMedia("(prefers-color-scheme: dark)");
  const theme = () => view.theme || (media.matches ? "dark" : "light");
  function applyTheme() {
    document.documentElement.dataset.theme = theme();
    element("theme").textContent = theme() === "dark" ? "Light" : "Dark";
  }
  const remember = (name, value) => { try { localStorage.setItem("moe-trainer-" + name, value); } catch { /* a file without storage */ } };
  const remembered = (name) => { try { return localStorage.getItem("moe-trainer-" + name); } catch { return null; } };

  // ------------------------------------------------------------------ sections and cards
  function section(id, title, note) {
    const head = make("h2", { id, text: title });
    if (note) head.append(" ", make("span", { class: "note", text: note }));
    const grid = make("div", { class: "grid" });
    element("charts").append(head, grid);
    element("sections").append(make("a", { href: "#" + id, text: title }));
    return grid;
  }
  const drop = (id) => { const head = element(id); head.nextSibling.remove(); head.remove(); element("sections").querySelector(`a[href="#${id}"]`)?.remove(); };
  function card(grid, title, note, isWide) {
    const box = make("div", { class: "card" + (isWide ? " wide" : "") }, make("h3", { text: title + " " }, note ? make("span", { class: "note", text: note }) : null));
    grid.append(box);
    return box;
  }
  function table(head, rows, kinds = []) {
    const body = make("tbody");
    for (const row of rows) body.append(make("tr", {}, ...row.map((cell, at) => make("td", { class: kinds[at] || null, text: cell instanceof Node ? null : cell }, cell instanceof Node ? cell : null))));
    return make("table", {}, make("thead", {}, make("tr", {}, ...head.map((each, at) => make("th", { class: kinds[at] || null, scope: "col", text: each })))), body);
  }
  // the numbers of a drawing, for screen readers and for copying; made when it is opened
  function asTable(box, rows) {
    const details = make("details", {}, make("summary", { text: "Table" }));
    details.ontoggle = () => {
      if (!details.open || details.childNodes.length > 1) return;
      const [head, body] = rows(), step = Math.ceil(body.length / 200);
      details.append(make("div", { class: "scroll", tabindex: 0 }, table(head, body.filter((_, at) => at % step === 0 || at === body.length - 1).map((row) => row.map((cell) => typeof cell === "number" || cell == null ? number(cell, 6) : cell)), head.map(() => "number"))));
    };
    details.refresh = () => { details.replaceChildren(details.firstChild); details.ontoggle(); };
    box.append(details);
    return details;
  }

  // ------------------------------------------------------------------ hints
  const hint = element("hint");
  function showHint(words, x, y) {
    hint.textContent = words;
    hint.hidden = false;
    const box = hint.getBoundingClientRect();
    hint.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
    hint.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
  }
  const hideHint = () => { hint.hidden = true; };

  // ------------------------------------------------------------------ charts
  function eventMarks(runs) {
    return runs.flatMap((run) => (run.events || []).map((event) => ({ ...event, run, x: place(run, event.iteration) }))).filter((event) => isNumber(event.x));
  }
  function drawEvents(plot) {
    const paint = plot.ctx, { left, top, width, height } = plot.bbox, dense = devicePixelRatio || 1;
    paint.save();
    paint.lineWidth = dense;
    for (const event of plot.events) {
      const at = plot.valToPos(event.x, "x", true);
      if (at < left || at > left + width) continue;
      const color = EVENT_COLORS[event.kind] || EVENT_COLORS.other, isQuiet = ["save", "evaluation", "sample", "slow_rank"].includes(event.kind);
      paint.strokeStyle = paint.fillStyle = color;
      if (!isQuiet) {
        paint.setLineDash([4 * dense, 4 * dense]);
        paint.beginPath();
        paint.moveTo(at, top);
        paint.lineTo(at, top + height);
        paint.stroke();
      }
      paint.setLineDash([]);
      paint.beginPath();
      paint.moveTo(at - 4 * dense, top);
      paint.lineTo(at + 4 * dense, top);
      paint.lineTo(at, top + (isQuiet ? 4 : 7) * dense);
      paint.fill();
    }
    paint.restore();
  }
  function hintEvents(plot) {
    const at = plot.cursor.left;
    if (at == null || at < 0 || plot.cursor.event == null) return;
    const near = plot.events.filter((event) => Math.abs(plot.valToPos(event.x, "x") - at) < 5).slice(0, 6);
    const box = plot.over.getBoundingClientRect();
    if (near.length && plot.over.matches(":hover")) showHint(near.map((event) => (data.runs.length > 1 ? event.run.name + ": " : "") + "iteration " + event.iteration + ": " + event.text).join("\n"), box.left + at, box.top + 10);
    else hideHint();
  }
  // range of the visible values; with `clip` without the outermost percent, where these are far away
  function range(plot, low, high, scale) {
    let values = [];
    const [first, end] = [plot.scales.x.min, plot.scales.x.max], x = plot.data[0];
    for (let at = 1; at < plot.data.length; at++) {
      if (!plot.series[at].show) continue;
      plot.data[at].forEach((value, index) => { if (isNumber(value) && (first == null || (x[index] >= first && x[index] <= end)) && (!view.logY || value > 0)) values.push(value); });
    }
    if (!values.length) return scale === "log" ? [0.1, 1] : [0, 1];
    values.sort((a, b) => a - b);
    [low, high] = [values[0], values[values.length - 1]];
    if (view.clip && values.length >= 50 && !plot.isStacked) {
      const inner = [values[Math.floor(values.length * 0.01)], values[Math.ceil(values.length * 0.99) - 1]], span = inner[1] - inner[0] || Math.abs(inner[1]) || 1;
      low = Math.max(low, inner[0] - 0.5 * span);
      high = Math.min(high, inner[1] + 0.5 * span);
    }
    if (view.logY && !plot.isStacked) return uPlot.rangeLog(low, high, 10, false);
    if (plot.isStacked) return [0, high * 1.04];
    const margin = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
    return [low >= 0 && low < (high - low) * 0.3 ? Math.min(0, low) : low - margin, high + margin];
  }
  function setZoom(from, to, source) {
    if (isZooming) return;
    isZooming = true;
    view.zoom = from == null ? null : [from, to];
    for (const plot of charts) if (plot !== source) plot.setScale("x", view.zoom ? { min: from, max: to } : { min: plot.data[0][0], max: plot.data[0][plot.data[0].length - 1] });
    isZooming = false;
  }
  const axisValues = (plot, marks) => marks.map((mark) => mark == null ? "" : view.axis === "wall_s" ? duration(mark) : number(mark));

  // lines: [{label, x, values, color, dash?, points?, width?, raw?}]; all x are of the chosen axis
  function chart(name, box, lines, options = {}) {
    lines = lines.filter((line) => line.x.length && line.values.some(isNumber));
    if (!lines.length) return null;
    if (view.logX) lines = lines.map((line) => ({ ...line, values: line.values.map((value, at) => line.x[at] > 0 ? value : null), x: line.x.map((value) => value > 0 ? value : null) })).map((line) => { const kept = line.x.map((value, at) => at).filter((at) => line.x[at] != null); return { ...line, x: kept.map((at) => line.x[at]), values: kept.map((at) => line.values[at]) }; });
    const drawn = [];
    for (const line of lines) {
      const isSmoothed = view.smoothing > 0 && !line.points && !options.stacked;
      if (isSmoothed) drawn.push({ ...line, label: line.label + " (unsmoothed)", alpha: 0.25, isRaw: true });
      drawn.push(isSmoothed ? { ...line, values: smooth(line.values) } : line);
    }
    const joined = drawn.length > 1 && drawn.some((line) => line.x !== drawn[0].x) ? uPlot.join(drawn.map((line) => [line.x, line.values])) : [drawn[0].x, ...drawn.map((line) => line.values)];
    const soft = css("--soft"), grid = css("--grid"), height = options.height || 220, width = () => Math.max(180, box.clientWidth - 30);
    const axis = { stroke: soft, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui" };
    const settings = {
      width: width(), height,
      legend: { show: options.legend !== false, live: true, markers: { width: 2 } },
      cursor: { sync: { key: "x", setSeries: false }, drag: { x: true, y: false }, focus: { prox: 16 }, points: { size: 6 } },
      scales: { x: { time: false, distr: view.logX ? 3 : 1 }, y: { distr: view.logY && !options.stacked ? 3 : 1, range } },
      axes: [{ ...axis, label: AXES.find(([id]) => id === view.axis)[1], labelSize: 16, labelFont: "11px system-ui", size: 32, values: axisValues, space: view.axis === "wall_s" ? 90 : 50 }, { ...axis, size: 60, values: (plot, marks) => marks.map((mark) => mark == null ? "" : number(mark)) }],
      series: [{ label: view.axis === "wall_s" ? "wall time" : view.axis, value: (plot, value) => value == null ? "-" : view.axis === "wall_s" ? duration(value) : whole(Math.round(value)) },
        ...drawn.map((line) => ({ label: line.label, stroke: line.color, width: line.width || 1.6, dash: line.dash, alpha: line.alpha || 1, spanGaps: true, fill: line.fill, points: line.points ? { show: true, size: 8, fill: line.color, stroke: css("--card") } : { show: line.x.length < 30, size: 4 }, paths: line.points ? () => null : undefined, value: (plot, value, _, at) => number(line.own && at != null ? line.own[at] : value ?? (plot.cursor.idx == null ? last(line.values) : null), 5) }))], // without a cursor the newest, also of what ends before the chart does
      bands: options.bands,
      hooks: {
        draw: [drawEvents],
        setCursor: [(plot) => { if (plot.cursor.idx == null && plot.data[0].length) plot.setLegend({ idx: plot.data[0].length - 1 }, false); hintEvents(plot); }],
        ready: [(plot) => { plot.setLegend({ idx: plot.data[0].length - 1 }, false); }],
        setSelect: [(plot) => { if (plot.select.width > 4) setZoom(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"), plot); }],
      },
    };
    const target = make("div", { role: "img", "aria-label": options.description || lines.map((line) => line.label + ", newest " + number(last(line.values))).join("; ") });
    box.append(target);
    const plot = new uPlot(settings, joined, target);
    plot.events = options.events || eventMarks(data.runs);
    plot.isStacked = Boolean(options.stacked);
    plot.resize = () => plot.setSize({ width: width(), height });
    plot.over.ondblclick = () => setZoom(null);
    drawn.forEach((line, at) => { if (line.isRaw) plot.root.querySelectorAll(".u-legend .u-series")[at + 1]?.remove(); });
    charts.push(plot);
    dashboard.charts[name] = plot;
    if (view.zoom) plot.setScale("x", { min: view.zoom[0], max: view.zoom[1] });
    if (options.table !== false) asTable(box, () => [[view.axis, ...lines.map((line) => line.label)], joined[0].map((x, at) => [x, ...(options.stacked ? lines.map((line) => line.own[at]) : joined.slice(1).map((values) => values[at]))])]);
    return plot;
  }
  // one chart with a metric of all runs, or several metrics of them
  function metricLines(metrics, factor = 1) {
    return data.runs.flatMap((run, at) => metrics.filter((metric) => series(run, metric)).map((metric, index) => ({
      label: label(run, metric.replaceAll("_", " ")), x: xOf(run), values: factor === 1 ? series(run, metric) : series(run, metric).map((value) => isNumber(value) ? value * factor : null),
      color: data.runs.length > 1 ? colorOf(at) : colorOf(index), dash: data.runs.length > 1 ? DASHES[index % 4] : [],
    })));
  }

  // ------------------------------------------------------------------ heat maps
  const VIRIDIS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];
  function blend(stops, share) {
    const at = Math.max(0, Math.min(1, share)) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
    return "rgb(" + stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * (at - low))).join(",") + ")";
  }
  const sequential = (low, high) => ({ color: (value) => blend(VIRIDIS, high > low ? (value - low) / (high - low) : 0), ticks: [0, 0.25, 0.5, 0.75, 1].map((share) => [share, number(low + share * (high - low), 3)]), at: (share) => blend(VIRIDIS, share) });
  // blue below 1, neutral at 1, red above, saturated at a factor of `most`
  function heat(share) {
    const far = Math.max(-1, Math.min(1, 2 * share - 1)), isDark = theme() === "dark";
    const end = far < 0 ? (isDark ? [77, 155, 240] : [33, 102, 172]) : isDark ? [255, 99, 88] : [178, 24, 43], middle = isDark ? [44, 50, 58] : [247, 247, 247];
    return "rgb(" + end.map((value, i) => Math.round(middle[i] + (value - middle[i]) * Math.abs(far))).join(",") + ")";
  }
  const ratios = (most) => ({ color: (value) => value === 0 ? css("--zero") : heat(0.5 + Math.log2(value) / Math.log2(most) / 2), ticks: [[0, "1/" + most], [0.25, number(most ** -0.5, 2)], [0.5, "1"], [0.75, number(most ** 0.5, 2)], [1, most + " x"]], at: heat });

  // rows: names; columns: names; value(row, column); words(row, column): the hint
  function heatMap(name, box, { rows, columns, value, words, scale, rowTitle, columnTitle, zero }) {
    const wrap = make("div", { class: "map" }), canvas = make("canvas", { tabindex: 0, role: "img", "aria-label": `${rowTitle} by ${columnTitle}; arrow keys read the values` });
    wrap.append(canvas);
    box.append(wrap);
    const foot = 34, head = 2;
    let left = 40, wide = 1, high = 1, chosen = null;
    function draw() {
      const paint = canvas.getContext("2d"), dense = devicePixelRatio || 1;
      paint.font = "11px system-ui";
      left = 26 + Math.max(...rows.map((row) => paint.measureText(row).width));
      wide = Math.max(2, Math.min(70, (box.clientWidth - 32 - left) / columns.length));
      high = Math.max(2, Math.min(24, 460 / rows.length));
      const size = [left + wide * columns.length + 2, head + high * rows.length + foot];
      canvas.style.width = size[0] + "px";
      canvas.style.height = size[1] + "px";
      canvas.width = size[0] * dense;
      canvas.height = size[1] * dense;
      paint.scale(dense, dense);
      paint.font = "11px system-ui";
      paint.textBaseline = "middle";
      const missing = css("--grid");
      rows.forEach((_, row) => columns.forEach((_, column) => {
        const found = value(row, column);
        paint.fillStyle = isNumber(found) ? scale.color(found) : missing;
        paint.fillRect(left + column * wide, head + row * high, wide > 5 ? wide - 0.6 : wide + 0.5, high > 8 ? high - 0.8 : high + 0.5);
      }));
      paint.fillStyle = css("--soft");
      const step = Math.ceil(14 / high), longest = Math.max(...columns.map((column) => paint.measureText(column).width)), across = Math.ceil((longest + 14) / wide);
      rows.forEach((row, at) => { if (at % step === 0) { paint.textAlign = "right"; paint.fillText(row, left - 6, head + (at + 0.5) * high); } });
      paint.textAlign = "left";
      for (let at = 0; at < columns.length; at += across) paint.fillText(columns[at], left + at * wide, head + high * rows.length + 10);
      paint.fillText(columnTitle, left, head + high * rows.length + 25);
      paint.save();
      paint.translate(8, head + high * rows.length / 2);
      paint.rotate(-Math.PI / 2);
      paint.textAlign = "center";
      paint.fillText(rowTitle, 0, 0);
      paint.restore();
      if (chosen) {
        paint.strokeStyle = css("--ink");
        paint.lineWidth = 2;
        paint.strokeRect(left + chosen[1] * wide, head + chosen[0] * high, wide, high);
      }
    }
    const say = (row, column, x, y) => { if (rows[row] == null || columns[column] == null) hideHint(); else showHint(words(row, column), x, y); };
    canvas.onmousemove = (event) => say(Math.floor((event.offsetY - head) / high), event.offsetX < left ? -1 : Math.floor((event.offsetX - left) / wide), event.clientX, event.clientY);
    canvas.onmouseleave = canvas.onblur = () => { hideHint(); if (chosen) { chosen = null; draw(); } };
    canvas.onkeydown = (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!move) return;
      event.preventDefault();
      chosen = chosen ? [Math.max(0, Math.min(rows.length - 1, chosen[0] + move[0])), Math.max(0, Math.min(columns.length - 1, chosen[1] + move[1]))] : [0, columns.length - 1];
      draw();
      const area = canvas.getBoundingClientRect();
      say(...chosen, area.left + left + chosen[1] * wide, area.top + head + chosen[0] * high);
    };
    const legend = make("canvas", { "aria-hidden": true, width: 10, height: 10 });
    box.append(legend);
    function drawLegend() {
      const paint = legend.getContext("2d"), dense = devicePixelRatio || 1, length = Math.min(300, Math.max(100, box.clientWidth - 160));
      legend.style.width = length + 120 + "px";
      legend.width = (length + 120) * dense;
      legend.height = 34 * dense;
      legend.style.height = "34px";
      paint.scale(dense, dense);
      paint.font = "11px system-ui";
      for (let at = 0; at <= length; at++) { paint.fillStyle = scale.at(at / length); paint.fillRect(14 + at, 4, 1.5, 9); }
      paint.fillStyle = css("--soft");
      paint.textAlign = "center";
      for (const [share, word] of scale.ticks) paint.fillText(word, 14 + share * length, 26);
      if (zero) { paint.fillStyle = css("--zero"); paint.strokeStyle = css("--soft"); paint.fillRect(length + 34, 4, 9, 9); paint.strokeRect(length + 34, 4, 9, 9); paint.fillStyle = css("--soft"); paint.textAlign = "left"; paint.fillText(zero, length + 48, 12); }
    }
    draw();
    drawLegend();
    const map = { redraw: draw, resize: () => { draw(); drawLegend(); }, cell: (row, column) => [left + (column + 0.5) * wide, head + (row + 0.5) * high], canvas };
    dashboard.maps[name] = map;
    return map;
  }
  // tokens of cells relative to a mean, with a slider over iterations and a table of the shown one
  // tables[at][row][column]: tokens; means[at][row]; where(row, column): the cell in words
  function tokenMap(name, box, iterations, tables, means, { where, ...names }) {
    let at = iterations.length - 1;
    const slider = make("input", { type: "range", min: 0, max: at, value: at, "aria-label": "iteration" }), shown = make("output", { text: "iteration " + iterations[at] });
    box.append(make("div", { class: "tools" }, make("label", {}, "iteration ", slider), shown));
    const value = (row, column) => tables[at][row][column] / means[at][row];
    const map = heatMap(name, box, { ...names, scale: ratios(4), value, words: (row, column) => `${where(row, column)}: ${whole(tables[at][row][column])} tokens, ${number(value(row, column), 3)} x the mean` });
    const details = asTable(box, () => [[names.rowTitle, ...names.columns.map((column) => names.columnTitle + " " + column)], tables[at].map((row, index) => [names.rows[index], ...row.map(whole)])]);
    slider.oninput = () => { at = +slider.value; shown.textContent = "iteration " + iterations[at]; map.redraw(); details.refresh(); };
    map.slider = slider;
    return map;
  }

  // ------------------------------------------------------------------ head of the page
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
    box.append(make("div", { class: "facts" }, ...facts.map(([name, value]) => make("span", {}, make("span", { class: "note", text: name + " " }), make("b", { text: value })))));
    const hardware = head.hardware && [head.hardware.device, head.hardware.hostnames?.length ? head.hardware.hostnames.slice(0, 3).join(", ") + (Math.max(head.hardware.hostnames.length, head.mapping?.nodes || 0) > 3 ? ", ..." : "") : null].filter(Boolean).join(" · ");
    const versions = head.versions && Object.entries(head.versions).filter(([, value]) => value).map(([name, value]) => name.replace("_", "-") + " " + value).join(", ");
    const chips = [modelWords(head.model), mappingWords(head.mapping), hardware, head.precision, head.global_batch_size ? "batch " + whole(head.global_batch_size) + (head.tokens_per_iteration ? " (" + number(head.tokens_per_iteration) + " tokens)" : "") : null, versions].filter(Boolean);
    const constants = Object.entries(records(run).constants || {}).filter(([name]) => !/zero|iteration$/.test(name));
    if (chips.length) box.append(make("div", { class: "chips" }, ...chips.map((words) => make("span", { text: words }))));
    if (constants.length) box.append(make("details", {}, make("summary", { text: plural(constants.length, "value") + " never changed" }), make("div", { class: "chips constants" }, ...constants.map(([name, value]) => make("span", {}, name.replaceAll("_", " ") + " ", make("b", { text: typeof value === "number" ? number(value, 6) : text(value) }))))));
    return box;
  }
  function findings() {
    const places = { routing: "#layers", ranks: "#ranks", loss: "#loss", events: "#events" };
    const order = { bad: 0, warn: 1, ok: 2 };
    const silent = (run) => (stateOf(run).name !== run.status ? [{ severity: "bad", card: "events", text: stateOf(run).words + " (when this page was written)" }] : []);
    const all = data.runs.flatMap((run) => [...silent(run), ...(run.findings || [])].map((finding) => ({ ...finding, run }))).sort((a, b) => (order[a.severity] ?? 1) - (order[b.severity] ?? 1));
    for (const finding of all.slice(0, 12)) {
      const show = () => { if (finding.metric) { view.health = finding.metric; draw(); } };
      const link = places[finding.card] && make("a", { href: places[finding.card], text: "show", onclick: show });
      element("findings").append(make("div", { class: "finding " + (order[finding.severity] == null ? "warn" : finding.severity), role: finding.severity === "bad" ? "alert" : null }, data.runs.length > 1 ? make("b", { text: finding.run.name }) : null, finding.text, link ? " " : null, link && finding.severity !== "ok" ? link : null));
    }
    if (all.length > 12) element("findings").append(make("p", { class: "note", text: all.length - 12 + " more" }));
  }
  function figures() {
    const run = data.runs[0], validation = (run.validations || []).filter((each) => each.set !== "test").pop();
    const memory = run.ranks?.memory_mb?.length ? Math.max(...run.ranks.memory_mb[run.ranks.memory_mb.length - 1].filter(isNumber)) : null;
    const values = [
      [number(last(series(run, "lm loss")), 5), "training loss"],
      validation ? [number(validation["lm loss"], 5), `validation loss, iteration ${validation.iteration}`] : null,
      [number(last(series(run, "tokens_per_s"))), "tokens/s"],
      [number(last(series(run, "tflops_per_gpu"))), "model TFLOP/s per rank"],
      series(run, "mfu") ? [number(last(series(run, "mfu")) * 100, 3) + " %", "MFU"] : null,
      [isNumber(last(series(run, "elapsed_ms"))) ? duration(last(series(run, "elapsed_ms")) / 1000) : "-", "iteration"],
      [number(last(series(run, "grad_norm"))), "gradient norm"],
      memory > 0 ? [number(memory / 1024, 3) + " GiB", "peak memory, fullest rank"] : isNumber(last(series(run, "max_memory_mb"))) ? [number(last(series(run, "max_memory_mb")) / 1024, 3) + " GiB", "peak memory, last rank"] : null,
    ].filter((each) => each && each[0] !== "-");
    for (const [value, name] of data.runs.length > 1 ? [] : values) element("figures").append(make("div", { class: "card figure" }, make("b", { text: value }), make("span", { text: name })));
    if (data.runs.length > 1) {
      const rows = data.runs.map((each, at) => [make("span", {}, make("span", { class: "swatch", style: "background:" + colorOf(at) }), each.name), number(last(series(each, "lm loss")), 5), number((each.validations || []).filter((one) => one.set !== "test").pop()?.["lm loss"], 5), number(last(series(each, "tokens_per_s"))), number(last(series(each, "tflops_per_gpu"))), number(last(series(each, "grad_norm")))]);
      element("figures").append(make("div", { class: "card wide scroll" }, table(["run", "training loss", "validation loss", "tokens/s", "TFLOP/s per rank", "gradient norm"], rows, ["", "number", "number", "number", "number", "number"])));
    }
  }

  // ------------------------------------------------------------------ sections
  const AUXILIARY = /(_loss$|_loss |indexer loss|z_loss)/;
  const metricOf = (each) => each.metric.split(",")[0], taskWords = (each) => [each.task, ...each.metric.split(",").slice(1)].join(", ");
  function lossSection() {
    const grid = section("loss", "Loss"), main = names(/^lm loss$|^mtp_\d+ loss$/), shape = (values) => view.perplexity ? values.map((value) => isNumber(value) ? Math.exp(value) : null) : values;
    const lines = metricLines(main).map((line) => ({ ...line, values: shape(line.values) }));
    data.runs.forEach((run, at) => {
      const kinds = [...new Set((run.validations || []).map((each) => each.set))];
      kinds.forEach((kind, index) => {
        const found = run.validations.filter((each) => each.set === kind && isNumber(each["lm loss"]));
        const x = found.map((each) => view.axis === "iteration" ? each.iteration : each[view.axis] ?? place(run, each.iteration));
        lines.push({ label: label(run, kind), x, values: shape(found.map((each) => each["lm loss"])), color: data.runs.length > 1 ? colorOf(at) : colorOf(main.length + index), points: true });
      });
    });
    chart("loss", card(grid, view.perplexity ? "Perplexity" : "Loss", data.runs.length > 1 ? "lines: training, points: validation" : "nats per token; points are validations", true), lines, { height: 380 });
    const auxiliary = names(AUXILIARY).filter((name) => !main.includes(name) && data.runs.some((run) => series(run, name)?.some((value) => value)));
    if (auxiliary.length) chart("auxiliary", card(grid, "Auxiliary losses", "unscaled, before their coefficients"), metricLines(auxiliary));
    // a chart per metric, of all its filters: an accuracy and a perplexity have no common axis
    for (const metric of new Set(data.runs.flatMap((run) => (run.tasks || []).map(metricOf)))) {
      const figuresOf = (run) => (run.tasks || []).filter((each) => metricOf(each) === metric), kinds = [...new Set(data.runs.flatMap((run) => figuresOf(run).map(taskWords)))];
      const lines = data.runs.flatMap((run, at) => kinds.map((kind, index) => {
        const found = figuresOf(run).filter((each) => taskWords(each) === kind);
        return { label: label(run, kind), x: found.map((each) => place(run, each.iteration)), values: found.map((each) => each.value), color: colorOf(data.runs.length > 1 ? at : index), dash: data.runs.length > 1 ? DASHES[index % 4] : [] };
      }));
      if (lines.some((line) => line.values.some(isNumber))) chart("tasks " + metric, card(grid, "Evaluation tasks: " + metric.replaceAll("_", " "), ""), lines);
    }
  }
  const KNOWN = {
    speed: [["tokens_per_s", "Throughput", "tokens per second, all ranks", 1], ["tflops_per_gpu", "Model FLOP/s", "TFLOP/s per rank", 1], ["mfu", "MFU", "% of the device's dense bf16 peak", 100], ["elapsed_ms", "Iteration time", "ms", 1], ["energy_j", "Energy", "J per iteration", 1]],
    optimizer: [["learning_rate", "Learning rate", "", 1], ["grad_norm", "Gradient norm", "before clipping", 1], ["params_norm", "Parameter norm", "", 1], ["loss_scale", "Loss scale", "", 1], ["num_zeros", "Zero gradients", "", 1], ["global_batch_size", "Global batch size", "samples", 1]],
  };
  const PROBLEMS = ["skipped_iterations", "nan_iterations", "repeated_iterations", "dropped_tokens"];
  const UNDRAWN = /^(consumed_samples|consumed_tokens|max_memory_mb|world_size|timestamp|time)$/;
  function isConstant(name) {
    return data.runs.every((run) => { const values = series(run, name)?.filter(isNumber) || []; return values.length < 2 || values.every((value) => value === values[0]); });
  }
  function metricSections() {
    const drawn = new Set(names(/^lm loss$|^mtp_\d+ loss$/));
    for (const name of names(AUXILIARY)) drawn.add(name);
    const speed = section("speed", "Speed");
    let count = 0;
    const add = (grid, name, title, note, factor) => {
      drawn.add(name);
      if (!data.runs.some((run) => series(run, name)) || (isConstant(name) && name !== "tokens_per_s")) return;
      if (chart(name, card(grid, title, note), metricLines([name], factor))) count += 1;
      else grid.lastChild.remove();
    };
    for (const each of KNOWN.speed) add(speed, ...each);
    data.runs.slice(0, 4).forEach((run, index) => {
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
    const problems = PROBLEMS.filter((name) => data.runs.some((each) => series(each, name)?.some((value) => value > 0)));
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
    const found = data.runs.filter((run) => run.ranks?.iteration?.length && (run.ranks.time_ms?.length || run.ranks.memory_mb?.length));
    const memory = names(/^max_memory_mb$/).length && !found.some((run) => run.ranks.memory_mb?.length);
    if (!found.length && !memory) return;
    const grid = section("ranks", "Ranks");
    if (memory && !isConstant("max_memory_mb")) chart("memory", card(grid, "Peak memory", "GiB, of the last rank"), metricLines(["max_memory_mb"], 1 / 1024));
    for (const run of found) {
      const ranks = run.ranks, rows = ranks.ranks.map(String), columns = ranks.iteration.map(String), key = data.runs.indexOf(run) ? "_" + data.runs.indexOf(run) : "";
      if (ranks.time_ms?.length) {
        const middles = ranks.time_ms.map(median), box = card(grid, label(run, "Compute time of the ranks"), "relative to the median rank of the iteration, without waits for others", true);
        heatMap("rank_time" + key, box, { rows, columns, rowTitle: "rank", columnTitle: "iteration", scale: ratios(2), value: (row, column) => middles[column] ? ranks.time_ms[column][row] / middles[column] : null, words: (row, column) => `rank ${rows[row]}, iteration ${columns[column]}: ${number(ranks.time_ms[column][row])} ms, ${number(ranks.time_ms[column][row] / middles[column], 3)} x the median` });
        asTable(box, () => [["iteration", ...rows.map((row) => "rank " + row)], columns.map((column, at) => [column, ...ranks.time_ms[at]])]);
      }
      if (ranks.memory_mb?.some((row) => row.some(isNumber))) {
        const all = ranks.memory_mb.flat().filter(isNumber), box = card(grid, label(run, "Peak memory of the ranks"), "GiB", true);
        heatMap("rank_memory" + key, box, { rows, columns, rowTitle: "rank", columnTitle: "iteration", scale: sequential(Math.min(...all) / 1024, Math.max(...all) / 1024), value: (row, column) => isNumber(ranks.memory_mb[column][row]) ? ranks.memory_mb[column][row] / 1024 : null, words: (row, column) => `rank ${rows[row]}, iteration ${columns[column]}: ${number(ranks.memory_mb[column][row] / 1024)} GiB` });
        asTable(box, () => [["iteration", ...rows.map((row) => "rank " + row)], columns.map((column, at) => [column, ...ranks.memory_mb[at]])]);
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
    const found = data.runs.filter((run) => run.routing?.iteration?.length);
    if (!found.length) return;
    const grid = section("routing", "Routing"), first = found[0];
    for (const run of found) {
      const worst = (run.routing.findings || []).slice(0, 3);
      if (worst.length) card(grid, label(run, "Worst layers"), "", true).append(...worst.map((each) => make("p", { text: each.text })));
    }
    if (found.some((run) => run.routing.straggler_cost?.some((value) => value > 0))) chart("straggler_cost", card(grid, "Straggler cost", "% more compute time, as layers wait for their busiest rank; a lower bound"), found.map((run) => ({ label: label(run, "cost"), x: run.routing.iteration.map((each) => place(run, each)), values: run.routing.straggler_cost.map((value) => value * 100), color: colorOf(data.runs.indexOf(run)) })));
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
      chart("health", box, shown.flatMap((run) => lines.map(([word, pick], at) => ({ label: label(run, word + " of the layers"), x: run.routing.iteration.map((each) => place(run, each)), values: spread(run, pick), color: data.runs.length > 1 ? colorOf(data.runs.indexOf(run)) : colorOf(at), dash: data.runs.length > 1 ? DASHES[at] : [] }))), { description: title + " of the layers: " + note });
      for (const run of shown) {
        const rows = run.routing.layers.map(String), columns = run.routing.iteration.map(String), values = of(run), all = values.flat().filter(isNumber).map((value) => value * factor);
        const low = kind === "ratio" ? 1 : Math.min(...all, kind === "share" ? 1 : 0), high = Math.max(...all, kind === "share" ? 1 : low + 1e-9), scale = kind === "share" ? { ...sequential(low, high), color: (value) => blend(VIRIDIS, high > low ? (high - value) / (high - low) : 0), at: (share) => blend(VIRIDIS, 1 - share) } : sequential(low, high);
        const map = make("div", { class: "wide" }, make("h3", { text: label(run, title) + " " }, make("span", { class: "note", text: note + "; bright is worse" })));
        healthBoxes.append(map);
        heatMap(found.indexOf(run) ? "health_" + found.indexOf(run) : "health", map, { rows, columns, rowTitle: "layer", columnTitle: "iteration", scale, value: (row, column) => isNumber(values[column][row]) ? values[column][row] * factor : null, words: (row, column) => `layer ${rows[row]}, iteration ${columns[column]}: ${number(values[column][row] * factor)}${kind === "percent" ? " %" : ""}` });
        asTable(map, () => [["iteration", ...rows.map((row) => "layer " + row)], columns.map((column, at) => [column, ...values[at]])]);
      }
    }
    for (const run of found) {
      const loads = run.routing.loads, key = data.runs.indexOf(run) ? "_" + data.runs.indexOf(run) : "";
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
    const all = eventMarks(data.runs).sort((a, b) => b.iteration - a.iteration);
    if (!all.length) return;
    const grid = section("events", "Events", plural(all.length, "event")), box = card(grid, "Newest first", "a row's button zooms the charts to its time", true);
    const rows = all.slice(0, 400).map((event) => [make("button", { type: "button", text: whole(event.iteration), "aria-label": "zoom to iteration " + event.iteration, onclick: () => { const x = xOf(event.run), span = (x[x.length - 1] - x[0]) * 0.05 || 1; setZoom(event.x - span, event.x + span); } }), ...(data.runs.length > 1 ? [event.run.name] : []), event.kind.replace("_", " "), isNumber(event.wall_s) ? duration(event.wall_s) : "-", event.text]);
    box.append(make("div", { class: "scroll", tabindex: 0 }, table(["iteration", ...(data.runs.length > 1 ? ["run"] : []), "kind", "wall time", "log line"], rows)));
  }
  function sampleSection() {
    const all = data.runs.flatMap((run) => (run.samples || []).map((sample) => ({ ...sample, run }))).sort((a, b) => b.iteration - a.iteration);
    if (!all.length) return;
    const grid = section("samples", "Samples", "texts that the model wrote");
    const box = card(grid, "Newest first", "", true), inner = make("div", { class: "scroll", tabindex: 0 });
    for (const sample of all.slice(0, 100)) inner.append(make("p", { class: "note", text: (data.runs.length > 1 ? sample.run.name + ", " : "") + "iteration " + sample.iteration }), make("pre", { class: "text" }, make("b", { text: sample.prompt }), sample.text));
    box.append(inner);
  }
  function settingsSection() {
    const found = data.runs.filter((run) => run.head?.settings && Object.keys(run.head.settings).length);
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
  function listSection() {
    const list = data.list;
    element("list").hidden = !list || data.runs.length > 0;
    element("list").replaceChildren();
    if (!list || data.runs.length) return;
    const chosen = new Set(), open = make("button", { type: "button", text: "Compare the chosen runs", disabled: true, onclick: () => { location.href = data.live.compare_url + [...chosen].map((query) => "&" + query).join(""); } });
    const rows = list.map((run) => [make("input", { type: "checkbox", "aria-label": "choose " + run.name, onchange: (event) => { if (event.target.checked) chosen.add(run.query); else chosen.delete(run.query); open.disabled = chosen.size < 2; } }), make("a", { href: run.url, text: run.name }), make("span", { class: "status " + run.status, text: run.state || run.status || "-" }), run.train_iters ? whole(run.iteration) + " of " + whole(run.train_iters) : whole(run.iteration), number(run.lm_loss, 5), run.updated || "-", run.finding ? make("div", { class: "finding " + run.finding.severity, text: run.finding.text }) : "-"]);
    element("list").append(make("h2", { text: "Runs" }), make("div", { class: "tools" }, open), make("div", { class: "card scroll" }, list.length ? table(["", "run", "status", "iteration", "training loss", "updated", "worst finding"], rows, ["", "", "", "number", "number", "", ""]) : make("p", { text: "No run is here yet." })));
  }

  // ------------------------------------------------------------------ everything
  function draw() {
    const begin = performance.now(), top = scrollY;
    charts.forEach((plot) => plot.destroy());
    charts = [];
    dashboard.charts = {};
    dashboard.maps = {};
    hideHint();
    applyTheme();
    for (const id of ["runs", "findings", "figures", "charts", "sections"]) element(id).replaceChildren();
    data.runs = data.runs || [];
    const main = data.runs[0];
    element("title").textContent = data.runs.length > 1 ? data.runs.length + " runs" : main?.name || "Runs";
    document.title = data.runs.length > 1 ? data.runs.map((run) => run.name).join(", ") : main?.name || "moe-trainer runs";
    element("state").textContent = (data.live ? "live, " : "") + "page written " + (data.written || "-");
    element("all-runs").hidden = !data.live?.list_url || !data.runs.length;
    if (data.live?.list_url) element("all-runs").href = data.live.list_url;
    listSection();
    element("controls").hidden = !data.runs.length;
    const axes = AXES.filter(([name]) => data.runs.every((run) => records(run)[name]?.some(isNumber)));
    if (axes.length && !axes.some(([name]) => name === view.axis)) view.axis = axes[0][0];
    element("axis").replaceChildren(...axes.map(([name, words]) => make("option", { value: name, text: words, selected: name === view.axis })));
    if (data.runs.length) {
      element("runs").append(...data.runs.map(runCard));
      findings();
      figures();
      if (data.runs.some((run) => xOf(run).length)) {
        lossSection();
        metricSections();
        rankSection();
        routingSection();
      }
      eventSection();
      sampleSection();
      settingsSection();
    }
    scrollTo(0, top);
    dashboard.draws += 1;
    dashboard.drawMs = performance.now() - begin;
  }
  dashboard.view = view;
  dashboard.draw = draw;
  dashboard.setZoom = setZoom;

  view.theme = remembered("theme");
  element("theme").onclick = () => { view.theme = theme() === "dark" ? "light" : "dark"; remember("theme", view.theme); draw(); };
  media.addEventListener?.("change", () => { if (!view.theme) draw(); });
  element("axis").onchange = (event) => { view.axis = event.target.value; view.zoom = null; draw(); };
  element("smoothing").oninput = (event) => { view.smoothing = +event.target.value; element("smoothing-value").textContent = event.target.value; draw(); };
  for (const [id, name] of [["log-y", "logY"], ["log-x", "logX"], ["clip", "clip"], ["perplexity", "perplexity"]]) element(id).onchange = (event) => { view[name] = event.target.checked; draw(); };
  element("reset").onclick = () => setZoom(null);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") { setZoom(null); hideHint(); } });
  let resizing = null;
  addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => { charts.forEach((plot) => plot.resize()); Object.values(dashboard.maps).forEach((map) => map.resize()); }, 100); });
  draw();
  if (data.live) {
    setInterval(async () => {
      if (document.hidden || (data.runs.length && data.runs.every((run) => run.status === "finished"))) return;
      if (document.activeElement?.matches("input, select, canvas") || document.querySelector("#list input:checked, .u-select[style*='width: ']:not([style*='width: 0px'])")) return; // someone uses it
      try {
        const answer = await fetch(data.live.data_url, { cache: "no-store" });
        if (!answer.ok) throw new Error(String(answer.status));
        dashboard.data = data = { ...await answer.json(), live: data.live };
        draw();
      } catch (error) {
        element("state").textContent = "the server does not answer (" + error.message + "); page written " + (data.written || "-");
      }
    }, Math.max(1000, data.live.poll_ms || 5000));
  }
})();
