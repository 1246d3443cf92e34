// Elements made from values. Text is always set as text, so that no name is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Make an HTML element: `on` are listeners, `style` properties, everything else attributes. */
export function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Make an SVG element. */
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) {
        element.addEventListener(event, listener);
      }
    } else if (name === "style") {
      for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    } else {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== ""));
  return element;
}

/** Replace all children of an element. */
export function put(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((each) => each !== null && each !== ""));
  return element;
}

/**
 * Make a table.
 *
 * Columns are `[name, value(row), isNumber]`; the first one heads its row. `attributes(row)` are the
 * attributes of a row, and `below(row)` is an optional row below it.
 */
export function table(columns, rows, { name = "", attributes = () => ({}), below = () => null } = {}) {
  const aligned = (isNumber) => (isNumber ? "number" : null);
  return el("table", { class: `data ${name}` },
    el("thead", {}, el("tr", {}, columns.map(([title, , isNumber]) => el("th", { scope: "col", class: aligned(isNumber) }, title)))),
    el("tbody", {}, rows.map((row) => [
      el("tr", attributes(row), columns.map(([, value, isNumber], place) =>
        el(place ? "td" : "th", { scope: place ? null : "row", class: aligned(isNumber) }, value(row)))),
      below(row),
    ])));
}

/** Make a select with a label; it keeps its choice when its options change. */
export function chooser(label, onChange) {
  const select = el("select", { on: { change: () => onChange(select.value) } });
  const whole = el("label", { class: "chooser" }, el("span", {}, label), select);
  return {
    element: whole,
    select,
    /** Offer `[value, text]` pairs and choose one. */
    offer(options, chosen) {
      const now = JSON.stringify(options);
      if (select.dataset.options !== now) {
        select.dataset.options = now;
        put(select, options.map(([value, text]) => el("option", { value }, text)));
      }
      select.value = chosen;
      whole.hidden = options.length < 2;
    },
  };
}

/** Make buttons of which one is pressed. */
export function switcher(label, options, chosen, onChange) {
  const group = el("div", { class: "switcher", role: "group", "aria-label": label });
  const buttons = options.map(([value, text]) =>
    el("button", { type: "button", on: { click: () => press(value) } }, text),
  );
  function press(value) {
    options.forEach(([each], place) => {
      buttons[place].setAttribute("aria-pressed", String(each === value));
    });
    if (value !== chosen) {
      chosen = value;
      onChange(value);
    }
  }
  press(chosen);
  group.append(...buttons);
  return group;
}

/** Make a hidden line whose changes a screen reader announces. */
export function readout() {
  return el("p", { class: "readout", "aria-live": "polite" });
}

/** Return a function that calls another once, a little after its last call. */
export function soon(call, wait = 150) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(call, wait);
  };
}
