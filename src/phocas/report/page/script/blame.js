// Who is lying: what was dropped of each worker, round by round and server by server.
import { chooser, el, put } from "./dom.js";
import { bytes, count, listing, middle, oneIn, percent, shares, whole } from "./format.js";
import { heatMap, scaleBar } from "./heat.js";

/** Return a run's table of what is known against its workers, the worst first. */
export function ranked(run) {
  return run.evidence
    .map(([worker, odds, since, dropped]) => ({ worker, odds, since, dropped, accused: since !== null }))
    .sort((one, two) => two.accused - one.accused || (one.since ?? 0) - (two.since ?? 0) ||
      Math.min(two.odds ?? 0, 1e15) - Math.min(one.odds ?? 0, 1e15) || one.worker - two.worker);
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
  if (run.suspects.length) said.push(count(run.suspects.length, "suspect"));
  if (run.suspect_servers.length) said.push(count(run.suspect_servers.length, "suspect server"));
  return said.length ? ` — ${said.join(", ")}` : "";
}

/** Return how much more is dropped of suspects than of the others, in tenths. */
function contrast(run) {
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
    const order = [...runs].sort((one, two) =>
      isSuspicious(two) - isSuspicious(one) ||
      (two.status === "running") - (one.status === "running") ||
      contrast(two) - contrast(one) || one.id - two.id);
    if (!runs.some((run) => run.id === chosen)) chosen = order[0].id;
    choice.offer(order.map((run) => [String(run.id),
      `${runTitle(run)}${named(run)}`]), String(chosen));
    const run = runs.find((each) => each.id === chosen);
    const rows = ranked(run);
    if (picked === null && rows[0]?.accused) picked = { worker: rows[0].worker };
    showVerdict(run, rows);
    showTable(run, rows);
    showDetail(run);
    showRounds(run);
    showLinks(run);
    note.textContent = remarks(run);
  }

  function showVerdict(run, rows) {
    const accused = rows.filter((row) => row.accused).map((row) => row.worker).sort((a, b) => a - b);
    const servers = run.suspect_servers;
    const parts = [];
    if (accused.length) {
      parts.push(el("strong", { class: "alarm" },
        `${accused.length === 1 ? "Worker" : "Workers"} ${listing(accused)} ${accused.length === 1 ? "is" : "are"} wrong beyond chance`));
    } else {
      parts.push(el("strong", {}, "No worker is accused"));
    }
    if (servers.length) {
      parts.push(el("strong", { class: "alarm" },
        `; what reaches ${servers.length === 1 ? "server" : "servers"} ${listing(servers)} is absurd, from more workers than may lie`));
    }
    parts.push(`. The rule is ${run.rule} among ${run.workers} workers; an honest one expects to lose ${percent(run.blame.expected)} of its values.`);
    put(verdict, parts);
  }

  function showTable(run, rows) {
    const top = rows.slice(0, Math.max(8, rows.filter((row) => row.accused).length));
    put(table, el("table", { class: "data suspects" },
      el("thead", {}, el("tr", {}, ["worker", "verdict", "by chance at most", "since round", "dropped", ""].map((name, place) =>
        el("th", { scope: "col", class: [0, 3, 4].includes(place) ? "number" : null }, name)))),
      el("tbody", {}, top.map((row) => el("tr", { class: row.accused ? "accused" : null, "aria-selected": String(picked?.worker === row.worker) },
        el("th", { scope: "row", class: "number" }, row.worker),
        el("td", {}, row.accused ? "▲ accused" : run.unusual.includes(row.worker) ? "△ unusual" : "not accused"),
        el("td", {}, oneIn(row.odds)),
        el("td", { class: "number" }, row.since ?? ""),
        el("td", { class: "number" }, percent(row.dropped, 1)),
        el("td", {}, el("button", { type: "button", "aria-label": `Show where worker ${row.worker} was dropped`, on: { click: () => pick({ worker: row.worker }) } }, "where")),
      )))),
      rows.length > top.length ? el("p", { class: "quiet" }, `${count(rows.length - top.length, "worker")} with less against them not listed`) : null);
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
    const accused = new Set(run.evidence.filter((each) => each[2] !== null).map((each) => each[0]));
    const label = (bin) => (from[bin] === to[bin] ? `round ${from[bin]}` : `rounds ${from[bin]} to ${to[bin]}`);
    heatMap(rounds, {
      rows: run.workers, columns: from.length, rowName: "worker", columnName: "round",
      title: `What was dropped of ${run.workers} workers in ${run.done} rounds.${accused.size ? ` Accused: ${listing([...accused])}.` : ""}`,
      value: (worker, bin) => apart[bin * run.workers + worker] / full,
      rowLabel: (worker) => `${accused.has(worker) ? "▲" : ""}${worker}`,
      columnLabel: (bin) => String(from[bin]),
      describe: (worker, bin) => [`worker ${worker}${accused.has(worker) ? ", accused" : ""}, ${label(bin)}`,
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
    said.push("“By chance at most” bounds how often an honest worker would ever look like this; it is accused at " +
      `1 in ${whole(run.workers / data.alarm)}.`);
    if (run.config.split && run.config.split !== "iid") {
      said.push(`Workers hold different data (${run.config.split}): a suspect differs from the others and need not be wrong.`);
    }
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
