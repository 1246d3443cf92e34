// The report of a guard of a DDP or FSDP job: flagged ranks, their layers and steps.
import { el, put, table } from "./dom.js";
import { count, listing, percent, whole } from "./format.js";
import { droppedMap } from "./heat.js";

const ACROSS = 32; // ranks in a row of the map
const GROUNDS = { distances: "farther from others than chance allows", addresses: "implausible values at the same addresses", values: "values that no honest rank can produce", replicas: "a comparison of weights between ranks" };
const VERDICTS = { persistent: "a persistent fault of its device", transient: "a transient fault of its device", data: "the same gradient, so that its data or settings are unusual", weights: "none, because its weights are different", "not reproduced": "not reproduced" };

const KINDS = {
  nonfinite: "Values that are not finite", hardware: "Wrong values at the same addresses, as from faulty hardware,", wrong: "Wrong values",
  differs: "Values that differ from those of the others, which is no proof of a fault,",
  drifted: "Weights that are not those of the majority",
};

/** Make the section. */
export function guardSection(root) {
  let guards = [];
  const host = el("div", {});
  put(root, el("h2", {}, "Flagged ranks"), host);
  function draw() {
    root.hidden = !guards.length;
    put(host, guards.map(() => el("article", {})));
    guards.forEach((guard, place) => show(host.children[place], guard));
  }
  return { update(data) { guards = data.guards; draw(); }, redraw: draw };
}

function show(article, guard) {
  const flagged = guard.suspects.map((suspect) => suspect.rank);
  const differ = guard.suspects.filter((suspect) => suspect.kind === "differs").map((suspect) => suspect.rank);
  const wrong = flagged.filter((rank) => !differ.includes(rank));
  const map = el("div", { class: "wide" });
  put(article,
    el("p", { class: "verdict" },
      wrong.length
        ? el("strong", { class: "alarm" }, `${wrong.length === 1 ? "Rank" : "Ranks"} ${listing(wrong)} ${wrong.length === 1 ? "is" : "are"} flagged as faulty`)
        : el("strong", {}, differ.length ? "No rank is flagged as faulty" : "No rank is flagged"),
      differ.length ? `; ${differ.length === 1 ? "rank" : "ranks"} ${listing(differ)} ${differ.length === 1 ? "differs" : "differ"} from the others` : "",
      `. ${guard.rule}, ${count(guard.ranks, "rank")}, ${count(guard.steps, "step")}; the rule is expected to drop ${percent(guard.expected)} of an honest rank's values.`),
    guard.failure === null ? null : el("p", { class: "alarm" }, `Aggregation ended: ${guard.failure}`),
    guard.nonfinite.map((first) => el("p", { class: "alarm" },
      `The first non-finite value came from rank ${first.rank} in step ${whole(first.step)}: ${first.parameters.join(", ")}; seen by ${count(first.seen_by, "other rank")}.`)),
    guard.lost === null ? null : el("p", { class: "alarm" }, `No rank is finite since step ${whole(guard.lost)}: later evidence is not counted.`),
    guard.split ? el("p", { class: "alarm" }, `Weights differ since step ${whole(guard.split.step)} without a majority, so that it is not known which are wrong: ranks ${guard.split.ranks.map((ranks) => ranks.join(", ")).join(" against ")} in ${guard.split.tensors.join(", ")}.`) : null,
    guard.unusual.length ? el("p", {}, `Unusual in the last steps, which is no proof of a fault: ${listing(guard.unusual)}.`) : null,
    guard.suspects.map(rankDetails),
    el("figure", {}, el("figcaption", {}, "Dropped values of each rank, over all steps"), map));
  const columns = Math.min(ACROSS, guard.ranks);
  droppedMap(map, {
    dropped: guard.dropped, expected: guard.expected, index: (row, column) => row * columns + column,
    rows: Math.ceil(guard.ranks / columns), columns, least: 18, rowName: "", columnName: "rank", labelWidth: 22,
    title: `Dropped values of ${count(guard.ranks, "rank")}.`,
    rowLabel: (row) => (guard.ranks > columns ? `${row * columns}+` : ""),
    columnLabel: String,
    name: (row, column) => {
      const rank = guard.members[row * columns + column];
      return rank === undefined ? "no such rank" : `rank ${rank}${flagged.includes(rank) ? ", flagged" : ""}`;
    },
  });
}

function rankDetails(suspect) {
  const sure = suspect.sure ? ` (false alarm probability ${suspect.sure > 0.9999 ? "below 0.01%" : percent(1 - suspect.sure, 2)})` : "";
  return el("div", { class: "suspect" },
    el("h3", {}, `Rank ${suspect.rank}${suspect.host ? ` on ${suspect.host}` : ""}`),
    el("p", {}, `${KINDS[suspect.kind] ?? suspect.kind} since step ${whole(suspect.since)}. Flagged in step ${whole(suspect.flagged)}: ${suspect.grounds.map((each) => GROUNDS[each] ?? each).join(" and ")}${sure}. ` +
      `${percent(suspect.dropped, 1)} of its values were dropped; ${percent(suspect.expected, 1)} were expected.`),
    suspect.tensors?.length ? el("p", {}, `Weights that are not those of the majority: ${suspect.tensors.join(", ")}.`) : null,
    suspect.confirmation ? el("p", {}, `Replay of its micro-batch${suspect.confirmation.by === null ? "" : ` there and on rank ${suspect.confirmation.by}`}: ${VERDICTS[suspect.confirmation.verdict] ?? suspect.confirmation.verdict}. ` +
      `${[suspect.confirmation.reason, ...Object.keys(suspect.confirmation.parameters)].filter(Boolean).join(", ")}`) : null,
    Object.keys(suspect.places).length ? el("div", { class: "scroll" }, table([
      ["layer", ([name]) => name],
      ["wrong there", ([, places]) => percent(places.share, 2), true],
      ["usual there", ([, places]) => percent(places.others, 2), true],
      ["since step", ([, places]) => places.since, true],
      ["probable cause", ([, places]) => ({ hardware: "hardware: the same addresses again", data: "data: other addresses each time", nonfinite: "not finite", differs: "values differ, without outliers" }[places.kind] ?? "not known yet")],
      ["stride", ([, places]) => places.stride ?? "–", true],
      ["first addresses", ([, places]) => places.addresses.slice(0, 8).map(whole).join(", ")],
    ], Object.entries(suspect.places))) : null);
}

/** Read a file that the user picked; throw an error with the reason if it is no guard's report. */
export async function readGuard(file) {
  const found = JSON.parse(await file.text());
  if (found?.schema !== 2 || !Array.isArray(found.suspects) || !Array.isArray(found.dropped)) {
    throw new Error("it is no report of a guard, of schema 2");
  }
  return found;
}
