// Texts of programs: numbered lines, coloured words, lines that can be clicked. Long texts come in blocks that the
// browser lays out when they come into sight.

import { el } from "report/dom.js";

const BLOCK = 120;
const MOST_COLOURED = 4000;

const WORDS = {
  python:
    /(?<comment>#.*)|(?<string>[rbfu]{0,2}"""(?:(?!""").)*(?:"""|$)|[rbfu]{0,2}"(?:[^"\\]|\\.)*"|[rbfu]{0,2}'(?:[^'\\]|\\.)*')|(?<keyword>\b(?:def|class|return|if|elif|else|for|while|in|not|and|or|is|import|from|as|with|lambda|None|True|False|self|yield|raise|try|except|finally|assert|del|pass)\b)|(?<number>\b\d[\w.]*)/g,
  llvm: /(?<comment>;.*)|(?<string>"[^"]*")|(?<keyword>\b(?:define|declare|br|ret|call|load|store|phi|getelementptr|fadd|fmul|fsub|fdiv|add|mul|sub|icmp|fcmp|select|inbounds|align|label|attributes|target|type|void|ptr|float|double|half|bfloat|i1|i8|i16|i32|i64)\b)|(?<name>[%@][\w.]+)|(?<number>\b\d[\w.]*)/g,
  assembly:
    /(?<comment>[#;].*)|(?<string>"[^"]*")|(?<keyword>^\s+\.?[a-z]\w+)|(?<name>%\w+|\b[xyz]mm\d+)|(?<number>\$?-?\b(?:0x)?\d[\w]*)/g,
  loops:
    /(?<comment>#.*)|(?<keyword>\b(?:for|if|rows|columns|lane|lanes|blocks|iterations|grain|cpu|sum|max|min|in|of)\b)|(?<name>%\d+|\b[a-z]+\d+\b)|(?<number>\b\d[\w.]*)/g,
};

function coloured(line, language) {
  const pattern = WORDS[language];
  if (!pattern) return [line];
  const parts = [];
  let end = 0;
  for (const match of line.matchAll(pattern)) {
    if (match.index > end) parts.push(line.slice(end, match.index));
    const [kind] = Object.entries(match.groups).find(([, text]) => text !== undefined);
    parts.push(el("span", { class: `word-${kind}` }, match[0]));
    end = match.index + match[0].length;
  }
  parts.push(line.slice(end));
  return parts;
}

// Whether each line starts inside of a text in three quotes.
function insideStrings(lines) {
  let inside = null;
  return lines.map((line) => {
    const before = inside !== null;
    for (const [quotes] of line.matchAll(/"""|'''/g)) {
      if (inside === null) inside = quotes;
      else if (inside === quotes) inside = null;
    }
    return before;
  });
}

// `decorate(number, row)` may change the row of a line; numbers count from 1.
export function codeBlock(lines, { language, label, decorate = () => {} } = {}) {
  const plain = lines.length > MOST_COLOURED;
  const inString = language === "python" ? insideStrings(lines) : [];
  const rows = lines.map((line, k) => {
    const content = plain
      ? [line]
      : inString[k]
        ? [el("span", { class: "word-string" }, line)]
        : coloured(line, language);
    const row = el(
      "div",
      { class: "row" },
      el("span", { class: "no", "aria-hidden": "true" }, String(k + 1)),
      el("span", { class: "content" }, content),
    );
    decorate(k + 1, row);
    return row;
  });
  const blocks = [];
  for (let k = 0; k < rows.length; k += BLOCK) {
    const part = rows.slice(k, k + BLOCK);
    blocks.push(el("div", { class: "block", style: `contain-intrinsic-size: auto ${part.length * 1.5}em` }, part));
  }
  const code = el("div", { class: "code", role: "region", tabindex: "0", "aria-label": label ?? "code" }, blocks);
  return { element: code, rows };
}

export function copyButton(text) {
  const button = el(
    "button",
    {
      type: "button",
      class: "quiet",
      onclick: async () => {
        try {
          await navigator.clipboard.writeText(text());
          button.textContent = "Copied";
        } catch {
          button.textContent = "No clipboard here";
        }
        setTimeout(() => {
          button.textContent = "Copy";
        }, 1500);
      },
    },
    "Copy",
  );
  return button;
}
