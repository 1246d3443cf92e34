// Where the data comes from: it is embedded, or the server streams what changes.

/** Read what is embedded in the page. */
export function embedded() {
  return JSON.parse(document.getElementById("data").textContent);
}

/** Put what has changed into the data: runs by their numbers. */
export function merge(data, changed) {
  const runs = new Map(data.runs.map((run) => [run.id, run]));
  for (const run of changed.runs ?? []) runs.set(run.id, run);
  return {
    ...data,
    guards: changed.guards ?? data.guards,
    runs: [...runs.values()].sort((a, b) => a.id - b.id),
  };
}

/** Listen for changes, if this page is served; `onState` hears whether the server is there. */
export function listen(data, onData, onState) {
  if (document.documentElement.dataset.source !== "stream") return;
  const source = new EventSource(`events?after=${data.version}`);
  source.addEventListener("whole", (event) => onData(JSON.parse(event.data), true));
  source.addEventListener("changed", (event) => onData(JSON.parse(event.data), false));
  source.addEventListener("problem", (event) => {
    const words = JSON.parse(event.data);
    onState(words === null ? "live" : "problem", words);
  });
  source.addEventListener("open", () => onState("live"));
  source.addEventListener("error", () => onState("lost"));
}
