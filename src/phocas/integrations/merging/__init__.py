"""Robust merging of files of tensors, without a training framework."""

from phocas.deprecation import former_names
from phocas.integrations.merging.formats import TensorFile, open_tensors
from phocas.integrations.merging.merged import Merged, file_digest, merge_files
from phocas.integrations.merging.receipt import (
    MergeRequest,
    differences,
    read_receipt,
    receipt,
    write_receipt,
)

__all__ = [
    "MergeRequest",
    "Merged",
    "TensorFile",
    "differences",
    "file_digest",
    "merge_files",
    "open_tensors",
    "read_receipt",
    "receipt",
    "write_receipt",
]

__getattr__ = former_names(__name__, {"Request": "MergeRequest"})
