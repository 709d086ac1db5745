"""How long a launch takes on a GPU."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch

_LAUNCHES = 20
_REPLAYS = 7


def seconds_per_launch(launch: Callable[[], object], device: str) -> float:
    """Median over replays of a CUDA graph of 20 launches, by events; caches are warm."""
    with torch.cuda.device(device):
        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_LAUNCHES):
                launch()
        graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        milliseconds = [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]
    return float(statistics.median(milliseconds)) / 1e3 / _LAUNCHES
