// Figures as people read them.

const digits = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

function scaled(value, factor, units) {
  let k = 0;
  while (value >= factor && k < units.length - 1) {
    value /= factor;
    k += 1;
  }
  return `${k === 0 && Number.isInteger(value) ? value : digits(value)} ${units[k]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "not measured";
  if (value === 0) return "0 s";
  return value >= 1 ? `${digits(value)} s` : scaled(value * 1e9, 1000, ["ns", "µs", "ms"]);
}

export const bytes = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
export const flops = (value) => scaled(value, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"]);
export const flopRate = (value) => scaled(value, 1000, ["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s"]);
export const byteRate = (value) => scaled(value, 1e3, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]);
export const percent = (part) =>
  part > 0 && part < 0.0005 ? "under 0.1 %" : `${(100 * part).toFixed(part < 0.0995 ? 1 : 0)} %`;
export const counted = (count, noun, plural = `${noun}s`) =>
  `${count.toLocaleString("en")} ${count === 1 ? noun : plural}`;
export const times = (value) => `${digits(value)} ×`;
export const tensor = (node) => (node.dtype ? `${node.dtype} [${node.sizes.join(", ")}]` : "");
