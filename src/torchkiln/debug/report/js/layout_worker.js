// Places boxes and edges of one group with dagre, which is loaded before this file. Runs in a worker where there is one.

function placeBoxes({ boxes, edges }) {
  const graph = new dagre.graphlib.Graph({ multigraph: false, compound: false });
  graph.setGraph({ rankdir: "TB", nodesep: 22, ranksep: 30, edgesep: 10, marginx: 14, marginy: 14 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const [key, width, height] of boxes) graph.setNode(key, { width, height });
  for (const [from, to] of edges) graph.setEdge(from, to);
  dagre.layout(graph);
  const size = graph.graph();
  return {
    width: Math.max(size.width, 1),
    height: Math.max(size.height, 1),
    boxes: boxes.map(([key, width, height]) => {
      const { x, y } = graph.node(key);
      return [x - width / 2, y - height / 2];
    }),
    edges: edges.map(([from, to]) => graph.edge(from, to).points.map(({ x, y }) => [x, y])),
  };
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
