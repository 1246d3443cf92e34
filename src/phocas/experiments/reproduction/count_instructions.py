"""A program for callgrind: call rules, each between two calls of ``getppid`` that mark the counts.

Its argument is a JSON list of (rule, m, d). The code is compiled for AVX2 on every processor.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np
from llvmlite import binding as llvm

if __name__ == "__main__":
    llvm.get_host_cpu_name = lambda: "haswell"
    llvm.get_host_cpu_features = lambda: {"avx2": True, "fma": True, "f16c": True}

    import phocas

    phocas.set_num_threads(1)
    for spec, m, d in json.loads(sys.argv[1]):
        rule = phocas.parse_rule(spec)
        rows = np.random.default_rng(0).normal(size=(m, d)).astype(np.float32)
        for _ in range(2):
            rule(rows[:, :1024])
        os.getppid()
        rule(rows)
        os.getppid()
