// A heat map: cells of one colour scale on a canvas, read by pointer and by keyboard.
import { el, put, readout } from "./dom.js";
import { diverging, isDark } from "./styles.js";
import { tooltip } from "./tooltip.js";

const LEFT = 46;
const BOTTOM = 34;

/**
 * Draw rows x columns of values from -1 to 1.
 *
 * `value(row, column)` gives a cell, `paint` may draw over it, `describe` says it in words,
 * `rowLabel` and `columnLabel` name the axes' places, `onPick(row, column)` is a click or Enter.
 */
export function heatMap(host, options) {
  const { rows, columns, value, describe, rowLabel, columnLabel, rowName, columnName, title } = options;
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
  put(host, frame, said);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const text = getComputedStyle(frame).color;
  const dark = isDark();
  for (let row = 0; row < rows; row += 1) {
    for (let column = 0; column < columns; column += 1) {
      const [red, green, blue] = diverging(value(row, column), dark);
      pen.fillStyle = `rgb(${red} ${green} ${blue})`;
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
  let at = options.picked ? [...options.picked] : [0, 0];
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

/** Draw what the colours mean. */
export function scaleBar(less, none, more) {
  const dark = isDark();
  const steps = Array.from({ length: 21 }, (_, place) => {
    const [red, green, blue] = diverging(place / 10 - 1, dark);
    return el("i", { style: { background: `rgb(${red} ${green} ${blue})` } });
  });
  return el("div", { class: "scale" }, el("span", {}, less), el("div", {}, steps), el("span", {}, more),
    none ? el("span", { class: "quiet" }, none) : null);
}
