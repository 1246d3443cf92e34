// Line charts with bands; values are read at the pointer, and a rectangle zooms in.
import { el, put, svg, readout } from "./dom.js";
import { digits } from "./format.js";
import { ink, marker, sample } from "./styles.js";
import { tooltip } from "./tooltip.js";

const SPACE = { left: 44, right: 10, top: 8, bottom: 34 };
const MARKED = 8; // markers along a line

/** Return about so many round numbers between two. */
export function ticks(low, high, about) {
  const raw = (high - low) / Math.max(1, about);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) {
    found.push(Number((at * step).toPrecision(12)));
  }
  return found;
}

/**
 * Draw a chart into an element.
 *
 * Lines are `{label, style, x, y, low, high}`, events `{x, label}` are marked by vertical lines,
 * `zoom` is null or `{x: [a, b], y: [a, b]}`, and `onZoom` is called with the next zoom.
 */
export function lineChart(host, { lines, title, xLabel, yLabel, yRange, height, zoom, onZoom, events = [] }) {
  const width = Math.max(240, host.clientWidth || 360);
  const inner = { width: width - SPACE.left - SPACE.right, height: height - SPACE.top - SPACE.bottom };
  const [x0, x1] = zoom?.x ?? [0, Math.max(1e-9, ...lines.map((line) => line.x.at(-1) ?? 0))];
  const [y0, y1] = zoom?.y ?? yRange;
  const px = (x) => SPACE.left + ((x - x0) / (x1 - x0)) * inner.width;
  const py = (y) => SPACE.top + (1 - (y - y0) / (y1 - y0)) * inner.height;
  const atX = (pixel) => x0 + ((pixel - SPACE.left) / inner.width) * (x1 - x0);
  const atY = (pixel) => y0 + (1 - (pixel - SPACE.top) / inner.height) * (y1 - y0);

  const clip = `clip-${(lineChart.number = (lineChart.number ?? 0) + 1)}`;
  const plot = svg("g", { "clip-path": `url(#${clip})` });
  lines.forEach((line, place) => plot.append(...drawn(line, place, lines.length, px, py)));
  for (const { x, label } of events) {
    plot.append(svg("g", { class: "event" }, svg("line", { x1: px(x), x2: px(x), y1: SPACE.top, y2: SPACE.top + inner.height }),
      svg("text", { x: px(x) + (px(x) > width / 2 ? -5 : 5), y: SPACE.top + 12, "text-anchor": px(x) > width / 2 ? "end" : "start" }, label)));
  }
  const cross = svg("g", { class: "cross", visibility: "hidden" },
    svg("line", { y1: SPACE.top, y2: SPACE.top + inner.height }));
  const band = svg("rect", { class: "band", visibility: "hidden" });
  const picture = svg(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    svg("defs", {}, svg("clipPath", { id: clip }, svg("rect", {
      x: SPACE.left, y: SPACE.top, width: inner.width, height: inner.height,
    }))),
    axes(px, py, [x0, x1], [y0, y1], width, height, inner, xLabel),
    plot, cross, band,
  );
  const said = readout();
  const frame = el("div", {
    class: "chart", tabindex: 0, role: "img",
    "aria-label": `${title}. ${summary(lines, yLabel)} Arrow keys read values${onZoom ? ", plus zooms in, minus out" : ""}.`,
  }, picture);
  const tip = tooltip(frame);
  put(host, frame, said);

  // The points of all lines, at which values can be read.
  const stops = [...new Set(lines.flatMap((line) => line.x))]
    .filter((x) => x >= x0 && x <= x1)
    .sort((a, b) => a - b);
  let at = -1;

  function read(x, y, aloud) {
    const values = lines
      .map((line) => ({ line, place: nearest(line.x, x) }))
      .filter(({ line, place }) => place >= 0 && Math.abs(line.x[place] - x) <= (x1 - x0) / 8)
      .map(({ line, place }) => ({ line, value: line.y[place], low: line.low?.[place], high: line.high?.[place] }))
      .filter(({ value }) => value !== null)
      .sort((a, b) => b.value - a.value);
    if (!values.length) return leave();
    cross.setAttribute("visibility", "visible");
    cross.firstChild.setAttribute("x1", px(x));
    cross.firstChild.setAttribute("x2", px(x));
    const where = `${xLabel} ${digits(x, 4)}`;
    tip.show(
      px(x), y,
      el("strong", {}, where),
      el("table", {}, values.map(({ line, value, low, high }) => el("tr", {},
        el("td", {}, sample(line.style)), el("td", {}, line.label),
        el("td", { class: "number" }, digits(value, 4)),
        el("td", { class: "quiet" }, low !== undefined && high > low ? `${digits(low)} to ${digits(high)}` : ""),
      ))),
    );
    if (aloud) {
      said.textContent = `${where}: ${values.map((each) => `${each.line.label} ${digits(each.value, 4)}`).join(", ")}`;
    }
  }
  function leave() {
    cross.setAttribute("visibility", "hidden");
    tip.hide();
  }

  let from = null;
  const place = (event) => {
    const box = picture.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  frame.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (from && (Math.abs(x - from[0]) > 4 || Math.abs(y - from[1]) > 4)) {
      for (const [name, value] of Object.entries({
        x: Math.min(x, from[0]), y: Math.min(y, from[1]),
        width: Math.abs(x - from[0]), height: Math.abs(y - from[1]), visibility: "visible",
      })) band.setAttribute(name, value);
      tip.hide();
      return;
    }
    const wanted = nearest(stops, atX(x));
    if (wanted >= 0) read(stops[(at = wanted)], y, false);
  });
  frame.addEventListener("pointerleave", () => from || leave());
  frame.addEventListener("pointerdown", (event) => {
    if (event.button || event.pointerType === "touch" || !onZoom) return;
    from = place(event);
    frame.setPointerCapture(event.pointerId);
  });
  frame.addEventListener("pointerup", (event) => {
    if (!from) return;
    const [x, y] = place(event);
    const [a, b] = [from, (from = null)];
    band.setAttribute("visibility", "hidden");
    if (b === null && Math.abs(x - a[0]) > 8 && Math.abs(y - a[1]) > 8) {
      const order = (one, two) => [Math.min(one, two), Math.max(one, two)];
      const [xs, ys] = [order(atX(x), atX(a[0])), order(atY(y), atY(a[1]))];
      onZoom({ x: [Math.max(xs[0], x0), Math.min(xs[1], x1)], y: [Math.max(ys[0], y0), Math.min(ys[1], y1)] });
    }
  });
  frame.addEventListener("dblclick", () => onZoom?.(null));
  frame.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step && stops.length) {
      at = Math.max(0, Math.min(stops.length - 1, at < 0 ? (step > 0 ? 0 : stops.length - 1) : at + step));
      read(stops[at], SPACE.top + 20, true);
    } else if (event.key === "Home" || event.key === "End") {
      at = event.key === "Home" ? 0 : stops.length - 1;
      read(stops[at], SPACE.top + 20, true);
    } else if ((event.key === "+" || event.key === "-") && onZoom) {
      const middle = at >= 0 ? stops[at] : (x0 + x1) / 2;
      const factor = event.key === "+" ? 0.25 : 1;
      const half = (x1 - x0) * factor;
      onZoom(event.key === "-" ? null : { x: [Math.max(0, middle - half), middle + half], y: [y0, y1] });
    } else if (event.key === "Escape") {
      leave();
      onZoom?.(null);
    } else {
      return;
    }
    event.preventDefault();
  });
  frame.addEventListener("blur", leave);
}

function drawn(line, place, count, px, py) {
  const shapes = [];
  if (line.low) {
    const there = line.x.map((x, at) => [x, line.low[at], line.high[at]]).filter((each) => each[1] !== null);
    if (there.some((each) => each[2] > each[1])) {
      const up = there.map(([x, , high]) => `${px(x).toFixed(1)} ${py(high).toFixed(1)}`);
      const down = there.map(([x, low]) => `${px(x).toFixed(1)} ${py(low).toFixed(1)}`).reverse();
      shapes.push(svg("path", { d: `M${[...up, ...down].join("L")}Z`, fill: ink(line.style), opacity: 0.15 }));
    }
  }
  let path = "";
  let pen = false;
  line.x.forEach((x, at) => {
    if (line.y[at] === null) {
      pen = false; // a value that is not finite leaves a gap
      return;
    }
    path += `${pen ? "L" : "M"}${px(x).toFixed(1)} ${py(line.y[at]).toFixed(1)}`;
    pen = true;
  });
  shapes.push(svg("path", {
    class: "line", d: path || "M0 0", "data-label": line.label,
    stroke: ink(line.style), "stroke-dasharray": line.style.dash.join(" ") || null,
  }));
  const every = Math.max(1, Math.floor(line.x.length / MARKED));
  const first = Math.floor((place * every) / Math.max(1, count));
  for (let at = first; at < line.x.length; at += every) {
    if (line.y[at] !== null) shapes.push(marker(line.style, px(line.x[at]), py(line.y[at])));
  }
  return shapes.filter((shape) => shape !== null);
}

function axes(px, py, [x0, x1], [y0, y1], width, height, inner, xLabel) {
  const bottom = SPACE.top + inner.height;
  return svg("g", { class: "axes" },
    ticks(y0, y1, inner.height / 30).map((y) => [
      svg("line", { class: "grid", x1: SPACE.left, x2: width - SPACE.right, y1: py(y), y2: py(y) }),
      svg("text", { x: SPACE.left - 7, y: py(y) + 4, "text-anchor": "end" }, digits(y)),
    ]),
    ticks(x0, x1, inner.width / 70).map((x) =>
      svg("text", { x: px(x), y: bottom + 16, "text-anchor": "middle" }, digits(x, 4))),
    svg("line", { class: "axis", x1: SPACE.left, x2: width - SPACE.right, y1: bottom, y2: bottom }),
    svg("text", { class: "name", x: SPACE.left + inner.width / 2, y: height - 3, "text-anchor": "middle" }, xLabel),
  );
}

function summary(lines, yLabel) {
  const ends = lines
    .map((line) => [line.label, line.y.findLast((value) => value !== null)])
    .filter(([, value]) => value !== undefined)
    .sort((a, b) => b[1] - a[1]);
  return `${yLabel} at the end: ${ends.map(([label, value]) => `${label} ${digits(value)}`).join(", ")}.`;
}

/** Return the index of the value in a list that is nearest to another, or -1. */
export function nearest(sorted, wanted) {
  let best = -1;
  let least = Infinity;
  sorted.forEach((value, place) => {
    const apart = Math.abs(value - wanted);
    if (apart < least) [least, best] = [apart, place];
  });
  return best;
}
