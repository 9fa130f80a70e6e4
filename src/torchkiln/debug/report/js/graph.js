// The graph of each stage with the source on its left and what is selected on its right.

import { codeBlock, copyButton } from "report/code.js";
import { choice, el, moveFocus, say } from "report/dom.js";
import { counted, seconds } from "report/figures.js";
import { GraphDrawing } from "report/graph_drawing.js";
import { inspect } from "report/inspector.js";
import { nodeList } from "report/node_list.js";
import { go, selection, to } from "report/route.js";
import { SourcePane } from "report/source_pane.js";

const FAMILIES = ["input", "pointwise", "reduction", "matmul", "view", "index", "output"];

let form = "drawing";

export function graphView(compilation, first) {
  if (!compilation.stages.length)
    return { element: el("p", { class: "remark" }, "No stage of this graph was recorded.") };
  const source = new SourcePane(compilation);
  const drawing = new GraphDrawing(compilation, (id) => go({ on: id === null ? null : `n:${id}`, s: state.s }));
  const middle = el("div", { class: "pane-body" });
  const details = el("div", { class: "pane-body inspector", tabindex: "-1" });
  const stages = el("div", {
    class: "stages",
    role: "group",
    "aria-label": "Stages",
    onkeydown: (event) => moveFocus(event, [...stages.querySelectorAll("a")]),
  });
  const title = el("h2", {});
  const legend = el(
    "p",
    { class: "legend", "aria-hidden": "true" },
    FAMILIES.map((name) => el("span", { class: `box ${name}` }, name)),
  );
  const tools = el(
    "div",
    { class: "tools" },
    button("−", "Zoom out (−)", () => drawing.view.zoom(0.8)),
    button("+", "Zoom in (+)", () => drawing.view.zoom(1.25)),
    button("Fit", "Fit the drawing into the frame (0)", () => drawing.fit(0.04)),
    button("Open all", "Open all groups", () => drawing.openAll(true)),
    button("Close all", "Close all groups", () => drawing.openAll(false)),
    el(
      "label",
      {},
      "Colours ",
      el(
        "select",
        {
          onchange: (event) => {
            drawing.recolour(event.target.value);
            legend.hidden = event.target.value !== "family";
          },
        },
        [
          ["family", "by operator"],
          ["kernel", "by kernel"],
          ["time", "by time"],
        ].map(([value, text]) => el("option", { value }, text)),
      ),
    ),
  );
  const forms = choice(
    "Shown as",
    [
      ["drawing", "Drawing"],
      ["list", "List"],
      ["text", "Text"],
    ],
    form,
    (value) => {
      form = value;
      update(state);
    },
  );
  const pane = el(
    "section",
    { class: "pane middle", "aria-label": "Graph" },
    el("header", {}, title, forms),
    stages,
    middle,
  );
  const right = el(
    "section",
    { class: "pane right", "aria-label": "Details" },
    el("header", {}, el("h2", {}, "Details")),
    details,
  );
  const panes = el("div", { class: "panes", "data-pane": "middle" }, source.element, pane, right);
  const phone = choice(
    "Part of this view",
    [
      ["source", "Source"],
      ["middle", "Graph"],
      ["right", "Details"],
    ],
    "middle",
    (value) => {
      panes.dataset.pane = value;
      if (value === "middle") drawing.fit();
    },
  );
  phone.classList.add("phone");
  let state = first;

  async function update(next) {
    state = { ...next, s: stageAt(compilation, next.s) };
    const stage = compilation.stages[state.s];
    const graphStage = stage.nodes.length ? state.s : compilation.lastGraph;
    const selected = selection(state);
    const related = compilation.related(selected, graphStage);
    const chosen = selected?.kind === "n" && related.nodes.size ? selected.key : null;
    title.textContent = stage.nodes.length ? `${counted(stage.nodes.length, "node")}` : "Text";
    stages.replaceChildren(...stageLinks(compilation, state, graphStage, related));
    stages.querySelector("[aria-current]").scrollIntoView({ block: "nearest", inline: "center" });
    source.show(compilation.stages[graphStage], related);
    details.replaceChildren(
      el("div", {}, inspect(compilation, graphStage, selected, related).flat(Infinity).filter(Boolean)),
    );
    details.scrollTop = 0;
    forms.hidden = !stage.nodes.length;
    if (!stage.nodes.length || form === "text") {
      middle.replaceChildren(stageText(compilation, stage, state.s, related));
      middle.querySelector(".row.related")?.scrollIntoView({ block: "center" });
    } else if (form === "list") {
      middle.replaceChildren(nodeList(stage, state.s, related.nodes));
      middle.querySelector(".related")?.scrollIntoView({ block: "center" });
    } else {
      if (drawing.element.parentNode !== middle) middle.replaceChildren(tools, drawing.element, legend);
      await drawing.show(state.s, related.nodes, chosen);
    }
    if (selected)
      say(
        `${selected.key}: ${counted(related.nodes.size, "node")}, ${counted(related.work.length, "kernel or call", "kernels and calls")}, ${counted(related.places.size, "line")}`,
      );
  }

  return { element: el("div", { class: "explore" }, phone, panes), update };
}

function button(text, label, onclick) {
  return el("button", { type: "button", title: label, "aria-label": label, onclick }, text);
}

// The stage that is asked for, else the last that is a graph: kernels name its nodes.
export function stageAt(compilation, wanted) {
  if (wanted !== null && compilation.stages[wanted]) return wanted;
  return compilation.lastGraph ?? compilation.stages.length - 1;
}

// A selected node is followed into the other stages.
function stageLinks(compilation, state, graphStage, related) {
  return compilation.stages.flatMap((stage, k) => {
    let { on } = state;
    if (stage.nodes.length && on?.startsWith("n:")) {
      const [same] = compilation.follow(graphStage, related.nodes, k);
      on = same === undefined ? null : `n:${same}`;
    }
    const here = k === state.s;
    const link = el(
      "a",
      {
        href: to({ s: k, on }),
        "aria-current": here ? "step" : null,
        title: stage.seconds ? `${seconds(stage.seconds)} to make` : null,
      },
      stage.name,
    );
    return k ? [el("span", { "aria-hidden": "true" }, "→"), link] : [link];
  });
}

// The text of a stage; the line of a node leads to it.
function stageText(compilation, stage, stageNumber, related) {
  const lines = compilation.recorded.lines(compilation.recorded.textNumber(stage.text));
  const { element } = codeBlock(lines, {
    language: stage.nodes.length ? "python" : "loops",
    label: `Text of ${stage.name}`,
    decorate: (number, row) => {
      const id = lines[number - 1].match(/^\s*%?(\w+)\s*[:=[(]/)?.[1];
      if (!id || !stage.nodes.length || !stage.byId.has(id)) return;
      row.classList.add("linked");
      row.classList.toggle("related", related.nodes.has(id));
      row.addEventListener("click", () => go({ s: stageNumber, on: `n:${id}` }));
    },
  });
  return el(
    "div",
    { class: "text-frame" },
    el(
      "div",
      { class: "tools" },
      copyButton(() => lines.join("\n")),
    ),
    element,
  );
}
