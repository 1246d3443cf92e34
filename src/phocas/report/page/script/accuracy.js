// Accuracy: one curve for each rule, a panel for each attack, and a table that compares the rules.
import { el, put, switcher, table } from "./dom.js";
import { accuracy, count, digits, distinct, interval, listing, mean, middle } from "./format.js";
import { lineChart } from "./chart.js";
import { sample } from "./styles.js";
import { flaggedIn } from "./detection.js";

const PANELS = 12; // drawn at first
const ROWS = 40; // of the table
const METRICS = [["top1", "top-1"], ["top3", "top-3"], ["loss", "loss"]];
const NAMES = { top1: "top-1 accuracy", top3: "top-3 accuracy", loss: "test loss" };
// Settings that make no panel: they distinguish curves or repeats, or change no result.
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

/** Write a setting with its name, unless its value makes the name clear. */
export function said(run, key) {
  const value = run.config[key];
  const text = typeof value === "string" ? value : JSON.stringify(value ?? null);
  return ["dataset", "model", "split", "optimizer", "schedule"].includes(key)
    ? text : `${key.replaceAll("_", " ")} ${text}`;
}

/** Group runs that differ only in their seed, with their mean final accuracy and median cost. */
export function groupsOf(runs) {
  const keys = differing(runs);
  const groups = new Map();
  for (const run of runs) {
    const setting = keys.map((key) => said(run, key)).join(", ");
    const key = JSON.stringify([run.rule, run.attack, setting]);
    if (!groups.has(key)) groups.set(key, { rule: run.rule, attack: run.attack, setting, runs: [] });
    groups.get(key).runs.push(run);
  }
  const known = (own, key) => own.map((run) => run[key]).filter((value) => value !== null);
  return [...groups.values()].map((group) => ({
    ...group, final: mean(known(group.runs, "final")), interval: interval(known(group.runs, "final")), ms: middle(known(group.runs, "ms")),
    isBaseline: group.rule === "mean" && group.attack === null,
  }));
}

/** Arrange groups of runs in panels, by attack and by all other settings that differ. */
export function panelsOf(runs) {
  const panels = new Map();
  for (const group of groupsOf(runs)) {
    const title = [group.attack ?? "no attack", group.setting].filter(Boolean).join(" · ");
    if (!panels.has(title)) panels.set(title, { title, setting: group.setting, attack: group.attack, groups: [] });
    panels.get(title).groups.push(group);
  }
  const found = [...panels.values()];
  for (const panel of found) {
    panel.clean = found.filter((other) => other.setting === panel.setting)
      .flatMap((other) => other.groups).find((group) => group.isBaseline);
  }
  const attacked = found.filter((panel) => panel.attack !== null);
  // Runs without an attack have a panel of their own if they are more than the baseline.
  const clean = found.filter((panel) => panel.attack === null &&
    (panel.groups.some((group) => !group.isBaseline) || !attacked.some((other) => other.setting === panel.setting)));
  return [...attacked, ...clean];
}

/** Average the curves of some runs: at each round the mean, the smallest and the largest value. */
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
  return {
    x: points.map(([round, { seconds }]) => (against === "round" ? round : mean(seconds))),
    y: points.map(([, { values }]) => mean(values)),
    low: points.map(([, { values }]) => (values.length ? Math.min(...values) : null)),
    high: points.map(([, { values }]) => (values.length ? Math.max(...values) : null)),
  };
}

/** Make the section. */
export function accuracySection(root) {
  let data = null;
  let metric = "top1";
  let against = "round";
  let zoom = null;
  let panels = PANELS;
  const hidden = new Set();
  const redraw = () => data && draw();
  const reset = el("button", { type: "button", on: { click: () => { zoom = null; draw(); } } }, "Whole range");
  const closer = el("button", { type: "button", on: { click: zoomToBest } }, "Zoom to the best");
  const controls = el("div", { class: "controls" },
    switcher("Metric", METRICS, metric, (value) => { metric = value; zoom = null; redraw(); }),
    switcher("Horizontal axis", [["round", "by round"], ["seconds", "by seconds"]], against, (value) => {
      against = value; zoom = null; redraw();
    }),
    closer, reset,
  );
  const heading = el("h2", {});
  const legend = el("div", { class: "legend", role: "group", "aria-label": "Curves; press to hide one" });
  const grid = el("div", { class: "panels" });
  const more = el("button", { type: "button", on: { click: () => { panels += PANELS; draw(); } } });
  const notes = el("p", { class: "note" });
  const compared = el("div", { class: "scroll comparison" });
  put(root, heading, controls, legend, el("div", { class: "two" }, compared, el("div", {}, grid, more)), notes);

  function zoomToBest() {
    const ends = data.runs.map((run) => run.curve[metric].findLast((value) => value !== null))
      .filter((value) => value !== undefined);
    const best = metric === "loss" ? Math.min(...ends) : Math.max(...ends);
    const last = Math.max(...data.runs.map((run) => run.curve[against].at(-1) ?? 0));
    const y = metric === "loss" ? [best * 0.8, best * 2] : [best - 0.13, best + 0.03];
    zoom = { x: [0, last], y };
    draw();
  }

  const styleOf = (group) => (group.isBaseline ? data.baseline : data.rules[group.rule]);
  function linesOf(panel) {
    const groups = panel.groups.filter((group) => !group.isBaseline).sort((one, two) => one.rule.localeCompare(two.rule));
    return [...groups, ...(panel.clean ? [panel.clean] : [])].map((group) => ({
      label: group.isBaseline ? "mean, no attack" : group.rule, style: styleOf(group),
      seeds: new Set(group.runs.map((run) => run.seed)).size, ...averaged(group.runs, metric, against),
    })).filter((line) => line.x.length);
  }

  function draw() {
    const found = panelsOf(data.runs.filter((run) => run.curve.round.length));
    const drawn = found.slice(0, panels).map((panel) => ({ ...panel, lines: linesOf(panel) }));
    const all = drawn.flatMap((panel) => panel.lines);
    showComparison();
    showLegend(all);
    const ends = all.flatMap((each) => each.high.filter((value) => value !== null));
    // A loss that has exploded would leave nothing to see of the others.
    const first = Math.max(...all.map((each) => each.y[0] ?? 0), 0.1);
    const yRange = metric === "loss" ? [0, Math.min(Math.max(...ends, 0.1), 2 * first)] : [0, 1];
    grid.classList.toggle("one", drawn.length === 1);
    root.classList.toggle("stacked", drawn.length !== 1 || compared.hidden);
    while (grid.children.length > drawn.length) grid.lastChild.remove();
    drawn.forEach((panel, place) => {
      if (!grid.children[place]) {
        grid.append(el("figure", {}, el("figcaption", {}), el("div", {}), el("p", { class: "quiet" })));
      }
      const [caption, host, note] = grid.children[place].children;
      put(caption, panel.title, el("span", { class: "quiet" }, ` ${NAMES[metric]}`));
      const shown = panel.lines.filter((each) => !hidden.has(each.label));
      const focused = host.contains(document.activeElement);
      lineChart(host, {
        lines: shown, title: `${NAMES[metric]}, ${panel.title}`,
        xLabel: against, yLabel: NAMES[metric], yRange,
        height: drawn.length === 1 ? 380 : 256, zoom,
        onZoom: (value) => { zoom = value; draw(); },
      });
      if (focused) host.firstChild.focus();
      note.textContent = seedsOf(shown);
    });
    reset.hidden = zoom === null;
    more.hidden = found.length <= panels;
    more.textContent = `Show more of ${found.length} panels`;
    notes.textContent = remarks(found);
  }

  function showComparison() {
    const groups = groupsOf(data.runs).sort((one, two) =>
      (one.attack === null) - (two.attack === null) || (one.attack ?? "").localeCompare(two.attack ?? "") ||
      one.setting.localeCompare(two.setting) || (two.final ?? -1) - (one.final ?? -1));
    heading.textContent = groups.length > 1 ? "Comparison of rules" : "Accuracy";
    compared.hidden = groups.length < 2;
    const truth = groups.some((group) => group.runs.some((run) => run.byzantine?.length));
    put(compared, table([
      ["rule", (group) => el("span", { class: "named" }, sample(styleOf(group)), el("span", {}, group.rule))],
      ["attack", (group) => group.attack ?? "none"],
      ...(groups.some((group) => group.setting) ? [["setting", (group) => group.setting]] : []),
      ["final accuracy", (group) => [accuracy(group.final), lostIn(group.runs)], true],
      ...(groups.some((group) => group.interval) ? [["95% interval", (group) => group.interval, true]] : []),
      ["ms/round", (group) => digits(group.ms), true],
      ["flagged", (group) => flaggedIn(group.runs)],
      ...(truth ? [["Byzantine", (group) => distinct(group.runs.map((run) => listing(run.byzantine ?? []))).join("; ") || "none"]] : []),
    ], groups.slice(0, ROWS)),
    groups.length > ROWS ? el("p", { class: "quiet" }, `${groups.length - ROWS} more are in the table of runs.`) : null);
  }

  function lostIn(runs) {
    const lost = runs.filter((run) => run.lost !== null).length;
    return lost ? el("div", { class: "alarm status" }, `▲ model lost${runs.length > 1 ? ` in ${lost} of ${runs.length} runs` : ""}`) : null;
  }

  function seedsOf(lines) {
    const numbers = distinct(lines.map((each) => each.seeds));
    if (!numbers.length) return "";
    if (numbers.length === 1) {
      return numbers[0] === 1 ? "1 seed per curve" : `mean of ${numbers[0]} seeds; band: smallest to largest`;
    }
    return `bands: smallest to largest of ${lines.map((each) => `${each.label} ${each.seeds}`).join(", ")} seeds`;
  }

  function showLegend(lines) {
    const entries = new Map(lines.map((each) => [each.label, each.style]));
    const focused = document.activeElement?.dataset?.label;
    put(legend, [...entries].map(([label, style]) => el("button", {
      type: "button", "aria-pressed": String(!hidden.has(label)), "data-label": label,
      on: { click: () => { if (!hidden.delete(label)) hidden.add(label); draw(); } },
    }, sample(style), el("span", {}, label))));
    if (focused) [...legend.children].find((each) => each.dataset.label === focused)?.focus();
  }

  function remarks(found) {
    const notes = [];
    if (found.some((panel) => panel.attack !== null && !panel.clean)) {
      notes.push("There is no run of the mean without an attack to compare with: phocas train --rule mean --attack none adds it.");
    }
    const thinned = data.runs.filter((run) => run.curve.points > run.curve.round.length).length;
    if (thinned) {
      notes.push(`${count(thinned, "curve")} had more than ${data.limits.points} points: so many are drawn, at even distances.`);
    }
    notes.push("ms/round: the median round without evaluations. Drag a rectangle to zoom, double-click to see all again; click a name to hide its curve.");
    return notes.join(" ");
  }

  return { update(next) { data = next; draw(); }, redraw };
}
