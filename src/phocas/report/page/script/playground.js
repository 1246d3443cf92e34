// Try a rule: points on a line that can be dragged, and the result of each rule.
import { el, put, svg } from "./dom.js";
import { digits } from "./format.js";
import { aggregates } from "./rules.js";
import { ink, marker, sample } from "./styles.js";

const NAMES = {
  mean: "mean", median: "median", "trimmed-mean": "trimmed mean", phocas: "Phocas", krum: "Krum",
};
const LOW = -10;
const HIGH = 10;
const LANE = 34;
const TOP = 64;
const SIDE = 16;

/** Make the section. */
export function playgroundSection(root) {
  let styles = null;
  let b = 3;
  let values = byzantine(10, b);
  let dragged = -1;
  const number = slider("Workers m", 4, 24, () => values.length, (value) => {
    values = value > values.length ? [...values, ...honest(value - values.length)] : values.slice(0, value);
    b = Math.min(b, (value - 1) >> 1);
    draw();
  });
  const given = slider("b", 0, () => (values.length - 1) >> 1, () => b, (value) => { b = value; draw(); });
  const host = el("div", { class: "wide" });
  const results = el("table", { class: "data results" });
  put(root, el("h2", {}, "Try a rule"),
    el("p", { class: "note" }, "Each point is the value of one worker for one parameter. Drag a point, or focus it and use the arrow keys. A bar is the range of values that a rule keeps; the marker on it is the result."),
    el("div", { class: "controls" }, number.element, given.element,
      el("button", { type: "button", on: { click: () => { values = honest(values.length); draw(); } } }, "All honest"),
      el("button", { type: "button", on: { click: () => { values = byzantine(values.length, b); draw(); } } }, "Make b of them Byzantine")),
    host, results);

  function draw() {
    if (!styles) return;
    number.show();
    given.show();
    const width = Math.max(260, host.clientWidth || 600);
    const px = (value) => SIDE + ((value - LOW) / (HIGH - LOW)) * (width - 2 * SIDE);
    const at = (pixel) => Math.max(LOW, Math.min(HIGH, LOW + ((pixel - SIDE) / (width - 2 * SIDE)) * (HIGH - LOW)));
    const found = aggregates(values, b);
    const lanes = Object.entries(found).map(([name, result], place) =>
      lane(name, result, TOP + LANE * (place + 0.5), px));
    const points = values.map((value, place) => point(value, place, px));
    const picture = svg("svg", { class: "playground", width, height: TOP + LANE * lanes.length + 8, role: "group", "aria-label": "The workers' values" },
      svg("line", { class: "axis", x1: SIDE, x2: width - SIDE, y1: 30, y2: 30 }),
      [-10, -5, 0, 5, 10].map((tick) => svg("g", { class: "axes" },
        svg("line", { class: "grid", x1: px(tick), x2: px(tick), y1: 30, y2: TOP + LANE * lanes.length }),
        svg("text", { x: px(tick), y: 54, "text-anchor": "middle" }, tick))),
      lanes, points);
    const focused = document.activeElement?.dataset?.worker;
    put(host, picture);
    if (focused !== undefined) points[Number(focused)]?.focus();
    picture.addEventListener("pointerdown", (event) => {
      const [x] = position(event, picture);
      let best = 0;
      values.forEach((value, place) => { if (Math.abs(px(value) - x) < Math.abs(px(values[best]) - x)) best = place; });
      const [, y] = position(event, picture);
      if (y > 48 || Math.abs(px(values[best]) - x) > 24) return;
      dragged = best;
      event.preventDefault();
      const move = (next) => { values[dragged] = at(position(next, host)[0]); draw(); };
      const stop = () => {
        removeEventListener("pointermove", move);
        removeEventListener("pointerup", stop);
        dragged = -1;
      };
      addEventListener("pointermove", move);
      addEventListener("pointerup", stop);
    });
    put(results, el("tbody", {}, Object.entries(found).map(([name, result]) => el("tr", {},
      el("th", { scope: "row" }, el("span", { class: "named" }, sample(styles[name]), NAMES[name])),
      el("td", { class: "number" }, result ? digits(result.value, 4) : "–"),
      el("td", { class: "quiet" }, result ? `keeps ${result.kept.length} of ${values.length}` : "needs 2b + 2 < m")))));
  }

  function lane(name, result, y, px) {
    const style = styles[name];
    const parts = [svg("text", { class: "lane", x: SIDE, y: y - 8 }, result ? NAMES[name] : `${NAMES[name]}: needs 2b + 2 < m`)];
    if (result) {
      const [low, high] = [Math.min(...result.kept), Math.max(...result.kept)];
      parts.push(svg("rect", { x: px(low) - 3, y: y - 3, width: px(high) - px(low) + 6, height: 6, rx: 3, fill: ink(style), opacity: 0.3 }));
      parts.push(marker(style, px(result.value), y, 6));
    }
    return parts;
  }

  function point(value, place, px) {
    return svg("circle", {
      class: "point", cx: px(value), cy: 30, r: 8, tabindex: 0, role: "slider", "data-worker": place,
      "aria-label": `worker ${place}`, "aria-valuemin": LOW, "aria-valuemax": HIGH, "aria-valuenow": value.toFixed(2),
      on: {
        keydown: (event) => {
          const step = { ArrowLeft: -0.2, ArrowRight: 0.2, PageDown: -2, PageUp: 2 }[event.key];
          if (!step && event.key !== "Home" && event.key !== "End") return;
          const wanted = event.key === "Home" ? LOW : event.key === "End" ? HIGH : values[place] + step;
          values[place] = Math.max(LOW, Math.min(HIGH, wanted));
          event.preventDefault();
          draw();
        },
      },
    });
  }

  return { update(data) { styles = data.styles; draw(); }, redraw: draw };
}

function honest(many) {
  // Not random: the report looks the same whenever it is opened.
  return Array.from({ length: many }, (_, place) => 2.4 * Math.sin(2.4 * place + 0.7) - 2 + 0.35 * Math.cos(5 * place));
}

function byzantine(many, wrong) {
  return honest(many).map((value, place) => (place < wrong ? HIGH - 1 - place * 0.6 : value));
}

function position(event, element) {
  const box = element.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

function slider(label, low, high, value, onChange) {
  const output = el("output", {});
  const input = el("input", { type: "range", min: low, step: 1, on: { input: () => onChange(Number(input.value)) } });
  return {
    element: el("label", { class: "chooser" }, el("span", {}, label), input, output),
    show() {
      input.max = typeof high === "function" ? high() : high;
      input.value = value();
      output.textContent = value();
    },
  };
}
