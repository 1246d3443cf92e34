"""Robust merging of files of tensors, without a training framework."""

from phocas.integrations.merging.formats import TensorFile, open_tensors
from phocas.integrations.merging.merged import Merged, file_digest, merge_files
from phocas.integrations.merging.receipt import (
    Request,
    differences,
    read_receipt,
    receipt,
    write_receipt,
)

__all__ = [
    "Merged",
    "Request",
    "TensorFile",
    "differences",
    "file_digest",
    "merge_files",
    "open_tensors",
    "read_receipt",
    "receipt",
    "write_receipt",
]
