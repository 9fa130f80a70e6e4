// Memory over the steps of a plan: how much is taken, and where every buffer lies.

import { el, svg, table } from "report/dom.js";
import { bytes, counted } from "report/figures.js";

const [LEFT, RIGHT] = [86, 880];
const MOST_ROWS = 300;
const MOST_DRAWN = 3000;

export function memoryView(compilation) {
  const { memory } = compilation.data;
  if (!memory || !memory.steps.length)
    return { element: el("p", { class: "remark" }, "No memory plan was recorded for this graph.") };
  const buffers = [...memory.buffers].sort((a, b) => b.bytes - a.bytes);
  const element = el(
    "div",
    { class: "page" },
    el("h2", {}, "Memory over the steps"),
    el(
      "p",
      {},
      `A call takes ${bytes(memory.peak_bytes)} at most, ${bytes(memory.arena_bytes)} of it in the arena, which is taken for the whole call. Inputs and constants are not counted.`,
    ),
    timeline(memory),
    arena(memory, buffers),
    el("h2", {}, counted(buffers.length, "buffer")),
    table(
      "Buffers by size",
      [
        ["buffer", (buffer) => el("span", { class: "mono" }, buffer.name), "text"],
        ["size", (buffer) => bytes(buffer.bytes)],
        ["alive in steps", (buffer) => `${buffer.first + 1} – ${buffer.last + 1}`],
        ["where", (buffer) => buffer.place, "text"],
      ],
      buffers.slice(0, MOST_ROWS),
    ),
    buffers.length > MOST_ROWS && el("p", { class: "remark" }, `The largest ${MOST_ROWS} of ${buffers.length}.`),
  );
  return { element };
}

const scale = (count) => (step) => LEFT + ((RIGHT - LEFT) * step) / Math.max(1, count);

function timeline(memory) {
  const [top, bottom] = [16, 210];
  const { steps } = memory;
  const x = scale(steps.length);
  const most = Math.max(...steps.map((step) => step.live_bytes));
  const y = (value) => bottom - ((bottom - top) * value) / ((most || 1) * 1.08);
  const corners = steps.flatMap((step, k) => [`${x(k)},${y(step.live_bytes)}`, `${x(k + 1)},${y(step.live_bytes)}`]);
  const peak = steps.findIndex((step) => step.live_bytes === most);
  const drawing = svg(
    "svg",
    {
      class: "drawing",
      viewBox: "0 0 900 240",
      role: "img",
      "aria-label": `Memory taken over ${counted(steps.length, "step")}; the most, ${bytes(most)}, in step ${peak + 1}, ${steps[peak].name}`,
    },
    [0, 0.25, 0.5, 0.75, 1].map((part) => [
      svg("line", { class: "grid", x1: LEFT, x2: RIGHT, y1: y(part * most), y2: y(part * most) }),
      svg("text", { x: LEFT - 8, y: y(part * most) + 4, "text-anchor": "end" }, bytes(Math.round(part * most))),
    ]),
    svg("polygon", { class: "area", points: `${x(0)},${bottom} ${corners.join(" ")} ${x(steps.length)},${bottom}` }),
    svg("line", { class: "peak", x1: x(peak), x2: x(peak + 1), y1: y(most), y2: y(most) }),
    svg("text", { x: LEFT, y: bottom + 20 }, "first step"),
    svg("text", { x: RIGHT, y: bottom + 20, "text-anchor": "end" }, `step ${steps.length}`),
  );
  steps.forEach((step, k) =>
    drawing.append(
      svg(
        "rect",
        { class: "touch", x: x(k), width: x(1) - x(0), y: top, height: bottom - top },
        svg("title", {}, `step ${k + 1}, ${step.name}: ${bytes(step.live_bytes)}`),
      ),
    ),
  );
  return el("figure", {}, drawing);
}

// Buffers of the arena: to the right the steps they are alive in, upwards where they lie.
function arena(memory, buffers) {
  const inside = buffers
    .map((buffer) => ({ ...buffer, at: Number(buffer.place.match(/^arena \+ (\d+)/)?.[1] ?? NaN) }))
    .filter(({ at }) => !Number.isNaN(at));
  if (!inside.length || !memory.arena_bytes) return null;
  const [top, bottom] = [16, 300];
  const x = scale(memory.steps.length);
  const y = (value) => bottom - ((bottom - top) * value) / memory.arena_bytes;
  return [
    el("h2", {}, "The arena"),
    el(
      "figure",
      {},
      svg(
        "svg",
        {
          class: "drawing",
          viewBox: "0 0 900 330",
          role: "img",
          "aria-label": `${counted(inside.length, "buffer")} in an arena of ${bytes(memory.arena_bytes)}; the table below has the same figures`,
        },
        [0, 0.5, 1].map((part) => [
          svg("line", {
            class: "grid",
            x1: LEFT,
            x2: RIGHT,
            y1: y(part * memory.arena_bytes),
            y2: y(part * memory.arena_bytes),
          }),
          svg(
            "text",
            { x: LEFT - 8, y: y(part * memory.arena_bytes) + 4, "text-anchor": "end" },
            bytes(Math.round(part * memory.arena_bytes)),
          ),
        ]),
        inside
          .slice(0, MOST_DRAWN)
          .map((buffer, k) =>
            svg(
              "rect",
              {
                class: `life life-${k % 6}`,
                x: x(buffer.first),
                width: Math.max(1.5, x(buffer.last + 1) - x(buffer.first)),
                y: y(buffer.at + buffer.bytes),
                height: Math.max(1.5, y(buffer.at) - y(buffer.at + buffer.bytes)),
              },
              svg(
                "title",
                {},
                `${buffer.name}: ${bytes(buffer.bytes)} at ${bytes(buffer.at)}, steps ${buffer.first + 1} to ${buffer.last + 1}`,
              ),
            ),
          ),
        svg("text", { x: LEFT, y: bottom + 20 }, "first step"),
        svg("text", { x: RIGHT, y: bottom + 20, "text-anchor": "end" }, `step ${memory.steps.length}`),
      ),
      el(
        "figcaption",
        { class: "remark" },
        "Each rectangle is a buffer: to the right the steps it is alive in, upwards where it lies.",
      ),
    ),
  ];
}
