"use strict";
// Sorts the table by a column and filters its rows; without script the table is whole and in order.
(() => {
  const table = document.getElementById("verdicts");
  const status = document.getElementById("shown");
  if (!table) return;
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const key = (row, column) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
  const compare = (a, b) => {
    const x = Number(a), y = Number(b);
    if (a !== "" && b !== "" && !Number.isNaN(x) && !Number.isNaN(y)) return x - y;
    if ((a === "") !== (b === "")) return a === "" ? 1 : -1;
    return a < b ? -1 : a > b ? 1 : 0;
  };
  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row, place) => ({row, place, key: key(row, column)}));
      rows.sort((a, b) => (down ? -1 : 1) * compare(a.key, b.key) || a.place - b.place);
      body.append(...rows.map((each) => each.row));
    });
  });
  const verdict = document.getElementById("only");
  const words = document.getElementById("words");
  const filter = () => {
    const wanted = words.value.trim().toLowerCase();
    let shown = 0;
    for (const row of body.rows) {
      const fits = (verdict.value === "" || row.dataset.verdict === verdict.value ||
          (verdict.value === "measured" && row.dataset.measured === "yes")) &&
        row.textContent.toLowerCase().includes(wanted);
      row.hidden = !fits;
      shown += fits ? 1 : 0;
    }
    status.textContent = `${shown} of ${body.rows.length} claims shown`;
  };
  verdict.addEventListener("change", filter);
  words.addEventListener("input", filter);
  document.getElementById("filters").hidden = false;
})();
