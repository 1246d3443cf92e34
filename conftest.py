"""What is not collected: examples in modules that need what is not installed."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = (
    [] if importlib.util.find_spec("flwr") else ["src/phocas/integrations/flower/*.py"]
)
