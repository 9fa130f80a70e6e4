// Keys that work everywhere, and the dialog that lists them.

import { byId, el } from "report/dom.js";
import { go, VIEWS } from "report/route.js";

const KEYS = [
  ["/", "search"],
  ["1 … 7", "the parts of the report"],
  ["← →", "pass before and after; nodes, stages and lines beside"],
  ["↑ ↓", "nodes above and below; lines of the source; results"],
  ["Enter", "open a group, select a node"],
  ["+ − 0", "zoom in, zoom out, fit"],
  ["Shift + arrows", "move the drawing"],
  ["Esc", "select nothing"],
  ["?", "these keys"],
];

const dialog = el(
  "dialog",
  { "aria-label": "Keys" },
  el("h2", {}, "Keys"),
  el(
    "table",
    {},
    el(
      "tbody",
      {},
      KEYS.map(([key, what]) =>
        el("tr", {}, el("th", { scope: "row" }, el("kbd", {}, key)), el("td", { class: "text" }, what)),
      ),
    ),
  ),
  el("form", { method: "dialog" }, el("button", {}, "Close")),
);

export function startKeys() {
  document.body.append(dialog);
  byId("help").addEventListener("click", () => dialog.showModal());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    if (event.target.matches("input[type=search], select, textarea")) return;
    const view = VIEWS[Number(event.key) - 1];
    if (event.key === "/") byId("search").focus();
    else if (event.key === "?") dialog.showModal();
    else if (event.key === "Escape") go({ on: null });
    else if (view) go({ view: view[0] });
    else return;
    event.preventDefault();
  });
}
