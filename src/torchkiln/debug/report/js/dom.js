// Elements. Texts become text nodes, so nothing of the user's program is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

export function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export const byId = (id) => document.getElementById(id);

// Tells a screen reader what a click did.
export function say(text) {
  byId("said").textContent = text;
}

// A table. Columns are [heading, cell of a row, "text" for words]; a cell is a text, an element or a list of them.
export function table(caption, columns, rows) {
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      {},
      el("caption", { class: "unseen" }, caption),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          columns.map(([heading, , kind]) => el("th", { scope: "col", class: kind }, heading)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((row) =>
          el(
            "tr",
            {},
            columns.map(([, cell, kind]) => el("td", { class: kind }, cell(row))),
          ),
        ),
      ),
    ),
  );
}

// Buttons of which one is pressed. Choices are [value, label]; arrow keys move between them.
export function choice(label, choices, current, choose) {
  const buttons = choices.map(([value, text]) =>
    el("button", { type: "button", "aria-pressed": String(value === current), onclick: () => press(value) }, text),
  );
  const press = (value) => {
    buttons.forEach((button, k) => button.setAttribute("aria-pressed", String(choices[k][0] === value)));
    choose(value);
  };
  return el(
    "div",
    { class: "choice", role: "group", "aria-label": label, onkeydown: (event) => moveFocus(event, buttons) },
    buttons,
  );
}

// Moves the focus within a list by arrow keys, Home and End.
export function moveFocus(event, items) {
  const at = items.indexOf(document.activeElement);
  const steps = {
    ArrowDown: at + 1,
    ArrowRight: at + 1,
    ArrowUp: at - 1,
    ArrowLeft: at - 1,
    Home: 0,
    End: items.length - 1,
  };
  const next = items[steps[event.key]];
  if (!next) return;
  event.preventDefault();
  next.focus();
}
