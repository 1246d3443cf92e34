"""Detection among the peers of outer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from phocas.detection import Detector
from phocas.detection.comparison import Sample
from phocas.detection.observer import as_arrays, as_tensors
from phocas.detection.own_past import WorkerData, check_worker_data
from phocas.integrations.outer.compression import Row
from phocas.rules import Rule
from phocas.seeds import Stream, generator

_MOST = 256  # peers that are compared with their past: the first ones that sent an update


class PeerHistory:
    """The evidence against the peers, which every peer computes from the same rows.

    With data that differ, a peer may join late and leave out steps. Only the first 256 peers are
    compared with their past. With data that are alike, the evidence starts from zero when the set
    of peers changes.
    """

    def __init__(self, rule: Rule, d: int, data: WorkerData, seed: int) -> None:
        self.rule, self.data = rule, check_worker_data(data)
        self.sample = Sample.draw(d, generator(Stream.SAMPLE, seed))
        self.columns = self.sample.columns(0, d)
        self.peers: list[int] = []
        self.detector = Detector(_MOST, data="differ")

    def observe(self, rows: Mapping[int, Row]) -> None:
        """Observe the rows of an outer step, by peer."""
        if self.data == "alike" and self.peers != list(rows):
            self._begin(list(rows))
        for peer in rows:
            if peer not in self.peers and len(self.peers) < _MOST:
                self.peers.append(peer)
        known = [peer for peer in rows if peer in self.peers]
        if not known:
            return
        seen = np.stack([rows[peer][self.columns] for peer in known]).astype(np.float64)
        differ = self.data == "differ"
        numbers = np.array([self.peers.index(peer) for peer in known]) if differ else None
        self.detector.observe(seen, participants=numbers)

    def _begin(self, peers: list[int]) -> None:
        self.peers = peers
        if self.data == "alike":
            m = len(peers)
            self.detector = Detector(m, self.rule.max_byzantine(m) or None)

    def flagged(self) -> tuple[int, ...]:
        """Return the flagged peers."""
        return tuple(self.peers[number] for number in self.detector.flagged())

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"peers": list(self.peers), "detector": as_tensors(self.detector.state())}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._begin(list(state["peers"]))
        self.detector.load_state(as_arrays(state["detector"], self.detector.state()))
