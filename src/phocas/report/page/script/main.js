// The page: its parts in order, the data they show, and what is said where there is none.
import { el, put, soon } from "./dom.js";
import { count, distinct, listing } from "./format.js";
import { embedded, listen, merge } from "./store.js";
import { accuracySection } from "./accuracy.js";
import { blameSection, isSuspicious } from "./blame.js";
import { guardSection, readGuard } from "./guards.js";
import { matrixSection } from "./matrix.js";
import { costSection } from "./cost.js";
import { runsSection } from "./runs.js";
import { playgroundSection } from "./playground.js";

const PARTS = [
  ["guards", "Guards", guardSection, false],
  ["blame", "Who is lying", blameSection, true],
  ["accuracy", "Accuracy", accuracySection, true],
  ["matrix", "The matrix", matrixSection, true],
  ["cost", "Cost", costSection, true],
  ["runs", "Runs", runsSection, true],
  ["playground", "Try a rule", playgroundSection, false],
];

let data = embedded();
const content = document.getElementById("content");
const places = document.getElementById("places");
const live = el("span", { class: "live", role: "status" });
const overview = el("p", { class: "summary" });
const empty = el("section", { class: "empty" });
const parts = PARTS.map(([id, name, make, needsRuns]) => {
  const root = el("section", { id, tabindex: -1 });
  return { id, name, root, needsRuns, part: make(root) };
});

function begin() {
  const theme = el("button", { type: "button", class: "theme", on: { click: turn } }, "Dark or light");
  put(document.getElementById("head"),
    el("div", { class: "title" }, el("h1", {}, el("b", {}, "phocas"), " ", el("span", { id: "source" })), live, theme), overview);
  put(content, empty, parts.map((each) => each.root));
  const told = el("span", { role: "status" });
  const picker = el("input", { type: "file", accept: ".json,application/json", id: "guard-file", on: { change: () => open(picker, told) } });
  put(document.getElementById("foot"), el("label", { class: "chooser" }, el("span", {}, "Open the report of a DDP or FSDP guard, as JSON:"), picker), told);
  update();
  addEventListener("resize", soon(redraw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  listen(data, (next, whole) => {
    data = whole ? next : merge(data, next);
    update();
  }, state);
  document.documentElement.dataset.ready = "true";
}

async function open(picker, told) {
  const [file] = picker.files;
  if (!file) return;
  try {
    const guard = await readGuard(file);
    data = { ...data, guards: [...data.guards, guard] };
    told.textContent = "";
    update();
    document.getElementById("guards").scrollIntoView();
  } catch (error) {
    told.textContent = `${file.name} cannot be shown: ${error.message}`;
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
  live.textContent = { live: "● live", lost: "○ the server is gone; asking again", problem: `▲ ${words}` }[kind];
}

function redraw() {
  for (const { part, root } of parts) if (!root.hidden) part.redraw();
}

function update() {
  document.getElementById("source").textContent = data.source.name;
  const suspicious = data.runs.some(isSuspicious) || data.guards.length > 0;
  const order = suspicious ? ["guards", "blame", "accuracy"] : ["accuracy", "blame", "guards"];
  // In the document itself, so that the keyboard and a reader go the same way as the eye.
  const now = [...content.children].map((each) => each.id).filter((id) => order.includes(id));
  if (now.join() !== order.join()) {
    for (const id of [...order].reverse()) empty.after(parts.find((each) => each.id === id).root);
  }
  for (const { part, root, needsRuns } of parts) {
    root.hidden = needsRuns && !data.runs.length;
    if (!root.hidden) part.update(data);
  }
  put(overview, summarised());
  empty.hidden = data.runs.length > 0 || data.guards.length > 0;
  if (!empty.hidden) {
    put(empty, el("h2", {}, "No runs yet"),
      el("p", {}, "This results file has no runs. Begin one, and it appears here:"),
      el("pre", {}, el("code", {}, `phocas train --rule phocas:b=8 --attack gambler --results ${data.source.path ?? data.source.name}`)),
      el("p", {}, "Meanwhile, rules can be tried below."));
  }
  const links = [...content.children].filter((each) => !each.hidden && each.id)
    .map((each) => parts.find((one) => one.id === each.id));
  put(places, links.map(({ id, name }) => el("a", { href: `#${id}` }, name)));
}

function summarised() {
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
