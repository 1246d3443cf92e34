"""The kernels for accelerators, generated as Triton source.

The kernels have the semantics of the CPU kernels, add in the same order, and use the same networks
and windows. The package does not depend on rules. It needs torch; Triton is imported on first use.
"""


class KernelError(RuntimeError):
    """Triton is missing, too old, or does not support the operation on this device."""
