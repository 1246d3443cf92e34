"""Robust federated learning with Flower: a strategy on its message API."""

from phocas.integrations.flower.optimisers import Adam, Momentum, ServerOptimiser
from phocas.integrations.flower.strategy import RobustStrategy

__all__ = ["Adam", "Momentum", "RobustStrategy", "ServerOptimiser"]
