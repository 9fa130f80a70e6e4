// The user's files beside the graph: lines that became nodes can be selected, hot ones are marked.

import { codeBlock } from "report/code.js";
import { el, moveFocus } from "report/dom.js";
import { counted, seconds } from "report/figures.js";
import { go, to } from "report/route.js";

export class SourcePane {
  constructor(compilation) {
    this.compilation = compilation;
    this.recorded = compilation.recorded;
    this.files = Object.keys(this.recorded.data.sources);
    this.choice = el(
      "select",
      { "aria-label": "Source file", onchange: () => this.open(this.choice.value) },
      this.files.map((file) => el("option", { value: file, title: file }, this.recorded.short(file))),
    );
    this.body = el("div", { class: "pane-body" });
    this.element = el(
      "section",
      { class: "pane source", "aria-label": "Source" },
      el("header", {}, el("h2", {}, "Source"), this.choice),
      this.body,
    );
    this.heat = this.lineSeconds();
  }

  // Seconds of all kernels and calls that a line has a part in.
  lineSeconds() {
    const found = new Map();
    for (const [place, work] of this.compilation.workOfPlace) {
      found.set(
        place,
        work.reduce((sum, { seconds: s }) => sum + (s ?? 0), 0),
      );
    }
    return found;
  }

  show(stage, related) {
    this.stage = stage;
    this.related = related;
    const [first] = [...related.places].filter((place) => place !== undefined);
    const used = first ?? this.commonest();
    const file = used === undefined ? this.files[0] : this.recorded.data.places[used][0];
    if (!this.files.length) {
      this.body.replaceChildren(el("p", { class: "remark" }, "No source of the program could be read."));
    } else if (this.recorded.data.sources[file] === undefined) {
      this.body.replaceChildren(el("p", { class: "remark" }, `${this.recorded.placeNames[used]} could not be read.`));
    } else if (first !== undefined || this.file === undefined) {
      this.open(file);
    } else {
      this.open(this.file);
    }
  }

  // A line of the file that has most nodes.
  commonest() {
    const counts = new Map();
    for (const place of this.stage?.ofPlace.keys() ?? []) {
      const [file] = this.recorded.data.places[place];
      if (this.recorded.data.sources[file] === undefined) continue;
      const known = counts.get(file) ?? { place, count: 0 };
      counts.set(file, { place: known.place, count: known.count + this.stage.ofPlace.get(place).length });
    }
    return [...counts.values()].sort((a, b) => b.count - a.count)[0]?.place;
  }

  open(file) {
    const moved = this.file !== file || this.shownStage !== this.stage;
    this.file = file;
    this.choice.value = file;
    if (moved) this.render(file);
    this.shownStage = this.stage;
    this.mark();
  }

  render(file) {
    const { recorded, stage } = this;
    const hottest = Math.max(...this.heat.values(), 1e-12);
    this.links = new Map();
    const { element, rows } = codeBlock(recorded.lines(recorded.data.sources[file]), {
      language: "python",
      label: `Source of ${file}`,
      decorate: (number, row) => {
        const place = recorded.placeNumbers.get(`${file}:${number}`);
        const nodes = stage?.ofPlace.get(place) ?? [];
        const taken = this.heat.get(place) ?? 0;
        if (!nodes.length && !this.compilation.workOfPlace.has(place)) return;
        const title = `${counted(nodes.length, "node")}${taken ? `, in kernels and calls that take ${seconds(taken)}` : ""}`;
        const link = el(
          "a",
          {
            class: "no",
            tabindex: "-1",
            href: to({ on: `l:${file}:${number}` }),
            title,
            "aria-label": `line ${number}: ${title}`,
          },
          String(number),
        );
        row.firstChild.replaceWith(link);
        row.classList.add("linked");
        row.style.setProperty("--heat-share", `${Math.round(100 * Math.sqrt(taken / hottest))}%`);
        row.addEventListener("click", (event) => {
          if (event.target === link || String(getSelection())) return;
          go({ on: `l:${file}:${number}` });
        });
        this.links.set(number, link);
      },
    });
    this.rows = rows;
    const links = [...this.links.values()];
    element.setAttribute("tabindex", links.length ? "-1" : "0");
    element.addEventListener("keydown", (event) => moveFocus(event, links));
    this.body.replaceChildren(element);
  }

  mark() {
    const { recorded, related } = this;
    const chosen = new Set();
    for (const place of related.places) {
      const [file, line] = recorded.data.places[place] ?? [];
      if (file === this.file) chosen.add(line);
    }
    this.rows.forEach((row, k) => row.classList.toggle("related", chosen.has(k + 1)));
    for (const [number, link] of this.links) {
      link.setAttribute("href", to({ on: `l:${this.file}:${number}` }));
      link.setAttribute("tabindex", "-1");
    }
    const first = [...chosen][0];
    const start = this.links.get(first) ?? this.links.values().next().value;
    start?.setAttribute("tabindex", "0");
    if (first !== undefined) scrollInto(this.body, this.rows[first - 1]);
  }
}

function scrollInto(frame, row) {
  if (!row) return;
  const [outer, inner] = [frame.getBoundingClientRect(), row.getBoundingClientRect()];
  if (inner.top >= outer.top + 20 && inner.bottom <= outer.bottom - 20) return;
  frame.scrollTop += inner.top - outer.top - outer.height / 3;
}
