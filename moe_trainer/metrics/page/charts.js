// Line charts over iterations, tokens or wall time.
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
// the chart under the pointer, or with the focus: cursors of the others follow it
let pointed = null;
// index of a value to show at `idx`: the nearest of a line, the newest before it of points; null outside of the line
function shownIndex(values, idx, isPoints) {
  const isThere = (at) => isNumber(values[at]);
  let before = idx, after = idx;
  while (before >= 0 && !isThere(before)) before -= 1;
  if (before === idx || isPoints) return before < 0 ? null : before;
  while (after < values.length && !isThere(after)) after += 1;
  if (before < 0 || after >= values.length) return null;
  return idx - before <= after - idx ? before : after;
}
const xWords = (x) => view.axis === "wall_s" ? duration(x) : view.axis + " " + whole(Math.round(x));
// the values of all lines at the pointer, the largest first, and the events there
function tooltip(plot) {
  const idx = plot.cursor.idx, x = plot.data[0][idx], y = plot.posToVal(plot.cursor.top, "y");
  const rows = plot.lines.map((line, at) => ({ line, at: line.isRaw || !plot.series[at + 1].show ? null : shownIndex(plot.data[at + 1], idx, line.points), values: plot.data[at + 1] })).filter((row) => row.at != null);
  for (const row of rows) row.value = row.line.own ? row.line.own[row.at] : row.values[row.at];
  rows.sort((a, b) => b.value - a.value);
  const nearest = rows.reduce((best, row) => !best || Math.abs(row.values[row.at] - y) < Math.abs(best.values[best.at] - y) ? row : best, null);
  const listed = rows.length > MAX_TOOLTIP ? rows.slice(Math.max(0, Math.min(rows.indexOf(nearest) - MAX_TOOLTIP / 2, rows.length - MAX_TOOLTIP)), rows.length).slice(0, MAX_TOOLTIP) : rows;
  const near = plot.events.filter((event) => isNumber(event.x) && Math.abs(plot.valToPos(event.x, "x") - plot.cursor.left) < 5).slice(0, 4);
  return make("div", {}, make("b", { text: xWords(x) }),
    make("table", {}, make("tbody", {}, ...listed.map((row) => make("tr", { class: row === nearest && rows.length > 1 ? "nearest" : null }, make("td", {}, make("span", { class: "swatch", style: "background:" + row.line.color }), row.line.label), make("td", { class: "number", text: number(row.value, 5) }), make("td", { text: row.line.points && row.at !== idx ? "at " + xWords(plot.data[0][row.at]) : "" }))))),
    rows.length > listed.length ? make("div", { text: `the nearest ${listed.length} of ${rows.length}` }) : null,
    ...near.map((event) => make("div", { text: (isMany() ? event.run.name + ": " : "") + "iteration " + event.iteration + ": " + event.text })));
}
const MAX_TOOLTIP = 24;
function pointAt(plot) {
  if (plot !== pointed) return;
  const { left, top, idx } = plot.cursor, box = plot.over.getBoundingClientRect();
  if (idx == null || left == null || left < 0) hideHint();
  else showHint(tooltip(plot), box.left + left, box.top + top);
}
// arrow keys move the cursor of a chart
function moveCursor(plot, event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  event.preventDefault();
  pointed = plot;
  const x = plot.data[0], { min, max } = plot.scales.x, first = x.findIndex((value) => value >= min), end = x.findLastIndex((value) => value <= max);
  const from = plot.cursor.left >= 0 && plot.cursor.idx != null ? plot.cursor.idx + step * (event.shiftKey ? 10 : 1) : step < 0 ? end : first;
  plot.setCursor({ left: plot.valToPos(x[Math.max(first, Math.min(end, from))], "x"), top: plot.over.clientHeight / 2 });
}
// range of the visible values; with `clip` without runs that diverged and the outermost percent, where these are far away
function range(plot, low, high, scale) {
  let values = [];
  // a run that diverged may leave the axis: the others are readable
  const hasHealthy = view.clip && plot.lines?.some((line) => !line.isDiverged && line.values.some(isNumber));
  const [first, end] = [plot.scales.x.min, plot.scales.x.max], x = plot.data[0];
  for (let at = 1; at < plot.data.length; at++) {
    if (!plot.series[at].show || (hasHealthy && plot.lines[at - 1].isDiverged)) continue;
    plot.data[at].forEach((value, index) => { if (isNumber(value) && (first == null || (x[index] >= first && x[index] <= end)) && (!view.logY || value > 0)) values.push(value); });
  }
  if (!values.length) return view.logY && !plot.isStacked ? [0.1, 1] : [0, 1];
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
// the whole x axis; of a single value with space around it, as uPlot begins: it never returns from an empty range
function allOf(plot) {
  const x = plot.data[0], [first, end] = [x[0], x[x.length - 1]], [min, max] = first === end ? (view.logX ? uPlot.rangeLog(first, end, 10, true) : uPlot.rangeNum(first, end, 0.1, true)) : [first, end];
  return { min, max };
}
function setZoom(from, to, source) {
  if (isZooming) return;
  isZooming = true;
  view.zoom = from == null ? null : [from, to];
  for (const plot of charts) if (plot !== source) plot.setScale("x", view.zoom ? { min: from, max: to } : allOf(plot));
  isZooming = false;
  writeAddress();
}
const WHOLE_STEPS = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((step) => step * 10 ** power)).flat();
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
  const soft = css("--soft"), grid = css("--grid"), height = () => fullHeight(box, plot.root.offsetHeight - plot.height + 130) || options.height || 220, width = () => Math.max(180, box.clientWidth - 30);
  const axis = { stroke: soft, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui" };
  const settings = {
    width: width(), height: options.height || 220,
    legend: { show: options.legend !== false, live: true, markers: { width: 2 } },
    cursor: { sync: { key: "x", setSeries: false }, drag: { x: true, y: false }, focus: { prox: 16 }, points: { size: 6 } },
    scales: { x: { time: false, distr: view.logX ? 3 : 1 }, y: { distr: view.logY && !options.stacked ? 3 : 1, range } },
    axes: [{ ...axis, label: AXES.find(([id]) => id === view.axis)[1], labelSize: 16, labelFont: "11px system-ui", size: 32, values: axisValues, incrs: view.axis === "iteration" ? WHOLE_STEPS : undefined, space: view.axis === "wall_s" ? 90 : 50 }, { ...axis, size: 60, values: (plot, marks) => marks.map((mark) => mark == null ? "" : number(mark)) }],
    series: [{ label: view.axis === "wall_s" ? "wall time" : view.axis, value: (plot, value) => value == null ? "-" : view.axis === "wall_s" ? duration(value) : whole(Math.round(value)) },
      ...drawn.map((line) => ({ label: line.label, stroke: line.color, width: line.width || (line.points ? 0.8 : 1.6), dash: line.points ? [3, 3] : line.dash, alpha: line.alpha || 1, spanGaps: true, fill: line.fill, points: line.points ? { show: true, size: 8, fill: line.color, stroke: css("--card") } : { show: line.x.length < 30, size: 4 }, value: (plot, value, _, at) => number(line.own && at != null ? line.own[at] : value ?? (plot.cursor.idx == null ? last(line.values) : null), 5) }))], // without a cursor the newest, also of what ends before the chart does
    bands: options.bands,
    hooks: {
      draw: [drawEvents],
      setCursor: [(plot) => { if (plot.cursor.idx == null && plot.data[0].length) plot.setLegend({ idx: plot.data[0].length - 1 }, false); pointAt(plot); }],
      ready: [(plot) => { plot.setLegend({ idx: plot.data[0].length - 1 }, false); }],
      setSelect: [(plot) => { if (plot.select.width > 4) setZoom(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"), plot); }],
    },
  };
  const target = make("div", { role: "img", tabindex: 0, "aria-label": options.description || lines.map((line) => line.label + ", newest " + number(last(line.values))).join("; ") });
  box.append(target);
  const plot = new uPlot({ ...settings, hooks: { ...settings.hooks, init: [(each) => { each.lines = drawn; }] } }, joined, target);
  plot.events = options.events || eventMarks(shown);
  plot.isStacked = Boolean(options.stacked);
  plot.resize = () => plot.setSize({ width: width(), height: height() });
  plot.over.ondblclick = () => setZoom(null);
  plot.over.onmouseenter = () => { pointed = plot; };
  plot.over.onmouseleave = target.onblur = () => { pointed = null; hideHint(); };
  target.onkeydown = (event) => moveCursor(plot, event);
  drawn.forEach((line, at) => { if (line.isRaw) plot.root.querySelectorAll(".u-legend .u-series")[at + 1]?.remove(); });
  charts.push(plot);
  dashboard.charts[name] = plot;
  if (view.zoom) plot.setScale("x", { min: view.zoom[0], max: view.zoom[1] });
  const shownValues = joined.slice(1).filter((_, at) => !view.smoothing || drawn[at].isRaw || drawn[at].points || options.stacked); // not smoothed
  const rows = () => [[view.axis, ...lines.map((line) => line.label)], joined[0].map((x, at) => [x, ...(options.stacked ? lines.map((line) => line.own[at]) : shownValues.map((values) => values[at]))])];
  drawingTools(box, name, { title: options.description, rows, canvases: () => [plot.ctx.canvas], lines: () => lines });
  asTable(box, rows);
  return plot;
}
const isDiverged = (run) => run.findings?.some((finding) => finding.severity === "bad" && finding.card === "loss") ?? false;
// the color of a run and dashes for its lines; of a single run a color for each line
const styleOf = (run, index) => isMany() ? { color: colorOf(run.at), dash: DASHES[(index + Math.floor(run.at / 8)) % 4], isDiverged: isDiverged(run) } : { color: colorOf(index), dash: [] };
// one chart with a metric of all runs, or several metrics of them
function metricLines(metrics, factor = 1, unit = "") {
  return shown.flatMap((run) => metrics.filter((metric) => series(run, metric)).map((metric, index) => ({
    label: label(run, factor === 1 ? metric.replaceAll("_", " ") : unit), x: xOf(run), values: factor === 1 ? series(run, metric) : series(run, metric).map((value) => isNumber(value) ? value * factor : null),
    ...styleOf(run, index),
  })));
}
