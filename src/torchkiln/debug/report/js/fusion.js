// Fusion decisions: what runs in one kernel, and why other things do not.

import { choice, el, table } from "report/dom.js";
import { counted } from "report/figures.js";
import { nodeLink, several } from "report/links.js";

const MOST_ROWS = 300;

let shown = "no";

export function fusionView(compilation) {
  const { fusions } = compilation.data;
  if (!fusions.length) return { element: el("p", { class: "remark" }, "No fusion was considered in this graph.") };
  const fused = fusions.filter((fusion) => fusion.fused);
  const apart = fusions.filter((fusion) => !fusion.fused);
  if (!apart.length) shown = "yes";
  const lists = { no: apart, yes: fused };
  const body = el("div", {});
  const nodes = (ids) =>
    several(
      ids.map((id) => nodeLink(compilation.lastGraph, id)),
      4,
    );
  const columns = [
    ["loop of", (fusion) => nodes(fusion.second), "text"],
    ["into", (fusion) => nodes(fusion.first), "text"],
    ["how", (fusion) => `${fusion.fused ? "" : "not "}${fusion.kind === "inline" ? "inlined" : "fused"}`, "text"],
    ["why not", (fusion) => fusion.reason, "text"],
  ];
  const show = (which) => {
    shown = which;
    const rows = lists[which];
    body.replaceChildren(
      ...[
        which === "no" && reasons(apart),
        table("Fusion decisions", which === "no" ? columns : columns.slice(0, 3), rows.slice(0, MOST_ROWS)),
        rows.length > MOST_ROWS && el("p", { class: "remark" }, `The first ${MOST_ROWS} of ${rows.length}.`),
      ].filter(Boolean),
    );
  };
  const choices = [
    ["no", `${apart.length} apart`],
    ["yes", `${fused.length} fused`],
  ];
  show(shown);
  return {
    element: el(
      "div",
      { class: "page" },
      el("h2", {}, counted(fusions.length, "fusion decision")),
      choice("Decisions", choices, shown, show),
      body,
    ),
  };
}

// How often each reason held.
function reasons(apart) {
  const counts = new Map();
  for (const { reason } of apart) counts.set(reason, (counts.get(reason) ?? 0) + 1);
  const rows = [...counts].sort((a, b) => b[1] - a[1]);
  if (rows.length === apart.length) return null;
  return el(
    "details",
    { open: rows.length <= 8 },
    el("summary", {}, counted(rows.length, "reason")),
    el(
      "ul",
      { class: "plain reasons" },
      rows.map(([reason, count]) =>
        el("li", {}, el("span", { class: "count" }, `${count} ×`), ` ${reason || "no reason given"}`),
      ),
    ),
  );
}
