// The rules of the playground, for one column of m numbers. The tests compare them with those of
// Python.

const meanOf = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const sorted = (values) => [...values].sort((a, b) => a - b);

/** Return the mean without the b smallest and the b largest, and the kept values. */
export function trimmedMean(values, b) {
  const kept = sorted(values).slice(b, values.length - b);
  return { value: meanOf(kept), kept };
}

/** Return the median. */
export function median(values) {
  return trimmedMean(values, (values.length - 1) >> 1);
}

/** Return the mean of the m - b values nearest to the trimmed mean; of two equally near values, the smaller. */
export function phocas(values, b) {
  const centre = trimmedMean(values, b).value;
  const near = sorted(values)
    .map((value, place) => ({ value, place, apart: Math.abs(value - centre) }))
    .sort((one, two) => one.apart - two.apart || one.place - two.place);
  const kept = sorted(near.slice(0, values.length - b).map((each) => each.value));
  return { value: meanOf(kept), kept };
}

/** Return the value with the smallest distances to its m - b - 2 nearest others, or null if 2b + 2 >= m. */
export function krum(values, b) {
  if (2 * b + 2 >= values.length) return null;
  let best = null;
  let least = Infinity;
  values.forEach((value, place) => {
    const apart = sorted(values.filter((_, other) => other !== place).map((each) => (each - value) ** 2));
    const score = apart.slice(0, values.length - b - 2).reduce((sum, each) => sum + each, 0);
    if (score < least) [least, best] = [score, value];
  });
  return { value: best, kept: [best] };
}

/** Return the result of each rule. */
export function aggregates(values, b) {
  return {
    mean: { value: meanOf(values), kept: sorted(values) },
    median: median(values),
    "trimmed-mean": trimmedMean(values, b),
    phocas: phocas(values, b),
    krum: krum(values, b),
  };
}
