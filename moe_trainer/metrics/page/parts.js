// Sections, cards, tables and hints.
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
function asTable(box, rows, write = (value) => number(value, 6)) {
  const details = make("details", {}, make("summary", { text: "Table" }));
  details.ontoggle = () => {
    if (!details.open || details.childNodes.length > 1) return;
    const [head, body] = rows(), step = Math.ceil(body.length / 200);
    details.append(make("div", { class: "scroll", tabindex: 0 }, table(head, body.filter((_, at) => at % step === 0 || at === body.length - 1).map((row) => row.map((cell) => typeof cell === "number" || cell == null ? write(cell) : cell)), head.map(() => "number"))));
  };
  details.refresh = () => { details.replaceChildren(details.firstChild); details.ontoggle(); };
  box.append(details);
  return details;
}

const hint = element("hint");
function showHint(words, x, y) {
  hint.replaceChildren(words);
  hint.hidden = false;
  const box = hint.getBoundingClientRect();
  // next to the pointer, where there is room for it
  hint.style.left = Math.max(4, x + 18 + box.width > innerWidth - 8 ? x - box.width - 18 : x + 18) + "px";
  hint.style.top = Math.max(4, Math.min(y + 12, innerHeight - box.height - 8)) + "px";
}
const hideHint = () => { hint.hidden = true; };
