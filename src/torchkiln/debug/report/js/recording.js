// The recording and the ways through it: node ↔ line ↔ kernel, from stage to stage.

export async function unpack(id) {
  const letters = atob(document.getElementById(id).textContent);
  const content = new Uint8Array(letters.length);
  for (let k = 0; k < letters.length; k += 1) content[k] = letters.charCodeAt(k);
  const stream = new Blob([content]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

export class Recorded {
  constructor(data) {
    this.data = data;
    this.compilations = data.compilations.map((compilation) => new Compilation(this, compilation));
    this.placeNames = data.places.map(([file, line]) => `${file}:${line}`);
    this.folder = commonFolder(Object.keys(data.sources));
    this.placeNumbers = new Map(this.placeNames.map((name, k) => [name, k]));
  }

  // The lines of a text as numbers: equal lines have equal numbers.
  lineNumbers(text) {
    const runs = this.data.texts[text];
    const numbers = [];
    for (let k = 0; k < runs.length; k += 2) {
      for (let j = 0; j < runs[k + 1]; j += 1) numbers.push(runs[k] + j);
    }
    return numbers;
  }

  lines(text) {
    return this.lineNumbers(text).map((number) => this.data.lines[number]);
  }

  // Texts of stages and passes are numbers of the recording's own table.
  textNumber(number) {
    return this.data.numbers[number];
  }

  // A file, or a file and line, without the folder that all sources share.
  short(name) {
    return name.startsWith(this.folder) ? name.slice(this.folder.length) : name;
  }

  sourceLine(place) {
    const [file, line] = this.data.places[place];
    const text = this.data.sources[file];
    return text === undefined ? "" : (this.lines(text)[line - 1] ?? "").trim();
  }
}

function commonFolder(files) {
  const folders = files.map((file) => file.slice(0, file.lastIndexOf("/") + 1));
  let common = folders[0] ?? "";
  for (const folder of folders) {
    while (!folder.startsWith(common)) common = common.slice(0, common.lastIndexOf("/", common.length - 2) + 1);
  }
  return common;
}

class Compilation {
  constructor(recorded, data) {
    this.recorded = recorded;
    this.data = data;
    this.stages = data.stages.map((number) => stageOf(recorded, number));
    this.graphs = this.stages.map((stage, k) => (stage.nodes.length ? k : -1)).filter((k) => k >= 0);
    this.passes = data.passes.map((number) => recorded.data.passes[number]);
    this.work = [
      ...data.kernels.map((kernel, k) => ({ ...kernel, kind: "kernel", key: `k:${k}` })),
      ...data.library_calls.map((call, k) => ({ ...call, kind: "library call", key: `c:${k}`, launches: 1 })),
    ];
    this.workByKey = new Map(this.work.map((work) => [work.key, work]));
    this.workOfNode = new Map();
    this.workOfPlace = new Map();
    for (const work of this.work) {
      for (const id of work.nodes) push(this.workOfNode, id, work);
      for (const place of work.lines) push(this.workOfPlace, place, work);
    }
  }

  get lastGraph() {
    return this.graphs.at(-1) ?? null;
  }

  get measuredSeconds() {
    return this.work.reduce((sum, work) => sum + (work.seconds ?? 0), 0);
  }

  // The nodes of stage `to` that nodes of stage `from` became, or came from.
  follow(from, ids, to) {
    let found = new Set(ids);
    const start = this.graphs.indexOf(from);
    const end = this.graphs.indexOf(to);
    for (let k = start; k > end; k -= 1) {
      const { byId } = this.stages[this.graphs[k]];
      found = new Set([...found].flatMap((id) => byId.get(id)?.comes_from ?? []));
    }
    for (let k = start; k < end; k += 1) {
      const { becomes } = this.stages[this.graphs[k + 1]];
      found = new Set([...found].flatMap((id) => becomes.get(id) ?? []));
    }
    const { byId } = this.stages[to];
    return new Set([...found].filter((id) => byId.has(id)));
  }

  workOf(stage, ids) {
    if (this.lastGraph === null) return [];
    return [...new Set([...this.follow(stage, ids, this.lastGraph)].flatMap((id) => this.workOfNode.get(id) ?? []))];
  }

  // Everything that belongs to a selection, as nodes of one stage, kernels and calls, and lines.
  related(selected, stage) {
    const nothing = { nodes: new Set(), work: [], places: new Set() };
    if (!selected || stage === null) return nothing;
    const graph = this.stages[stage];
    if (selected.kind === "n") {
      const node = graph.byId.get(selected.key);
      if (!node) return nothing;
      return { nodes: new Set([node.id]), work: this.workOf(stage, [node.id]), places: new Set(node.lines) };
    }
    if (selected.kind === "l") {
      const place = this.recorded.placeNumbers.get(selected.key);
      const nodes = new Set(graph.ofPlace.get(place) ?? []);
      const work = [...new Set([...this.workOf(stage, nodes), ...(this.workOfPlace.get(place) ?? [])])];
      return { nodes, work, places: new Set([place]) };
    }
    const work = this.workByKey.get(`${selected.kind}:${selected.key}`);
    if (!work) return nothing;
    return { nodes: this.follow(this.lastGraph, work.nodes, stage), work: [work], places: new Set(work.lines) };
  }
}

// What a stage has, indexed once; graphs of one capture share stages.
const known = new WeakMap();

function stageOf(recorded, number) {
  const data = recorded.data.stages[number];
  if (!known.has(data)) known.set(data, new Stage(data));
  return known.get(data);
}

class Stage {
  constructor(data) {
    Object.assign(this, data);
  }

  get byId() {
    return this.once("_byId", () => new Map(this.nodes.map((node) => [node.id, node])));
  }

  get users() {
    return this.once("_users", () => collect(this.nodes, (node) => node.reads));
  }

  get becomes() {
    return this.once("_becomes", () => collect(this.nodes, (node) => node.comes_from));
  }

  get ofPlace() {
    return this.once("_ofPlace", () => collect(this.nodes, (node) => node.lines));
  }

  once(name, make) {
    this[name] ??= make();
    return this[name];
  }
}

function collect(nodes, keys) {
  const found = new Map();
  for (const node of nodes) {
    for (const key of new Set(keys(node))) push(found, key, node.id);
  }
  return found;
}

function push(map, key, value) {
  const list = map.get(key);
  if (list) list.push(value);
  else map.set(key, [value]);
}
