// What is known of the selection: a node, a kernel or library call, or a line of the source.

import { codeBlock } from "report/code.js";
import { el } from "report/dom.js";
import { bytes, counted, flops, percent, seconds, tensor } from "report/figures.js";
import { lineLink, nodeLink, several, workLink } from "report/links.js";
import { share } from "report/limits.js";
import { to } from "report/route.js";

const fact = (name, ...value) => [el("dt", {}, name), el("dd", {}, value)];
const mono = (text) => el("span", { class: "mono" }, text);

export function inspect(compilation, stageNumber, selected, related) {
  if (!selected) return nothing(compilation);
  if (selected.kind === "n") return aboutNode(compilation, stageNumber, selected.key);
  if (selected.kind === "l") return aboutLine(compilation, stageNumber, selected.key, related);
  return aboutWork(compilation, stageNumber, compilation.workByKey.get(`${selected.kind}:${selected.key}`), related);
}

function nothing(compilation) {
  const hot = [...compilation.work]
    .filter(({ seconds: s }) => s)
    .sort((a, b) => b.seconds - a.seconds)
    .slice(0, 6);
  return [
    el("p", { class: "remark" }, "Select a node, a line of the source or a kernel: the others light up with it."),
    hot.length && [el("h3", {}, "Most time"), workList(compilation, hot)],
  ];
}

function workList(compilation, work) {
  const total = compilation.measuredSeconds;
  return el(
    "ul",
    { class: "plain" },
    work.map((item) =>
      el(
        "li",
        {},
        workLink(item, "graph"),
        item.lines.length > 0 &&
          el(
            "span",
            { class: "mono where" },
            compilation.recorded.short(compilation.recorded.placeNames[item.lines[0]]),
          ),
        el(
          "span",
          { class: "remark" },
          ` ${seconds(item.seconds)}${item.seconds ? `, ${percent(item.seconds / total)}` : ""}`,
        ),
      ),
    ),
  );
}

function aboutNode(compilation, stageNumber, id) {
  const stage = compilation.stages[stageNumber];
  const node = stage.byId.get(id);
  if (!node) return [el("p", { class: "remark" }, `${id} is not in this stage.`)];
  const at = compilation.graphs.indexOf(stageNumber);
  const [before, after] = [compilation.graphs[at - 1], compilation.graphs[at + 1]];
  const becomes = after === undefined ? [] : (compilation.stages[after].becomes.get(id) ?? []);
  const users = stage.users.get(id) ?? [];
  const work = compilation.workOf(stageNumber, [id]);
  return [
    el("h3", { class: "mono" }, node.id),
    el(
      "dl",
      {},
      fact("does", mono(node.target)),
      tensor(node) && fact("gives", mono(tensor(node))),
      node.module && fact("in module", mono(node.module)),
      node.reads.length > 0 && fact("reads", several(node.reads.map((read) => nodeLink(stageNumber, read)))),
      users.length > 0 && fact("read by", several(users.map((user) => nodeLink(stageNumber, user)))),
      before !== undefined &&
        node.comes_from.length > 0 &&
        fact(`from ${compilation.stages[before].name}`, several(node.comes_from.map((from) => nodeLink(before, from)))),
      becomes.length > 0 &&
        fact(`in ${compilation.stages[after].name}`, several(becomes.map((next) => nodeLink(after, next)))),
    ),
    node.lines.length > 0 && [
      el("h4", {}, "Source"),
      el(
        "ul",
        { class: "plain" },
        node.lines.map((place) => el("li", {}, lineLink(compilation.recorded, place, true))),
      ),
    ],
    work.length > 0 && [el("h4", {}, "Runs in"), work.map((item) => workCard(compilation, item))],
    work.length === 0 &&
      node.op === "call_function" &&
      el("p", { class: "remark" }, "No kernel or library call names it: a view, or folded into others."),
  ];
}

// A kernel with its loops, or a library call with its reason.
export function workCard(compilation, work) {
  const { recorded } = compilation;
  const code =
    work.kind === "kernel" &&
    codeBlock(recorded.lines(work.text), { language: "loops", label: `Loops of ${work.name}` }).element;
  return el(
    "article",
    { class: "card" },
    el("p", {}, workLink(work), el("span", { class: "remark" }, ` ${work.kind}, ${seconds(work.seconds)}`)),
    code || el("p", {}, el("code", {}, `${work.name}(${work.arguments})`)),
    work.reason && el("p", { class: "remark" }, work.reason),
    work.kind === "kernel" &&
      el(
        "p",
        { class: "several" },
        [
          ["llvm", "LLVM"],
          ["assembly", "Assembly"],
        ].map(([kind, label]) => el("a", { href: to({ view: "kernels", on: work.key, code: kind }) }, label)),
      ),
  );
}

function aboutLine(compilation, stageNumber, name, related) {
  const place = compilation.recorded.placeNumbers.get(name);
  const nodes = [...related.nodes];
  return [
    el("h3", { class: "mono", title: name }, compilation.recorded.short(name)),
    place !== undefined && el("p", {}, el("code", {}, compilation.recorded.sourceLine(place))),
    el("h4", {}, `${counted(nodes.length, "node")} in ${compilation.stages[stageNumber]?.name ?? "this stage"}`),
    several(
      nodes.map((id) => nodeLink(stageNumber, id)),
      30,
    ),
    el("h4", {}, counted(related.work.length, "kernel or call", "kernels and calls")),
    related.work.slice(0, 4).map((work) => workCard(compilation, work)),
    related.work.length > 4 &&
      several(
        related.work.slice(4).map((work) => workLink(work, "graph")),
        30,
      ),
  ];
}

function aboutWork(compilation, stageNumber, work, related) {
  if (!work) return [el("p", { class: "remark" }, "There is no such kernel.")];
  const nodes = [...related.nodes];
  return [
    el("h3", { class: "mono" }, work.name),
    workFacts(compilation, work),
    workCard(compilation, work),
    work.lines.length > 0 && [
      el("h4", {}, "Source"),
      el(
        "ul",
        { class: "plain" },
        work.lines.map((place) => el("li", {}, lineLink(compilation.recorded, place, true))),
      ),
    ],
    el("h4", {}, counted(nodes.length, "node")),
    several(
      nodes.map((id) => nodeLink(stageNumber, id)),
      30,
    ),
  ];
}

export function workFacts(compilation, work) {
  const reached = share(compilation.recorded.data.limits, work);
  return el(
    "dl",
    {},
    fact("kind", work.kind),
    fact(
      "time",
      seconds(work.seconds),
      work.seconds ? `, ${percent(work.seconds / compilation.measuredSeconds)} of this graph` : "",
    ),
    work.launches > 1 && fact("launches", String(work.launches)),
    fact("moves", bytes(work.bytes)),
    fact("computes", work.operations ? flops(work.operations) : "no floating-point operations"),
    reached && fact("reaches", `${percent(reached.part)} of this machine's ${reached.by}`),
  );
}
