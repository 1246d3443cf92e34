// Numbers and lists as people write them.

/** Write a share as a percentage. */
export function percent(share, digits = 0) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)}%`;
}

/** Write a number with so many digits that matter. */
export function digits(value, count = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(Math.max(0, count - 2));
  return String(Number(value.toPrecision(count)));
}

/** Write an accuracy as tables do. */
export function accuracy(value) {
  return value === null || value === undefined ? "–" : value.toFixed(3);
}

/** Write a whole number with its thousands apart. */
export function whole(value) {
  return Math.round(value).toLocaleString("en");
}

/** Write how unlikely something is: at most once in so many. */
export function oneIn(odds) {
  if (odds === null || odds === undefined || odds < 2) return "no evidence";
  if (odds < 1e6) return `1 in ${whole(Number(odds.toPrecision(2)))}`;
  if (odds < 1e15) {
    const [value, word] = odds < 1e9 ? [odds / 1e6, "million"] : [odds / 1e9, "billion"];
    return `1 in ${whole(Number(value.toPrecision(2)))} ${word}`;
  }
  return "1 in 10¹⁵ or less";
}

/** Say how many there are of something. */
export function count(number, word, plural = `${word}s`) {
  return `${whole(number)} ${number === 1 ? word : plural}`;
}

/** Write numbers short: 0–3, 7, 9. */
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

/** Read bytes out of base64. */
export function bytes(text) {
  const plain = atob(text);
  const found = new Uint8Array(plain.length);
  for (let place = 0; place < plain.length; place += 1) found[place] = plain.charCodeAt(place);
  return found;
}

/** Read shares from 0 to 1 out of two bytes each. */
export function shares(text) {
  const codes = new Uint16Array(bytes(text).buffer);
  const found = new Float64Array(codes.length);
  for (let place = 0; place < codes.length; place += 1) found[place] = codes[place] / 65535;
  return found;
}

/** Return values in order, each once. */
export function distinct(values) {
  return [...new Set(values)].sort((a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)),
  );
}

/** Return the middle value. */
export function middle(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  if (!sorted.length) return NaN;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}
