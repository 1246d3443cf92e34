"""Run the app in Flower's simulation: python -m tests.integrations.flower.simulate 12."""

from __future__ import annotations

import sys

from flwr.simulation import run_simulation
from tests.integrations.flower.apps import client, server

if __name__ == "__main__":
    run_simulation(
        server,
        client,
        int(sys.argv[1]),
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {
                "address": "local",  # and no cluster that may be on this machine
                "num_cpus": 2,
                "include_dashboard": False,
                "_node_ip_address": "127.0.0.1",
            },
        },
    )
