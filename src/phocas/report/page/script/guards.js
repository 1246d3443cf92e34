// What a guard of a DDP or FSDP job reports: the rank, the layer and the step.
import { el, put } from "./dom.js";

/** Make the section. */
export function guardSection(root) {
  put(root, el("h2", {}, "Guards"));
  return { update(data) { root.hidden = !data.guards.length; }, redraw() {} };
}
