// Cost: the time of a round, by phase.
import { el, put, table } from "./dom.js";
import { digits, middle } from "./format.js";
import { groupsOf } from "./accuracy.js";

const PHASES = [
  ["data", "data"], ["gradients", "gradient"], ["attack", "attack"], ["aggregate", "aggregation"],
  ["update", "update"], ["metrics", "records"],
];
const SHOWN = 40;

/**
 * Return groups of runs that differ only in their seed, cheapest first.
 *
 * `ms` is the median round. It is divided among the phases in proportion to their medians, whose sum
 * is not the median of the sum.
 */
export function costs(runs) {
  const median = (group, phase) => middle(group.runs.map((run) => run.cost[phase] ?? 0));
  const phases = (group) => {
    const medians = PHASES.map(([phase]) => median(group, phase));
    const total = medians.reduce((sum, part) => sum + part, 0);
    return medians.map((part) => (group.ms * part) / total);
  };
  return groupsOf(runs.filter((run) => run.cost.gradients !== null && run.ms !== null)).map((group) => ({
    label: [group.rule, group.attack ?? "no attack", group.setting].filter(Boolean).join(" · "),
    ms: group.ms, parts: phases(group), evaluation: median(group, "evaluation"),
  })).sort((one, two) => one.ms - two.ms);
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
      const most = Math.max(...groups.map((group) => group.ms), 1e-9);
      const words = (part, place) => `${PHASES[place][1]} ${digits(part)} ms`;
      put(host, table([
        ["rule and attack", (group) => group.label],
        ["ms/round", (group) => digits(group.ms), true],
        ["evaluation, ms/round", (group) => digits(group.evaluation), true],
        ["by phase", (group) => [
          el("div", { class: "stack" }, group.parts.map((part, place) => el("i", {
            class: `phase ${PHASES[place][0]}`, style: { width: `${(100 * part) / most}%` }, title: words(part, place),
          }))),
          el("span", { class: "unseen" }, group.parts.map(words).join(", "))]],
      ], groups.slice(0, SHOWN), { name: "cost" }));
      note.textContent = "ms/round is the median round without evaluations, divided in proportion to the median time of each phase. " +
        "The time of evaluations is divided by the number of rounds. Runs that differ only in their seed are one row: their median." +
        (groups.length > SHOWN ? ` The ${SHOWN} cheapest of ${groups.length} are shown.` : "");
    },
    redraw() {},
  };
}
