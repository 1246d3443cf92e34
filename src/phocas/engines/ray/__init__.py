"""The ray engine: workers and servers as actors, on a cluster or on this machine.

The same trainer as the local engine's, and the same bits where the rows are the same: batches,
dropout and lies depend on the seed, the round and the worker alone.
"""

from __future__ import annotations

from typing import Any

from phocas.engines.faults import FaultScript
from phocas.engines.ray.cluster import RayCluster
from phocas.engines.ray.session import Session
from phocas.engines.ray.settings import RaySettings
from phocas.machine import available_cores
from phocas.training.parameters import FlatParameters
from phocas.training.trainer import Trainer

_LEAST_STORE = 256 << 20


def start(
    model: Any,
    loss: Any,
    data: Any,
    *,
    address: str | None = None,
    faults: FaultScript | str | list[str] | None = None,
    processes: int | None = None,
    deadline: float = 60.0,
    server_deadline: float = 120.0,
    on_missing: str = "wait",
    missing: int | None = None,
    wait_seconds: float = 600.0,
    threads: int | None = None,
    num_workers: int = 20,
    **settings: Any,
) -> Trainer:
    """Make a trainer whose workers and servers are actors on Ray.

    Args:
        model: a module, as for :class:`phocas.training.Trainer`; so are ``loss``, ``data`` and all
            settings that are not named here.
        loss: see there.
        data: see there.
        address: ``auto`` or the host:port of a head node; None begins a Ray on this machine alone,
            listening on its loopback.
        faults: a script of what goes wrong; see :mod:`phocas.engines.faults`.
        processes: worker processes, for ``num_workers`` logical workers.
        deadline: seconds after which a worker is late, and its row one of NaN.
        server_deadline: seconds after which a server that does not answer is restored.
        on_missing: ``wait`` or ``stop`` when more rows are missing than the rule survives.
        missing: rows that may be missing in a round; 0 asks again until all are there.
        wait_seconds: the longest wait before the run stops.
        threads: cores to use, of this machine.
        num_workers: m.
        settings: those of :class:`phocas.training.Trainer`.
    """
    script = faults if isinstance(faults, FaultScript) else FaultScript.parse(faults or [])
    ray_settings = RaySettings(
        processes=processes,
        deadline=deadline,
        server_deadline=server_deadline,
        on_missing=on_missing,  # type: ignore[arg-type]  # checked there
        missing=missing,
        wait_seconds=wait_seconds,
        faults=script,
    )
    matrix = num_workers * FlatParameters(model).size * 8
    session: Session | None = None

    def cluster(trainer: Trainer) -> RayCluster:
        nonlocal session
        session = Session(
            address,
            cores=threads or available_cores(),
            store_bytes=max(_LEAST_STORE, 3 * matrix + trainer.samples.nbytes),
        )
        return RayCluster(trainer, session, ray_settings)

    try:
        return Trainer(
            model,
            loss,
            data,
            num_workers=num_workers,
            threads=threads,
            cluster=cluster,
            **settings,
        )
    except BaseException:
        if session is not None:
            session.close()
        raise
