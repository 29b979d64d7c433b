"""Steps as CUDA graphs: a host takes twice as long to launch the kernels of a step as a GPU takes to compute them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from training.learning.batches import Batch

Work = Callable[[Batch, Tensor, Tensor], dict[str, Tensor]]
WARM = 3  # runs of a shape before it is captured; they compile and choose kernels


@dataclass(frozen=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: dict[str, Tensor]


def inputs_of(batch: Batch, crops: Tensor, progress: Tensor) -> list[Tensor]:
    return [*(getattr(batch, f.name) for f in fields(batch)[2:]), crops, progress]


class Graphs:
    """``work`` (batch, crops, progress) as one CUDA graph for each shape. It reads no pixels and waits for no result.

    The current stream is not the default one. The outputs hold until the next call. A shape that can't be captured is
    computed without a graph.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._met: Counter[object] = Counter()
        self._captured: dict[object, Captured | None] = {}

    def __call__(self, batch: Batch, crops: Tensor, progress: Tensor) -> dict[str, Tensor]:
        shape = batch.tiling, crops.shape
        self._met[shape] += 1
        if crops.is_cuda and self._met[shape] == WARM + 1:
            self._captured[shape] = self._capture(batch, crops, progress)
        captured = self._captured.get(shape)
        if captured is None:
            return self._work(batch, crops, progress)
        torch._foreach_copy_(captured.inputs, inputs_of(batch, crops, progress))
        captured.graph.replay()
        return captured.outputs

    def _capture(self, batch: Batch, crops: Tensor, progress: Tensor) -> Captured | None:
        inputs = [each.clone() for each in inputs_of(batch, crops, progress)]
        *own, crops, progress = inputs
        graph = torch.cuda.CUDAGraph()
        pools = (c.graph.pool() for c in self._captured.values() if c is not None)
        try:
            with torch.cuda.graph(
                graph, next(pools, None), torch.cuda.current_stream(), "thread_local"
            ):
                outputs = self._work(Batch(batch.tiling, batch.pixels[:0], *own), crops, progress)
        except RuntimeError as error:
            print(f"no graph for {tuple(crops.shape)}: {error}", flush=True)
            return None
        return Captured(graph, inputs, outputs)
