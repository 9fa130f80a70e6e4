// The roofline: how much a kernel computes for each byte it moves, and how fast, below what this machine can do.

import { el, svg } from "report/dom.js";
import { byteRate, counted, flopRate, percent, seconds } from "report/figures.js";
import { share } from "report/limits.js";
import { go } from "report/route.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [86, 880, 24, 330];

export function roofline(compilation) {
  const { limits } = compilation.recorded.data;
  const measured = compilation.work.filter((work) => work.seconds && work.operations && work.bytes);
  if (!measured.length) return el("p", { class: "remark" }, "No kernel was measured, so there is no roofline.");
  const points = measured.map((work) => ({ work, x: work.operations / work.bytes, y: work.operations / work.seconds }));
  const roof = limits?.operations_per_second ?? 0;
  // The largest copy goes to memory; the fastest stays in a cache.
  const fastest = limits?.bandwidths.reduce(
    (a, b) => (b.bytes_per_second > a.bytes_per_second ? b : a),
    limits.bandwidths[0],
  );
  const slopes = [...new Set([limits?.bandwidths.at(-1), fastest])].filter(Boolean);
  const across = ends([
    ...points.map(({ x }) => x),
    ...slopes.filter(() => roof).map((slope) => roof / slope.bytes_per_second),
  ]);
  const up = ends([...points.map(({ y }) => y), ...(roof ? [roof] : [])]);
  const x = (value) => LEFT + ((RIGHT - LEFT) * Math.log(value / across[0])) / Math.log(across[1] / across[0]);
  const y = (value) => BOTTOM - ((BOTTOM - TOP) * Math.log(value / up[0])) / Math.log(up[1] / up[0]);
  const drawing = svg("svg", {
    class: "drawing roofline",
    viewBox: "0 0 900 380",
    role: "group",
    "aria-label": `Roofline of ${counted(points.length, "kernel or call", "kernels and calls")}; the table below has the same figures`,
  });
  for (const tick of powers(across)) {
    drawing.append(
      svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: TOP, y2: BOTTOM }),
      svg("text", { x: x(tick), y: BOTTOM + 18, "text-anchor": "middle" }, String(Number(tick.toPrecision(1)))),
    );
  }
  for (const tick of powers(up)) {
    drawing.append(
      svg("line", { class: "grid", x1: LEFT, x2: RIGHT, y1: y(tick), y2: y(tick) }),
      svg("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, flopRate(tick).replace(".00", "")),
    );
  }
  drawing.append(
    svg("text", { x: RIGHT, y: BOTTOM + 38, "text-anchor": "end" }, "floating-point operations for each byte"),
    svg("text", { x: LEFT, y: TOP - 8 }, "floating-point operations a second"),
  );
  for (const slope of slopes) {
    const knee = roof ? Math.min(across[1], roof / slope.bytes_per_second) : across[1];
    const from = Math.max(across[0], up[0] / slope.bytes_per_second);
    if (knee <= from) continue;
    drawing.append(
      svg("line", {
        class: "limit",
        x1: x(from),
        y1: y(from * slope.bytes_per_second),
        x2: x(knee),
        y2: y(knee * slope.bytes_per_second),
      }),
    );
    const at = Math.sqrt(from * Math.min(knee, from * 30));
    drawing.append(
      svg(
        "text",
        { class: "limit-name", x: x(at) + 6, y: y(at * slope.bytes_per_second) + 14 },
        byteRate(slope.bytes_per_second),
      ),
    );
  }
  if (roof) {
    const knee = Math.min(...slopes.map((slope) => roof / slope.bytes_per_second), across[1]);
    drawing.append(
      svg("line", { class: "limit", x1: x(Math.max(knee, across[0])), x2: RIGHT, y1: y(roof), y2: y(roof) }),
      svg("text", { class: "limit-name", x: RIGHT, y: y(roof) - 6, "text-anchor": "end" }, `${flopRate(roof)}, matmul`),
    );
  }
  const longest = Math.max(...points.map(({ work }) => work.seconds));
  for (const { work, x: px, y: py } of points.sort((a, b) => b.work.seconds - a.work.seconds)) {
    const reached = share(limits, work);
    const name = `${work.name}: ${seconds(work.seconds)}, ${flopRate(py)}${reached ? `, ${percent(reached.part)} of the machine's ${reached.by}` : ""}`;
    const open = () => go({ view: "kernels", on: work.key });
    drawing.append(
      svg(
        "circle",
        {
          class: work.kind === "kernel" ? "kernel" : "library",
          "data-key": work.key,
          tabindex: "0",
          role: "link",
          "aria-label": name,
          cx: x(px),
          cy: y(py),
          r: 4 + 9 * Math.sqrt(work.seconds / longest),
          onclick: open,
          onkeydown: (event) => event.key === "Enter" && open(),
        },
        svg("title", {}, name),
      ),
    );
  }
  const left = compilation.work.filter((work) => work.seconds && !work.operations).length;
  return el(
    "figure",
    {},
    drawing,
    el(
      "figcaption",
      { class: "remark" },
      el("span", { class: "key kernel" }),
      "kernels",
      el("span", { class: "key library" }),
      "library calls",
      `. Larger circles take longer; lines are what this machine reached when it was measured.${left ? ` ${counted(left, "other")} without floating-point operations: in the table.` : ""}`,
    ),
  );
}

function ends(values) {
  return [
    10 ** Math.floor(Math.log10(Math.min(...values)) - 0.15),
    10 ** Math.ceil(Math.log10(Math.max(...values)) + 0.1),
  ];
}

function powers([low, high]) {
  const found = [];
  for (let k = Math.round(Math.log10(low)); k <= Math.round(Math.log10(high)); k += 1) found.push(10 ** k);
  return found;
}
