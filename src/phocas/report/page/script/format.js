// Numbers and lists as text, and numbers decoded from base64.

/** Write a share as a percentage. */
export function percent(share, digits = 0) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)}%`;
}

/** Write a number with so many significant digits. */
export function digits(value, count = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(Math.max(0, count - 2));
  return String(Number(value.toPrecision(count)));
}

/** Write an accuracy with three decimals. */
export function accuracy(value) {
  return value === null || value === undefined ? "–" : value.toFixed(3);
}

/** Write an integer with separators of thousands. */
export function whole(value) {
  return Math.round(value).toLocaleString("en");
}

/** Write the upper bound 1 / odds of a probability. */
export function oneIn(odds) {
  if (odds === null || odds === undefined || odds < 2) return "no evidence";
  if (odds < 1e6) return `1 in ${whole(Number(odds.toPrecision(2)))}`;
  const power = String(Math.min(15, Math.floor(Math.log10(odds))));
  return `1 in 10${[...power].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("")}`;
}

/** Write a number with its noun. */
export function count(number, word, plural = `${word}s`) {
  return `${whole(number)} ${number === 1 ? word : plural}`;
}

/** Write a list of numbers with its ranges: 0–3, 7, 9. */
export function listing(numbers) {
  const spans = [];
  for (const number of numbers) {
    const last = spans.at(-1);
    if (last && number === last[1] + 1) last[1] = number;
    else spans.push([number, number]);
  }
  return spans
    .map(([first, last]) => {
      if (first === last) return `${first}`;
      return last === first + 1 ? `${first}, ${last}` : `${first}–${last}`;
    })
    .join(", ");
}

/** Decode base64. */
export function bytes(text) {
  const plain = atob(text);
  const found = new Uint8Array(plain.length);
  for (let place = 0; place < plain.length; place += 1) found[place] = plain.charCodeAt(place);
  return found;
}

/** Decode shares from 0 to 1, of two bytes each. */
export function shares(text) {
  const codes = new Uint16Array(bytes(text).buffer);
  const found = new Float64Array(codes.length);
  for (let place = 0; place < codes.length; place += 1) found[place] = codes[place] / 65535;
  return found;
}

/** Return the different values in ascending order. */
export function distinct(values) {
  return [...new Set(values)].sort((a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)),
  );
}

/** Return the median. */
export function middle(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  if (!sorted.length) return NaN;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

/** Return the mean, or null of no values. */
export function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

// The 97.5% points of Student's t for 1 to 30 degrees of freedom.
const STUDENT = [
  12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
  2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];

/** Write the 95% interval of a mean by Student's t; of fewer than two values there is none. */
export function interval(values) {
  const n = values.length;
  if (n < 2) return "";
  const centre = mean(values);
  const variance = values.reduce((sum, value) => sum + (value - centre) ** 2, 0) / (n - 1);
  const half = (STUDENT[n - 2] ?? 1.96) * Math.sqrt(variance / n);
  return `${accuracy(centre - half)} to ${accuracy(centre + half)}`;
}
