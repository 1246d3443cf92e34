// What a guard of a DDP or FSDP job reports: the rank, the layer and the step.
import { el, put } from "./dom.js";
import { count, listing, percent, whole } from "./format.js";
import { heatMap, scaleBar } from "./heat.js";
import { saturation } from "./blame.js";

const ACROSS = 32; // ranks in a row of the map
const GROUNDS = { distances: "farther from others than chance allows", addresses: "absurd values at the same addresses" };

const KINDS = {
  nonfinite: "Values that are not finite", hardware: "Wrong at the same addresses, as broken hardware is,", wrong: "Wrong",
  differs: "Differs from the others, and need not be wrong,",
};

/** Make the section. */
export function guardSection(root) {
  let guards = [];
  const host = el("div", {});
  put(root, el("h2", {}, "Which rank is wrong"), host);
  function draw() {
    root.hidden = !guards.length;
    put(host, guards.map(() => el("article", {})));
    guards.forEach((guard, place) => show(host.children[place], guard));
  }
  return { update(data) { guards = data.guards; draw(); }, redraw: draw };
}

function show(article, guard) {
  const named = guard.suspects.map((suspect) => suspect.rank);
  const differ = guard.suspects.filter((suspect) => suspect.kind === "differs").map((suspect) => suspect.rank);
  const wrong = named.filter((rank) => !differ.includes(rank));
  const map = el("div", { class: "wide" });
  const bar = el("div", {});
  put(article,
    el("p", { class: "verdict" },
      wrong.length
        ? el("strong", { class: "alarm" }, `${wrong.length === 1 ? "Rank" : "Ranks"} ${listing(wrong)} ${wrong.length === 1 ? "is" : "are"} wrong`)
        : el("strong", {}, differ.length ? "No rank is wrong" : "No rank is suspect"),
      differ.length ? `; ${differ.length === 1 ? "rank" : "ranks"} ${listing(differ)} ${differ.length === 1 ? "differs" : "differ"} from the others` : "",
      `. ${guard.rule}, ${count(guard.ranks, "rank")}, ${count(guard.steps, "step")}; an honest rank expects to lose ${percent(guard.expected)} of its values.`),
    guard.failure === null ? null : el("p", { class: "alarm" }, `Aggregation ended: ${guard.failure}`),
    guard.nonfinite.map((first) => el("p", { class: "alarm" },
      `The first non-finite value came from rank ${first.rank} in step ${whole(first.step)}: ${first.parameters.join(", ")}; seen by ${count(first.seen_by, "other rank")}.`)),
    guard.lost === null ? null : el("p", { class: "alarm" }, `No rank is finite since step ${whole(guard.lost)}: evidence is void since.`),
    guard.unusual.length ? el("p", {}, `Unusual lately, which is no proof: ${listing(guard.unusual)}.`) : null,
    guard.suspects.map(suspected),
    el("figure", {}, el("figcaption", {}, "Dropped of each rank, over all steps"), map, bar));
  const apart = guard.dropped.map((share) => (share ?? 0) - guard.expected);
  const full = saturation(apart);
  const columns = Math.min(ACROSS, guard.ranks);
  heatMap(map, {
    rows: Math.ceil(guard.ranks / columns), columns, least: 18, rowName: "", columnName: "rank", labelWidth: 22,
    title: `What was dropped of ${count(guard.ranks, "rank")}.`,
    value: (row, column) => (apart[row * columns + column] ?? 0) / full,
    rowLabel: (row) => (guard.ranks > columns ? `${row * columns}+` : ""),
    columnLabel: String,
    describe: (row, column) => {
      const place = row * columns + column;
      const rank = guard.members[place];
      return place < guard.ranks
        ? [`rank ${rank}${named.includes(rank) ? ", suspect" : ""}`, `${percent(guard.dropped[place], 1)} dropped, ${percent(guard.expected, 1)} expected`]
        : ["no such rank"];
    },
  });
  put(bar, scaleBar(`${percent(full, 1)} less`, "or more than an honest rank would expect", `${percent(full, 1)} more`));
}

function suspected(suspect) {
  const sure = suspect.sure ? `, ${suspect.sure > 0.9999 ? "more than 99.99%" : percent(suspect.sure, 2)} sure` : "";
  return el("div", { class: "suspect" },
    el("h3", {}, `Rank ${suspect.rank}${suspect.host ? ` on ${suspect.host}` : ""}`),
    el("p", {}, `${KINDS[suspect.kind] ?? suspect.kind} since step ${whole(suspect.since)}. Named in step ${whole(suspect.flagged)}: ${suspect.grounds.map((each) => GROUNDS[each] ?? each).join(" and ")}${sure}. ` +
      `${percent(suspect.dropped, 1)} of its values were dropped, ${percent(suspect.expected, 1)} are expected.`),
    Object.keys(suspect.places).length ? el("div", { class: "scroll" }, el("table", { class: "data" },
      el("thead", {}, el("tr", {}, ["layer", "wrong there", "usual there", "since step", "looks like", "stride", "first addresses"].map((name, place) =>
        el("th", { scope: "col", class: [1, 2, 3, 5].includes(place) ? "number" : null }, name)))),
      el("tbody", {}, Object.entries(suspect.places).map(([name, places]) => el("tr", {},
        el("th", { scope: "row" }, name), el("td", { class: "number" }, percent(places.share, 2)),
        el("td", { class: "number" }, percent(places.others, 2)), el("td", { class: "number" }, places.since),
        el("td", {}, { hardware: "hardware: the same addresses again", data: "data: others each time", nonfinite: "not finite" }[places.kind] ?? "not known yet"),
        el("td", { class: "number" }, places.stride ?? "–"),
        el("td", {}, places.addresses.slice(0, 8).map(whole).join(", ")),
      ))))) : null);
}

/** Read a file that somebody has picked; throw with the reason if it is no guard's report. */
export async function readGuard(file) {
  const found = JSON.parse(await file.text());
  if (found?.schema !== 2 || !Array.isArray(found.suspects) || !Array.isArray(found.dropped)) {
    throw new Error("it is no report of a guard, of schema 2");
  }
  return found;
}
