"""What goes up arrives unchanged, and nothing is overwritten that is still read."""

import numpy as np
import torch

from kestrel_engine.runtime.gpu.state.staging import (
    RING,
    Field,
    ImageUploader,
    Results,
    RowBuffers,
    Uploader,
)

CPU = torch.device("cpu")


def test_arrays_of_all_types_arrive_in_one_copy():
    rng = np.random.default_rng(1)
    arrays = {
        "a": rng.integers(0, 2**40, 7),
        "b": rng.random((3, 2), dtype=np.float32),
        "c": rng.random(5),
        "d": rng.integers(0, 99, (2, 3)).astype(np.int32),
        "empty": np.empty(0, np.float32),
    }
    there = Uploader(CPU)(arrays)
    for name, array in arrays.items():
        assert torch.equal(there[name], torch.from_numpy(array)), name


def test_what_was_sent_stays_when_the_ring_comes_round():
    upload = Uploader(CPU)
    sent = [upload({"a": np.full(3, i)})["a"] for i in range(3 * RING)]
    assert [t.tolist() for t in sent] == [[i] * 3 for i in range(3 * RING)]


def test_an_image_arrives_in_any_shape():
    crops = np.random.default_rng(2).integers(0, 255, (2, 4, 4, 3), dtype=np.uint8)
    there = torch.zeros(crops.size, dtype=torch.uint8)
    ImageUploader(CPU)(crops, there)
    assert np.array_equal(there.view(2, 4, 4, 3).numpy(), crops)


def test_row_fields_are_aligned_and_sent_together():
    fields = {"i": Field(np.int32), "d": Field(np.float64), "w": Field(np.int32, (3,))}
    rows = RowBuffers(fields, 5, CPU)
    host = rows.host()
    host["i"][:] = range(5)
    host["d"][:] = np.arange(5) / 3
    host["w"][:] = np.arange(15).reshape(5, 3)
    rows.send()
    for name, array in host.items():
        assert torch.equal(rows.device[name], torch.from_numpy(array)), name
    address = rows.device["d"].data_ptr()
    rows.host()["d"][:] = 1
    assert rows.device["d"][0] == 0, "filled, but not sent"
    rows.send()
    assert rows.device["d"][0] == 1 and rows.device["d"].data_ptr() == address


def test_results_are_nobody_elses_until_released():
    results = Results(4, 2, CPU)
    first = results.fetch(torch.arange(6, dtype=torch.int32).view(3, 2))
    second = results.fetch(torch.zeros(4, 2, dtype=torch.int32))
    assert first.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    results.release(first)
    third = results.fetch(torch.full((4, 2), 9, dtype=torch.int32))
    assert third.data_ptr() == first.data_ptr() and second.sum() == 0
    assert third.shape == (4, 2) and third.sum() == 72
