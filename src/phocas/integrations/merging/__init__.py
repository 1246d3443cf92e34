"""Robust merging of files of tensors, without a training framework."""

from phocas.integrations.merging.formats import TensorFile, open_tensors
from phocas.integrations.merging.merge import Merged, file_digest, merge_files
from phocas.integrations.merging.receipt import Request, receipt, write_receipt

__all__ = [
    "Merged",
    "Request",
    "TensorFile",
    "file_digest",
    "merge_files",
    "open_tensors",
    "receipt",
    "write_receipt",
]
