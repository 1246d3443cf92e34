// Cost: where the time of a round goes.
import { el, put } from "./dom.js";
import { digits, middle } from "./format.js";
import { differing, said } from "./accuracy.js";

const PHASES = [
  ["data", "data"], ["gradients", "gradient"], ["attack", "attack"], ["aggregate", "aggregation"],
  ["update", "update"], ["metrics", "records"], ["evaluation", "evaluation"],
];
const SHOWN = 40;

/** Group runs that differ in their seed alone, and take the middle of their times. */
export function costs(runs) {
  const keys = differing(runs);
  const groups = new Map();
  for (const run of runs) {
    if (run.cost.gradients === null) continue;
    const label = [run.rule, run.attack ?? "no attack", ...keys.map((key) => said(run, key))].join(" · ");
    if (!groups.has(label)) groups.set(label, []);
    groups.get(label).push(run);
  }
  return [...groups.entries()].map(([label, own]) => {
    const parts = PHASES.map(([phase]) => middle(own.map((run) => run.cost[phase] ?? 0)));
    return { label, runs: own.length, parts, total: parts.reduce((sum, part) => sum + part, 0) };
  }).sort((one, two) => one.total - two.total);
}

/** Make the section. */
export function costSection(root) {
  const legend = el("div", { class: "legend" }, PHASES.map(([phase, name]) =>
    el("span", { class: "key" }, el("i", { class: `phase ${phase}` }), name)));
  const host = el("div", { class: "scroll" });
  const note = el("p", { class: "note" });
  put(root, el("h2", {}, "Cost"), legend, host, note);
  return {
    update(data) {
      const groups = costs(data.runs);
      root.hidden = !groups.length;
      const most = Math.max(...groups.map((group) => group.total), 1e-9);
      put(host, el("table", { class: "data cost" },
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "rule and attack"),
          el("th", { scope: "col", class: "number" }, "ms/round"), el("th", { scope: "col", class: "bars" }, "milliseconds a round, by phase"))),
        el("tbody", {}, groups.slice(0, SHOWN).map((group) => el("tr", {},
          el("th", { scope: "row" }, group.label),
          el("td", { class: "number" }, digits(group.total)),
          el("td", { class: "bars" }, el("div", { class: "stack", style: { width: `${(100 * group.total) / most}%` } },
            group.parts.map((part, place) => el("i", {
              class: `phase ${PHASES[place][0]}`, style: { width: `${(100 * part) / group.total}%` },
              title: `${PHASES[place][1]}: ${digits(part)} ms`,
            }))),
          el("span", { class: "unseen" }, group.parts.map((part, place) => `${PHASES[place][1]} ${digits(part)} ms`).join(", "))),
        )))));
      note.textContent = "The median round of each run, and the median over runs that differ in their seed alone; " +
        "an evaluation's time is spread over the rounds between two." +
        (groups.length > SHOWN ? ` The ${SHOWN} quickest of ${groups.length} are shown.` : "");
    },
    redraw() {},
  };
}
