"""What is right for connected components: the smallest connected vertex of each, computed with numpy.

Counterpart: ``bench/loops.py`` and its peers. The algorithm is another one than theirs: labels also jump to the label
of their label, and whole arrays go round until nothing changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Vertices = npt.NDArray[Any]


def smallest_connected(a: Vertices, b: Vertices, vertices: int) -> Vertices:
    """Return, for each of ``vertices`` vertices, the smallest one that it is connected with by edges ``a`` – ``b``."""
    label = np.arange(vertices)
    while True:
        smaller = np.minimum(label[a], label[b])
        found = label.copy()
        for ends in (a, b):
            np.minimum.at(found, ends, smaller)
            np.minimum.at(found, label[ends], smaller)
        found = found[found]
        if np.array_equal(found, label):
            return label
        label = found
