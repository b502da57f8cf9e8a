// What every drawing offers: its numbers as CSV, its picture as PNG, and the whole window.
function download(name, type, content) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const link = make("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
const fileName = (name, kind) => ((isMany() ? "runs" : data.runs[0]?.name || "run") + "-" + name).replace(/[^\w.-]+/g, "_") + "." + kind;
function csv([head, body]) {
  const cell = (value) => value == null ? "" : /[",\r\n]/.test(value) ? '"' + String(value).replaceAll('"', '""') + '"' : String(value);
  return [head, ...body].map((row) => row.map(cell).join(",") + "\r\n").join("");
}
// a canvas with the title, the drawing and the names of its lines
function picture(title, canvases, lines = []) {
  const dense = devicePixelRatio || 1, font = 12 * dense, row = 18 * dense, pad = 10 * dense, wide = Math.max(...canvases.map((each) => each.width));
  const out = make("canvas"), paint = out.getContext("2d"), places = [];
  paint.font = font + "px system-ui";
  let x = 0, rows = lines.length ? 1 : 0;
  for (const line of lines) {
    const length = paint.measureText(line.label).width + 30 * dense;
    if (x && x + length > wide) { x = 0; rows += 1; }
    places.push([x, rows - 1]);
    x += length;
  }
  const top = pad + row * 1.4, tall = canvases.reduce((sum, each) => sum + each.height, 0);
  out.width = wide + 2 * pad;
  out.height = top + tall + rows * row + 2 * pad;
  paint.fillStyle = css("--card");
  paint.fillRect(0, 0, out.width, out.height);
  paint.fillStyle = css("--ink");
  paint.textBaseline = "middle";
  paint.font = `600 ${font * 1.15}px system-ui`;
  paint.fillText(title, pad, pad + row / 2);
  let y = top;
  for (const each of canvases) { paint.drawImage(each, pad, y); y += each.height; }
  paint.font = font + "px system-ui";
  lines.forEach((line, at) => {
    const [left, line_row] = places[at], middle = y + pad / 2 + (line_row + 0.5) * row;
    paint.fillStyle = line.color;
    paint.fillRect(pad + left, middle - 4 * dense, 12 * dense, 8 * dense);
    paint.fillStyle = css("--ink");
    paint.fillText(line.label, pad + left + 17 * dense, middle);
  });
  return out;
}
const resizeDrawings = () => { charts.forEach((plot) => plot.resize()); drawMaps(Object.values(dashboard.maps)); };
function setFull(box, isFull) {
  box.classList.toggle("full", isFull);
  document.body.classList.toggle("has-full", isFull);
  const button = box.querySelector("button.full-screen");
  if (button) button.textContent = isFull ? "Close" : "Full screen";
  resizeDrawings();
}
// of a drawing's box; returns whether one was open
function closeFull() {
  const box = document.querySelector(".full");
  if (box) setFull(box, false);
  return Boolean(box);
}
// height of a drawing that fills the window, without what surrounds it
const fullHeight = (box, around) => box.classList.contains("full") ? Math.max(200, innerHeight - around) : null;
// rows(): [head, body], in full precision; canvases(): what is drawn; lines(): of the legend
function drawingTools(box, name, { title, rows, canvases, lines }) {
  const words = box.querySelector("h3")?.firstChild.textContent.trim() || title || name.replaceAll("_", " ");
  const button = (text, kind, onclick) => make("button", { type: "button", class: kind, text, "aria-label": `${text}: ${words}`, onclick });
  const save = () => picture(words, canvases(), lines?.()).toBlob((blob) => download(fileName(name, "png"), "image/png", blob));
  const full = button("Full screen", "full-screen", () => setFull(box, !box.classList.contains("full")));
  full.id = "full-" + name;
  full.removeAttribute("aria-label"); // the text changes
  full.setAttribute("title", words);
  box.prepend(make("div", { class: "drawing-tools" }, button("CSV", "csv", () => download(fileName(name, "csv"), "text/csv", csv(rows()))), button("PNG", "png", save), full));
}
