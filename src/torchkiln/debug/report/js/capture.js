// What Dynamo did: graph breaks, recompilations, guards; what the graph is compiled for; what the cache had.

import { codeBlock } from "report/code.js";
import { el, table } from "report/dom.js";
import { counted } from "report/figures.js";
import { lineLink } from "report/links.js";

export function captureView(compilation, _state, recorded) {
  const { graph_breaks: breaks, recompilations, guards } = recorded.data;
  const place = (item) => (item.line === null ? "" : lineLink(recorded, item.line, true));
  return {
    element: el(
      "div",
      { class: "page" },
      el("h2", {}, counted(breaks.length, "graph break")),
      breaks.length
        ? table(
            "Graph breaks",
            [
              ["why", (item) => el("span", { class: "reason" }, item.reason), "text"],
              ["where", place, "text"],
            ],
            breaks,
          )
        : el("p", { class: "remark" }, "Dynamo captured without a break."),
      el("h2", {}, counted(recompilations.length, "recompilation")),
      recompilations.length
        ? table(
            "Recompilations",
            [
              ["function", (item) => el("span", { class: "mono" }, item.function), "text"],
              [
                "guards that failed",
                (item) =>
                  el(
                    "ul",
                    { class: "plain" },
                    item.reasons.map((reason) => el("li", {}, el("code", {}, reason))),
                  ),
                "text",
              ],
              ["where", place, "text"],
            ],
            recompilations,
          )
        : el("p", { class: "remark" }, "Nothing was compiled again."),
      compilation && inputs(compilation),
      compilation && cache(compilation),
      el("h2", {}, `Guards of ${counted(guards.length, "frame")}`),
      guards.length
        ? guards.map((item) => guardList(item, place))
        : el("p", { class: "remark" }, "No guards were recorded."),
    ),
  };
}

function guardList(item, place) {
  const lines = item.text.split("\n");
  return el(
    "details",
    { open: lines.length < 30 },
    el(
      "summary",
      {},
      el("span", { class: "mono" }, item.function),
      el("span", { class: "remark" }, ` ${counted(lines.length, "guard")} `),
    ),
    el("p", {}, place(item)),
    codeBlock(lines, { language: "python", label: `Guards of ${item.function}` }).element,
  );
}

function inputs(compilation) {
  const { data } = compilation;
  return el(
    "section",
    {},
    el("h2", {}, `${counted(data.inputs.length, "input")} of ${data.id}`),
    data.inputs.length > 0 &&
      table(
        "Inputs",
        [
          ["input", (item) => el("span", { class: "mono" }, item.name), "text"],
          ["dtype", (item) => item.dtype || "none", "text"],
          ["sizes", (item) => item.value || item.sizes.join(" × ") || "–", "text"],
          ["strides", (item) => item.strides.join(", "), "text"],
          ["device", (item) => item.device, "text"],
          ["gradient", (item) => (item.requires_grad ? "yes" : ""), "text"],
        ],
        data.inputs.slice(0, 500),
      ),
  );
}

function cache(compilation) {
  const { cache: lookups } = compilation.data;
  return el(
    "section",
    {},
    el("h2", {}, "Cache"),
    lookups.length
      ? table(
          "Cache",
          [
            ["looked for", (item) => item.what, "text"],
            ["found", (item) => el("span", { class: item.hit ? "good" : "bad" }, item.hit ? "hit" : "miss"), "text"],
            ["why", (item) => item.why, "text"],
          ],
          lookups,
        )
      : el("p", { class: "remark" }, "Nothing was looked up."),
  );
}
