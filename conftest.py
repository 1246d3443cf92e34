"""What is not collected: modules that need what is not installed."""

from __future__ import annotations

import importlib.util

_FLOWER = ("src/phocas/integrations/flower/*.py", "tests/integrations/flower/*.py")
_NVFLARE = ("src/phocas/integrations/nvflare.py", "tests/integrations/nvflare/*.py")
_SITE = ("tools/site/hook.py", "tools/site/docstrings.py", "tools/site/maths.py")
collect_ignore_glob = [
    *(() if importlib.util.find_spec("flwr") else _FLOWER),
    *(() if importlib.util.find_spec("nvflare") else _NVFLARE),
    *(() if importlib.util.find_spec("mkdocs") else _SITE),
]
