// Heat maps of experts, layers and ranks.
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

// maps that wait until the page is complete: each look at a width lays out the page, so all are measured, then all are drawn
let waiting = null;
function drawMaps(maps) {
  for (const map of maps) map.measure();
  for (const map of maps) map.paint();
}

// rows: names; columns: names; value(row, column); words(row, column): the hint
// numbers(): its table, [head, body]; write(number): how a cell of it is written
function heatMap(name, box, { rows, columns, value, words, scale, rowTitle, columnTitle, zero, numbers, write }) {
  const wrap = make("div", { class: "map" }), canvas = make("canvas", { tabindex: 0, role: "img", "aria-label": `${rowTitle} by ${columnTitle}; arrow keys read the values` });
  wrap.append(canvas);
  box.append(wrap);
  const foot = 34, head = 2;
  let left = 40, wide = 1, high = 1, room = 0, chosen = null;
  function draw() {
    const paint = canvas.getContext("2d"), dense = devicePixelRatio || 1;
    paint.font = "11px system-ui";
    left = 26 + Math.max(...rows.map((row) => paint.measureText(row).width));
    const tall = fullHeight(box, 220);
    wide = Math.max(2, Math.min(tall ? 160 : 70, (room - 32 - left) / columns.length));
    high = Math.max(2, Math.min(tall ? 60 : 24, (tall || 460) / rows.length));
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
    const paint = legend.getContext("2d"), dense = devicePixelRatio || 1, length = Math.min(300, Math.max(100, room - 160));
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
  const map = { redraw: draw, measure: () => { room = box.clientWidth; }, paint: () => { draw(); drawLegend(); }, cell: (row, column) => [left + (column + 0.5) * wide, head + (row + 0.5) * high], canvas, details: asTable(box, numbers, write) };
  dashboard.maps[name] = map;
  drawingTools(box, "map-" + name, { rows: numbers, canvases: () => [canvas, legend] });
  if (waiting) waiting.push(map);
  else drawMaps([map]);
  return map;
}
// tokens of cells relative to a mean, with a slider over iterations and a table of the shown one
// tables[at][row][column]: tokens; means[at][row]; where(row, column): the cell in words
function tokenMap(name, box, iterations, tables, means, { where, ...names }) {
  let at = iterations.length - 1;
  const slider = make("input", { type: "range", min: 0, max: at, value: at, "aria-label": "iteration" }), shown = make("output", { text: "iteration " + iterations[at] });
  box.append(make("div", { class: "tools" }, make("label", {}, "iteration ", slider), shown));
  const value = (row, column) => tables[at][row][column] / means[at][row];
  const map = heatMap(name, box, { ...names, numbers: () => [[names.rowTitle, ...names.columns.map((column) => names.columnTitle + " " + column)], tables[at].map((row, index) => [names.rows[index], ...row])], write: whole, scale: ratios(4), value, words: (row, column) => `${where(row, column)}: ${whole(tables[at][row][column])} tokens, ${number(value(row, column), 3)} x the mean` });
  slider.oninput = () => { at = +slider.value; shown.textContent = "iteration " + iterations[at]; map.redraw(); map.details.refresh(); };
  map.slider = slider;
  return map;
}
