"""A client of NVFlare in NumPy that misbehaves by its name, as its arguments have it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import nvflare.client as flare

TARGET = 3.0


def trained(given: dict[str, Any], how: str, rng: np.random.Generator) -> dict[str, Any]:
    state = {}
    for name in ("layer.weight", "layer.bias"):
        noise = rng.normal(scale=0.01, size=given[name].shape)
        state[name] = (given[name] + 0.5 * (TARGET - given[name]) + noise).astype(np.float32)
    state["batches"] = given["batches"] + 1
    if how == "raises":
        raise RuntimeError("this client's disk is full")
    if how == "keys":
        state["layer.extra"] = state.pop("layer.bias")
    elif how == "shape":
        state["layer.weight"] = state["layer.weight"][:-1]
    elif how == "dtype":
        state["layer.weight"] = state["layer.weight"].astype(np.float64)
    elif how == "greedy":
        state["layer.weight"][:] = -100
        state["layer.bias"][:] = np.nan
    return state


def main() -> None:
    flare.init()
    site = flare.get_site_name()
    kinds = dict(each.split("=") for each in sys.argv[1].split(","))
    how = kinds.get(site, "honest")
    rng = np.random.default_rng(int(site.removeprefix("site-")))
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        state = trained(received.params, how, rng)
        kind = flare.ParamsType.DIFF if how == "diff" else flare.ParamsType.FULL
        meta = {"NUM_STEPS_CURRENT_ROUND": 10**9 if how == "greedy" else 100}
        loss = float(np.abs(received.params["layer.weight"] - TARGET).mean())
        flare.send(flare.FLModel(kind, state, metrics={"loss": loss}, meta=meta))


if __name__ == "__main__":
    main()
