// Who is lying: what was dropped of each worker, round by round and server by server.
import { chooser, el, put } from "./dom.js";
import { bytes, count, listing, middle, oneIn, percent, shares, whole } from "./format.js";
import { heatMap, scaleBar } from "./heat.js";

/** Return a run's table of what is known against its workers, the worst first. */
export function ranked(run) {
  return run.evidence
    .map(([worker, odds, since, dropped]) => ({
      worker, odds, since, dropped, flagged: since !== null, byzantine: Boolean(run.byzantine?.includes(worker)),
    }))
    .sort((one, two) => two.flagged - one.flagged || (one.since ?? 0) - (two.since ?? 0) || two.byzantine - one.byzantine ||
      Math.min(two.odds ?? 0, 1e15) - Math.min(one.odds ?? 0, 1e15) || one.worker - two.worker);
}

/** Tell whether the workers of a run hold data of one kind: only then is a flagged worker wrong. */
export function sameData(run) {
  return (run.config.split ?? "iid") === "iid";
}

/** Say what some workers are. */
function workersAre(numbers, what, noun = "worker") {
  return numbers.length === 1 ? `${noun} ${numbers[0]} is ${what}` : `${noun}s ${listing(numbers)} are ${what}`;
}

/** Say what is known of the flagged workers of a run, and what a simulation knows to be true. */
export function flags(run) {
  const flagged = [...run.suspects].sort((a, b) => a - b);
  const wrong = run.byzantine;
  const honest = wrong === null ? [] : flagged.filter((worker) => !wrong.includes(worker));
  const missed = (wrong ?? []).filter((worker) => !flagged.includes(worker));
  let known = "No worker is flagged";
  if (flagged.length) {
    known = workersAre(flagged, "flagged", "Worker");
    if (!sameData(run)) {
      known += `: ${flagged.length === 1 ? "it differs" : "they differ"} from the others beyond chance. ` +
        `The workers' data differ too (${run.config.split}), so this is no proof of a fault`;
    } else if (!honest.length) known += ": wrong beyond chance";
  }
  const truth = [];
  if (wrong?.length) truth.push(`In this simulation ${workersAre(wrong, "Byzantine")}`);
  else if (honest.length) truth.push("In this simulation no worker is Byzantine");
  if (honest.length) truth.push(workersAre(honest, honest.length === 1 ? "a false alarm" : "false alarms"));
  if (missed.length) truth.push(`not flagged: ${listing(missed)}`);
  return { known, truth: truth.join("; "), alarm: flagged.length > 0 && sameData(run) && !honest.length };
}

/** Tell whether the rule of a run left anything out: the mean does not, whoever lies. */
export function dropsAnything(run) {
  return run.evidence.some(([, , , dropped]) => dropped > 0);
}

/** Tell whether anybody is named in a run, be it a worker or what is before a server. */
export function isSuspicious(run) {
  return run.suspects.length > 0 || run.suspect_servers.length > 0;
}

function named(run) {
  const said = [];
  if (run.lost !== null) said.push(`model lost in round ${run.lost}`);
  if (run.suspects.length) said.push(sameData(run) ? count(run.suspects.length, "suspect") : `${run.suspects.length} differing`);
  if (run.suspect_servers.length) said.push(count(run.suspect_servers.length, "suspect server"));
  return said.length ? ` — ${said.join(", ")}` : "";
}

/** Order runs for the chooser: what learned first, then what has news, then what shows it best. */
export function inOrder(runs) {
  const best = Math.max(...runs.map((run) => run.final ?? 0));
  const learned = (run) => run.lost === null && (run.status === "running" || run.final === null || run.final > best / 2);
  return [...runs].sort((one, two) =>
    learned(two) - learned(one) || isSuspicious(two) - isSuspicious(one) ||
    (two.status === "running") - (one.status === "running") ||
    contrast(two) - contrast(one) || (two.final ?? 0) - (one.final ?? 0) || one.id - two.id);
}

/** Return how much more is dropped of suspects than of the others, in tenths; 0 without suspects. */
function contrast(run) {
  if (!run.suspects.length) return 0;
  const of = (chosen) => {
    const own = run.evidence.filter(([worker]) => run.suspects.includes(worker) === chosen);
    return own.length ? own.reduce((sum, [, , , dropped]) => sum + dropped, 0) / own.length : 0;
  };
  return Math.round(10 * (of(true) - of(false)));
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

/** Say of a run which it is. */
export function runTitle(run) {
  const what = run.attack ? `${run.rule} under ${run.attack}` : `${run.rule}, no attack`;
  return `run ${run.id}: ${run.name ? `${run.name}, ` : ""}${what}, seed ${run.seed}`;
}

/** Make the section. */
export function blameSection(root) {
  let data = null;
  let chosen = null;
  let picked = null; // {worker, bin} or {worker, server}
  const choice = chooser("Run", (value) => { chosen = Number(value); picked = null; draw(); });
  const verdict = el("p", { class: "verdict" });
  const table = el("div", { class: "scroll" });
  const detail = el("div", { class: "detail", "aria-live": "polite" });
  const rounds = el("div", { class: "wide" });
  const links = el("div", { class: "wide" });
  const linksNote = el("p", { class: "quiet" });
  const linksFigure = el("figure", {}, el("figcaption", {}, "By server and worker"), links, linksNote);
  const bar = el("div");
  const note = el("p", { class: "note" });
  put(root, el("h2", {}, "Who is lying"), el("div", { class: "controls" }, choice.element), verdict,
    el("div", { class: "two" }, el("div", {}, table), detail), bar,
    el("div", { class: "two maps" },
      el("figure", {}, el("figcaption", {}, "By worker and round"), rounds), linksFigure),
    note);

  const shown = () => data.runs.filter((run) => run.blame);
  function draw() {
    const runs = shown();
    root.hidden = !runs.length;
    if (!runs.length) return;
    const order = inOrder(runs);
    if (!runs.some((run) => run.id === chosen)) chosen = order[0].id;
    choice.offer(order.map((run) => [String(run.id),
      `${runTitle(run)}${named(run)}`]), String(chosen));
    const run = runs.find((each) => each.id === chosen);
    const rows = ranked(run);
    if (picked === null && rows[0]?.flagged) picked = { worker: rows[0].worker };
    showVerdict(run);
    showTable(run, rows);
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
    parts.push(el("strong", { class: alarm ? "alarm" : null }, known));
    if (servers.length) {
      parts.push(el("strong", { class: "alarm" },
        `; what reaches ${servers.length === 1 ? "server" : "servers"} ${listing(servers)} is absurd, from more workers than may lie`));
    }
    if (truth) parts.push(". ", el("strong", {}, truth));
    parts.push(`. The rule is ${run.rule} among ${run.workers} workers; an honest one expects to lose ${percent(run.blame.expected)} of its values.`);
    put(verdict, parts);
  }

  function showTable(run, rows) {
    const top = rows.slice(0, Math.max(8, rows.filter((row) => row.flagged || row.byzantine).length));
    const truth = run.byzantine !== null;
    const state = (row) => (row.flagged ? "▲ flagged" : `not flagged${run.unusual.includes(row.worker) ? ", unusual △" : ""}`);
    const actual = (row) => (row.byzantine ? "Byzantine" : row.flagged ? "false alarm" : "honest");
    put(table, el("table", { class: "data suspects" },
      el("thead", {}, el("tr", {}, ["worker", "state", ...(truth ? ["in truth"] : []), "by chance at most", "since", "dropped", ""].map((name) =>
        el("th", { scope: "col", class: ["worker", "since", "dropped"].includes(name) ? "number" : null }, name)))),
      el("tbody", {}, top.map((row) => el("tr", { class: row.flagged ? "flagged" : null, "aria-selected": String(picked?.worker === row.worker) },
        el("th", { scope: "row", class: "number" }, row.worker),
        el("td", {}, state(row)),
        truth ? el("td", {}, actual(row)) : null,
        // Who was flagged once stays so: what was shown then bounds the chance for good.
        el("td", {}, oneIn(row.flagged ? Math.max(row.odds ?? 0, run.workers / data.alarm) : row.odds)),
        el("td", { class: "number" }, row.since ?? ""),
        el("td", { class: "number" }, percent(row.dropped, 1)),
        el("td", {}, el("button", { type: "button", "aria-label": `Show where worker ${row.worker} was dropped`, on: { click: () => pick({ worker: row.worker }) } }, "where")),
      )))),
      rows.length > top.length ? el("p", { class: "quiet" }, `${count(rows.length - top.length, "worker")} not listed`) : null);
  }

  function pick(what) {
    picked = what;
    const run = shown().find((each) => each.id === chosen);
    showTable(run, ranked(run));
    showDetail(run);
  }

  function showDetail(run) {
    const worker = picked?.worker;
    if (worker === undefined) {
      put(detail, el("p", { class: "quiet" }, "Pick a worker or a cell to see the servers, the columns and the layers."));
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
      })).filter((row) => picked.server === undefined || row.server === picked.server)
        .sort((one, two) => two.absurd - one.absurd || two.share - one.share).slice(0, 6);
      parts.push(el("table", { class: "data" },
        el("thead", {}, el("tr", {}, ["server", "dropped", "columns", "layers"].map((name, place) =>
          el("th", { scope: "col", class: place < 2 ? "number" : null }, name)))),
        el("tbody", {}, rows.map(({ server, share, absurd }) => {
          const [start, stop] = run.bounds[server] ?? [null, null];
          return el("tr", {}, el("th", { scope: "row", class: "number" }, `${absurd ? "▲ " : ""}${server}`),
            el("td", { class: "number" }, percent(share, 1)),
            el("td", {}, start === null ? "not recorded" : `${whole(start)}–${whole(stop - 1)}`),
            el("td", {}, start === null ? "" : layersOf(run, start, stop).map((layer) =>
              el("div", {}, `${layer.name} `, el("span", { class: "quiet" }, `[${whole(layer.from)}–${whole(layer.to - 1)}]`)))));
        }))));
    } else {
      parts.push(el("p", { class: "quiet" }, "What each server dropped was not recorded for this run."));
    }
    put(detail, parts);
  }

  function showRounds(run) {
    const dropped = shares(run.blame.workers);
    const { from, to, expected } = run.blame;
    const apart = dropped.map((share) => share - expected);
    const full = saturation(apart);
    const flagged = new Set(run.evidence.filter((each) => each[2] !== null).map((each) => each[0]));
    const label = (bin) => (from[bin] === to[bin] ? `round ${from[bin]}` : `rounds ${from[bin]} to ${to[bin]}`);
    heatMap(rounds, {
      rows: run.workers, columns: from.length, rowName: "worker", columnName: "round",
      title: `What was dropped of ${run.workers} workers in ${run.done} rounds.${flagged.size ? ` Flagged: ${listing([...flagged])}.` : ""}`,
      value: (worker, bin) => apart[bin * run.workers + worker] / full,
      rowLabel: (worker) => `${flagged.has(worker) ? "▲" : ""}${worker}`,
      columnLabel: (bin) => String(from[bin]),
      describe: (worker, bin) => [`worker ${worker}${flagged.has(worker) ? ", flagged" : ""}, ${label(bin)}`,
        `${percent(dropped[bin * run.workers + worker], 1)} dropped, ${percent(expected)} expected`],
      onPick: (worker, bin) => pick({ worker, bin }),
    });
    put(bar, scaleBar(`${percent(full, 1)} less`, "or more: dropped of a worker, against what an honest one would expect", `${percent(full, 1)} more`));
  }

  function showLinks(run) {
    linksFigure.hidden = !run.blame.servers || run.servers < 2;
    if (linksFigure.hidden) return;
    const dropped = shares(run.blame.servers);
    const absurd = run.absurd ? bytes(run.absurd) : [];
    const { expected } = run.blame;
    const apart = dropped.map((share) => share - expected);
    const full = saturation(apart);
    heatMap(links, {
      rows: run.servers, columns: run.workers, rowName: "server", columnName: "worker", labelWidth: 18,
      title: `What each of ${run.servers} servers dropped of each worker.${run.suspect_servers.length ? ` Suspect: server ${listing(run.suspect_servers)}.` : ""}`,
      value: (server, worker) => apart[server * run.workers + worker] / full,
      paint: (pen, server, worker, x, y, w, h, dark) => {
        if (!absurd[server * run.workers + worker]) return;
        pen.fillStyle = dark ? "#ffffff" : "#000000";
        const size = Math.min(w, h) * 0.32;
        pen.beginPath();
        pen.moveTo(x + w / 2, y + h / 2 - size);
        pen.lineTo(x + w / 2 + size, y + h / 2 + size);
        pen.lineTo(x + w / 2 - size, y + h / 2 + size);
        pen.fill();
      },
      rowLabel: (server) => `${run.suspect_servers.includes(server) ? "▲" : ""}${server}`, columnLabel: String,
      describe: (server, worker) => [`server ${server}, worker ${worker}`,
        `${percent(dropped[server * run.workers + worker], 1)} dropped, ${percent(expected)} expected`,
        ...(absurd[server * run.workers + worker] ? ["▲ absurd values have come this way"] : [])],
      onPick: (server, worker) => pick({ worker, server }),
    });
    linksNote.textContent = `Colours end at ${percent(full, 1)}.` +
      (absurd.some((each) => each) ? " ▲ marks links on which absurd values came." : "");
  }

  function remarks(run) {
    const said = [];
    const { kept, from } = run.blame;
    if (!dropsAnything(run)) said.push(`${run.rule} left nothing out of any worker: suspects are known by the distances between rows alone.`);
    if (kept > from.length) said.push(`${whole(kept)} rounds are drawn as ${from.length} columns, each the mean over its rounds.`);
    if (run.blame.servers) said.push("Shares by server are means over the rounds of evaluations.");
    said.push("“By chance at most” bounds how often an honest worker would ever look like this; it is flagged at " +
      `1 in ${whole(run.workers / data.alarm)}.`);
    return said.join(" ");
  }

  return { update(next) { data = next; draw(); }, redraw: () => data && draw() };
}

/**
 * Return the difference at which colours are full: several times what is usual in this run.
 *
 * Krum drops all but one worker, Heraclius next to nothing: the same colours must tell in both.
 */
export function saturation(apart) {
  return Math.max(0.05, Math.min(1, 6 * middle(Array.from(apart, Math.abs))));
}
