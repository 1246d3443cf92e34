// Detection in one run: its curve, the flagged workers, and the values that were dropped.
import { chooser, el, put, table } from "./dom.js";
import { accuracy, bytes, count, distinct, listing, oneIn, percent, shares, whole } from "./format.js";
import { lineChart } from "./chart.js";
import { droppedMap } from "./heat.js";

const HUGE = "values over a million times their usual size";

/** Return a row for each worker of a run, those with most evidence first. */
export function ranked(run) {
  return run.evidence
    .map(([worker, odds, since, dropped]) => ({
      worker, odds, since, dropped, flagged: since !== null, unusual: run.unusual.includes(worker),
      byzantine: Boolean(run.byzantine?.includes(worker)),
    }))
    .sort((one, two) => two.flagged - one.flagged || (one.since ?? 0) - (two.since ?? 0) || two.byzantine - one.byzantine ||
      Math.min(two.odds ?? 0, 1e15) - Math.min(one.odds ?? 0, 1e15) || one.worker - two.worker);
}

/** The word for a flagged worker, by what detection has compared it with. */
export const WORD = { others: "flagged", past: "changed", unlike: "differing" };

/** Return whether a flag proves a fault: not if workers whose data differ were compared. */
function provesFault(run) {
  return run.compared !== "unlike";
}

const inOrder = (numbers) => [...numbers].sort((a, b) => a - b);

function workersAre(numbers, what, noun = "worker") {
  return numbers.length === 1 ? `${noun} ${numbers[0]} is ${what}` : `${noun}s ${listing(numbers)} are ${what}`;
}

/** Write the verdict on a run's workers, and the truth as far as the simulation knows it. */
export function flags(run) {
  const flagged = inOrder(run.suspects);
  const byzantine = run.byzantine;
  const honest = byzantine === null ? [] : flagged.filter((worker) => !byzantine.includes(worker));
  const missed = (byzantine ?? []).filter((worker) => !flagged.includes(worker));
  let known = "No worker is flagged";
  if (flagged.length) {
    known = workersAre(flagged, "flagged", "Worker");
    if (run.compared === "past") {
      known += `: no longer as in ${flagged.length === 1 ? "its" : "their"} own past, which data that differ ` +
        `(${run.config.split}) do not explain`;
    } else if (!provesFault(run)) {
      known += `: ${flagged.length === 1 ? "it differs" : "they differ"} from the others beyond chance. ` +
        `The workers' data differ too (${run.config.split}), so this is no proof of a fault`;
    } else if (!honest.length) known += ": faulty beyond chance";
  }
  const truth = [];
  if (byzantine?.length) truth.push(`In this simulation ${workersAre(byzantine, "Byzantine")}`);
  else if (honest.length) truth.push("In this simulation no worker is Byzantine");
  if (honest.length) truth.push(workersAre(honest, honest.length === 1 ? "a false alarm" : "false alarms"));
  if (missed.length) truth.push(`not flagged: ${listing(missed)}`);
  return { known, truth: truth.join("; "), alarm: flagged.length > 0 && provesFault(run) && !honest.length };
}

const workersText = (numbers) => (numbers.length ? `${numbers.length === 1 ? "worker" : "workers"} ${listing(numbers)}` : "");

/** Write what is flagged in runs that differ only in their seed. */
export function flaggedIn(runs) {
  const texts = runs.map((run) => [
    workersText(inOrder(run.suspects)), run.suspect_servers.length ? `server ${listing(run.suspect_servers)}` : "",
  ].filter(Boolean).join("; ") || "none");
  const different = distinct(texts);
  if (different.length === 1) return different[0];
  return different.map((text) => `${text} (${texts.filter((each) => each === text).length} of ${runs.length} runs)`).join("; ");
}

/** Return whether the rule of a run dropped any value. */
export function dropsAnything(run) {
  return run.evidence.some(([, , , dropped]) => dropped > 0);
}

function remarkable(run) {
  return run.suspects.length > 0 || run.suspect_servers.length > 0;
}

/** Order runs for a chooser: runs that learned first, then those with flags, then the clearest. */
export function bestFirst(runs) {
  const best = Math.max(...runs.map((run) => run.final ?? 0));
  const learned = (run) => run.lost === null && (run.status === "running" || run.final === null || run.final > best / 2);
  return [...runs].sort((one, two) =>
    learned(two) - learned(one) || remarkable(two) - remarkable(one) ||
    (two.status === "running") - (one.status === "running") ||
    contrast(two) - contrast(one) || (two.final ?? 0) - (one.final ?? 0) || one.id - two.id);
}

/** Return how much more was dropped of flagged workers than of others, in tenths; 0 without flags. */
function contrast(run) {
  if (!run.suspects.length) return 0;
  const dropped = (flagged) => {
    const own = run.evidence.filter(([worker]) => run.suspects.includes(worker) === flagged);
    return own.length ? own.reduce((sum, [, , , share]) => sum + share, 0) / own.length : 0;
  };
  return Math.round(10 * (dropped(true) - dropped(false)));
}

/** Return the layers that a range of columns lies in, with its part of each. */
export function layersOf(run, start, stop) {
  const found = [];
  let first = 0;
  for (const [name, size] of run.layers) {
    const [from, to] = [Math.max(start, first), Math.min(stop, first + size)];
    if (from < to) found.push({ name, from: from - first, to: to - first, size });
    first += size;
  }
  return found;
}

/** Write which run it is. */
export function runTitle(run) {
  const what = run.attack ? `${run.rule} under ${run.attack}` : `${run.rule}, no attack`;
  return `run ${run.id}: ${run.name ? `${run.name}, ` : ""}${what}, seed ${run.seed}`;
}

function outcome(run) {
  const parts = [];
  if (run.lost !== null) parts.push(`model lost in round ${run.lost}`);
  if (run.suspects.length) parts.push(`${run.suspects.length} ${WORD[run.compared]}`);
  if (run.suspect_servers.length) parts.push(`server ${listing(run.suspect_servers)}`);
  return parts.length ? ` — ${parts.join(", ")}` : "";
}

/** Make the section. */
export function detectionSection(root) {
  let data = null;
  let chosen = null;
  let picked = null; // {worker, bin} or {worker, server}
  const heading = el("h2", {});
  const choice = chooser("Run", (value) => { chosen = Number(value); picked = null; draw(); });
  const verdict = el("p", { class: "verdict" });
  const curve = el("div", { class: "wide" });
  const workers = el("div", { class: "scroll" });
  const detail = el("div", { class: "detail", "aria-live": "polite" });
  const rounds = el("div", { class: "wide" });
  const links = el("div", { class: "wide" });
  const linksFigure = el("figure", {}, el("figcaption", {}, "Dropped values by server and worker"), links);
  const note = el("p", { class: "note" });
  put(root, heading, el("div", { class: "controls" }, choice.element), verdict,
    el("div", { class: "two even" },
      el("figure", {}, el("figcaption", {}, "Accuracy by round"), curve), el("div", {}, workers, detail)),
    el("div", { class: "two maps" },
      el("figure", {}, el("figcaption", {}, "Dropped values by worker and round"), rounds), linksFigure),
    note);

  const shown = () => data.runs.filter((run) => run.blame);
  function draw() {
    const runs = shown();
    root.hidden = !runs.length;
    if (!runs.length) return;
    const order = bestFirst(runs);
    if (!runs.some((run) => run.id === chosen)) chosen = order[0].id;
    choice.offer(order.map((run) => [String(run.id), `${runTitle(run)}${outcome(run)}`]), String(chosen));
    const run = runs.find((each) => each.id === chosen);
    heading.textContent = runs.length > 1 ? "Detection in one run" : runTitle(run).replace("run", "Run");
    const rows = ranked(run);
    if (picked === null && rows[0]?.flagged) picked = { worker: rows[0].worker };
    showVerdict(run);
    showCurve(run);
    showWorkers(run, rows);
    showDetail(run);
    showRounds(run);
    showLinks(run);
    note.textContent = remarks(run);
  }

  function showVerdict(run) {
    const servers = run.suspect_servers;
    const { known, truth, alarm } = flags(run);
    const parts = [];
    if (run.lost !== null) parts.push(el("strong", { class: "alarm" }, `Model lost in round ${run.lost}`), ": evidence of later rounds is not counted. ");
    parts.push(el("strong", { class: alarm ? "alarm" : null }, known), ". ");
    if (servers.length) {
      parts.push(el("strong", { class: "alarm" },
        `${servers.length === 1 ? "Server" : "Servers"} ${listing(servers)} received ${HUGE}`),
      ", from more workers than the rule tolerates: the fault is at the server or its links, not at the workers. ");
    }
    if (truth) parts.push(el("strong", {}, truth), ". ");
    parts.push(`The rule is ${run.rule} with ${run.workers} workers; it is expected to drop ${percent(run.blame.expected)} of an honest worker's values. ` +
      `Final accuracy: ${accuracy(run.final)}.`);
    put(verdict, parts);
  }

  function showCurve(run) {
    const since = new Map();
    for (const { worker, since: round } of ranked(run)) if (round !== null) since.set(round, [...(since.get(round) ?? []), worker]);
    const first = [...since].sort(([one], [two]) => one - two).slice(0, 1)
      .map(([x, numbers]) => ({ x, label: `${workersText(inOrder(numbers))} flagged` }));
    lineChart(curve, {
      lines: [{ label: run.rule, style: data.rules[run.rule], x: run.curve.round, y: run.curve.top1 }],
      title: "Accuracy by round", xLabel: "round", yLabel: "top-1 accuracy", yRange: [0, 1], height: 240,
      events: run.lost === null ? first : [{ x: run.lost, label: "model lost" }],
    });
  }

  function showWorkers(run, rows) {
    const listed = rows.filter((row) => row.flagged || row.byzantine || row.unusual || row.odds >= 2);
    const others = rows.length - listed.length;
    put(workers, listed.length ? table([
      ["worker", (row) => row.worker, true],
      ["state", (row) => (row.flagged ? "▲ flagged" : `not flagged${row.unusual ? ", unusual △" : ""}`)],
      ...(run.byzantine === null ? [] : [["truth", (row) => (row.byzantine ? "Byzantine" : row.flagged ? "false alarm" : "honest")]]),
      // A flagged worker stays flagged: the evidence of that round bounds the probability for good.
      ["false alarm probability, at most", (row) => oneIn(row.flagged ? Math.max(row.odds ?? 0, run.workers / data.alarm) : row.odds)],
      ["since round", (row) => row.since ?? "", true],
      ["dropped", (row) => percent(row.dropped, 1), true],
      [el("span", { class: "unseen" }, "details"), (row) => el("button", {
        type: "button", "aria-label": `Show where values of worker ${row.worker} were dropped`, on: { click: () => pick({ worker: row.worker }) },
      }, "where")],
    ], listed, {
      name: "workers", attributes: (row) => ({ class: row.flagged ? "flagged" : null, "aria-selected": String(picked?.worker === row.worker) }),
    }) : null,
    others ? el("p", { class: "quiet" }, `${listed.length ? `${count(others, "other worker")}: ` : "There is "}no evidence${listed.length ? "." : " against any worker."}`) : null);
  }

  function pick(what) {
    picked = what;
    const run = shown().find((each) => each.id === chosen);
    showWorkers(run, ranked(run));
    showDetail(run);
  }

  function showDetail(run) {
    const worker = picked?.worker;
    if (worker === undefined) {
      put(detail);
      return;
    }
    const parts = [el("h3", {}, `Worker ${worker}${picked.server === undefined ? "" : `, at server ${picked.server}`}`)];
    if (picked.bin !== undefined) {
      const [from, to] = [run.blame.from[picked.bin], run.blame.to[picked.bin]];
      const share = shares(run.blame.workers)[picked.bin * run.workers + worker];
      parts.push(el("p", {}, `${from === to ? `Round ${from}` : `Rounds ${from} to ${to}`}: ${percent(share, 1)} of its values dropped.`));
    }
    if (run.blame.servers) {
      const dropped = shares(run.blame.servers);
      const absurd = run.absurd ? bytes(run.absurd) : [];
      const rows = Array.from({ length: run.servers }, (_, server) => ({
        server, share: dropped[server * run.workers + worker], absurd: Boolean(absurd[server * run.workers + worker]),
        range: run.bounds[server] ?? null,
      })).filter((row) => picked.server === undefined || row.server === picked.server)
        .sort((one, two) => two.absurd - one.absurd || two.share - one.share).slice(0, 4);
      parts.push(table([
        ["server", (row) => `${row.absurd ? "▲ " : ""}${row.server}`, true],
        ["dropped", (row) => percent(row.share, 1), true],
        ["columns", ({ range }) => (range ? `${whole(range[0])}–${whole(range[1] - 1)}` : "not recorded")],
        ["layers", ({ range }) => (range ? layersOf(run, ...range).map((layer) =>
          el("div", {}, `${layer.name} `, el("span", { class: "quiet" }, `[${whole(layer.from)}–${whole(layer.to - 1)}]`))) : "")],
      ], rows));
    } else {
      parts.push(el("p", { class: "quiet" }, "Dropped values by server were not recorded for this run."));
    }
    put(detail, parts);
  }

  function showRounds(run) {
    const { from, to, expected } = run.blame;
    const flagged = inOrder(ranked(run).filter((row) => row.flagged).map((row) => row.worker));
    const label = (bin) => (from[bin] === to[bin] ? `round ${from[bin]}` : `rounds ${from[bin]} to ${to[bin]}`);
    const isByzantine = (worker) => run.byzantine?.includes(worker);
    droppedMap(rounds, {
      dropped: shares(run.blame.workers), expected, index: (worker, bin) => bin * run.workers + worker,
      rows: run.workers, columns: from.length, rowName: "worker", columnName: "round",
      title: `Dropped values of ${run.workers} workers in ${run.done} rounds.${flagged.length ? ` Flagged: ${listing(flagged)}.` : ""}`,
      name: (worker, bin) => `worker ${worker}${flagged.includes(worker) ? ", flagged" : ""}${isByzantine(worker) ? ", Byzantine" : ""}, ${label(bin)}`,
      rowLabel: (worker) => `${flagged.includes(worker) ? "▲" : ""}${isByzantine(worker) ? "B " : ""}${worker}`,
      columnLabel: (bin) => String(from[bin]),
      onPick: (worker, bin) => pick({ worker, bin }),
    });
  }

  function showLinks(run) {
    const absurd = run.absurd ? bytes(run.absurd) : [];
    linksFigure.hidden = !run.blame.servers || run.servers < 2 || !(dropsAnything(run) || absurd.some((each) => each));
    if (linksFigure.hidden) return;
    const index = (server, worker) => server * run.workers + worker;
    droppedMap(links, {
      dropped: shares(run.blame.servers), expected: run.blame.expected, index,
      rows: run.servers, columns: run.workers, rowName: "server", columnName: "worker", labelWidth: 18,
      title: `Dropped values by server and worker.${run.suspect_servers.length ? ` Flagged: server ${listing(run.suspect_servers)}.` : ""}`,
      name: (server, worker) => `server ${server}, worker ${worker}`,
      marked: (server, worker) => (absurd[index(server, worker)] ? `▲ ${HUGE}` : null),
      rowLabel: (server) => `${run.suspect_servers.includes(server) ? "▲" : ""}${server}`, columnLabel: String,
      onPick: (server, worker) => pick({ worker, server }),
    });
  }

  function remarks(run) {
    const notes = [];
    const { kept, from } = run.blame;
    if (!dropsAnything(run) && run.suspects.length) notes.push(`${run.rule} drops no values: workers are flagged by the distances between rows.`);
    if (run.byzantine?.length) notes.push("B marks Byzantine workers, which are known because the attack is simulated.");
    if (run.absurd && bytes(run.absurd).some((each) => each)) notes.push(`▲ marks links with ${HUGE}.`);
    if (kept > from.length) notes.push(`${whole(kept)} rounds are drawn as ${from.length} columns, each the mean over its rounds.`);
    if (run.blame.servers) notes.push("Shares by server are means over the rounds with an evaluation.");
    notes.push("The false alarm probability bounds how often an honest worker has this much evidence against it at any time; a worker is flagged at " +
      `1 in ${whole(run.workers / data.alarm)}.`);
    return notes.join(" ");
  }

  return { update(next) { data = next; draw(); }, redraw: () => data && draw() };
}
