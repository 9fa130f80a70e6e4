// How near a kernel comes to what this machine can do.

// What a copy of as many bytes reaches: the smallest measured one that is no smaller, or the largest.
export function bandwidth(limits, moved) {
  const fitting = limits.bandwidths.find((known) => known.bytes >= moved) ?? limits.bandwidths.at(-1);
  return fitting?.bytes_per_second ?? 0;
}

// The part of the limit that holds for it, and which one that is; null where nothing was measured.
export function share(limits, work) {
  if (!limits || !work.seconds) return null;
  const copy = bandwidth(limits, work.bytes / work.launches);
  const memory = copy ? work.bytes / copy : 0;
  const compute = limits.operations_per_second ? work.operations / limits.operations_per_second : 0;
  if (!memory && !compute) return null;
  return memory >= compute
    ? { part: memory / work.seconds, by: "bandwidth" }
    : { part: compute / work.seconds, by: "arithmetic" };
}
