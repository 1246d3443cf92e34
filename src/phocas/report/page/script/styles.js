// One colour, dash and mark for each rule, the same as in the figures of the paper.
import { svg } from "./dom.js";

// Half the width of a mark is 1 here.
const MARKS = {
  o: ["M-.9 0a.9.9 0 1 0 1.8 0a.9.9 0 1 0-1.8 0Z", true],
  s: ["M-.8-.8H.8V.8H-.8Z", true],
  D: ["M0-1.1L1.1 0L0 1.1L-1.1 0Z", true],
  d: ["M0-1.2L.7 0L0 1.2L-.7 0Z", true],
  "^": ["M0-1.1L1 .8H-1Z", true],
  v: ["M0 1.1L1-.8H-1Z", true],
  "<": ["M-1.1 0L.8-1V1Z", true],
  ">": ["M1.1 0L-.8-1V1Z", true],
  P: ["M-.4-1H.4V-.4H1V.4H.4V1H-.4V.4H-1V-.4H-.4Z", true],
  "*": ["M0-1.3L.35-.4L1.25-.35L.55.2L.8 1.1L0 .6L-.8 1.1L-.55.2L-1.25-.35L-.35-.4Z", true],
  h: ["M0-1L.87-.5V.5L0 1L-.87.5V-.5Z", true],
  p: ["M0-1L.95-.3L.6.8H-.6L-.95-.3Z", true],
  x: ["M-.8-.8L.8.8M-.8.8L.8-.8", false],
  X: ["M-.9-.9L.9.9M-.9.9L.9-.9", false],
  "+": ["M-1 0H1M0-1V1", false],
};

/** Return a colour for the page: black is the colour of the text, in the dark as well. */
export function ink(style) {
  return style.colour === "#000000" ? "currentColor" : style.colour;
}

const DASHES = [[7, 4], [2, 3], [10, 3, 2, 3], [4, 2]];

/** Give each rule its style; of those with one style, as with another b, all but the first a dash. */
export function told(rules) {
  const known = new Map();
  const found = new Map();
  for (const [rule, style] of rules) {
    const name = `${style.colour}${style.mark}${style.dash}`;
    const place = known.get(name) ?? 0;
    known.set(name, place + 1);
    found.set(rule, place ? { ...style, dash: DASHES[(place - 1) % DASHES.length] } : style);
  }
  return found;
}

/** Draw a mark at a place. */
export function mark(style, x, y, size = 4) {
  const [path, filled] = MARKS[style.mark] ?? [null, false];
  if (!path) return null;
  return svg("path", {
    d: path,
    transform: `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${size})`,
    fill: filled ? ink(style) : "none",
    stroke: filled ? "none" : ink(style),
    "stroke-width": filled ? null : 1.6 / size,
  });
}

/** Draw a short piece of a line, for a legend. */
export function sample(style) {
  return svg(
    "svg",
    { class: "sample", width: 34, height: 14, viewBox: "0 0 34 14", "aria-hidden": "true" },
    svg("line", {
      x1: 1, x2: 33, y1: 7, y2: 7,
      stroke: ink(style), "stroke-width": 2, "stroke-dasharray": style.dash.join(" ") || null,
    }),
    mark(style, 17, 7),
  );
}

// Blue for less, vermilion for more, of the same two as in the figures: told apart by the
// colour-blind, and by their darkness in black and white.
const LESS = [0, 114, 178];
const MORE = [213, 94, 0];

/** Return red, green and blue for a value from -1 to 1, on the ground of the page. */
export function diverging(value, dark) {
  const ground = dark ? [38, 41, 48] : [240, 240, 236];
  const end = value < 0 ? LESS : MORE;
  const share = Math.min(1, Math.abs(value)) ** 0.8;
  return ground.map((from, place) => Math.round(from + (end[place] - from) * share));
}

/** Tell whether the page is dark now. */
export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
