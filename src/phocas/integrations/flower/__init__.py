"""Robust federated learning with Flower: a strategy for its message API."""

from phocas.deprecation import former_names
from phocas.integrations.flower.optimizers import Adam, Momentum, UpdateOptimizer, Yogi
from phocas.integrations.flower.strategy import RobustStrategy

__all__ = ["Adam", "Momentum", "RobustStrategy", "UpdateOptimizer", "Yogi"]

__getattr__ = former_names(__name__, {"ServerOptimiser": "UpdateOptimizer"})
