// Values of runs and how they are written; what the page remembers.
const element = (id) => document.getElementById(id);
const RUN_COLORS = { light: ["#0b5cad", "#c2410c", "#15803d", "#a21caf", "#a16207", "#0e7490", "#4d4d4d", "#be185d"], dark: ["#6cb2ff", "#ff9a5c", "#5fd38a", "#e29bf5", "#f0c24b", "#5cd1e5", "#c9ced6", "#ff8fb8"] };
const PART_COLORS = ["#4e79a7", "#f28e2b", "#76b7b2", "#b07aa1", "#9c9c9c", "#59a14f", "#edc948", "#e15759"];
const EVENT_COLORS = { resume: "#7a8290", save: "#7a8290", evaluation: "#7a8290", sample: "#7a8290", skip: "#d97706", rerun: "#d97706", nan: "#d33a2f", slow_rank: "#d33a2f", other: "#7a8290" };
const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4]];
// what the page remembers between redraws; most of it is in its address, too (address.js)
const view = { axis: "iteration", smoothing: 0, logX: false, logY: false, clip: true, perplexity: false, zoom: null, health: null, theme: null, changed: true, search: "", filter: "", sort: "state", seeds: false, hidden: new Set(), picked: new Set() };
// shown: the runs that are not hidden
let data = dashboard.data, shown = [], charts = [], isZooming = false;

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
// the unit of rates that are in TFLOP/s, by the largest: those of a CPU are thousandths of one
function flopsUnit(values) {
  const largest = Math.max(0, ...values.filter(isNumber));
  return [["TFLOP/s", 1], ["GFLOP/s", 1e3], ["MFLOP/s", 1e6]].map(([name, factor]) => ({ name, factor })).find(({ factor }) => !largest || largest * factor >= 1) || { name: "FLOP/s", factor: 1e12 };
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

const AXES = [["iteration", "iteration"], ["tokens", "tokens"], ["wall_s", "wall time"]];
const records = (run) => run.records || {};
const xOf = (run, axis = view.axis) => records(run)[axis] || records(run).iteration || [];
const series = (run, name) => (records(run).series || {})[name];
const last = (values) => { for (let at = (values || []).length - 1; at >= 0; at--) if (isNumber(values[at])) return values[at]; return null; };
const names = (pattern) => [...new Set(shown.flatMap((run) => Object.keys(records(run).series || {})))].filter((name) => pattern.test(name));
const colorOf = (at) => RUN_COLORS[theme()][at % 8];
const isMany = () => data.runs.length > 1;
const label = (run, name) => isMany() ? run.name + ": " + name : name;
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

const media = window.matchMedia("(prefers-color-scheme: dark)");
const theme = () => view.theme || (media.matches ? "dark" : "light");
function applyTheme() {
  document.documentElement.dataset.theme = theme();
  element("theme").textContent = theme() === "dark" ? "Light" : "Dark";
}
const remember = (name, value) => { try { localStorage.setItem("moe-trainer-" + name, value); } catch { /* a file without storage */ } };
const remembered = (name) => { try { return localStorage.getItem("moe-trainer-" + name); } catch { return null; } };
