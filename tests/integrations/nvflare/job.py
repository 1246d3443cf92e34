"""A job for NVFlare's simulator, with a model of several kinds of arrays."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.model import ModelLearnable, make_model_learnable
from nvflare.app_common.abstract.model_persistor import ModelPersistor
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.fuel.utils.constants import FrameworkType
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner

from phocas.integrations.nvflare import RobustAggregator

ROUNDS = 2


class Reporter(ModelPersistor):  # type: ignore[misc]  # nvflare is untyped
    """Begin with a model of several kinds of arrays, and report what became of it."""

    def __init__(self, report: str) -> None:
        super().__init__()
        self.report = report

    def load_model(self, fl_ctx: FLContext) -> ModelLearnable:
        del fl_ctx
        state = {
            "layer.weight": np.zeros((40, 30), np.float32),
            "layer.bias": np.zeros(7, np.float32),
            "batches": np.array(0, np.int64),
        }
        return make_model_learnable(state, {})

    def save_model(self, model: ModelLearnable, fl_ctx: FLContext) -> None:
        del fl_ctx
        found = {
            name: [float(value.mean()), str(value.dtype)]
            for name, value in model["weights"].items()
        }
        with Path(self.report).open("a") as file:
            file.write(json.dumps(found) + "\n")


def main(folder: Path, rule: str, kinds: str, clients: int) -> int:
    job = FedJob("hostile", min_clients=clients)
    job.set_app_packages(["phocas"])
    persistor = job.to_server(Reporter(str(folder / "report.jsonl")), id="persistor")
    job.to_server(
        FedAvg(
            num_clients=clients,
            num_rounds=ROUNDS,
            persistor_id=persistor,
            aggregator=RobustAggregator(rule),
            ignore_result_error=True,
        )
    )
    script = str(Path(__file__).parent / "client.py")
    job.to_clients(ScriptRunner(script, kinds, framework=FrameworkType.NUMPY))
    return int(job.simulator_run(str(folder / "workspace"), n_clients=clients, threads=clients))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])))
