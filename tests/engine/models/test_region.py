import math

import pytest
import torch

from kestrel_engine.models.region import RegionModel, coord_of_bin, size_of_bins
from tests.engine.models.small import random_tensors, small_config, small_model


def test_values_of_bins_are_those_of_the_hub_code():
    """The stored answer of Moondream 3 for an image of a stop sign (moondream.md section 7)."""
    assert coord_of_bin(289).value == 0.2822265625
    assert coord_of_bin(326).value == 0.318359375
    size = size_of_bins(780, 838)
    assert coord_of_bin(269).value - size.width / 2 == pytest.approx(0.16633163392543793, abs=1e-6)
    assert coord_of_bin(284).value + size.height / 2 == pytest.approx(0.4200967699289322, abs=1e-6)


def test_sizes_run_from_a_thousandth_to_one():
    assert size_of_bins(0, 1023).width == 2**-10
    assert size_of_bins(0, 1023).height == 1.0
    widths = [size_of_bins(i, 0).width for i in range(1024)]
    assert widths == sorted(widths)


@pytest.mark.parametrize("family", ["moondream2", "moondream3"])
def test_shapes_and_features(family):
    region = small_model(family).region
    values = torch.tensor([[0.25, 0.5], [1.0, 0.0]])
    embedded = region.embed_sizes(values)
    waves = []
    for width, height in values.tolist():
        angles = [
            2
            * math.pi
            * float(width * region.size_features[0, i] + height * region.size_features[1, i])
            for i in range(region.size_features.shape[1])
        ]
        waves.append([math.cos(a) for a in angles] + [math.sin(a) for a in angles])
    expected = region.size_encoder(torch.tensor(waves))
    torch.testing.assert_close(embedded, expected, atol=1e-4, rtol=1e-4)
    assert region.embed_coords(values[:, 0]).shape == (2, 32)
    hidden = torch.randn(3, 32)
    assert region.coord_logits(hidden).shape == (3, 64)
    assert region.size_logits(hidden).shape == (3, 2, 32)


def test_without_its_layer_norm_the_heads_read_the_stream_as_it_is():
    config = small_config("moondream3")
    tensors = random_tensors(config)
    hidden = torch.randn(2, 32)
    assert RegionModel(config.region, tensors).ln is not None
    for part in ("weight", "bias"):
        del tensors[f"region.ln.{part}"]
    bare = RegionModel(config.region, tensors)
    expected = hidden @ tensors["region.coord_decoder.weight"].T
    expected += tensors["region.coord_decoder.bias"]
    torch.testing.assert_close(bare.coord_logits(hidden), expected, atol=1e-5, rtol=1e-5)
