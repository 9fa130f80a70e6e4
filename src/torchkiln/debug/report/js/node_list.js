// A graph as a list of modules and nodes: for readers who do not see the drawing, and for small screens.

import { el } from "report/dom.js";
import { counted, tensor } from "report/figures.js";
import { groupNodes } from "report/groups.js";
import { nodeLink } from "report/links.js";

const lists = new WeakMap();

export function nodeList(stage, stageNumber, related) {
  if (!lists.has(stage)) lists.set(stage, groupNodes(stage));
  const { root } = lists.get(stage);
  return el(
    "div",
    { class: "node-list", role: "region", "aria-label": `Nodes of ${stage.name}` },
    content(root, stageNumber, related),
  );
}

function content(group, stageNumber, related) {
  return el(
    "ul",
    {},
    group.children.map((child) =>
      el("li", {}, child.node ? nodeRow(child.node, stageNumber, related) : groupRow(child, stageNumber, related)),
    ),
  );
}

function nodeRow(node, stageNumber, related) {
  const chosen = related.has(node.id);
  const link = nodeLink(stageNumber, node.id);
  if (chosen) link.setAttribute("aria-current", "true");
  return el(
    "span",
    { class: chosen ? "related" : null },
    link,
    el("span", { class: "remark mono" }, ` ${node.target} ${tensor(node)}`),
  );
}

// What is in a group is made when it is opened.
function groupRow(group, stageNumber, related) {
  const holds = holdsAny(group, related);
  const details = el(
    "details",
    { open: holds, ontoggle: () => fill() },
    el(
      "summary",
      {},
      el("span", { class: "mono" }, group.name),
      el("span", { class: "remark" }, ` ${counted(group.count, "node")}`),
    ),
  );
  const fill = () => {
    if (details.open && details.children.length === 1) details.append(content(group, stageNumber, related));
  };
  if (holds) fill();
  return details;
}

function holdsAny(group, related) {
  return (
    related.size > 0 &&
    group.children.some((child) => (child.node ? related.has(child.node.id) : holdsAny(child, related)))
  );
}
