// Draws the page of moe_trainer/metrics/dashboard.py. All values come from the element #data, on a server also from its address.
function draw() {
  const begin = performance.now(), top = scrollY, focused = document.activeElement?.id, openDetails = element("all-findings")?.open, rows = element("runs-table"), scrolled = rows && [rows.scrollLeft, rows.scrollTop];
  closeFull();
  charts.forEach((plot) => plot.destroy());
  charts = [];
  dashboard.charts = {};
  dashboard.maps = {};
  waiting = [];
  hideHint();
  applyTheme();
  for (const id of ["list", "runs", "findings", "figures", "charts", "sections"]) element(id).replaceChildren();
  data.runs = data.runs || [];
  data.runs.forEach((run, at) => { run.at = at; });
  const main = data.runs[0], count = data.runs.length;
  if (count < 2) view.hidden.clear();
  shown = data.runs.filter((run) => !view.hidden.has(run.name));
  element("title").textContent = count > 1 ? count + " runs" : main?.name || "Runs";
  document.title = count > 1 ? data.runs.map((run) => run.name).join(", ") : main?.name || "moe-trainer runs";
  element("state").textContent = (data.live ? "live, " : "") + "page written " + (data.written || "-");
  element("all-runs").hidden = !data.live?.list_url || !count;
  if (data.live?.list_url) element("all-runs").href = data.live.list_url;
  element("list").hidden = !data.list || count > 0;
  element("controls").hidden = !count;
  const axes = AXES.filter(([name]) => data.runs.every((run) => records(run)[name]?.some(isNumber)));
  if (axes.length && !axes.some(([name]) => name === view.axis)) view.axis = axes[0][0];
  element("axis").replaceChildren(...axes.map(([name, words]) => make("option", { value: name, text: words, selected: name === view.axis })));
  element("runs").className = count > 1 ? "table" : "cards";
  if (count > 1) runTable(element("runs"), data.runs);
  else if (count) element("runs").append(runCard(main, 0));
  else if (data.list) runTable(element("list"), data.list);
  if (count) {
    findings();
    if (openDetails) element("all-findings").open = true;
    if (count === 1) figures();
    if (shown.some((run) => xOf(run).length)) {
      lossSection();
      metricSections();
      rankSection();
      routingSection();
    }
    if (!shown.length) element("charts").append(make("p", { class: "note", text: "No run is chosen in the table." }));
    eventSection();
    sampleSection();
    if (count > 1) section("details", "Runs").append(...shown.map((run) => runCard(run, run.at)));
    settingsSection();
  }
  reportSection();
  drawMaps(waiting);
  waiting = null;
  scrollTo(0, top);
  if (scrolled) element("runs-table")?.scrollTo(...scrolled);
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  dashboard.draws += 1;
  dashboard.drawMs = performance.now() - begin;
}
dashboard.view = view;
dashboard.draw = draw;
dashboard.setZoom = setZoom;

view.theme = remembered("theme");
element("theme").onclick = () => { view.theme = theme() === "dark" ? "light" : "dark"; remember("theme", view.theme); draw(); };
media.addEventListener?.("change", () => { if (!view.theme) draw(); });
const change = () => { writeAddress(); draw(); };
element("axis").onchange = (event) => { view.axis = event.target.value; view.zoom = null; change(); };
element("smoothing").oninput = (event) => { view.smoothing = +event.target.value; showControls(); change(); };
for (const [id, name] of SWITCHES) element(id).onchange = (event) => { view[name] = event.target.checked; change(); };
element("reset").onclick = () => setZoom(null);
document.addEventListener("keydown", (event) => { if (event.key !== "Escape") return;
  hideHint();
  if (!closeFull() && !event.target.matches?.("input[type=search]")) setZoom(null);
});
document.addEventListener("click", (event) => {
  const link = event.target.closest?.('a[href^="#"]');
  if (!link) return;
  event.preventDefault();
  goTo(link.getAttribute("href").slice(1));
});
addEventListener("hashchange", () => { readAddress(); showControls(); draw(); });
let resizing = null;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(resizeDrawings, 100); });
const anchor = location.hash.slice(1);
readAddress();
showControls();
draw();
goTo(anchor); // an address of a section
if (data.live) {
  setInterval(async () => {
    if (document.hidden || (data.runs.length && data.runs.every((run) => run.status === "finished"))) return;
    if (document.activeElement?.matches("input[type=search], input[type=range], select, canvas, [role=img]") || document.querySelector(".full, .u-select[style*='width: ']:not([style*='width: 0px'])")) return; // someone uses it
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
