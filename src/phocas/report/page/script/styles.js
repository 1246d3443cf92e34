// One colour, dash and marker for each rule, the same as in the figures of matplotlib.
import { svg } from "./dom.js";

// Paths of matplotlib's markers, of half width 1, and whether they are filled.
const MARKERS = {
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
  "|": ["M0-1.1V1.1", false],
  "_": ["M-1.1 0H1.1", false],
  "8": ["M-.4-1H.4L1-.4V.4L.4 1H-.4L-1 .4V-.4Z", true],
};

/** Return a style's colour; black becomes the colour of the text, for dark mode. */
export function ink(style) {
  return style.colour === "#000000" ? "currentColor" : style.colour;
}

/** Draw a marker at a point. */
export function marker(style, x, y, size = 4) {
  const [path, filled] = MARKERS[style.marker] ?? [null, false];
  if (!path) return null;
  return svg("path", {
    d: path,
    transform: `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${size})`,
    fill: filled ? ink(style) : "none",
    stroke: filled ? "none" : ink(style),
    "stroke-width": filled ? null : 1.6 / size,
  });
}

/** Draw a short piece of a curve, for a legend. */
export function sample(style) {
  return svg(
    "svg",
    { class: "sample", width: 34, height: 14, viewBox: "0 0 34 14", "aria-hidden": "true" },
    svg("line", {
      x1: 1, x2: 33, y1: 7, y2: 7,
      stroke: ink(style), "stroke-width": 2, "stroke-dasharray": style.dash.join(" ") || null,
    }),
    marker(style, 17, 7),
  );
}

/** Return red, green and blue of a colour of the palette. */
function channels(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** Return a function that gives the colour of a value from -1 (blue) over 0 (ground) to 1 (orange). */
export function diverging(dark) {
  const ground = dark ? [38, 41, 48] : [240, 240, 236];
  const [less, more] = [channels("blue"), channels("orange")];
  return (value) => {
    const end = value < 0 ? less : more;
    const share = Math.min(1, Math.abs(value)) ** 0.8;
    return `rgb(${ground.map((from, place) => Math.round(from + (end[place] - from) * share)).join(" ")})`;
  };
}

/** Return whether dark mode is on. */
export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
