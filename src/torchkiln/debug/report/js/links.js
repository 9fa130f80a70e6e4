// Links between the things of a report.

import { el } from "report/dom.js";
import { seconds } from "report/figures.js";
import { to } from "report/route.js";

export function nodeLink(stage, id, text = id) {
  return el("a", { href: to({ view: "graph", s: stage, on: `n:${id}` }), class: "mono" }, text);
}

// A kernel or library call: its code, or in the graph where the reader is looking at that.
export function workLink(work, view = "kernels") {
  return el(
    "a",
    {
      href: to({ view, on: work.key }),
      class: `mono work ${work.kind === "kernel" ? "" : "library"}`,
      title: `${work.kind}, ${seconds(work.seconds)}`,
    },
    work.name,
  );
}

export function lineLink(recorded, place, withText = false) {
  const name = recorded.placeNames[place];
  const text = withText ? recorded.sourceLine(place) : "";
  return el(
    "a",
    { href: to({ view: "graph", on: `l:${name}` }), class: "line-link", title: name },
    el("span", { class: "mono place" }, recorded.short(name)),
    text && el("code", {}, text),
  );
}

export function passLink(number, text) {
  return el("a", { href: to({ view: "passes", p: number, on: null }) }, text);
}

// Links one after the other, the first ones at once and the others on a click.
export function several(links, most = 12) {
  const list = el("span", { class: "several" }, links.slice(0, most));
  if (links.length > most) {
    const more = el(
      "button",
      { type: "button", class: "quiet", onclick: () => more.replaceWith(...links.slice(most)) },
      `${links.length - most} more`,
    );
    list.append(more);
  }
  return list;
}
