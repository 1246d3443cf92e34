"""A robust outer step for DiLoCo and local SGD: peers train alone, and a rule joins their updates.

:class:`OuterStep` needs torch alone.
"""

from phocas.integrations.outer.compression import Compression, Float32, Int8, TopK
from phocas.integrations.outer.step import OuterResult, OuterStep

__all__ = ["Compression", "Float32", "Int8", "OuterResult", "OuterStep", "TopK"]
