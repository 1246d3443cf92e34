// Where the data comes from: it is embedded, or the server streams what changes.

/** Read what is embedded in the page. */
export function embedded() {
  return JSON.parse(document.getElementById("data").textContent);
}

/** Put changed runs into the data, by their numbers. */
export function merge(data, changed) {
  const runs = new Map(data.runs.map((run) => [run.id, run]));
  for (const run of changed) runs.set(run.id, run);
  return { ...data, runs: [...runs.values()].sort((a, b) => a.id - b.id) };
}

/** Listen for changes, if this page is served; `onState` hears whether the server is there. */
export function listen(onData, onState) {
  if (document.documentElement.dataset.source !== "stream") return;
  const source = new EventSource("events");
  source.addEventListener("whole", (event) => onData(JSON.parse(event.data), true));
  source.addEventListener("runs", (event) => onData(JSON.parse(event.data), false));
  source.addEventListener("problem", (event) => onState("problem", JSON.parse(event.data)));
  source.addEventListener("open", () => onState("live"));
  source.addEventListener("error", () => onState("lost"));
}
