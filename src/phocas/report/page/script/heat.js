// Heat maps: cells of one colour scale on a canvas, read by pointer and by keyboard.
import { el, put, readout } from "./dom.js";
import { middle, percent } from "./format.js";
import { diverging, isDark } from "./styles.js";
import { tooltip } from "./tooltip.js";

const LEFT = 46;
const BOTTOM = 34;
const VISIBLE = 0.02; // a smaller difference of dropped shares cannot be seen

/**
 * Draw rows x columns of values from -1 to 1, with their colour scale below.
 *
 * `empty` is the reason why there is nothing to show: it is written in place of the map.
 * `value(row, column)` is a cell's value, `paint` may draw over a cell, `describe` returns its lines
 * of text, `rowLabel` and `columnLabel` return the labels of the axes, `onPick(row, column)` is
 * called on a click or Enter, and `scale` has the texts of the colour scale: less, more, note.
 */
export function heatMap(host, options) {
  const { rows, columns, value, describe, rowLabel, columnLabel, rowName, columnName, title } = options;
  if (options.empty) {
    put(host, el("p", { class: "quiet nothing" }, options.empty));
    return;
  }
  const width = Math.max(220, host.clientWidth || 480);
  const cellWidth = (width - LEFT - 4) / columns;
  const cellHeight = Math.max(options.least ?? 6, Math.min(22, (options.height ?? 420) / rows));
  const height = Math.ceil(cellHeight * rows) + BOTTOM;
  const canvas = el("canvas", { "aria-hidden": "true" });
  const scale = Math.min(2, window.devicePixelRatio || 1);
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const said = readout();
  const frame = el("div", {
    class: "heat", tabindex: 0, role: "img",
    "aria-label": `${title} Arrow keys move between cells${options.onPick ? ", Enter picks one" : ""}.`,
  }, canvas);
  const tip = tooltip(frame);
  const dark = isDark();
  const colour = diverging(dark);
  put(host, frame, said, scaleBar(colour, ...options.scale));
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const text = getComputedStyle(frame).color;
  for (let row = 0; row < rows; row += 1) {
    for (let column = 0; column < columns; column += 1) {
      pen.fillStyle = colour(value(row, column));
      const [x, y] = corner(row, column);
      const gap = cellHeight > 8 ? 1 : 0;
      const side = cellWidth > 8 ? 1 : 0;
      pen.fillRect(x, y, Math.ceil(cellWidth) - side + (side ? 0 : 0.5), cellHeight - gap);
      options.paint?.(pen, row, column, x, y, cellWidth - side, cellHeight - gap, dark);
    }
  }
  pen.fillStyle = text;
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const everyRow = Math.max(1, Math.ceil(14 / cellHeight));
  for (let row = 0; row < rows; row += everyRow) {
    pen.fillText(rowLabel(row), LEFT - 6, (row + 0.5) * cellHeight);
  }
  pen.textAlign = "center";
  const everyColumn = Math.max(1, Math.ceil((options.labelWidth ?? 34) / cellWidth));
  for (let column = 0; column < columns; column += everyColumn) {
    pen.fillText(columnLabel(column), LEFT + (column + 0.5) * cellWidth, height - BOTTOM + 10);
  }
  pen.fillText(columnName, LEFT + (width - LEFT) / 2, height - 7);
  pen.save();
  pen.translate(8, (height - BOTTOM) / 2);
  pen.rotate(-Math.PI / 2);
  pen.fillText(rowName, 0, 0);
  pen.restore();

  function corner(row, column) {
    return [LEFT + column * cellWidth, row * cellHeight];
  }
  let at = [0, 0];
  const cursor = el("div", { class: "cursor", hidden: true });
  frame.append(cursor);
  function show(row, column, aloud) {
    at = [row, column];
    const [x, y] = corner(row, column);
    cursor.hidden = false;
    cursor.style.transform = `translate(${x - 1}px, ${y - 1}px)`;
    cursor.style.width = `${Math.max(3, cellWidth)}px`;
    cursor.style.height = `${cellHeight + 1}px`;
    const words = describe(row, column);
    tip.show(x + cellWidth, y + cellHeight, words.map((line) => el("div", {}, line)));
    if (aloud) said.textContent = words.join(", ");
  }
  function leave() {
    cursor.hidden = true;
    tip.hide();
  }
  function find(event) {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - LEFT) / cellWidth);
    const row = Math.floor((event.clientY - box.top) / cellHeight);
    return row >= 0 && row < rows && column >= 0 && column < columns ? [row, column] : null;
  }
  frame.addEventListener("pointermove", (event) => {
    const cell = find(event);
    if (cell) show(...cell, false);
    else leave();
  });
  frame.addEventListener("pointerleave", leave);
  frame.addEventListener("click", (event) => {
    const cell = find(event);
    if (cell) options.onPick?.(...cell);
  });
  frame.addEventListener("keydown", (event) => {
    const [down, right] = {
      ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
    }[event.key] ?? [0, 0];
    if (down || right) {
      const row = Math.max(0, Math.min(rows - 1, at[0] + down));
      show(row, Math.max(0, Math.min(columns - 1, at[1] + right)), true);
    } else if ((event.key === "Enter" || event.key === " ") && options.onPick) {
      options.onPick(...at);
    } else {
      return;
    }
    event.preventDefault();
  });
  frame.addEventListener("blur", leave);
}

/**
 * Draw by how much more or less was dropped than is expected of an honest worker.
 *
 * `dropped` are shares, `index(row, column)` the place of a cell in them, `name(row, column)` its
 * name, and `marked(row, column)` an optional text for a cell that has a triangle. All other options
 * are those of `heatMap`.
 */
export function droppedMap(host, { dropped, expected, index, name, marked = () => null, ...options }) {
  const apart = Array.from(dropped, (share) => (share ?? 0) - expected);
  const most = apart.reduce((found, each) => Math.max(found, Math.abs(each)), 0);
  // Krum drops all rows but one, Heraclius almost no values: the scale is that of this run.
  const full = Math.max(0.05, Math.min(most, 6 * middle(apart.map(Math.abs))));
  const someMarked = Array.from({ length: options.rows * options.columns }, (_, place) =>
    marked(Math.floor(place / options.columns), place % options.columns)).some(Boolean);
  let empty = null;
  if (most < VISIBLE && !someMarked) {
    empty = dropped.some((share) => share > 0)
      ? `No dropped share differs by more than ${percent(VISIBLE)} from the ${percent(expected, 1)} expected of an honest worker.`
      : "No values were dropped.";
  }
  heatMap(host, {
    ...options, empty,
    value: (row, column) => (apart[index(row, column)] ?? 0) / full,
    describe: (row, column) => [name(row, column),
      `${percent(dropped[index(row, column)], 1)} dropped, ${percent(expected)} expected`, marked(row, column)].filter(Boolean),
    paint: (pen, row, column, x, y, w, h, dark) => {
      if (!marked(row, column)) return;
      pen.fillStyle = dark ? "#ffffff" : "#000000";
      const size = Math.min(w, h) * 0.32;
      pen.beginPath();
      pen.moveTo(x + w / 2, y + h / 2 - size);
      pen.lineTo(x + w / 2 + size, y + h / 2 + size);
      pen.lineTo(x + w / 2 - size, y + h / 2 + size);
      pen.fill();
    },
    scale: [`−${percent(full)}`, `+${percent(full)}`, `percentage points from the ${percent(expected)} expected of an honest worker`],
  });
}

function scaleBar(colour, less, more, note) {
  const steps = Array.from({ length: 21 }, (_, place) => el("i", { style: { background: colour(place / 10 - 1) } }));
  return el("div", { class: "scale" }, el("span", {}, less), el("div", {}, steps), el("span", {}, more),
    el("span", { class: "quiet" }, note));
}
