// The address of the page holds what is shown, so that it can be sent to someone: #zoom=100,200&hide=RUN&filter=lr=0.1&sort=-validation
// key of the address, how it is written ("" for the default), how it is read
const ADDRESS = [
  ["axis", () => view.axis === "iteration" ? "" : view.axis, (value) => { view.axis = AXES.some(([name]) => name === value) ? value : "iteration"; }],
  ["zoom", () => view.zoom ? view.zoom.map((value) => +value.toPrecision(8)).join(",") : "", (value) => { const found = value.split(",").map(Number); view.zoom = value && found.length === 2 && found.every(Number.isFinite) && found[0] < found[1] ? found : null; }],
  ["smoothing", () => view.smoothing || "", (value) => { view.smoothing = Math.max(0, Math.min(0.99, Number(value) || 0)); }],
  ["logx", () => view.logX ? 1 : "", (value) => { view.logX = value === "1"; }],
  ["logy", () => view.logY ? 1 : "", (value) => { view.logY = value === "1"; }],
  ["clip", () => view.clip ? "" : 0, (value) => { view.clip = value !== "0"; }],
  ["perplexity", () => view.perplexity ? 1 : "", (value) => { view.perplexity = value === "1"; }],
  ["filter", () => view.filter, (value) => { view.filter = value; }],
  ["sort", () => view.sort === "state" ? "" : view.sort, (value) => { view.sort = value || "state"; }],
  ["seeds", () => view.seeds ? 1 : "", (value) => { view.seeds = value === "1"; }],
];
const ADDRESS_SETS = [["hide", "hidden"], ["pick", "picked"]];

function writeAddress() {
  const found = new URLSearchParams();
  for (const [key, write] of ADDRESS) if (write() !== "") found.set(key, write());
  for (const [key, name] of ADDRESS_SETS) for (const each of view[name]) found.append(key, each);
  const words = found.toString();
  // browsers limit how often it changes; the next change writes everything
  try { if (words !== location.hash.slice(1)) history.replaceState(null, "", words ? "#" + words : location.pathname + location.search); } catch { /* too often */ }
}
function readAddress() {
  const found = new URLSearchParams(location.hash.slice(1));
  for (const [key, , read] of ADDRESS) read(found.get(key) || "");
  for (const [key, name] of ADDRESS_SETS) view[name] = new Set(found.getAll(key));
}
// the controls as the address says
function showControls() {
  element("smoothing").value = view.smoothing;
  element("smoothing-value").textContent = view.smoothing;
  for (const [id, name] of SWITCHES) element(id).checked = view[name];
}
const SWITCHES = [["log-y", "logY"], ["log-x", "logX"], ["clip", "clip"], ["perplexity", "perplexity"]];

// links to a place of the page move there and leave the address as it is
function goTo(id) {
  const target = id && document.getElementById(id);
  if (!target) return;
  target.scrollIntoView();
  if (target.tabIndex < 0) target.setAttribute("tabindex", "-1");
  target.focus({ preventScroll: true });
}
