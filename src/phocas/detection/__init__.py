"""Detection of faulty workers: which, since when and where, for every engine and integration."""

from phocas.detection.detector import FALSE_ALARM, Detector
from phocas.detection.flags import Evidence

__all__ = ["FALSE_ALARM", "Detector", "Evidence"]
