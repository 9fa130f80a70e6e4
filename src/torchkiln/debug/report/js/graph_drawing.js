// The drawing of one graph: groups that open and close, nodes, edges, the selection.

import { say, svg } from "report/dom.js";
import { counted, percent, seconds, tensor } from "report/figures.js";
import { allGroups, around, family, firstOpen, groupNodes } from "report/groups.js";
import { layOut, TITLE } from "report/layout.js";
import { PanZoom } from "report/pan_zoom.js";

const MOST_DRAWN = 1500;
const HUES = [25, 265, 150, 320, 85, 215, 355, 185, 55, 290, 120, 240];

// Groups and what is open in them, by stage: a reader who comes back finds the drawing as it was.
const trees = new WeakMap();

function treeOf(stage) {
  if (!trees.has(stage)) {
    const tree = groupNodes(stage);
    tree.open = firstOpen(tree.root);
    for (const leaf of tree.leaves.values())
      leaf.labels = [shortened(leaf.node.label || leaf.node.id), tensor(leaf.node)];
    for (const group of allGroups(tree.root)) group.labels = [group.name, counted(group.count, "node")];
    tree.root.labels = ["", ""];
    trees.set(stage, tree);
  }
  return trees.get(stage);
}

// Names of weights can be as long as a sentence; their ends say most.
const shortened = (name) => (name.length > 34 ? `${name.slice(0, 10)}…${name.slice(-22)}` : name);

export class GraphDrawing {
  // `choose` is called with the name of a node, or null where nothing is to be selected.
  constructor(compilation, choose) {
    this.compilation = compilation;
    this.choose = choose;
    this.colours = "family";
    this.items = new Map();
    this.edges = new Map();
    this.layer = svg("g", {});
    this.element = svg(
      "svg",
      { class: "graph", role: "group", tabindex: "0", "aria-label": "Graph" },
      svg(
        "defs",
        {},
        svg(
          "marker",
          {
            id: "arrow",
            viewBox: "0 0 8 8",
            refX: 7,
            refY: 4,
            markerWidth: 8,
            markerHeight: 8,
            markerUnits: "userSpaceOnUse",
            orient: "auto",
          },
          svg("path", { d: "M0 0L8 4L0 8z" }),
        ),
      ),
      this.layer,
    );
    this.view = new PanZoom(this.element, this.layer);
    this.element.addEventListener("click", (event) => this.clicked(event));
    this.element.addEventListener("keydown", (event) => this.pressed(event));
  }

  // Draws a stage; `related` are the nodes of the selection, `chosen` the one that is selected itself.
  async show(stageNumber, related, chosen) {
    const fresh = this.stageNumber !== stageNumber;
    this.stageNumber = stageNumber;
    this.stage = this.compilation.stages[stageNumber];
    this.tree = treeOf(this.stage);
    this.related = related;
    this.chosen = chosen;
    const wanted = chosen ?? (related.size && related.size <= 12 ? [...related][0] : null);
    for (const id of chosen ? [chosen] : related.size <= 12 ? related : []) {
      for (const group of around(this.tree.leaves.get(id))) this.tree.open.add(group.key);
    }
    await this.draw();
    if (fresh) this.fit();
    if (wanted) this.reveal(wanted);
  }

  async draw() {
    const tree = this.tree;
    this.element.setAttribute("aria-busy", "true");
    const placed = await layOut(tree.root, tree.open);
    if (tree !== this.tree) return;
    this.placed = placed;
    this.items.clear();
    this.edges.clear();
    const back = svg("g", { class: "back" });
    const lines = svg("g", { class: "edges" });
    const front = svg("g", {});
    this.drawGroup(placed, 0, 0, { back, lines, front });
    this.overlay = svg("g", { class: "edges through" });
    this.layer.replaceChildren(back, lines, this.overlay, front);
    this.element.setAttribute(
      "aria-label",
      `Graph of ${this.stage.name}: ${counted(this.stage.nodes.length, "node")}, ${this.items.size} things drawn. Arrow keys move between them, Enter opens. "List" shows the same as a list.`,
    );
    this.element.removeAttribute("aria-busy");
    this.mark();
  }

  drawGroup(placed, x, y, layers) {
    for (const { from, to, points, count } of placed.edges) {
      const path = svg("path", { d: curve(points.map(([px, py]) => [x + px, y + py])), "marker-end": "url(#arrow)" });
      path.append(
        svg(
          "title",
          {},
          count > 1 ? `${from.labels[0]} → ${to.labels[0]}: ${count} values` : `${from.labels[0]} → ${to.labels[0]}`,
        ),
      );
      layers.lines.append(path);
      this.edges.set(`${from.key}\n${to.key}`, {
        path,
        first: shifted(points[0], x, y),
        last: shifted(points.at(-1), x, y),
      });
    }
    for (const { item, at, size, inner } of placed.boxes) {
      const box = { item, x: x + at[0], y: y + at[1], width: size[0], height: size[1], inner };
      if (inner) {
        layers.back.append(this.drawOpen(box));
        this.drawGroup(inner, box.x, box.y + TITLE, layers);
      } else {
        layers.front.append(item.node ? this.drawNode(box) : this.drawClosed(box));
      }
    }
  }

  keep(box, element) {
    box.element = element;
    this.items.set(box.item.key, box);
    return element;
  }

  drawNode(box) {
    const { node, labels } = box.item;
    const name = `${labels[0]}${labels[1] ? `, ${labels[1]}` : ""}, ${node.target}${node.module ? `, in ${node.module}` : ""}`;
    return this.keep(
      box,
      svg(
        "g",
        {
          class: `box ${family(node)}`,
          "data-key": box.item.key,
          tabindex: "-1",
          role: "button",
          "aria-label": name,
          transform: `translate(${box.x} ${box.y})`,
        },
        svg("rect", { width: box.width, height: box.height, rx: 7 }),
        svg("text", { x: box.width / 2, y: labels[1] ? 17 : box.height / 2 + 4 }, labels[0]),
        labels[1] && svg("text", { class: "small", x: box.width / 2, y: 32 }, labels[1]),
        svg("title", {}, `${node.id}: ${node.target}`),
      ),
    );
  }

  drawClosed(box) {
    const { labels, key } = box.item;
    return this.keep(
      box,
      svg(
        "g",
        {
          class: "box closed",
          "data-key": key,
          tabindex: "-1",
          role: "button",
          "aria-expanded": "false",
          "aria-label": `module ${key || labels[0]}, ${labels[1]}`,
          transform: `translate(${box.x} ${box.y})`,
        },
        svg("rect", { class: "behind", x: 4, y: 4, width: box.width, height: box.height, rx: 8 }),
        svg("rect", { width: box.width, height: box.height, rx: 8 }),
        svg("path", { class: "sign", d: "M12 14l5 4l-5 4z" }),
        svg("text", { x: box.width / 2 + 6, y: 17 }, labels[0]),
        svg("text", { class: "small", x: box.width / 2 + 6, y: 32 }, labels[1]),
        svg("title", {}, `${key}: ${labels[1]}, click to open`),
      ),
    );
  }

  drawOpen(box) {
    const { labels, key } = box.item;
    return this.keep(
      box,
      svg(
        "g",
        {
          class: "box open",
          "data-key": key,
          tabindex: "-1",
          role: "button",
          "aria-expanded": "true",
          "aria-label": `module ${key || labels[0]}, ${labels[1]}, open`,
          transform: `translate(${box.x} ${box.y})`,
        },
        svg("rect", { width: box.width, height: box.height, rx: 10 }),
        svg("path", { class: "sign", d: "M9 11h9l-4.5 6z" }),
        svg("text", { class: "title", x: 24, y: 18 }, labels[0]),
        svg("title", {}, `${key}: ${labels[1]}, click to close`),
      ),
    );
  }

  // Colours and the selection, without a new layout.
  mark() {
    const held = new Map();
    for (const id of this.related) {
      for (const group of around(this.tree.leaves.get(id))) held.set(group.key, (held.get(group.key) ?? 0) + 1);
    }
    const total = this.compilation.measuredSeconds || 1;
    for (const box of this.items.values()) {
      const { element, item } = box;
      const id = item.node?.id;
      element.classList.toggle("chosen", id !== undefined && id === this.chosen);
      element.classList.toggle("related", id !== undefined && this.related.has(id));
      element.classList.toggle("holds", !item.node && held.has(item.key));
      element.querySelector(".badge")?.remove();
      if (!item.node && !box.inner && held.has(item.key)) {
        element.append(svg("text", { class: "badge", x: box.width - 8, y: 12 }, String(held.get(item.key))));
      }
      if (item.node) this.colour(element, item.node, total);
    }
    this.element.classList.toggle("selecting", this.related.size > 0);
    this.drawThrough();
    const start = this.items.get(`node ${this.chosen}`) ?? this.items.values().next().value;
    this.rove(start?.element);
  }

  colour(element, node, total) {
    const work = this.colours === "family" ? [] : this.compilation.workOf(this.stageNumber, [node.id]);
    element.classList.toggle("plain", this.colours !== "family");
    element.style.removeProperty("--fill");
    if (!work.length) return;
    if (this.colours === "kernel") {
      const hue = HUES[this.compilation.work.indexOf(work[0]) % HUES.length];
      element.style.setProperty("--fill", `light-dark(oklch(0.9 0.07 ${hue}), oklch(0.4 0.08 ${hue}))`);
    } else {
      const share = work.reduce((sum, { seconds: s }) => sum + (s ?? 0), 0) / total;
      element.style.setProperty(
        "--fill",
        `color-mix(in oklab, var(--heat) ${Math.round(8 + 92 * Math.sqrt(share))}%, var(--raised))`,
      );
    }
    const title = element.querySelector("title");
    title.textContent = `${node.id}: ${node.target}\n${work.map((w) => `${w.name}: ${seconds(w.seconds)}${w.seconds ? ` (${percent(w.seconds / total)})` : ""}`).join("\n")}`;
  }

  // Marks the edges from and to the selected node. One that crosses the borders of groups is the edge between the
  // groups, and lines from its ends to the nodes.
  drawThrough() {
    this.overlay.replaceChildren();
    for (const { path } of this.edges.values()) path.classList.remove("reads", "users");
    const node = this.chosen && this.stage.byId.get(this.chosen);
    if (!node) return;
    for (const id of new Set(node.reads)) this.drawLink(id, node.id, "reads");
    for (const id of this.stage.users.get(node.id) ?? []) this.drawLink(node.id, id, "users");
  }

  drawLink(fromId, toId, kind) {
    const [from, to] = [this.shown(fromId), this.shown(toId)];
    if (!from || !to || from === to) return;
    let [a, b] = [from.item, to.item];
    while (a.depth > b.depth) a = a.parent;
    while (b.depth > a.depth) b = b.parent;
    while (a.parent !== b.parent) [a, b] = [a.parent, b.parent];
    const edge = this.edges.get(`${a.key}\n${b.key}`);
    if (!edge) return;
    edge.path.classList.add(kind);
    const line = (x1, y1, x2, y2) => {
      const bend = Math.max(12, Math.abs(y2 - y1) / 2);
      this.overlay.append(
        svg("path", { class: kind, d: `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}` }),
      );
    };
    if (a !== from.item) line(from.x + from.width / 2, from.y + from.height, ...edge.first);
    if (b !== to.item) line(...edge.last, to.x + to.width / 2, to.y);
  }

  // The box that stands for a node: its own, or that of the closed group it is in.
  shown(id) {
    const leaf = this.tree.leaves.get(id);
    if (!leaf) return null;
    const closed = around(leaf).find((group) => !this.tree.open.has(group.key));
    return this.items.get(closed ? closed.key : leaf.key);
  }

  reveal(id) {
    const box = this.shown(id);
    if (box) this.view.reveal(box.x, box.y, box.width, box.height);
  }

  fit(smallest) {
    if (this.placed) this.view.fit(this.placed.width, this.placed.height, smallest);
  }

  recolour(colours) {
    this.colours = colours;
    this.mark();
  }

  // Opens or closes a group, which stays where it is on the screen.
  async toggle(group) {
    const before = this.items.get(group.key);
    const [left, top] = [this.view.x + before.x * this.view.scale, this.view.y + before.y * this.view.scale];
    const opens = !this.tree.open.delete(group.key);
    if (opens) this.tree.open.add(group.key);
    const focused = document.activeElement === before.element;
    await this.draw();
    const after = this.items.get(group.key);
    this.view.pan(left - (this.view.x + after.x * this.view.scale), top - (this.view.y + after.y * this.view.scale));
    if (focused) this.rove(after.element, true);
    say(`${group.labels[0]} ${opens ? `opened, ${counted(group.children.length, "part")}` : "closed"}`);
  }

  // Opens groups from the outside, as many as can be drawn; or closes all.
  async openAll(open) {
    if (open) {
      const level = (groups) => {
        const shown =
          this.tree.root.children.length +
          allGroups(this.tree.root)
            .filter((g) => this.tree.open.has(g.key))
            .reduce((n, g) => n + g.children.length, 0);
        let left = MOST_DRAWN - shown;
        for (const group of groups) {
          if (!this.tree.open.has(group.key)) left -= group.children.length;
          if (left < 0) return say(`Opened as much as can be drawn at once: ${MOST_DRAWN} things`);
          this.tree.open.add(group.key);
        }
        const inner = groups.flatMap((group) => group.children.filter((child) => !child.node));
        return inner.length ? level(inner) : say("Opened all");
      };
      level(this.tree.root.children.filter((child) => !child.node));
    } else {
      this.tree.open.clear();
      say("Closed all");
    }
    await this.draw();
    this.fit();
  }

  clicked(event) {
    if (this.view.dragged) return;
    const key = event.target.closest("[data-key]")?.dataset.key;
    if (key === undefined) this.choose(null);
    else this.activate(this.items.get(key).item);
  }

  activate(item) {
    if (item.node) this.choose(item.node.id);
    else this.toggle(item);
  }

  rove(element, focus = false) {
    this.roving?.setAttribute("tabindex", "-1");
    this.roving = element;
    element?.setAttribute("tabindex", "0");
    if (focus) element?.focus({ preventScroll: true });
  }

  pressed(event) {
    const at = this.items.get(event.target.closest("[data-key]")?.dataset.key);
    const arrows = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in arrows) {
      const [dx, dy] = arrows[event.key];
      if (at && !event.shiftKey) this.step(at, dx, dy);
      else this.view.pan(-60 * dx, -60 * dy);
    } else if (event.key === "+" || event.key === "=") this.view.zoom(1.25);
    else if (event.key === "-") this.view.zoom(0.8);
    else if (event.key === "0") this.fit(0.04);
    else if ((event.key === "Enter" || event.key === " ") && at) this.activate(at.item);
    else if (event.key === "Enter") this.rove(this.roving, true);
    else return;
    event.preventDefault();
  }

  // Moves the focus to the nearest box in a direction.
  step(at, dx, dy) {
    const centre = (box) => [box.x + box.width / 2, box.y + (box.inner ? 10 : box.height / 2)];
    const [x, y] = centre(at);
    let best = null;
    let nearest = Infinity;
    for (const box of this.items.values()) {
      const [bx, by] = centre(box);
      const along = (bx - x) * dx + (by - y) * dy;
      const across = Math.abs((bx - x) * dy) + Math.abs((by - y) * dx);
      if (box === at || along < 4 || along + 2 * across >= nearest) continue;
      nearest = along + 2 * across;
      best = box;
    }
    if (!best) return;
    this.rove(best.element, true);
    this.view.reveal(best.x, best.y, best.width, best.inner ? TITLE : best.height);
  }
}

const shifted = ([x, y], dx, dy) => [x + dx, y + dy];

// A line through points, rounded at its bends.
function curve(points) {
  const [first, ...rest] = points;
  let path = `M${first[0]} ${first[1]}`;
  for (let k = 0; k < rest.length - 1; k += 1) {
    const [x, y] = rest[k];
    const [nx, ny] = rest[k + 1];
    path += `Q${x} ${y} ${(x + nx) / 2} ${(y + ny) / 2}`;
  }
  const [x, y] = rest.at(-1);
  return `${path}L${x} ${y}`;
}
