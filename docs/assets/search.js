/* The search library reads a leading "-" as "without this word": a pasted flag such as --moe-router-topk loses its dashes. */
document.addEventListener(
  "input",
  (event) => {
    const box = event.target;
    if (box instanceof HTMLInputElement && box.matches(".md-search__input") && /(^|\s)-/.test(box.value)) {
      box.value = box.value.replace(/(^|\s)-+/g, "$1");
    }
  },
  true
);
