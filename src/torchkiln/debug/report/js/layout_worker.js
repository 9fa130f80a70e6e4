// Places boxes and edges of one group with dagre, which is loaded before this file. Runs in a worker where there is one.

function placeBoxes({ boxes, edges }) {
  const connected = new Set(edges.flat());
  const alone = boxes.filter(([key]) => !connected.has(key));
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: "TB", nodesep: 22, ranksep: 30, edgesep: 10, marginx: 14, marginy: 14 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const [key, width, height] of boxes) {
    if (connected.has(key)) graph.setNode(key, { width, height });
  }
  for (const [from, to] of edges) graph.setEdge(from, to);
  dagre.layout(graph);
  const places = new Map();
  for (const key of graph.nodes()) {
    const { x, y, width, height } = graph.node(key);
    places.set(key, [x - width / 2, y - height / 2]);
  }
  const size = edges.length ? graph.graph() : { width: 0, height: 0 };
  const rows = placeInRows(alone, size, places);
  return {
    width: Math.max(size.width, rows.width, 1),
    height: Math.max(rows.bottom, 1),
    boxes: boxes.map(([key]) => places.get(key)),
    edges: edges.map(([from, to]) => graph.edge(from, to).points.map(({ x, y }) => [x, y])),
  };
}

// Boxes without edges would be one long row; they go into rows of about the width of the rest.
function placeInRows(alone, size, places) {
  const most = Math.max(size.width - 14, 14 + 200 * Math.sqrt(alone.length));
  let [x, y, tallest, width] = [14, size.height ? size.height + 8 : 14, 0, 0];
  for (const [key, w, h] of alone) {
    if (x > 14 && x + w > most) {
      [x, y, tallest] = [14, y + tallest + 18, 0];
    }
    places.set(key, [x, y]);
    [x, tallest, width] = [x + w + 18, Math.max(tallest, h), Math.max(width, x + w + 14)];
  }
  return { width, bottom: alone.length ? y + tallest + 14 : size.height };
}

if (typeof WorkerGlobalScope !== "undefined") {
  onmessage = ({ data }) => {
    try {
      postMessage({ number: data.number, placed: placeBoxes(data) });
    } catch (error) {
      postMessage({ number: data.number, failure: String(error) });
    }
  };
}
