// Kernels and library calls: the roofline, a table, and the code of the selected one.

import { codeBlock, copyButton } from "report/code.js";
import { choice, el, moveFocus, table } from "report/dom.js";
import { bytes, counted, flops, percent, seconds } from "report/figures.js";
import { workFacts } from "report/inspector.js";
import { share } from "report/limits.js";
import { lineLink, nodeLink, several } from "report/links.js";
import { roofline } from "report/roofline.js";
import { go, to } from "report/route.js";

const CODES = [
  ["text", "Loops"],
  ["llvm", "LLVM"],
  ["assembly", "Assembly"],
];
const LANGUAGES = { text: "loops", llvm: "llvm", assembly: "assembly" };
const MOST_ROWS = 200;

export function kernelsView(compilation) {
  if (!compilation.work.length)
    return {
      element: el(
        "p",
        { class: "remark" },
        compilation.data.fallback
          ? `This graph runs eagerly: ${compilation.data.fallback}`
          : "This graph has no kernels and calls nothing.",
      ),
    };
  const sorted = [...compilation.work].sort((a, b) => (b.seconds ?? 0) - (a.seconds ?? 0));
  const longest = sorted[0].seconds || 1;
  const list = el("ol", {
    class: "kernel-list",
    "aria-label": "Kernels and library calls, the slowest first",
    onkeydown: (event) => step(event),
  });
  const items = sorted.map((work) => listItem(compilation.recorded, work, longest));
  list.append(...items.map((item) => el("li", {}, item)));
  const right = el("div", { class: "page kernel-detail", tabindex: "-1" });
  const element = el(
    "div",
    { class: "kernels" },
    el(
      "section",
      { class: "pane", "aria-label": "Kernels and library calls" },
      el("header", {}, el("h2", {}, counted(sorted.length, "kernel or call", "kernels and calls"))),
      list,
    ),
    el("section", { class: "pane", "aria-label": "Figures and code" }, right),
  );
  let shownKey;

  function step(event) {
    moveFocus(event, items);
    const at = items.indexOf(document.activeElement);
    if (event.defaultPrevented && at >= 0) go({ on: sorted[at].key });
  }

  function update(state) {
    const work = compilation.workByKey.get(state.on) ?? null;
    items.forEach((item, k) => {
      item.setAttribute("href", to({ on: sorted[k].key }));
      item.setAttribute("tabindex", sorted[k] === (work ?? sorted[0]) ? "0" : "-1");
      if (sorted[k] === work) item.setAttribute("aria-current", "true");
      else item.removeAttribute("aria-current");
    });
    list.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
    right.replaceChildren(...(work ? workDetail(compilation, work, state.code) : figures(compilation)));
    if (shownKey !== work?.key) right.scrollTop = 0;
    shownKey = work?.key;
  }

  return { element, update };
}

function listItem(recorded, work, longest) {
  const place = work.lines.length ? recorded.short(recorded.placeNames[work.lines[0]]) : "";
  return el(
    "a",
    { class: work.kind === "kernel" ? "" : "library", title: work.kind },
    el("span", { class: "name mono" }, work.name),
    el("span", { class: "time" }, work.seconds ? seconds(work.seconds) : ""),
    el("span", { class: "where" }, place),
    bar((work.seconds ?? 0) / longest),
  );
}

function figures(compilation) {
  return [el("h2", {}, "Kernels against this machine's limits"), roofline(compilation), ...workTables(compilation)];
}

function workTables(compilation) {
  const { limits } = compilation.recorded.data;
  const total = compilation.measuredSeconds;
  const part = (work) => {
    const reached = share(limits, work);
    return reached ? [bar(reached.part), `${percent(reached.part)} `, el("span", { class: "remark" }, reached.by)] : "";
  };
  const name = (work) => el("a", { href: to({ on: work.key, code: "text" }), class: "mono" }, work.name);
  const columns = [
    ["time", (work) => seconds(work.seconds)],
    ["of graph", (work) => (work.seconds && total ? [bar(work.seconds / total), percent(work.seconds / total)] : "")],
    ["moves", (work) => bytes(work.bytes)],
    ["computes", (work) => (work.operations ? flops(work.operations) : "–")],
    ["of limit", part],
  ];
  const lines = [
    "source",
    (work) =>
      several(
        work.lines.slice(0, 40).map((place) => lineLink(compilation.recorded, place)),
        2,
      ),
    "text",
  ];
  const sorted = (kind) =>
    compilation.work.filter((work) => work.kind === kind).sort((a, b) => (b.seconds ?? 0) - (a.seconds ?? 0));
  const kernels = sorted("kernel");
  const calls = sorted("library call");
  return [
    kernels.length &&
      section(
        counted(kernels.length, "kernel"),
        [["kernel", name, "text"], ["launches", (work) => String(work.launches)], ...columns, lines],
        kernels,
      ),
    calls.length &&
      section(
        counted(calls.length, "library call"),
        [["call", name, "text"], ...columns, ["why", (work) => work.reason, "text"], lines],
        calls,
      ),
  ].filter(Boolean);
}

// The slowest first; the rest of a long table on a click.
function section(title, columns, rows) {
  const frame = el("section", {}, el("h2", {}, title), table(title, columns, rows.slice(0, MOST_ROWS)));
  if (rows.length > MOST_ROWS) {
    const more = el(
      "button",
      { type: "button", onclick: () => frame.replaceChildren(el("h2", {}, title), table(title, columns, rows)) },
      `All ${rows.length}`,
    );
    frame.append(more);
  }
  return frame;
}

export function bar(part) {
  return el(
    "span",
    { class: "bar", "aria-hidden": "true" },
    el("span", { style: `width: ${Math.min(100, Math.round(100 * part))}%` }),
  );
}

function workDetail(compilation, work, kind) {
  const { recorded } = compilation;
  const header = el(
    "header",
    {},
    el("h2", { class: "mono" }, work.name),
    el("a", { href: to({ view: "graph", on: work.key, s: null }) }, "Show in graph"),
    el("a", { href: to({ on: null }) }, "All kernels"),
  );
  const about = el(
    "div",
    { class: "about" },
    workFacts(compilation, work),
    el(
      "div",
      {},
      work.lines.length > 0 && [
        el("h3", {}, "Source"),
        el(
          "ul",
          { class: "plain" },
          work.lines.slice(0, 20).map((place) => el("li", {}, lineLink(recorded, place, true))),
        ),
      ],
      work.nodes.length > 0 && [
        el("h3", {}, counted(work.nodes.length, "node")),
        several(work.nodes.map((id) => nodeLink(compilation.lastGraph, id))),
      ],
    ),
  );
  if (work.kind !== "kernel")
    return [
      header,
      about,
      el("p", {}, el("code", {}, `${work.name}(${work.arguments})`)),
      el("p", { class: "remark" }, work.reason),
    ];
  const language = kind in LANGUAGES ? kind : "text";
  const lines = recorded.lines(work[language]);
  return [
    header,
    about,
    el(
      "div",
      { class: "tools" },
      choice("Code", CODES, language, (value) => go({ code: value })),
      copyButton(() => lines.join("\n")),
      el("span", { class: "remark" }, counted(lines.length, "line")),
    ),
    codeBlock(lines, { language: LANGUAGES[language], label: `${language} of ${work.name}` }).element,
  ];
}
