// The data of the report: embedded in the file, or streamed by the server as it changes.

/** Return the embedded data. */
export function embedded() {
  return JSON.parse(document.getElementById("data").textContent);
}

/** Return the data with changed runs replaced. */
export function merge(data, changed) {
  const runs = new Map(data.runs.map((run) => [run.id, run]));
  for (const run of changed.runs ?? []) runs.set(run.id, run);
  return {
    ...data,
    guards: changed.guards ?? data.guards,
    rules: changed.rules ?? data.rules,
    runs: [...runs.values()].sort((a, b) => a.id - b.id),
  };
}

/** Listen for changes if the report is served; `onState` is called when the server comes or goes. */
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
