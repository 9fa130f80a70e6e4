// Opens the recording and shows the part of the report that the address names.

import { captureView } from "report/capture.js";
import { byId, el } from "report/dom.js";
import { fusionView } from "report/fusion.js";
import { graphView } from "report/graph.js";
import { startKeys } from "report/keys.js";
import { kernelsView } from "report/kernels.js";
import { memoryView } from "report/memory.js";
import { overview } from "report/overview.js";
import { passesView } from "report/passes.js";
import { Recorded, unpack } from "report/recording.js";
import { current, go, to, VIEWS } from "report/route.js";
import { startSearch } from "report/search.js";

// Each makes {element, update}: `update` is called with every new state as long as the same view is shown.
const MAKE = {
  overview,
  graph: graphView,
  passes: passesView,
  kernels: kernelsView,
  memory: memoryView,
  fusion: fusionView,
  capture: captureView,
};
const NEED_NOTHING = new Set(["overview", "capture"]);

let recorded;
let shown = { view: null, c: null, update: null };

function show() {
  const state = current();
  const compilation = recorded.compilations[state.c] ?? recorded.compilations[0] ?? null;
  const frame = byId("view");
  if (shown.view !== state.view || shown.compilation !== compilation) {
    const made = make(compilation, state);
    shown = { view: state.view, compilation, update: made.update };
    frame.className = `view-${state.view}`;
    frame.setAttribute("aria-label", VIEWS.find(([name]) => name === state.view)[1]);
    frame.replaceChildren(made.element);
    scrollTo(0, 0);
  }
  shown.update?.(state);
  showBar(state);
}

function make(compilation, state) {
  if (!compilation && !NEED_NOTHING.has(state.view))
    return { element: el("p", { class: "remark" }, "No graph was compiled.") };
  try {
    return MAKE[state.view](compilation, state, recorded);
  } catch (error) {
    console.error(error); // the other parts of the report are of use without this one
    return { element: el("p", { class: "bad" }, `This part could not be shown: ${error}`) };
  }
}

function showBar(state) {
  byId("views").replaceChildren(
    ...VIEWS.map(([view, name]) =>
      el(
        "a",
        {
          href: to({ view, on: ["graph", "kernels"].includes(view) ? state.on : null }),
          "aria-current": view === state.view ? "page" : null,
        },
        name,
      ),
    ),
  );
  byId("compilation-choice").hidden = recorded.compilations.length < 2 || state.view === "overview";
  byId("compilation").value = String(state.c);
}

function startCompilations() {
  const select = byId("compilation");
  select.append(
    ...recorded.compilations.map(({ data }, k) =>
      el("option", { value: k }, data.id.includes(data.kind) ? data.id : `${data.id}, ${data.kind}`),
    ),
  );
  select.addEventListener("change", () => go({ c: Number(select.value), s: null, p: null, on: null }));
}

// The choice of light or dark outlives the page where the browser lets it.
function startScheme() {
  const inputs = [...document.querySelectorAll('input[name="scheme"]')];
  try {
    const kept = document.getElementById(localStorage.getItem("torchkiln-scheme") ?? "");
    if (inputs.includes(kept)) kept.checked = true;
    inputs.forEach((input) =>
      input.addEventListener("change", () => localStorage.setItem("torchkiln-scheme", input.id)),
    );
  } catch {
    // Pages from files may have no storage.
  }
}

async function start() {
  startScheme();
  try {
    recorded = new Recorded(await unpack("recording"));
  } catch (error) {
    byId("view").replaceChildren(
      el("p", {}, `The recording could not be read: ${error}. The report needs a browser of 2023 or later.`),
    );
    return;
  }
  startCompilations();
  startSearch(recorded);
  startKeys();
  addEventListener("hashchange", show);
  show();
  document.documentElement.dataset.ready = Math.round(performance.now());
}

start();
