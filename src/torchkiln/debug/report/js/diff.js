// What changed between two texts, line by line. Lines are numbers: equal lines have equal numbers.

const SMALL = 250000;

// Pairs [index in a, index in b] of lines that stayed, in order.
export function sameLines(a, b) {
  const found = [];
  match(a, 0, a.length, b, 0, b.length, found);
  return found;
}

function match(a, a0, a1, b, b0, b1, found) {
  while (a0 < a1 && b0 < b1 && a[a0] === b[b0]) found.push([a0++, b0++]);
  const tail = [];
  while (a0 < a1 && b0 < b1 && a[a1 - 1] === b[b1 - 1]) tail.push([--a1, --b1]);
  if (a0 < a1 && b0 < b1) {
    const anchors = uniquePairs(a, a0, a1, b, b0, b1);
    if (anchors.length) {
      let [i, j] = [a0, b0];
      for (const [ai, bj] of [...anchors, [a1, b1]]) {
        match(a, i, ai, b, j, bj, found);
        if (ai < a1) found.push([ai, bj]);
        [i, j] = [ai + 1, bj + 1];
      }
    } else if ((a1 - a0) * (b1 - b0) <= SMALL) {
      longestCommon(a, a0, a1, b, b0, b1, found);
    }
  }
  found.push(...tail.reverse());
}

// Lines that are in both parts exactly once, as far as they are in the same order (patience).
function uniquePairs(a, a0, a1, b, b0, b1) {
  const count = (lines, from, to) => {
    const places = new Map();
    for (let k = from; k < to; k += 1) places.set(lines[k], places.has(lines[k]) ? -1 : k);
    return places;
  };
  const inB = count(b, b0, b1);
  const pairs = [...count(a, a0, a1)]
    .filter(([line, place]) => place >= 0 && (inB.get(line) ?? -1) >= 0)
    .map(([line, place]) => [place, inB.get(line)]);
  pairs.sort((p, q) => p[0] - q[0]);
  return increasing(pairs);
}

// The longest run of pairs whose second numbers grow.
function increasing(pairs) {
  const ends = [];
  const before = new Array(pairs.length).fill(-1);
  pairs.forEach(([, j], k) => {
    let low = 0;
    let high = ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (pairs[ends[middle]][1] < j) low = middle + 1;
      else high = middle;
    }
    before[k] = low ? ends[low - 1] : -1;
    ends[low] = k;
  });
  const run = [];
  for (let k = ends.at(-1) ?? -1; k >= 0; k = before[k]) run.unshift(pairs[k]);
  return run;
}

function longestCommon(a, a0, a1, b, b0, b1, found) {
  const width = b1 - b0 + 1;
  const lengths = new Uint32Array((a1 - a0 + 1) * width);
  for (let i = a1 - 1; i >= a0; i -= 1) {
    for (let j = b1 - 1; j >= b0; j -= 1) {
      const at = (i - a0) * width + (j - b0);
      lengths[at] = a[i] === b[j] ? lengths[at + width + 1] + 1 : Math.max(lengths[at + width], lengths[at + 1]);
    }
  }
  for (let i = a0, j = b0; i < a1 && j < b1;) {
    const at = (i - a0) * width + (j - b0);
    if (a[i] === b[j]) found.push([i++, j++]);
    else if (lengths[at + width] >= lengths[at + 1]) i += 1;
    else j += 1;
  }
}

// Rows of a view side by side: {left, right, kind}; kind is same, changed, gone or new; left and right are indices or null.
export function sideBySide(a, b) {
  const rows = [];
  let [i, j] = [0, 0];
  for (const [ai, bj] of [...sameLines(a, b), [a.length, b.length]]) {
    while (i < ai && j < bj) rows.push({ left: i++, right: j++, kind: "changed" });
    while (i < ai) rows.push({ left: i++, right: null, kind: "gone" });
    while (j < bj) rows.push({ left: null, right: j++, kind: "new" });
    if (ai < a.length) rows.push({ left: i++, right: j++, kind: "same" });
  }
  return rows;
}

// Where two lines differ: the lengths of what they share at the start and at the end.
export function sharedEnds(before, after) {
  const most = Math.min(before.length, after.length);
  let start = 0;
  while (start < most && before[start] === after[start]) start += 1;
  let end = 0;
  while (end < most - start && before[before.length - 1 - end] === after[after.length - 1 - end]) end += 1;
  return [start, end];
}
