// Runs: a table with filters, the settings of each run, and the differences of two.
import { chooser, el, put, table } from "./dom.js";
import { accuracy, digits, distinct, listing } from "./format.js";
import { differing, said } from "./accuracy.js";
import { WORD } from "./detection.js";

const MARKS = {
  complete: "✓", running: "▶", interrupted: "❙❙", stopped: "■", failed: "✕", killed: "✕",
};
const FILTERS = [
  ["rule", (run) => run.rule], ["attack", (run) => run.attack ?? "none"],
  ["b", (run) => (run.b === null ? "none" : String(run.b))], ["seed", (run) => String(run.seed)],
  ["status", (run) => run.status],
];

/** Make the section. */
export function runsSection(root) {
  let data = null;
  const wanted = new Map();
  const compared = new Set();
  const opened = new Set();
  const choosers = FILTERS.map(([name]) => chooser(name, (value) => { wanted.set(name, value); draw(); }));
  const search = el("input", { type: "search", placeholder: "any setting", on: { input: () => draw() } });
  const host = el("div", { class: "scroll" });
  const differences = el("div", { class: "differences", "aria-live": "polite" });
  const counted = el("p", { class: "quiet" });
  put(root, el("h2", {}, "Runs"),
    el("div", { class: "controls" }, choosers.map((each) => each.element),
      el("label", { class: "chooser" }, el("span", {}, "Search"), search)),
    counted, host, differences);

  function matching() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    return data.runs.filter((run) =>
      FILTERS.every(([name, value]) => !wanted.get(name) || value(run) === wanted.get(name)) &&
      words.every((word) => JSON.stringify([run.id, run.name, run.config, run.status]).toLowerCase().includes(word)));
  }

  function draw() {
    FILTERS.forEach(([name, value], place) => {
      const values = distinct(data.runs.map(value));
      if (!values.includes(wanted.get(name))) wanted.set(name, "");
      choosers[place].offer(values.length > 1 ? [["", "all"], ...values.map((each) => [each, each])] : [["", "all"]], wanted.get(name));
    });
    const runs = matching();
    const keys = differing(data.runs);
    const some = (test) => data.runs.some(test);
    const columns = [
      [el("span", { class: "unseen" }, "compare"), (run) => el("input", {
        type: "checkbox", id: `compare-${run.id}`, "aria-label": `Compare run ${run.id}`, checked: compared.has(run.id),
        on: { change: (event) => { compare(run.id, event.target.checked); } },
      })],
      ["run", (run) => run.id, true],
      ...(some((run) => run.name) ? [["name", (run) => run.name ?? ""]] : []),
      ["rule", (run) => run.rule], ["attack", (run) => run.attack ?? "none"],
      ["seed", (run) => run.seed, true],
      ...keys.map((key) => [key.replaceAll("_", " "), (run) => said(run, key).replace(`${key.replaceAll("_", " ")} `, "")]),
      ["status", (run) => el("span", { class: `status ${run.status}` }, `${MARKS[run.status] ?? ""} ${run.status}`)],
      ["rounds", (run) => `${run.done}/${run.rounds}`, true],
      ...(some((run) => run.skipped) ? [["skipped", (run) => run.skipped ? el("span", { class: "alarm" }, `▲ ${run.skipped}`) : "", true]] : []),
      ["final", (run) => accuracy(run.final), true], ["best", (run) => accuracy(run.best), true],
      ["ms/round", (run) => digits(run.ms), true],
      ...(some((run) => run.lost !== null) ? [["model lost", (run) => (run.lost === null ? "" : el("span", { class: "alarm" }, `▲ round ${run.lost}`))]] : []),
      ...Object.entries(WORD).filter(([compared]) => some((run) => run.suspects.length && run.compared === compared))
        .map(([compared, word]) => [word, (run) => (run.compared === compared ? listing(run.suspects) : "")]),
      ...(some((run) => run.excluded?.length) ? [["excluded", (run) => (run.excluded ?? []).join(", ")]] : []),
      ...(some((run) => run.byzantine?.length) ? [["Byzantine", (run) => listing(run.byzantine ?? [])]] : []),
      [el("span", { class: "unseen" }, "settings"), (run) => el("button", {
        type: "button", id: `settings-${run.id}`, "aria-expanded": String(opened.has(run.id)), "aria-label": `Settings of run ${run.id}`,
        on: { click: () => { if (!opened.delete(run.id)) opened.add(run.id); draw(); } },
      }, "settings")],
    ];
    counted.textContent = `${runs.length} of ${data.runs.length} runs. Tick two to compare them.`;
    const focused = document.activeElement?.id;
    put(host, table(columns, runs, {
      name: "runs", attributes: (run) => ({ "data-run": run.id }),
      below: (run) => (opened.has(run.id) ? el("tr", { class: "settings" }, el("td", { colspan: columns.length }, settings(run))) : null),
    }));
    if (focused) document.getElementById(focused)?.focus();
    showDifferences();
  }

  function compare(id, on) {
    if (on) compared.add(id);
    else compared.delete(id);
    if (compared.size > 2) compared.delete([...compared][0]);
    draw();
  }

  function settings(run) {
    const known = Object.entries(run.config).filter(([, value]) => value !== null);
    return [
      run.message ? el("p", { class: "alarm" }, run.message) : null,
      run.origin ? el("p", { class: "quiet" }, `resumed from ${run.origin}`) : null,
      el("div", { class: "command" }, el("code", {}, run.command), copyButton(run.command)),
      el("dl", {}, known.map(([key, value]) => el("div", {}, el("dt", {}, key),
        el("dd", {}, typeof value === "string" ? value : JSON.stringify(value))))),
    ];
  }

  function showDifferences() {
    const pair = data.runs.filter((run) => compared.has(run.id));
    if (pair.length < 2) return put(differences);
    const keys = distinct(pair.flatMap((run) => Object.keys(run.config)))
      .filter((key) => JSON.stringify(pair[0].config[key] ?? null) !== JSON.stringify(pair[1].config[key] ?? null));
    const rows = [
      ...keys.map((key) => [key, ...pair.map((run) => JSON.stringify(run.config[key] ?? null))]),
      ["final accuracy", ...pair.map((run) => accuracy(run.final))],
      ["ms/round", ...pair.map((run) => digits(run.ms))],
      ["flagged workers", ...pair.map((run) => listing(run.suspects) || "none")],
      ["skipped rounds", ...pair.map((run) => String(run.skipped))],
    ];
    return put(differences, el("h3", {}, `Runs ${pair[0].id} and ${pair[1].id}`),
      keys.length ? null : el("p", {}, "All settings are the same."),
      table([
        ["setting", ([key]) => key], ...pair.map((run, place) => [`run ${run.id}`, (row) => row[place + 1]]),
      ], rows, { attributes: ([, one, two]) => ({ class: one === two ? "same" : null }) }));
  }

  return { update(next) { data = next; draw(); }, redraw() {} };
}

/** Make a button that copies a text; it selects the text if the browser denies the clipboard. */
export function copyButton(text) {
  const button = el("button", { type: "button", on: { click: copy } }, "Copy");
  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      const range = document.createRange();
      range.selectNodeContents(button.previousElementSibling);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      button.textContent = "Selected: press Ctrl+C";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }
  return button;
}
