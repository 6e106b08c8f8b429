// Filters and sorts the table of guide/results. Without it every row stands there.
"use strict";

function explore(form, table) {
  const rows = [...table.tBodies[0].rows];
  const count = document.getElementById("explorer-count");
  const fields = [...form.elements].filter((field) => field.name);
  const key = (row, column) => {
    const cell = row.cells[column];
    const number = Number(cell.dataset.value ?? cell.textContent);
    return Number.isNaN(number) || cell.textContent === "–" ? cell.textContent : number;
  };

  function filter() {
    let shown = 0;
    for (const row of rows) {
      row.hidden = fields.some((field) => field.value && row.dataset[field.name] !== field.value);
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${rows.length} rows`;
    const state = new URLSearchParams(fields.filter((f) => f.value).map((f) => [f.name, f.value]));
    history.replaceState(null, "", state.size ? `?${state}` : location.pathname);
  }

  function sort(header, column) {
    const down = header.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    const sign = down ? -1 : 1;
    rows.sort((a, b) => {
      const [x, y] = [key(a, column), key(b, column)];
      const order = typeof x === "number" && typeof y === "number" ? x - y
        : String(x).localeCompare(String(y), "en", { numeric: true });
      return sign * order;
    });
    table.tBodies[0].append(...rows);
  }

  [...table.tHead.rows[0].cells].slice(0, -1).forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = header.textContent;
    button.addEventListener("click", () => sort(header, column));
    header.replaceChildren(button);
  });
  for (const [name, value] of new URLSearchParams(location.search)) {
    if (form.elements[name]) form.elements[name].value = value;
  }
  form.hidden = false;
  form.addEventListener("input", filter);
  filter();
}

explore(document.getElementById("explorer"), document.getElementById("explorer-rows"));
