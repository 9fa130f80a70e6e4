// The first page: how fast it is, where the time goes, and what deserves a look.

import { el, table } from "report/dom.js";
import { bytes, counted, percent, seconds, times } from "report/figures.js";
import { bar } from "report/kernels.js";
import { share } from "report/limits.js";
import { lineLink } from "report/links.js";
import { to } from "report/route.js";

export function overview(_compilation, _state, recorded) {
  return {
    element: el(
      "div",
      { class: "page" },
      cards(recorded),
      el("section", { "aria-label": "Worth a look" }, el("h2", {}, "Worth a look"), hints(recorded)),
      graphs(recorded),
      hottest(recorded),
      el("div", { class: "columns" }, stageTimes(recorded), passTimes(recorded)),
      about(recorded.data.about),
    ),
  };
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

function cards(recorded) {
  const { data, compilations } = recorded;
  const work = compilations.flatMap((compilation) => compilation.work);
  const lookups = compilations.flatMap((compilation) => compilation.data.cache);
  const kernels = work.filter(({ kind }) => kind === "kernel").length;
  const speedup = data.eager_seconds && data.compiled_seconds ? data.eager_seconds / data.compiled_seconds : null;
  const compiling = sum(Object.values(data.seconds));
  const peak = Math.max(0, ...compilations.map((compilation) => compilation.data.memory?.peak_bytes ?? 0));
  return el(
    "div",
    { class: "cards" },
    speedup &&
      card(
        times(speedup),
        speedup >= 1 ? "as fast as eager" : "of eager's speed",
        `${seconds(data.compiled_seconds)} a call, eager ${seconds(data.eager_seconds)}`,
        "strong",
      ),
    !speedup &&
      data.compiled_seconds !== null &&
      card(seconds(data.compiled_seconds), "a call", "eager was not measured", "strong"),
    card(
      seconds(compiling),
      "to compile",
      `${counted(data.passes.length, "pass", "passes")}, ${data.passes.filter((pass) => pass.changed).length} changed something`,
    ),
    card(
      String(kernels),
      kernels === 1 ? "kernel" : "kernels",
      `${counted(work.length - kernels, "library call")}`,
      "",
      to({ view: "kernels", on: null }),
    ),
    card(bytes(peak), "at the peak", "the most that one graph takes in a call", "", to({ view: "memory", on: null })),
    card(
      String(data.graph_breaks.length),
      data.graph_breaks.length === 1 ? "graph break" : "graph breaks",
      counted(data.recompilations.length, "recompilation"),
      "",
      to({ view: "capture", on: null }),
    ),
    lookups.length > 0 &&
      card(
        `${lookups.filter(({ hit }) => hit).length} of ${lookups.length}`,
        "cache hits",
        "",
        "",
        to({ view: "capture", on: null }),
      ),
  );
}

function card(figure, name, remark, kind = "", href = null) {
  return el(
    href ? "a" : "div",
    { class: `figure-card ${kind}`, href },
    el("strong", {}, figure),
    el("span", {}, name),
    remark && el("small", {}, remark),
  );
}

// What a reader would want to change, the costliest first.
export function findings(recorded) {
  const { data, compilations } = recorded;
  const found = [];
  if (data.eager_seconds && data.compiled_seconds > data.eager_seconds) {
    found.push({
      weight: 3,
      text: `Compiled code is slower than eager: ${seconds(data.compiled_seconds)} against ${seconds(data.eager_seconds)}.`,
    });
  }
  for (const item of data.graph_breaks)
    found.push({
      weight: 2,
      text: `Graph break: ${item.reason.split("\n")[0]}`,
      place: item.line,
      href: to({ view: "capture" }),
    });
  for (const item of data.recompilations)
    found.push({
      weight: 2,
      text: `${item.function} was compiled again: ${item.reasons[0] ?? "no reason given"}`,
      place: item.line,
      href: to({ view: "capture" }),
    });
  compilations.forEach((compilation, c) => {
    const { fallback, id } = compilation.data;
    if (fallback) found.push({ weight: 3, text: `${id} runs eagerly: ${fallback}`, href: to({ view: "capture", c }) });
    const total = compilation.measuredSeconds;
    for (const work of compilation.work) {
      const reached = share(data.limits, work);
      const part = work.seconds / total;
      if (!reached || part < 0.08 || reached.part > 0.35) continue;
      found.push({
        weight: part,
        text: `${work.name} takes ${percent(part)} of ${id} and reaches ${percent(reached.part)} of this machine's ${reached.by}.`,
        href: to({ view: "kernels", c, on: work.key }),
      });
    }
  });
  return found.sort((a, b) => b.weight - a.weight);
}

function hints(recorded) {
  const found = findings(recorded);
  if (!found.length)
    return el(
      "p",
      { class: "good" },
      "Nothing stands out: no graph breaks, no recompilations, no slow kernel far from what the machine can do.",
    );
  return el(
    "ul",
    { class: "hints" },
    found
      .slice(0, 8)
      .map(({ text, href, place }) =>
        el(
          "li",
          {},
          href ? el("a", { href }, text) : text,
          place !== undefined && place !== null && [" ", lineLink(recorded, place)],
        ),
      ),
    found.length > 8 && el("li", { class: "remark" }, `and ${found.length - 8} more`),
  );
}

function graphs(recorded) {
  const rows = recorded.compilations.map((compilation, c) => ({ compilation, c }));
  if (!rows.length) return el("p", {}, "No graph was compiled.");
  return el(
    "section",
    {},
    el("h2", {}, counted(rows.length, "graph")),
    table(
      "Graphs",
      [
        [
          "graph",
          ({ compilation, c }) => el("a", { href: to({ view: "graph", c, s: null, on: null }) }, compilation.data.id),
          "text",
        ],
        ["kind", ({ compilation }) => compilation.data.kind, "text"],
        [
          "nodes",
          ({ compilation }) =>
            compilation.lastGraph === null
              ? ""
              : compilation.stages[compilation.lastGraph].nodes.length.toLocaleString("en"),
        ],
        ["kernels", ({ compilation }) => String(compilation.data.kernels.length)],
        ["library calls", ({ compilation }) => String(compilation.data.library_calls.length)],
        [
          "in kernels and calls",
          ({ compilation }) => (compilation.measuredSeconds ? seconds(compilation.measuredSeconds) : "not measured"),
        ],
        [
          "peak memory",
          ({ compilation }) => (compilation.data.memory ? bytes(compilation.data.memory.peak_bytes) : ""),
        ],
        ["compiled in", ({ compilation }) => seconds(compilation.data.seconds)],
      ],
      rows,
    ),
  );
}

function hottest(recorded) {
  const all = recorded.compilations.flatMap((compilation, c) =>
    compilation.work.filter((work) => work.seconds).map((work) => ({ work, c, compilation })),
  );
  const total = sum(all.map(({ work }) => work.seconds));
  if (!total) return null;
  const rows = all.sort((a, b) => b.work.seconds - a.work.seconds).slice(0, 8);
  return el(
    "section",
    {},
    el("h2", {}, "Where a call's time goes"),
    table(
      "Slowest kernels and calls",
      [
        [
          "",
          ({ work, c }) => el("a", { href: to({ view: "kernels", c, on: work.key }), class: "mono" }, work.name),
          "text",
        ],
        ["graph", ({ compilation }) => el("span", { class: "whole" }, compilation.data.id), "text"],
        ["time", ({ work }) => seconds(work.seconds)],
        ["share", ({ work }) => [bar(work.seconds / total), percent(work.seconds / total)]],
        [
          "source",
          ({ work, c }) =>
            work.lines.slice(0, 1).map((place) => {
              const link = lineLink(recorded, place, true);
              link.setAttribute("href", to({ view: "graph", c, s: null, on: work.key }));
              return link;
            }),
          "text",
        ],
      ],
      rows,
    ),
  );
}

function timesTable(title, rows) {
  const total = sum(rows.map(([, , taken]) => taken));
  const shown = rows
    .filter(([, , taken]) => taken)
    .sort((a, b) => b[2] - a[2])
    .slice(0, 8);
  if (!shown.length) return null;
  return el(
    "section",
    {},
    el("h2", {}, title),
    table(
      title,
      [
        ["", ([name, href]) => (href ? el("a", { href }, name) : name), "text"],
        ["time", ([, , taken]) => seconds(taken)],
        ["share", ([, , taken]) => [bar(taken / total), percent(taken / total)]],
      ],
      shown,
    ),
  );
}

function stageTimes(recorded) {
  return timesTable(
    "Time of stages",
    Object.entries(recorded.data.seconds).map(([name, time]) => [name, null, time]),
  );
}

function passTimes(recorded) {
  const taken = new Map();
  recorded.compilations.forEach((compilation, c) =>
    compilation.data.passes.forEach((number, p) => {
      if (!taken.has(number))
        taken.set(number, [
          `${compilation.passes[p].stage}/${compilation.passes[p].name}`,
          to({ view: "passes", c, p, on: null }),
          compilation.passes[p].seconds,
        ]);
    }),
  );
  return timesTable("Time of passes", [...taken.values()]);
}

function about(data) {
  return el(
    "p",
    { class: "remark about-line" },
    `Recorded ${data.date} with torchkiln ${data.torchkiln} and torch ${data.torch}, for ${data.target}, ${counted(data.threads, "thread")}.`,
  );
}
