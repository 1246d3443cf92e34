// A box of values beside the pointer, inside its chart or map.
import { el, put } from "./dom.js";

/** Make a tooltip inside an element. */
export function tooltip(host) {
  const box = el("div", { class: "tooltip", hidden: true, "aria-hidden": "true" });
  host.append(box);
  return {
    /** Show lines of content at a point of the host, on the side that has room. */
    show(x, y, ...content) {
      put(box, ...content);
      box.hidden = false;
      const start = host.getBoundingClientRect().left;
      const room = innerWidth - start - x > box.offsetWidth + 20;
      const left = room ? x + 12 : Math.max(8 - start, x - box.offsetWidth - 12);
      const top = Math.max(0, Math.min(y - 12, host.clientHeight - box.offsetHeight));
      box.style.transform = `translate(${left}px, ${top}px)`;
    },
    hide() {
      box.hidden = true;
    },
  };
}
