"""How a process that trains keeps its memory: what one step frees, the next one takes again.

Owns the settings of the C library's allocator, which otherwise gives large tensors back to the kernel and has them filled with
zeros at each step: 1,700 to 5,400 page faults a step at widths 64 to 256.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Names of glibc's mallopt(3)."""


@cache
def keep_memory() -> bool:
    """Tell glibc to keep what is freed, once a process; returns whether it did (elsewhere nothing is changed)."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(name, value) for name, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26)))
