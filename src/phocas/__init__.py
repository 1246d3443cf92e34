"""Byzantine-resilient aggregation and training."""
