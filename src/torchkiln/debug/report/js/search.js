// The search field: nodes, modules, kernels, library calls, passes and lines of the source.

import { byId, el } from "report/dom.js";
import { counted, tensor } from "report/figures.js";
import { stageAt } from "report/graph.js";
import { current, to } from "report/route.js";

const MOST = 40;

export function startSearch(recorded) {
  const input = byId("search");
  const list = byId("search-results");
  const said = byId("search-said");
  let options = [];
  let at = -1;

  const close = () => {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  };
  const mark = (next) => {
    if (!options.length) return;
    options[at]?.setAttribute("aria-selected", "false");
    at = (next + options.length) % options.length;
    options[at].setAttribute("aria-selected", "true");
    options[at].scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", options[at].id);
  };
  const find = () => {
    const query = input.value.trim();
    if (!query) {
      said.textContent = "";
      return close();
    }
    const { found, total } = search(recorded, query);
    options = found.map((entry, k) =>
      el(
        "a",
        {
          id: `result-${k}`,
          role: "option",
          "aria-selected": "false",
          tabindex: "-1",
          href: entry.href,
          onclick: close,
        },
        el("span", { class: "kind" }, entry.kind),
        el("span", { class: "mono" }, entry.name),
        el("span", { class: "remark" }, entry.remark),
      ),
    );
    list.replaceChildren(
      ...(options.length ? options : [el("p", { class: "remark" }, `Nothing is called “${query}”.`)]),
    );
    if (total > found.length) list.append(el("p", { class: "remark" }, `${total - found.length} more: type on`));
    said.textContent = total ? counted(total, "result") : "No results";
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    at = -1;
    return mark(0);
  };
  input.addEventListener("input", find);
  input.addEventListener("focus", () => input.value.trim() && find());
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") mark(at + 1);
    else if (event.key === "ArrowUp") mark(at - 1);
    else if (event.key === "Enter" && options[at] && !list.hidden) {
      location.hash = options[at].getAttribute("href");
      close();
    } else if (event.key === "Escape") {
      if (list.hidden) input.value = "";
      close();
      event.stopPropagation();
    } else return;
    event.preventDefault();
  });
  document.addEventListener("pointerdown", (event) => {
    if (!event.target.closest(".search")) close();
  });
}

// Names that are the query come first, then those that start with it, then those that have it in them.
export function search(recorded, query) {
  const wanted = query.toLowerCase();
  const found = [];
  for (const entry of entries(recorded)) {
    const name = entry.name.toLowerCase();
    const place = name.indexOf(wanted);
    if (place < 0 && !entry.more?.toLowerCase().includes(wanted)) continue;
    found.push([name === wanted ? 0 : place === 0 ? 1 : place > 0 ? 2 : 3, entry]);
  }
  found.sort((a, b) => a[0] - b[0]);
  return { found: found.slice(0, MOST).map(([, entry]) => ({ ...entry, href: entry.href() })), total: found.length };
}

// Where an entry leads is made for those that are shown alone.
function* entries(recorded) {
  const state = current();
  const compilation = recorded.compilations[state.c];
  if (compilation?.stages.length) {
    const s = compilation.stages[stageAt(compilation, state.s)].nodes.length
      ? stageAt(compilation, state.s)
      : compilation.lastGraph;
    for (const work of compilation.work) {
      yield {
        kind: work.kind,
        name: work.name,
        more: work.arguments,
        remark: work.lines.length ? recorded.short(recorded.placeNames[work.lines[0]]) : "",
        href: () => to({ view: state.view === "graph" ? "graph" : "kernels", on: work.key }),
      };
    }
    const modules = new Map();
    for (const node of s === null ? [] : compilation.stages[s].nodes) {
      if (node.module && !modules.has(node.module)) modules.set(node.module, node);
      yield {
        kind: "node",
        name: node.id,
        more: `${node.target} ${node.module} ${node.label}`,
        remark: `${node.target} ${tensor(node)}`,
        href: () => to({ view: "graph", s, on: `n:${node.id}` }),
      };
    }
    for (const [name, node] of modules)
      yield { kind: "module", name, remark: "", href: () => to({ view: "graph", s, on: `n:${node.id}` }) };
    for (const [p, pass] of compilation.passes.entries()) {
      yield {
        kind: "pass",
        name: pass.name,
        more: pass.stage,
        remark: `${pass.stage}, ${pass.graph} graph${pass.changed ? "" : ", changed nothing"}`,
        href: () => to({ view: "passes", p, on: null }),
      };
    }
  }
  for (const [file, text] of Object.entries(recorded.data.sources)) {
    for (const [k, line] of recorded.lines(text).entries()) {
      if (!line.trim()) continue;
      yield {
        kind: "line",
        name: line.trim(),
        remark: recorded.short(`${file}:${k + 1}`),
        href: () => to({ view: "graph", on: `l:${file}:${k + 1}` }),
      };
    }
  }
}
