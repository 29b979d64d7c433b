"""How crops are dealt out to captured passes; what a graph would replay is run here. tests/golden has real ones."""

import torch

from kestrel_engine.runtime.gpu.vision.graphs import CropPassShape, VisionGraphs
from kestrel_engine.runtime.gpu.vision.tower import FusedVision, even_size
from kestrel_engine.runtime.gpu.weights import pack_weights
from tests.engine.runtime.gpu.small_models import small_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tower():
    config, tensors = small_model("moondream2")
    tensors = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    return FusedVision(config.vision, pack_weights(config, tensors))


class Replayed:
    """Runs a pass of ``shape`` in place of its graph, and adds the shape to ``ran``."""

    def __init__(self, graphs, vision, shape, ran):
        self.graphs, self.vision, self.shape, self.ran = graphs, vision, shape, ran

    def replay(self):
        self.ran.append(self.shape)
        with self.vision.attention.chosen():
            graphs, n = self.graphs, self.shape.crops
            self.vision.encode_pass(graphs._crops[:n], graphs._features[:n])


def graphs_of(vision, shapes):
    """Graphs of ``shapes``, and the list of those that were replayed."""
    graphs, ran = VisionGraphs(vision, None, max_crops=3), []
    graphs.graphs = {shape: Replayed(graphs, vision, shape, ran) for shape in shapes}
    return graphs, ran


def random_crops(vision, count):
    side = vision.config.crop_size
    return torch.randint(0, 255, (count, side, side, 3), dtype=torch.uint8, device=DEVICE)


def test_passes_have_about_one_size():
    assert [even_size(count, 64) for count in (1, 48, 64, 65, 130)] == [1, 48, 64, 33, 44]
    assert [even_size(count, 24) for count in (9, 24, 25, 48, 54)] == [9, 24, 13, 24, 18]
    assert even_size(9, 4) == 3


@torch.inference_mode()
def test_crops_beyond_the_largest_pass_go_in_passes_of_one_size():
    vision = tower()
    graphs, ran = graphs_of(vision, [CropPassShape(count) for count in (1, 2, 3)])
    crops = random_crops(vision, 4)
    assert torch.allclose(graphs.encode_crops(crops), vision.encode_crops(crops), atol=1e-5)
    assert ran == [CropPassShape(2), CropPassShape(2)]
    kept = graphs.encode_crops(crops[:1])
    graphs.encode_crops(crops[1:2])
    assert torch.allclose(kept, vision.encode_crops(crops[:1]), atol=1e-5), "the next pass took it"


@torch.inference_mode()
def test_a_pass_leaves_room_where_such_a_graph_exists():
    vision = tower()
    roomy = CropPassShape(3, with_room=True)
    graphs, ran = graphs_of(vision, [roomy, CropPassShape(3), CropPassShape(2)])
    crops = random_crops(vision, 3)
    for count, leave_room in ((3, True), (2, True), (3, False)):
        found = graphs.encode_crops(crops[:count], leave_room=leave_room)
        assert torch.allclose(found, vision.encode_crops(crops[:count]), atol=1e-5)
    assert ran == [roomy, CropPassShape(2), CropPassShape(3)]


def test_large_passes_are_captured_with_room_too():
    vision = tower()
    plain = [CropPassShape(count) for count in range(30, 0, -1)]
    assert VisionGraphs(vision, None, max_crops=30).shapes == plain
    roomy = [CropPassShape(count, with_room=True) for count in (30, 29, 28)]
    assert VisionGraphs(vision, None, max_crops=30, with_room=True).shapes == plain + roomy
