"""A rehearsal runs a few layers of each kind, in this thread only."""

import threading

from kestrel_engine.runtime.gpu.capture import rehearsal, rehearsed


def test_outside_a_rehearsal_all_layers_run() -> None:
    layers = list(range(9))
    assert rehearsed(layers) is layers
    with rehearsal():
        pass
    assert rehearsed(layers) is layers


def test_a_rehearsal_runs_the_first_two_and_the_last_of_each_kind() -> None:
    layers = [*range(4), *range(10, 20)]
    with rehearsal():
        assert rehearsed(layers) == [0, 1, 19]
        assert rehearsed(layers, lambda layer: layer >= 10) == [0, 1, 3, 10, 11, 19]
        assert rehearsed([7]) == [7] and rehearsed([7, 8]) == [7, 8] and rehearsed([]) == []


def test_lists_of_one_length_keep_their_layers_together() -> None:
    layers, changes = list(range(27)), [str(n) for n in range(27)]
    with rehearsal():
        pairs = list(zip(rehearsed(layers), rehearsed(changes), strict=True))
    assert pairs == [(0, "0"), (1, "1"), (26, "26")]


def test_other_threads_run_all_layers() -> None:
    found: list[int] = []
    with rehearsal():
        other = threading.Thread(target=lambda: found.extend(rehearsed(range(5))))
        other.start()
        other.join()
    assert found == [0, 1, 2, 3, 4]
