// The table of runs: of a folder on a server, or of the runs that share the page. It sorts, filters, groups seeds and chooses.
const SEVERITIES = { bad: 0, warn: 1, ok: 2 };
const MAX_SETTINGS = 8; // that have a column
// what is wrong, by the part of the page that shows it
const TROUBLES = { loss: "bad loss", routing: "bad routing", ranks: "slow rank" };

// a run as a row: from the list of a server, or from all that is known of it
function rowOf(run) {
  const state = stateOf(run), isListed = !run.records;
  const findings = [...silentFinding(run), ...(isListed ? [run.finding].filter(Boolean) : run.findings || [])].sort((a, b) => (SEVERITIES[a.severity] ?? 1) - (SEVERITIES[b.severity] ?? 1));
  const finding = findings.find((each) => each.severity !== "ok"), isBadEnd = ["failed", "killed", "stalled", "silent"].includes(state.name);
  const figures = isListed ? { loss: run.lm_loss, validation: run.validation_loss, tokens_per_s: run.tokens_per_s, iteration: run.iteration, train_iters: run.train_iters } : {
    loss: last(series(run, "lm loss")), validation: run.newest_validation?.["lm loss"], tokens_per_s: run.throughput, tflops: latest(run, "tflops_per_gpu"), grad_norm: latest(run, "grad_norm"),
    iteration: run.progress?.iteration, train_iters: run.progress?.train_iters ?? run.head?.train_iters,
  };
  return { run, name: run.name, query: run.query, url: run.url, status: state, finding, ...figures, updated: run.updated, settings: (isListed ? run.settings : run.head?.settings) || {},
    // ended badly, diverged or NaN, another bad finding, interrupted, worth a look, fine
    urgency: isBadEnd ? 0 : finding?.severity === "bad" ? (finding.card === "loss" ? 1 : 2) : state.name === "interrupted" ? 3 : finding ? 4 : 5 };
}
const latest = (run, name) => last(series(run, name)) ?? records(run).constants?.[name] ?? null;

// ---- filter: words and conditions like lr=0.1, micro-batch-size!=2, validation<4, state=failed, optimizer=*adam*; all must hold
function condition(term) {
  const [, name, sign, wanted] = /^-{0,2}([\w-]+)(!=|>=|<=|=|<|>)(.*)$/.exec(term) || [];
  if (!name) return (row) => [row.name, row.status.words, row.finding?.text].join(" ").toLowerCase().includes(term.toLowerCase());
  const key = name.replaceAll("-", "_").toLowerCase(), pattern = new RegExp("^" + wanted.split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join(".*") + "$", "is");
  const isEqual = (value) => wanted !== "" && typeof value === "number" && !Number.isNaN(Number(wanted)) ? value === Number(wanted) : pattern.test(text(value));
  const signs = { "=": isEqual, "!=": (value) => !isEqual(value), "<": (value) => value < Number(wanted), ">": (value) => value > Number(wanted), "<=": (value) => value <= Number(wanted), ">=": (value) => value >= Number(wanted) };
  return (row) => {
    const own = { run: row.name, name: row.name, state: row.status.name, loss: row.loss, validation: row.validation, tokens_per_s: row.tokens_per_s, iteration: row.iteration };
    const value = key in row.settings ? row.settings[key] : own[key];
    if (value === undefined) return sign === "!=";
    return (isNumber(value) || !/[<>]/.test(sign)) && signs[sign](value);
  };
}
function filtered(rows) {
  const conditions = view.filter.split(/\s+/).filter(Boolean).map(condition);
  return rows.filter((row) => conditions.every((holds) => holds(row)));
}

// ---- columns
const uncompared = () => new Set([...(data.uncompared || [])].filter((name) => name !== "seed"));
function differingSettings(rows) {
  const skipped = uncompared(), known = rows.filter((row) => Object.keys(row.settings).length);
  return [...new Set(known.flatMap((row) => Object.keys(row.settings)))].filter((name) => !skipped.has(name) && new Set(known.map((row) => text(row.settings[name]))).size > 1).sort();
}
const settingWords = (value) => value === undefined ? "-" : typeof value === "number" && !Number.isInteger(value) ? number(value, 6) : text(value);
function runColumns(rows) {
  const hasSome = (name) => rows.some((row) => isNumber(row[name])), figure = (id, title, digits, factor = 1) => ({ id, title, kind: "number", value: (row) => row[id], cell: (row) => isNumber(row[id]) ? number(row[id] * factor, digits) : "-", isFigure: true, digits, factor });
  const flops = flopsUnit(rows.map((row) => row.tflops));
  return [
    { id: "name", title: "run", value: (row) => row.name, cell: nameCell },
    { id: "state", title: "state", value: (row) => row.urgency, cell: stateCell },
    { id: "finding", title: "worst finding", value: (row) => row.finding ? row.finding.text : null, cell: findingCell, kind: "worst" },
    { id: "iteration", title: "iteration", kind: "number", value: (row) => row.iteration, cell: (row) => row.train_iters ? whole(row.iteration) + " of " + whole(row.train_iters) : whole(row.iteration) },
    figure("loss", "training loss", 5), figure("validation", "validation loss", 5), figure("tokens_per_s", "tokens/s", 4),
    ...differingSettings(rows).slice(0, MAX_SETTINGS).map((name) => ({ id: "setting-" + name, title: name, kind: "setting", value: (row) => row.settings[name] ?? null, cell: (row) => settingWords(row.settings[name]) })),
    ...(hasSome("tflops") ? [figure("tflops", flops.name + " per rank", 4, flops.factor)] : []), ...(hasSome("grad_norm") ? [figure("grad_norm", "gradient norm", 4)] : []),
    { id: "updated", title: "updated", value: (row) => row.updated, cell: (row) => row.updated || "-" },
  ];
}
function nameCell(row) {
  return make("span", {}, row.url ? null : make("span", { class: "swatch", style: "background:" + colorOf(row.run.at) }), row.url ? make("a", { href: row.url, text: row.name }) : row.name);
}
// the finding says since when
function stateCell(row) {
  const trouble = row.finding?.severity === "bad" && TROUBLES[row.finding.card];
  return make("span", {}, make("span", { class: "status " + (row.status.name || ""), title: row.status.words, text: row.status.name === "silent" ? "no sign of life" : row.status.name || "-" }), trouble ? " " : null, trouble ? make("span", { class: "status bad", text: trouble }) : null);
}
function findingCell(row) {
  if (!row.finding) return "-";
  const severity = SEVERITIES[row.finding.severity] == null ? "warn" : row.finding.severity;
  return make("span", { class: "worst-text " + severity, title: row.finding.text, text: row.finding.text });
}

// ---- order
// what is unknown comes last, whatever the direction
function compareValues(a, b, sign) {
  const isMissing = (value) => value == null || Number.isNaN(value);
  if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
  return sign * (typeof a === "number" && typeof b === "number" ? a - b : text(a).localeCompare(text(b), "en", { numeric: true }));
}
function sorted(items, columns, valueOf) {
  const sign = view.sort.startsWith("-") ? -1 : 1, column = columns.find(({ id }) => id === view.sort.replace(/^-/, "")) || columns[1];
  return [...items].sort((a, b) => compareValues(valueOf(a, column), valueOf(b, column), sign));
}
function seedGroups(rows) {
  const groups = new Map(), skipped = uncompared();
  for (const row of rows) {
    const names = Object.keys(row.settings).filter((name) => name !== "seed" && !skipped.has(name)).sort();
    const key = names.length ? JSON.stringify(names.map((name) => [name, row.settings[name]])) : row.name;
    groups.set(key, [...(groups.get(key) || []), row]);
  }
  return [...groups.values()];
}
const mean = (values) => values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
const meanOf = (rows, column) => mean(rows.map(column.value).filter(isNumber));
function meanWords(rows, column) {
  const values = rows.map(column.value).filter(isNumber), middle = mean(values);
  if (middle == null) return "-";
  const deviation = values.length > 1 ? Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1)) : null;
  return number(middle * column.factor, column.digits) + (deviation == null ? "" : " ± " + number(deviation * column.factor, 2));
}

// ---- choice: of a list the runs to compare, of a page the runs that its charts show
const isChosen = (row) => row.url ? view.picked.has(row.name) : !view.hidden.has(row.name);
function choose(rows, isOn) {
  for (const row of rows) {
    const set = row.url ? view.picked : view.hidden;
    if (isOn === Boolean(row.url)) set.add(row.name);
    else set.delete(row.name);
  }
}

function runTable(box, runs) {
  const all = runs.map(rowOf), isList = Boolean(data.list && !data.runs.length), changed = () => { writeAddress(); if (isList) fill(); else draw(); };
  const search = make("input", { type: "search", id: "filter-runs", placeholder: "filter: text, lr=0.1, loss<4, state=failed", "aria-label": "filter the runs by text or by conditions like lr=0.1", value: view.filter, spellcheck: "false" });
  const seeds = make("input", { type: "checkbox", id: "group-seeds" }), counts = make("span", { class: "note", role: "status", id: "runs-shown" }), inner = make("div", { class: "card scroll", id: "runs-table", tabindex: 0 });
  const compare = isList ? make("button", { type: "button", id: "compare", text: "Compare the chosen runs", onclick: () => { location.href = data.live.compare_url + all.filter(isChosen).map((row) => "&" + row.query).join(""); } }) : null;
  seeds.checked = view.seeds;
  seeds.onchange = () => { view.seeds = seeds.checked; writeAddress(); fill(); };
  search.oninput = () => { view.filter = search.value; writeAddress(); fill(); };
  box.append(make("div", { class: "tools" }, search, all.some((row) => "seed" in row.settings) ? make("label", {}, seeds, "group seeds") : null, compare, counts), inner);

  function check(rows, id, words) {
    const input = make("input", { type: "checkbox", id, "aria-label": words, onchange: () => { choose(rows, input.checked); changed(); } }), count = rows.filter(isChosen).length;
    input.checked = rows.length > 0 && count === rows.length;
    input.indeterminate = count > 0 && count < rows.length;
    return input;
  }
  function headCell(column) {
    const isSorted = view.sort.replace(/^-/, "") === column.id, isDown = isSorted && view.sort.startsWith("-");
    const button = make("button", { type: "button", class: "sort", id: "sort-" + column.id, text: column.title + (isSorted ? (isDown ? " ▾" : " ▴") : ""), onclick: () => { view.sort = isSorted && !isDown ? "-" + column.id : column.id; writeAddress(); fill(); element("sort-" + column.id)?.focus(); } });
    return make("th", { scope: "col", class: column.kind, "aria-sort": isSorted ? (isDown ? "descending" : "ascending") : null }, button);
  }
  function rowLine(row, columns, isMember) {
    const verb = isList ? "choose " : "show ";
    return make("tr", { class: (row.urgency < 3 ? "urgent" : "") + (isMember ? " member" : "") }, make("td", {}, check([row], "choose-" + all.indexOf(row), verb + row.name)), ...columns.map((column, at) => make(at ? "td" : "th", { class: column.kind, scope: at ? null : "row" }, column.cell(row))));
  }
  function groupLine(rows, columns) {
    const same = (column) => new Set(rows.map((row) => text(column.value(row)))).size === 1;
    return make("tr", { class: "group" }, make("td", {}, check(rows, "choose-group-" + all.indexOf(rows[0]), "all seeds of " + rows[0].name)), ...columns.map((column, at) => {
      if (!at) return make("th", { scope: "row", text: plural(rows.length, "seed") + " of " + rows[0].name });
      return make("td", { class: column.kind, text: column.isFigure ? meanWords(rows, column) : column.kind === "setting" && same(column) ? column.cell(rows[0]) : "" });
    }));
  }
  function fill() {
    const rows = filtered(all), columns = runColumns(rows.length ? rows : all), chosen = all.filter(isChosen), left = inner.scrollLeft;
    let lines;
    if (view.seeds) {
      const groups = seedGroups(rows).map((group) => sorted(group, columns, (row, column) => column.value(row)));
      const valueOf = (group, column) => group.length > 1 && column.isFigure ? meanOf(group, column) : column.value(group[0]);
      lines = sorted(groups, columns, valueOf).flatMap((group) => group.length > 1 ? [groupLine(group, columns), ...group.map((row) => rowLine(row, columns, true))] : [rowLine(group[0], columns)]);
    } else lines = sorted(rows, columns, (row, column) => column.value(row)).map((row) => rowLine(row, columns));
    const nothing = all.length ? "No run fits the filter." : "No run is here yet.";
    inner.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, check(rows, "choose-all", isList ? "choose all that are listed" : "show all that are listed")), ...columns.map(headCell))), make("tbody", {}, ...lines)), ...(rows.length ? [] : [make("p", { text: nothing })]));
    inner.scrollLeft = left;
    const more = differingSettings(rows).slice(MAX_SETTINGS), most = data.live?.max_runs || Infinity;
    counts.textContent = [rows.length < all.length ? `${rows.length} of ${plural(all.length, "run")}` : plural(all.length, "run"), isList ? plural(chosen.length, "run") + " chosen" + (chosen.length > most ? `, at most ${most} can be compared` : "") : chosen.length < all.length ? `charts show ${chosen.length}` : null, more.length ? `${plural(more.length, "setting")} more ${more.length === 1 ? "differs" : "differ"}: ${more.slice(0, 5).join(", ")}${more.length > 5 ? ", ..." : ""}` : null].filter(Boolean).join(" · ");
    if (compare) compare.disabled = chosen.length < 2 || chosen.length > most;
  }
  fill();
}
