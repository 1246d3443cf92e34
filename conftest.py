"""What is not collected: modules that need what is not installed."""

from __future__ import annotations

import importlib.util

_FLOWER = ("src/phocas/integrations/flower/*.py", "tests/integrations/flower/*.py")
collect_ignore_glob = [] if importlib.util.find_spec("flwr") else list(_FLOWER)
