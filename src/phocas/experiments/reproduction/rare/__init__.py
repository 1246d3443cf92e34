"""The study of rare features: tokens that few ranks see in a step, under every rule."""
