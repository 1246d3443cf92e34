"""The paper as data: its tasks and figures, its claims, and what became of them."""
