// Asks the worker for the places of boxes. A page that may have no worker lays out by itself.

let worker;
let asked = 0;
const waiting = new Map();

const source = (id) =>
  new TextDecoder().decode(Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0)));

function start() {
  const code = `${source("layout-library")}\n${source("layout-worker")}`;
  try {
    worker = new Worker(URL.createObjectURL(new Blob([code], { type: "text/javascript" })));
    worker.onmessage = ({ data }) => {
      const { resolve, reject } = waiting.get(data.number);
      waiting.delete(data.number);
      if (data.failure) reject(new Error(data.failure));
      else resolve(data.placed);
    };
  } catch {
    worker = null;
    const script = document.createElement("script");
    script.textContent = `${code}\nwindow.placeBoxes = placeBoxes;`;
    document.head.append(script);
  }
}

function place(boxes, edges) {
  if (worker === undefined) start();
  if (worker === null) return Promise.resolve(window.placeBoxes({ boxes, edges }));
  asked += 1;
  const number = asked;
  return new Promise((resolve, reject) => {
    waiting.set(number, { resolve, reject });
    worker.postMessage({ number, boxes, edges });
  });
}

export const TITLE = 26;
const LETTER = 6.9;

export function boxSize(item) {
  const [first, second] = item.labels;
  const length = Math.max(first.length * LETTER, second.length * LETTER * 0.86);
  return [Math.max(56, length + (item.node ? 22 : 40)), second ? 40 : 28];
}

// Places of everything that is drawn: open groups are laid out from the inside. Results of a group are kept as long as
// the same groups in it are open.
export async function layOut(group, open) {
  const inner = await Promise.all(
    group.children.map((child) => (!child.node && open.has(child.key) ? layOut(child, open) : null)),
  );
  const sizes = inner.map((placed, k) => (placed ? [placed.width, placed.height + TITLE] : boxSize(group.children[k])));
  const signature = sizes.join(" ");
  if (group.kept?.signature !== signature) {
    const boxes = group.children.map((child, k) => [child.key, ...sizes[k]]);
    const edges = [...group.edges.values()];
    const placed = await place(
      boxes,
      edges.map(({ from, to }) => [from.key, to.key]),
    );
    group.kept = { signature, placed, edges };
  }
  const { placed, edges } = group.kept;
  return {
    group,
    width: Math.max(placed.width, group.name ? group.labels[0].length * LETTER + 60 : 0),
    height: placed.height,
    boxes: group.children.map((child, k) => ({ item: child, at: placed.boxes[k], size: sizes[k], inner: inner[k] })),
    edges: edges.map((edge, k) => ({ ...edge, points: placed.edges[k] })),
  };
}
