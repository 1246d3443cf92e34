"""The kernels for accelerators, written in Triton's language at run time.

They have the semantics of the processor's kernels, add in the same order, and are written by the
same networks and windows. Nothing here knows of rules. Needs torch; Triton is loaded at first use.
"""


class KernelError(RuntimeError):
    """Triton is not here, too old, or cannot do what is asked on this device."""
