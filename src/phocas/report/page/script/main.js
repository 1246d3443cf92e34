// The HTML report: its sections in order, and the data they show.
import { el, put, soon } from "./dom.js";
import { count, distinct, listing } from "./format.js";
import { embedded, listen, merge } from "./store.js";
import { accuracySection } from "./accuracy.js";
import { detectionSection } from "./detection.js";
import { guardSection, readGuard } from "./guards.js";
import { matrixSection } from "./matrix.js";
import { costSection } from "./cost.js";
import { runsSection } from "./runs.js";
import { playgroundSection } from "./playground.js";

const SECTIONS = [
  ["guards", "Ranks", guardSection, false],
  ["accuracy", "Comparison", accuracySection, true],
  ["detection", "Detection", detectionSection, true],
  ["matrix", "Gradient matrix", matrixSection, true],
  ["cost", "Cost", costSection, true],
  ["runs", "Runs", runsSection, true],
  ["playground", "Try a rule", playgroundSection, false],
];

let data = embedded();
const content = document.getElementById("content");
const links = document.getElementById("sections");
const live = el("span", { class: "live", role: "status" });
const overview = el("p", { class: "summary" });
const empty = el("section", { class: "empty" });
const sections = SECTIONS.map(([id, name, make, needsRuns]) => {
  const root = el("section", { id, tabindex: -1 });
  return { id, name, root, needsRuns, section: make(root) };
});

function begin() {
  const theme = el("button", { type: "button", class: "theme", on: { click: turn } }, "Dark or light");
  put(document.getElementById("head"),
    el("div", { class: "title" }, el("h1", {}, el("b", {}, "phocas"), " ", el("span", { id: "source" })), live, theme), overview);
  put(content, empty, sections.map((each) => each.root));
  const problem = el("span", { role: "status" });
  const picker = el("input", { type: "file", accept: ".json,application/json", id: "guard-file", on: { change: () => open(picker, problem) } });
  put(document.getElementById("foot"), el("label", { class: "chooser" }, el("span", {}, "Open the JSON report of a DDP or FSDP guard:"), picker), problem);
  update();
  addEventListener("resize", soon(redraw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  listen(data, (next, whole) => {
    data = whole ? next : merge(data, next);
    update();
  }, state);
  document.documentElement.dataset.ready = "true";
}

async function open(picker, problem) {
  const [file] = picker.files;
  if (!file) return;
  try {
    const guard = await readGuard(file);
    data = { ...data, guards: [...data.guards, guard] };
    problem.textContent = "";
    update();
    document.getElementById("guards").scrollIntoView();
  } catch (error) {
    problem.textContent = `${file.name} cannot be shown: ${error.message}`;
  }
}

function turn() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  redraw();
}

function state(kind, words) {
  live.className = `live ${kind}`;
  live.textContent = { live: "● live", lost: "○ the server is gone; trying again", problem: `▲ ${words}` }[kind];
}

function redraw() {
  for (const { section, root } of sections) if (!root.hidden) section.redraw();
}

function update() {
  document.getElementById("source").textContent = data.source.name;
  // One run opens on that run, several on their comparison. The elements themselves are moved, so
  // that keyboards and screen readers follow the same order as the eye.
  const [first, second] = (data.runs.length > 1 ? ["accuracy", "detection"] : ["detection", "accuracy"])
    .map((id) => document.getElementById(id));
  if (first.nextElementSibling !== second) first.after(second);
  for (const { section, root, needsRuns } of sections) {
    root.hidden = needsRuns && !data.runs.length;
    if (!root.hidden) section.update(data);
  }
  put(overview, summary());
  empty.hidden = data.runs.length > 0 || data.guards.length > 0;
  if (!empty.hidden) {
    put(empty, el("h2", {}, "No runs yet"),
      el("p", {}, "This results file has no runs. Start one, and it appears here:"),
      el("pre", {}, el("code", {}, `phocas train --rule phocas:b=8 --attack gambler --results ${data.source.path ?? data.source.name}`)),
      el("p", {}, "Rules can be tried below."));
  }
  const visible = [...content.children].filter((each) => !each.hidden && each.id)
    .map((each) => sections.find((one) => one.id === each.id));
  put(links, visible.map(({ id, name }) => el("a", { href: `#${id}` }, id === "accuracy" && data.runs.length < 2 ? "Accuracy" : name)));
}

function summary() {
  const runs = data.runs;
  if (!runs.length) return "";
  const statuses = distinct(runs.map((run) => run.status))
    .map((status) => `${runs.filter((run) => run.status === status).length} ${status}`).join(", ");
  const skipping = runs.filter((run) => run.skipped);
  return [
    `${count(runs.length, "run")} (${statuses}), ${count(new Set(runs.map((run) => run.rule)).size, "rule")}, ` +
    `${count(new Set(runs.filter((run) => run.attack).map((run) => run.attack)).size, "attack")}, ` +
    `${count(new Set(runs.map((run) => run.seed)).size, "seed")}.`,
    skipping.length ? el("span", { class: "alarm" }, ` ▲ Rounds were skipped in ${skipping.length === 1 ? "run" : "runs"} ${listing(skipping.map((run) => run.id))}.`) : null,
    data.source.made && document.documentElement.dataset.source === "embedded" ? el("span", { class: "quiet" }, ` Written ${data.source.made.slice(0, 16).replace("T", " ")} UTC.`) : null,
  ];
}

begin();
