"""Adapters of the vision tower and of the projector in GpuRuntime: crops of different adapters share passes, and each
image gets the prefix of merged weights."""

from dataclasses import replace

import pytest
import torch

from kestrel_engine.models.moondream import Moondream
from kestrel_engine.runtime.gpu.adapters.layout import SlabLayout
from kestrel_engine.runtime.gpu.vision.graphs import CropPassShape, VisionGraphs
from kestrel_engine.runtime.gpu.vision.tower import FusedVision
from kestrel_engine.runtime.gpu.weights import pack_weights
from kestrel_engine.types.embedding import EmbeddingSpec
from kestrel_engine.types.step import EncodeSlice, ImageRead, StepPlan
from tests.engine.adapters.random_adapters import adapter, merged, random_tensors
from tests.engine.runtime.gpu.small_models import gpu_runtime, picture, small_model
from tests.engine.runtime.gpu.test_gpu_runtime import DEVICE, SIZES, TEXT, Talk, answers, image

pytestmark = pytest.mark.usefixtures("checked_addresses")

CONFIG, TENSORS = small_model("moondream2")
CPU = torch.device("cpu")
LAYOUT = SlabLayout(CONFIG, torch.float32, torch.device(DEVICE))
CHANGES = {
    "tower": random_tensors(CONFIG, 1, 3, vision=True, only="vision.blocks"),
    "mlp": random_tensors(CONFIG, 2, 35, vision=True, only="vision.blocks.0.mlp"),
    "projector": random_tensors(CONFIG, 3, 16, vision=True, only="proj_mlp"),
    "all": random_tensors(CONFIG, 4, 5, vision=True),
}


def with_slabs(name):
    plain = adapter(name, CHANGES[name])
    return replace(plain, weights={}, slabs=LAYOUT.pack(plain.weights))


ADAPTERS = {None: None} | {name: with_slabs(name) for name in CHANGES}


def runtime_of(tensors, **options):
    return gpu_runtime(CONFIG, tensors, **SIZES, **options)


def encoded(runtime, images, *, parts=1):
    """Encodes all images together, and returns the prefix of each. ``parts``: the steps."""
    for part in range(parts):
        pieces = []
        for each in images:
            first, last = (each.num_crops * n // parts for n in (part, part + 1))
            pieces.append(EncodeSlice(each, first, last))
        runtime.collect(runtime.launch(StepPlan(part, encode=tuple(pieces))))
    return [runtime.parts.images.prefix(each.key).cpu() for each in images]


def of_all(names):
    """The same picture with each of the adapters."""
    plain = picture("wide", (1, 2), CONFIG, seed=1)
    return [plain if name is None else plain.with_adapter(ADAPTERS[name]) for name in names]


@pytest.fixture(scope="module")
def tested():
    runtime = runtime_of(TENSORS, adapters=LAYOUT)
    yield runtime
    runtime.close()


def expected(name, images):
    runtime = runtime_of(TENSORS if name is None else merged(TENSORS, CHANGES[name]))
    try:
        return encoded(runtime, images), runtime
    finally:
        runtime.close()


@pytest.mark.slow
def test_images_of_all_adapters_in_one_step_have_the_prefixes_of_merged_weights(tested):
    names = [None, *CHANGES]
    got = encoded(tested, of_all(names), parts=2)
    for name, prefix in zip(names, got, strict=True):
        (wanted,), _ = expected(name, of_all([None]))
        torch.testing.assert_close(prefix, wanted, rtol=1e-4, atol=1e-4)
    assert len({float(prefix.sum()) for prefix in got}) == len(names), "the adapters change nothing"
    # Nothing remains for images without adapters, which are computed as ever.
    again = replace(of_all([None])[0], key="again")
    (plain,) = encoded(tested, [again])
    (wanted,), _ = expected(None, [again])
    assert torch.equal(plain, wanted)


@pytest.mark.parametrize("name", ["tower", "projector"])
def test_an_image_alone_whose_crops_come_alone(tested, name):
    (own,) = of_all([name])
    own = replace(own, key=f"alone/{name}")
    (got,) = encoded(tested, [own], parts=own.num_crops)
    (wanted,), _ = expected(name, of_all([None]))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_tokens_equal_those_of_merged_weights(tested):
    """With the adapter of all layers, alone and beside the plain image."""
    own, plain = of_all(["all", None])
    encoded(tested, [own, plain])

    class Tuned(Talk):
        def _row(self, tokens, *, samples):
            return replace(super()._row(tokens, samples=samples), adapter=ADAPTERS["all"])

    def ids(runtime, *talks):
        found = answers(runtime, talks)
        return [[token.id for token in found[talk.number]] for talk in talks]

    rules = [TEXT] * 3
    got = ids(
        tested,
        Tuned(0, [*image(CONFIG, own.key), 11, 12], rules),
        Talk(1, [*image(CONFIG, plain.key), 11, 12], rules),
    )
    for tokens, weights in zip(got, (merged(TENSORS, CHANGES["all"]), TENSORS), strict=True):
        runtime = runtime_of(weights)
        encoded(runtime, [plain])
        assert [tokens] == ids(runtime, Talk(0, [*image(CONFIG, plain.key), 11, 12], rules))
        runtime.close()


def test_embeddings_of_crops_have_the_adapter(tested):
    (own,) = of_all(["all"])
    own = replace(own, key="own/crops", keeps_features=True)
    spec = EmbeddingSpec(image=True, crops=True, patches=True)
    plan = StepPlan(
        5, encode=(EncodeSlice(own, 0, own.num_crops),), reads=(ImageRead(7, own, spec),)
    )
    found = tested.collect(tested.launch(plan)).readings[7]
    model = Moondream(CONFIG, merged(TENSORS, CHANGES["all"])).vision
    with torch.inference_mode():
        features = model.encode_crops(torch.from_numpy(own.crops))
        wanted = torch.stack([model.embed(each[None], (1, 1)) for each in features])
    torch.testing.assert_close(torch.tensor(found.crops), wanted, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_captured_passes():
    """With adapters, crops are padded to the next captured number. What a graph would replay is run here."""
    packed = pack_weights(CONFIG, {name: tensor.to(DEVICE) for name, tensor in TENSORS.items()})
    anchor = torch.zeros(1, device=DEVICE)
    vision = FusedVision(CONFIG.vision, packed, adapters=(LAYOUT, anchor))
    graphs = VisionGraphs(vision, None, max_crops=12)
    assert {shape.crops for shape in graphs.shapes if shape.adapted} == {*range(1, 11), 12}
    assert {shape.crops for shape in graphs.shapes if not shape.adapted} == set(range(1, 13))
    ran = []

    class Noted:
        def __init__(self, shape):
            self.shape = shape

        def replay(self):
            ran.append(self.shape)
            with vision.attention.chosen():
                graphs.body(self.shape)

    graphs.graphs = {shape: Noted(shape) for shape in graphs.shapes}
    side = CONFIG.vision.crop_size
    crops = torch.randint(0, 255, (11, side, side, 3), dtype=torch.uint8, device=DEVICE)
    names = [None, "tower", "projector", "mlp", "all"] * 2 + ["mlp"]
    adapters = [ADAPTERS[name] for name in names]
    got = graphs.encode_crops(crops, adapters)
    assert ran == [CropPassShape(12, True)]
    for name in {None, "tower", "mlp", "projector"}:
        own = [index for index, each in enumerate(names) if each == name]
        weights = TENSORS if name is None else merged(TENSORS, CHANGES[name])
        wanted = Moondream(CONFIG, weights).vision.encode_crops(crops[own].cpu())
        torch.testing.assert_close(got[own].cpu(), wanted, rtol=1e-4, atol=1e-4)
    # Adapters that leave the tower as it is take the passes without adapters.
    graphs.encode_crops(crops[:3], [None, ADAPTERS["projector"], None])
    graphs.encode_crops(crops[:2])
    assert ran[1:] == [CropPassShape(3), CropPassShape(2)]


def test_which_crops_are_shared():
    keyed = replace(of_all([None])[0], crop_keys=("a", "b", "c"))
    tower, projector = (keyed.with_adapter(ADAPTERS[name]) for name in ("mlp", "projector"))
    assert projector.crop_keys == keyed.crop_keys and tower.crop_keys != keyed.crop_keys
    assert len({keyed.key, tower.key, projector.key}) == 3
    # Adapters in the form of plain torch have the same parts.
    plain = adapter("projector", CHANGES["projector"])
    assert plain.changes_vision and not plain.changes_tower
    text = adapter("text", random_tensors(CONFIG, 5, 3))
    assert not text.changes_vision and not with_no_vision(text).changes_vision


def with_no_vision(plain):
    return replace(plain, weights={}, slabs=LAYOUT.pack(plain.weights))


def test_a_runtime_without_adapters_of_images_says_so():
    runtime = runtime_of(TENSORS, adapters=LAYOUT, adapt_vision=False)
    assert runtime.vision.changes is None
    (own,) = of_all(["tower"])
    with pytest.raises(AssertionError, match="computes no adapters"):
        encoded(runtime, [own])
    runtime.close()
