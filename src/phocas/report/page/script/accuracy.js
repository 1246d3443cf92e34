// Accuracy: a line a rule, a band over seeds, a panel an attack, and the clean baseline in each.
import { el, put, switcher } from "./dom.js";
import { accuracy, count, digits, distinct } from "./format.js";
import { lineChart } from "./chart.js";
import { sample, told } from "./styles.js";

const PANELS = 12; // drawn at first
const METRICS = [["top1", "top-1"], ["top3", "top-3"], ["loss", "loss"]];
const NAMES = { top1: "top-1 accuracy", top3: "top-3 accuracy", loss: "test loss" };
// These tell runs apart in other ways than by a panel, or change no result.
const NO_PANEL = new Set([
  "rule", "seed", "name", "rounds", "results", "data_dir", "threads", "evaluate_every",
  "checkpoint_rounds", "checkpoint_seconds", "record_matrix", "attack",
]);

/** Return the settings besides rule, attack and seed in which runs differ. */
export function differing(runs) {
  const keys = distinct(runs.flatMap((run) => Object.keys(run.config)));
  return keys.filter(
    (key) => !NO_PANEL.has(key) &&
      new Set(runs.map((run) => JSON.stringify(run.config[key] ?? null))).size > 1,
  );
}

/** Write a setting so that it is clear which it is. */
export function said(run, key) {
  const value = run.config[key];
  const text = typeof value === "string" ? value : JSON.stringify(value ?? null);
  return ["dataset", "model", "split", "optimizer", "schedule"].includes(key)
    ? text : `${key.replaceAll("_", " ")} ${text}`;
}

/** Group runs into panels: by attack, and by whatever else tells them apart. */
export function panelsOf(runs) {
  const keys = differing(runs);
  const panels = new Map();
  for (const run of runs) {
    const setting = keys.map((key) => said(run, key)).join(", ");
    const title = [run.attack ?? "no attack", setting].filter(Boolean).join(" · ");
    if (!panels.has(title)) panels.set(title, { title, setting, attack: run.attack, runs: [] });
    panels.get(title).runs.push(run);
  }
  const found = [...panels.values()];
  for (const panel of found) {
    panel.clean = found
      .filter((other) => other.attack === null && other.setting === panel.setting)
      .flatMap((other) => other.runs)
      .filter((run) => run.rule === "mean");
  }
  const attacked = found.filter((panel) => panel.attack !== null);
  // Runs without an attack have a panel of their own if they are more than the baseline.
  const clean = found.filter((panel) => panel.attack === null &&
    (panel.runs.some((run) => run.rule !== "mean") || !attacked.some((other) => other.setting === panel.setting)));
  return [...attacked, ...clean];
}

/** Average the curves of some runs: at each round the mean, the least and the largest. */
export function averaged(runs, metric, against) {
  const rounds = new Map();
  for (const run of runs) {
    run.curve.round.forEach((round, place) => {
      const value = run.curve[metric][place];
      if (!rounds.has(round)) rounds.set(round, { values: [], seconds: [] });
      if (value !== null) rounds.get(round).values.push(value);
      rounds.get(round).seconds.push(run.curve.seconds[place]);
    });
  }
  const points = [...rounds.entries()].sort(([one], [two]) => one - two);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  return {
    x: points.map(([round, { seconds }]) => (against === "round" ? round : mean(seconds))),
    y: points.map(([, { values }]) => (values.length ? mean(values) : null)),
    low: points.map(([, { values }]) => (values.length ? Math.min(...values) : null)),
    high: points.map(([, { values }]) => (values.length ? Math.max(...values) : null)),
  };
}

/** Make the section. */
export function accuracySection(root) {
  let data = null;
  let styles = new Map();
  let metric = "top1";
  let against = "round";
  let zoom = null;
  let panels = PANELS;
  const hidden = new Set();
  const redraw = () => data && draw();
  const reset = el("button", { type: "button", on: { click: () => { zoom = null; draw(); } } }, "Whole range");
  const closer = el("button", { type: "button", on: { click: zoomToBest } }, "Zoom to the best");
  const controls = el("div", { class: "controls" },
    switcher("What is measured", METRICS, metric, (value) => { metric = value; zoom = null; redraw(); }),
    switcher("Against what", [["round", "by round"], ["seconds", "by seconds"]], against, (value) => {
      against = value; zoom = null; redraw();
    }),
    closer, reset,
  );
  const legend = el("div", { class: "legend", role: "group", "aria-label": "Lines; press to hide one" });
  const grid = el("div", { class: "panels" });
  const more = el("button", { type: "button", on: { click: () => { panels += PANELS; draw(); } } });
  const notes = el("p", { class: "note" });
  put(root, el("h2", {}, "Accuracy"), controls, legend, grid, more, notes);

  function zoomToBest() {
    const ends = data.runs.map((run) => run.curve[metric].findLast((value) => value !== null))
      .filter((value) => value !== undefined);
    const best = metric === "loss" ? Math.min(...ends) : Math.max(...ends);
    const last = Math.max(...data.runs.map((run) => run.curve[against].at(-1) ?? 0));
    const y = metric === "loss" ? [best * 0.8, best * 2] : [best - 0.13, best + 0.03];
    zoom = { x: [0, last], y };
    draw();
  }

  function linesOf(panel) {
    const rules = distinct(panel.runs.map((run) => run.rule));
    const lines = rules
      .filter((rule) => !(panel.attack === null && rule === "mean"))
      .map((rule) => {
        const runs = panel.runs.filter((run) => run.rule === rule);
        return line(runs, rule, styles.get(rule));
      });
    if (panel.clean.length) lines.push(line(panel.clean, "mean, no attack", data.baseline));
    return lines.filter((each) => each.x.length);
  }
  function line(runs, label, style) {
    const seeds = new Set(runs.map((run) => run.seed)).size;
    return { label, style, seeds, ...averaged(runs, metric, against) };
  }

  function draw() {
    const found = panelsOf(data.runs.filter((run) => run.curve.round.length));
    const drawn = found.slice(0, panels).map((panel) => ({ ...panel, lines: linesOf(panel) }));
    const all = drawn.flatMap((panel) => panel.lines);
    showLegend(all, drawn);
    const ends = all.flatMap((each) => each.high.filter((value) => value !== null));
    // A loss that has exploded would leave nothing to see of the others.
    const first = Math.max(...all.map((each) => each.y[0] ?? 0), 0.1);
    const yRange = metric === "loss" ? [0, Math.min(Math.max(...ends, 0.1), 2 * first)] : [0, 1];
    grid.classList.toggle("one", drawn.length === 1);
    while (grid.children.length > drawn.length) grid.lastChild.remove();
    drawn.forEach((panel, place) => {
      if (!grid.children[place]) {
        grid.append(el("figure", {}, el("figcaption", {}), el("div", {}), el("p", { class: "quiet" })));
      }
      const [caption, host, note] = grid.children[place].children;
      put(caption, panel.title, el("span", { class: "quiet" }, ` ${NAMES[metric]}`));
      const shown = panel.lines.filter((each) => !hidden.has(each.label));
      if (host.contains(document.activeElement) && document.activeElement !== document.body) {
        host.dataset.refocus = "1";
      }
      lineChart(host, {
        lines: shown, title: `${NAMES[metric]} under ${panel.title}`,
        xLabel: against, xUnit: "", yLabel: NAMES[metric], yRange,
        height: drawn.length === 1 ? 380 : 256, zoom,
        onZoom: (value) => { zoom = value; draw(); },
      });
      if (host.dataset.refocus) {
        delete host.dataset.refocus;
        host.firstChild.focus();
      }
      note.textContent = seedsOf(shown);
    });
    reset.hidden = zoom === null;
    more.hidden = found.length <= panels;
    more.textContent = `Show more of ${found.length} panels`;
    notes.textContent = remarks(found);
  }

  function seedsOf(lines) {
    const numbers = distinct(lines.map((each) => each.seeds));
    if (!numbers.length) return "";
    if (numbers.length === 1) {
      return numbers[0] === 1 ? "1 seed a line" : `mean of ${numbers[0]} seeds; band: smallest to largest`;
    }
    return `bands: smallest to largest of ${lines.map((each) => `${each.label} ${each.seeds}`).join(", ")} seeds`;
  }

  function showLegend(lines, drawn) {
    const labels = new Map();
    for (const each of lines) {
      if (!labels.has(each.label)) labels.set(each.label, { style: each.style, ends: [] });
      const end = each.y.findLast((value) => value !== null);
      if (end !== undefined) labels.get(each.label).ends.push(end);
    }
    const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
    const sign = metric === "loss" ? 1 : -1;
    const entries = [...labels.entries()].sort(([, one], [, two]) => sign * (mean(one.ends) - mean(two.ends)));
    const focused = document.activeElement?.dataset?.label;
    put(legend, entries.map(([label, { style, ends }]) =>
      el("button", {
        type: "button", "aria-pressed": String(!hidden.has(label)), "data-label": label,
        on: { click: () => { if (!hidden.delete(label)) hidden.add(label); draw(); } },
      }, sample(style), el("span", {}, label),
      drawn.length === 1 ? el("b", {}, metric === "loss" ? digits(mean(ends)) : accuracy(mean(ends))) : null)));
    if (focused) [...legend.children].find((each) => each.dataset.label === focused)?.focus();
  }

  function remarks(found) {
    const said = [];
    if (found.some((panel) => panel.attack !== null && !panel.clean.length)) {
      said.push("There is no run of the mean without an attack to compare with: phocas train --rule mean --attack none adds it.");
    }
    const thinned = data.runs.filter((run) => run.curve.points > run.curve.round.length).length;
    if (thinned) {
      said.push(`${count(thinned, "curve")} had more than ${data.limits.points} points: so many are drawn, evenly apart.`);
    }
    said.push("Drag a rectangle to zoom, double-click to see all again; click a name to hide its line.");
    return said.join(" ");
  }

  function update(next) {
    data = next;
    // The largest b first: it is the one that is told most often.
    const rules = new Map([...data.runs].sort((one, two) => (two.b ?? 0) - (one.b ?? 0) || one.id - two.id)
      .map((run) => [run.rule, run.style]));
    styles = told(rules);
    draw();
  }

  return { update, redraw };
}
