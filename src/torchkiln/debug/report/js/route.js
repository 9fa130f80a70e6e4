// Where the reader is: the part of the address after #. Every place of the report is a link, and Back goes back.

export const VIEWS = [
  ["overview", "Overview"],
  ["graph", "Graph"],
  ["passes", "Passes"],
  ["kernels", "Kernels"],
  ["memory", "Memory"],
  ["fusion", "Fusion"],
  ["capture", "Capture"],
];

// c: compilation, s: stage, p: pass, on: what is selected ("n:add_1", "k:0", "c:2", "l:model.py:12"), code: kind of code
const EMPTY = { view: "overview", c: 0, s: null, p: null, on: null, code: "text" };
const NUMBERS = new Set(["c", "s", "p"]);

export function current() {
  const [view, query] = location.hash.slice(1).split("?");
  const state = { ...EMPTY };
  if (VIEWS.some(([name]) => name === view)) state.view = view;
  for (const [name, value] of new URLSearchParams(query ?? "")) {
    if (name in EMPTY) state[name] = NUMBERS.has(name) ? Number(value) : value;
  }
  return state;
}

export function address(state) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (name !== "view" && value !== EMPTY[name]) query.set(name, value);
  }
  const text = query.toString();
  return `#${state.view}${text ? `?${text}` : ""}`;
}

// The address that differs from where the reader is in these fields.
export const to = (changes) => address({ ...current(), ...changes });

export function go(changes) {
  const target = to(changes);
  if (target !== location.hash) location.hash = target;
}

export function selection(state) {
  if (!state.on) return null;
  return { kind: state.on[0], key: state.on.slice(2) };
}
