// The gradient matrix: some columns of one round, as in the paper's Figure 1.
import { chooser, el, put } from "./dom.js";
import { bytes, digits, middle, percent, whole } from "./format.js";
import { heatMap } from "./heat.js";
import { bestFirst, dropsAnything, layersOf, runTitle } from "./detection.js";

/** Decode a value from its sign and logarithm. */
export function decoded(code) {
  if (code === 0) return 0;
  if (code === -32768) return NaN;
  if (Math.abs(code) === 32767) return Math.sign(code) * Infinity;
  return Math.sign(code) * 2 ** (Math.abs(code) / 100 - 160);
}

/** Return the distance of each cell from the median of its column, in median deviations, scaled to -1 to 1. */
export function deviations(values, rows, columns) {
  const found = new Float64Array(values.length);
  const each = Array.from({ length: columns }, (_, column) => {
    const own = Array.from({ length: rows }, (_, row) => values[row * columns + column]);
    const finite = own.filter(Number.isFinite);
    const centre = finite.length ? middle(finite) : 0;
    return { own, centre, spread: finite.length ? middle(finite.map((value) => Math.abs(value - centre))) : 0 };
  });
  // The deviation of a column in which most values are zero is zero: use that of most columns.
  const usual = middle(each.map(({ spread }) => spread).filter((spread) => spread > 0)) || 1e-30;
  each.forEach(({ own, centre, spread }, column) => own.forEach((value, row) => {
    const apart = Number.isNaN(value) ? Infinity : value - centre;
    found[row * columns + column] =
      Math.sign(apart) * Math.min(1, Math.log1p(Math.abs(apart) / Math.max(spread, usual / 4)) / 4);
  }));
  return found;
}

/** Return whether the rule of a run dropped whole rows. */
export function byRow(run) {
  const lost = bytes(run.pictures.shown.at(-1).lost);
  const columns = lost.length / run.workers;
  return lost.some((part) => part > 0) &&
    lost.every((part, place) => part === lost[place - (place % columns)]);
}

/** Make the section. */
export function matrixSection(root) {
  let data = null;
  let chosen = null;
  let round = null;
  const choice = chooser("Run", (value) => { chosen = Number(value); round = null; draw(); });
  const slider = el("input", { type: "range", min: 0, step: 1, "aria-label": "Round", on: { input: () => { round = Number(slider.value); draw(); } } });
  const label = el("output", {});
  const control = el("label", { class: "chooser" }, el("span", {}, "Round"), slider, label);
  const host = el("div", { class: "wide" });
  const note = el("p", { class: "note" });
  put(root, el("h2", {}, "Gradient matrix"), el("div", { class: "controls" }, choice.element, control), host, note);

  function draw() {
    const runs = data.runs.filter((run) => run.pictures.shown.length);
    for (const element of [control, host]) element.hidden = !runs.length;
    if (!runs.length) {
      choice.offer([], "");
      put(note, "No run has recorded its gradient matrix. ", el("code", {}, "phocas train --record-matrix 50"),
        " records a sample of it every 50 rounds.");
      return;
    }
    if (!runs.some((run) => run.id === chosen)) {
      const order = bestFirst(runs);
      chosen = (order.find((run) => run.attack && dropsAnything(run) && !byRow(run)) ?? order[0]).id;
    }
    choice.offer(runs.map((run) => [String(run.id), runTitle(run)]), String(chosen));
    const run = runs.find((each) => each.id === chosen);
    const pictures = run.pictures.shown;
    slider.max = pictures.length - 1;
    round = Math.min(round ?? pictures.length - 1, pictures.length - 1);
    slider.value = round;
    const picture = pictures[round];
    label.textContent = picture.round;
    const codes = new Int16Array(bytes(picture.values).buffer);
    const values = Float64Array.from(codes, decoded);
    const lost = bytes(picture.lost);
    const rows = run.workers;
    const columns = values.length / rows;
    const apart = deviations(values, rows, columns);
    const [start, , stride, width] = picture.columns;
    const place = (column) => start + Math.floor(column / width) * stride + (column % width);
    const layers = Array.from({ length: columns }, (_, column) => layersOf(run, place(column), place(column) + 1)[0]);
    heatMap(host, {
      rows, columns, least: 9, height: 480, rowName: "worker", columnName: "column of the matrix", labelWidth: 64,
      title: `${columns} columns of the gradient matrix in round ${picture.round}, ${percent(share(lost))} of the cells dropped.`,
      empty: apart.some((value) => value) || lost.some((part) => part) ? null : "All workers sent the same values.",
      value: (row, column) => apart[row * columns + column],
      paint: (pen, row, column, x, y, w, h, dark) => {
        const part = lost[row * columns + column] / 255;
        if (part === 0) return;
        pen.fillStyle = dark ? `rgb(0 0 0 / ${0.75 * part})` : `rgb(60 60 60 / ${0.55 * part})`;
        pen.fillRect(x, y, Math.ceil(w), h);
        if (w < 3) return;
        pen.strokeStyle = dark ? "rgb(255 255 255 / .35)" : "rgb(0 0 0 / .55)";
        pen.lineWidth = 1;
        pen.beginPath();
        pen.moveTo(x, y + h);
        pen.lineTo(x + w, y);
        pen.stroke();
      },
      rowLabel: (row) => `${run.byzantine?.includes(row) ? "B " : ""}${row}`, columnLabel: (column) => whole(place(column)),
      describe: (row, column) => {
        const value = values[row * columns + column];
        const part = lost[row * columns + column] / 255;
        const layer = layers[column];
        return [
          `worker ${row}, column ${whole(place(column))}${layer ? `, ${layer.name}[${whole(layer.from)}]` : ""}`,
          `${Number.isFinite(value) ? digits(value) : String(value)}: ${part === 0 ? "kept" : part === 1 ? "dropped" : `${percent(part)} dropped`}`,
        ];
      },
      scale: ["below the column's median", "above", "logarithmic scale of median deviations; darkened: dropped"],
    });
    const d = run.layers.reduce((sum, [, size]) => sum + size, 0);
    put(note, `${columns} of ${d ? whole(d) : "the"} columns, in blocks of ${width} at even distances, as the servers received them. `,
      run.pictures.recorded > pictures.length ? `${pictures.length} of ${run.pictures.recorded} recorded rounds are in this file. ` : "",
      byRow(run) ? "Whole rows were dropped: their cells are shaded alike." : "");
  }
  const share = (lost) => lost.reduce((sum, part) => sum + part, 0) / 255 / Math.max(1, lost.length);

  return { update(next) { data = next; draw(); }, redraw: () => data && draw() };
}
