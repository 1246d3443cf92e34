"""Byzantine-resilient training: parameter server, workers, models and data."""
