// The nodes of a graph as a tree of modules. No group has more than MOST children: long ones are cut into parts.

const MOST = 60;

// A group: {key, name, children, parent, depth, count, edges}. A leaf: {key, node, parent, depth}.
export function groupNodes(stage) {
  const root = group("", "", null);
  const paths = new Map(stage.nodes.map((node) => [node.id, node.module ? node.module.split(".") : []]));
  const groups = new Map([["", root]]);
  const leaves = new Map();
  for (const node of stage.nodes) {
    const path = node.module || node.op === "output" ? paths.get(node.id) : commonPath(stage, node, paths);
    const parent = groupAt(groups, path);
    const leaf = { key: `node ${node.id}`, node, parent };
    parent.children.push(leaf);
    leaves.set(node.id, leaf);
  }
  shortenChains(root);
  cutLong(root);
  number(root, 0);
  for (const node of stage.nodes) {
    for (const read of new Set(node.reads)) {
      if (leaves.has(read)) connect(leaves.get(read), leaves.get(node.id));
    }
  }
  return { root, leaves };
}

function group(key, name, parent) {
  return { key, name, parent, children: [], edges: new Map(), count: 0, depth: 0 };
}

// An input or a weight belongs to the module that reads it; training returns many for backward, which says nothing.
function commonPath(stage, node, paths) {
  const users = (stage.users.get(node.id) ?? []).filter((id) => stage.byId.get(id).op !== "output");
  const readers = users.map((id) => paths.get(id));
  if (!readers.length) return [];
  let common = readers[0];
  for (const path of readers) {
    let k = 0;
    while (k < common.length && k < path.length && common[k] === path[k]) k += 1;
    common = common.slice(0, k);
  }
  return common;
}

function groupAt(groups, path) {
  const key = path.join(".");
  if (!groups.has(key)) {
    const parent = groupAt(groups, path.slice(0, -1));
    const numbered = /^\d+$/.test(path.at(-1)) && path.length > 1; // "layers.3" says more than "3"
    const made = group(key, path.slice(numbered ? -2 : -1).join("."), parent);
    parent.children.push(made);
    groups.set(key, made);
  }
  return groups.get(key);
}

// A module that holds nothing but one other module is drawn as one: "encoder.layers".
function shortenChains(at) {
  at.children = at.children.map((child) => {
    if (child.node) return child;
    shortenChains(child);
    const [only] = child.children;
    if (child.children.length > 1 || only.node) return child;
    only.name = only.name.startsWith(`${child.name}.`) ? only.name : `${child.name}.${only.name}`;
    only.parent = at;
    return only;
  });
}

function cutLong(at) {
  at.children.filter((child) => !child.node).forEach(cutLong);
  while (at.children.length > MOST) {
    const size = Math.max(2, Math.ceil(at.children.length / Math.ceil(at.children.length / MOST)));
    const parts = [];
    for (let k = 0; k < at.children.length; k += size) {
      const part = group(`${at.key} part ${parts.length + 1} of ${at.children.length}`, `part ${parts.length + 1}`, at);
      part.children = at.children.slice(k, k + size);
      part.children.forEach((child) => {
        child.parent = part;
      });
      parts.push(part);
    }
    at.children = parts;
  }
}

function number(at, depth) {
  at.depth = depth;
  if (at.node) return 1;
  at.count = at.children.reduce((sum, child) => sum + number(child, depth + 1), 0);
  return at.count;
}

// An edge is kept where both of its ends are children of one group.
function connect(from, to) {
  while (from.depth > to.depth) from = from.parent;
  while (to.depth > from.depth) to = to.parent;
  while (from.parent !== to.parent) {
    from = from.parent;
    to = to.parent;
  }
  if (from === to) return;
  const { edges } = from.parent;
  const key = `${from.key}\n${to.key}`;
  const edge = edges.get(key);
  if (edge) edge.count += 1;
  else edges.set(key, { from, to, count: 1 });
}

// Which groups are open at first: whole levels from the outside, as long as no more than `most` things are drawn.
export function firstOpen(root, most = 64) {
  const open = new Set();
  let shown = root.children.length;
  let level = root.children.filter((child) => !child.node);
  while (level.length) {
    shown += level.reduce((sum, { children }) => sum + children.length, 0);
    if (shown > most) break;
    level.forEach(({ key }) => open.add(key));
    level = level.flatMap(({ children }) => children.filter((child) => !child.node));
  }
  return open;
}

export function allGroups(at) {
  return at.children.filter((child) => !child.node).flatMap((child) => [child, ...allGroups(child)]);
}

// The groups around a leaf, the outermost first.
export function around(leaf) {
  const found = [];
  for (let at = leaf.parent; at?.parent; at = at.parent) found.unshift(at);
  return found;
}

const FAMILIES = [
  [
    "matmul",
    /(^|[._])(mm|bmm|addmm|baddbmm|matmul|linear|conv\w*|convolution\w*|einsum|\w*attention\w*|dot|mv)(_|$|\.)/,
  ],
  [
    "reduction",
    /(^|[._])(sum|mean|amax|amin|max|min|argmax|argmin|softmax|_softmax|log_softmax|\w*norm\w*|var|var_mean|std|prod|cumsum|any|all|logsumexp)(_|$|\.)/,
  ],
  ["index", /(^|[._])(embedding\w*|index\w*|gather|scatter\w*|topk|sort)(_|$|\.)/],
  [
    "view",
    /(^|[._])(view|reshape|_unsafe_view|permute|transpose|t|expand|slice\w*|select\w*|unsqueeze|squeeze|cat|split\w*|chunk|clone|as_strided|getitem|copy_?|contiguous|_to_copy|to|flatten|detach|alias|unbind|stack)(_|$|\.)/,
  ],
];

// What a node does, for its colour.
export function family(node) {
  if (node.op === "placeholder" || node.op === "get_attr") return "input";
  if (node.op === "output") return "output";
  const name = node.target.replace(/^(torch\.ops\.)?(aten|prims|torch|operator|_operator)\./, "").replace(/\.\w+$/, "");
  return FAMILIES.find(([, pattern]) => pattern.test(name))?.[0] ?? "pointwise";
}
