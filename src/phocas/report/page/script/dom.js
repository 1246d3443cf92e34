// Elements from values. Text is always set as text, so that no name is ever read as HTML.

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

/** Put children in the place of those that are there. */
export function put(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((each) => each !== null && each !== ""));
  return element;
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

/** Say something to who listens instead of looking. */
export function readout() {
  return el("p", { class: "readout", "aria-live": "polite" });
}

/** Call a function soon, once, however often it is asked for. */
export function soon(call, wait = 150) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(call, wait);
  };
}
