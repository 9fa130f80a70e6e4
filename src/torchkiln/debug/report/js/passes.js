// The pass stepper: one pass after the other, the graph before and after side by side.

import { el, say } from "report/dom.js";
import { counted, seconds } from "report/figures.js";
import { sharedEnds, sideBySide } from "report/diff.js";
import { go, to } from "report/route.js";

const CONTEXT = 3;

let onlyChanged = true;

export function passesView(compilation, first) {
  const { recorded, passes } = compilation;
  if (!passes.length) return { element: el("p", { class: "remark" }, "No pass was recorded for this graph.") };
  const list = el("ol", { class: "pass-list", "aria-label": "Passes" });
  const body = el("div", { class: "pass-body" });
  const title = el("h2", {});
  const facts = el("p", { class: "remark" });
  const back = el("button", { type: "button", onclick: () => step(-1) }, "← Previous");
  const forth = el("button", { type: "button", onclick: () => step(1) }, "Next →");
  const box = el("input", {
    type: "checkbox",
    checked: onlyChanged,
    onchange: () => {
      onlyChanged = box.checked;
      update(state);
    },
  });
  const changedCount = passes.filter((pass) => pass.changed).length;
  const element = el(
    "div",
    { class: "passes" },
    el(
      "section",
      { class: "pane", "aria-label": "Passes" },
      el(
        "header",
        {},
        el("h2", {}, counted(passes.length, "pass", "passes")),
        el("label", {}, box, ` only the ${changedCount} that changed something`),
      ),
      list,
    ),
    el(
      "section",
      { class: "pane stepper", "aria-label": "Before and after" },
      el("header", {}, el("div", {}, title, facts), el("div", { class: "tools" }, back, forth)),
      body,
    ),
  );
  element.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, j: 1, k: -1 };
    if (!(event.key in steps) || event.target.matches("input, .row *")) return;
    if (body.contains(event.target) && event.key.startsWith("Arrow")) return;
    event.preventDefault();
    step(steps[event.key], list.contains(event.target));
  });
  let state = first;
  let shown = [];
  let at = 0;

  function step(by, focus = false) {
    const next = shown[shown.indexOf(at) + by];
    if (next === undefined) return;
    go({ p: next, on: null });
    if (focus) update({ ...state, p: next }).then(() => list.querySelector("[aria-current]")?.focus());
  }

  async function update(next) {
    state = next;
    const changed = passes.map((pass, k) => (pass.changed ? k : -1)).filter((k) => k >= 0);
    at = passes[state.p] ? state.p : (changed[0] ?? 0);
    shown = onlyChanged && changed.length ? changed : passes.map((_, k) => k);
    if (!shown.includes(at)) shown = [...shown, at].sort((a, b) => a - b);
    list.replaceChildren(...shown.map((k) => passItem(passes[k], k, k === at)));
    const pass = passes[at];
    title.textContent = pass.name;
    facts.textContent = `Pass ${pass.number} in ${pass.stage}, on the ${pass.graph} graph, ${seconds(pass.seconds)}`;
    back.disabled = shown.indexOf(at) === 0;
    forth.disabled = shown.indexOf(at) === shown.length - 1;
    body.replaceChildren(...comparison(recorded, pass));
    list.querySelector("[aria-current]").scrollIntoView({ block: "nearest" });
    say(`Pass ${shown.indexOf(at) + 1} of ${shown.length}: ${pass.name}`);
  }

  return { element, update };
}

function passItem(pass, k, here) {
  return el(
    "li",
    {},
    el(
      "a",
      {
        href: to({ p: k, on: null }),
        "aria-current": here ? "step" : null,
        class: pass.changed ? null : "idle",
        tabindex: here ? "0" : "-1",
      },
      el("span", { class: "mono" }, String(pass.number)),
      el("span", { class: "name" }, `${pass.stage}/${pass.name}`),
      el("span", { class: "remark" }, `${pass.graph}, ${seconds(pass.seconds)}`),
    ),
  );
}

// Changed lines with a few around them; runs of lines that stayed are shown on a click.
export function comparison(recorded, pass) {
  if (pass.before === pass.after) return [el("p", { class: "remark" }, "This pass changed nothing.")];
  const [before, after] = [pass.before, pass.after].map((text) => recorded.lineNumbers(recorded.textNumber(text)));
  const rows = sideBySide(before, after);
  const text = (lines, k) => (k === null ? null : recorded.data.lines[lines[k]]);
  const draw = (row) => diffRow(row, text(before, row.left), text(after, row.right));
  const near = new Set();
  rows.forEach((row, k) => {
    if (row.kind === "same") return;
    for (let j = k - CONTEXT; j <= k + CONTEXT; j += 1) near.add(j);
  });
  const body = el("tbody", {});
  for (let k = 0; k < rows.length;) {
    let end = k;
    while (end < rows.length && !near.has(end)) end += 1;
    if (end > k) body.append(folded(rows.slice(k, end), draw));
    for (; end < rows.length && near.has(end); end += 1) body.append(draw(rows[end]));
    k = end;
  }
  const count = (kinds) => rows.filter(({ kind }) => kinds.includes(kind)).length;
  return [
    el(
      "p",
      { class: "remark" },
      `${counted(count(["changed"]), "line")} changed, ${count(["gone"])} gone, ${count(["new"])} new`,
    ),
    el(
      "div",
      { class: "scroll code diff", tabindex: "0", role: "region", "aria-label": "Before and after" },
      el(
        "table",
        {},
        el(
          "colgroup",
          {},
          ["no", "", "no", ""].map((kind) => el("col", { class: kind })),
        ),
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            el("th", { scope: "col", colspan: 2 }, "before"),
            el("th", { scope: "col", colspan: 2 }, "after"),
          ),
        ),
        body,
      ),
    ),
  ];
}

function folded(rows, draw) {
  const row = el(
    "tr",
    { class: "folded" },
    el(
      "td",
      { colspan: 4 },
      el(
        "button",
        { type: "button", class: "quiet", onclick: () => row.replaceWith(...rows.map(draw)) },
        `${counted(rows.length, "line")} as before`,
      ),
    ),
  );
  return row;
}

function diffRow({ left, right, kind }, before, after) {
  const [start, end] = kind === "changed" ? sharedEnds(before, after) : [0, 0];
  const marked = (line, tag) =>
    kind !== "changed"
      ? [line]
      : [line.slice(0, start), el(tag, {}, line.slice(start, line.length - end)), line.slice(line.length - end)];
  const cells = (k, line, sign, tag, className) => [
    el("td", { class: "no", "aria-hidden": "true" }, k === null ? "" : String(k + 1)),
    el(
      "td",
      { class: `content ${k === null ? "none" : className}` },
      line !== null && [sign && el("span", { class: "unseen" }, sign), marked(line, tag)],
    ),
  ];
  const changed = kind !== "same";
  return el(
    "tr",
    { class: kind },
    cells(left, before, changed && "gone: ", "del", changed ? "gone" : ""),
    cells(right, after, changed && "new: ", "ins", changed ? "new" : ""),
  );
}
