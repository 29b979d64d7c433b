"""Several images in one prompt: what is computed whole, what is shared, what is computed once."""

from dataclasses import replace

import pytest

from kestrel_engine.scheduler.budget import StepBudget
from kestrel_engine.scheduler.memory.prompt_images import PromptImages
from kestrel_engine.scheduler.policy import SchedulerPolicy
from kestrel_engine.types.requests import ImageBlock
from tests.engine.scheduler.simulation import IMAGE_POSITIONS, LIMITS, Simulation, Spec, alone

TEXT = (100, 101, 102, 103, 104, 105, 106)
BLOCK = {key: ImageBlock(key, IMAGE_POSITIONS) for key in "abc"}


def atoms(spec, num_pages, page_size=5):
    submission = spec.submission()
    images = PromptImages(submission, page_size)
    return [(atom.key, atom.num_pages) for atom in images.atoms(submission.prompt, num_pages)]


def rows(simulation):
    return [row for plan in simulation.runtime.plans for row in plan.prefill]


def test_an_image_and_its_neighbours_on_its_pages_are_one_atom():
    spec = Spec(1, TEXT, image="a", more=((0, "b"), (6, "c")))
    # Positions: 0-9 BOS and a, 10-18 b, 19-24 text, 25-33 c, 34 text.
    assert atoms(spec, 7) == [
        ((0, BLOCK["a"]), 2),
        ((BLOCK["b"], 100), 2),
        ((101, 102, 103, 104, 105), 1),
        ((BLOCK["c"], 106), 2),
    ]
    assert atoms(spec, 6) == atoms(spec, 7)[:3] == atoms(spec, 5)
    assert atoms(spec, 3) == atoms(spec, 7)[:1] == atoms(spec, 2)
    assert atoms(spec, 1) == []


def test_images_on_one_page_are_one_atom():
    spec = Spec(1, TEXT, image="a", more=((2, "b"), (2, "c")))
    # Positions: 0-9 BOS and a, 10-11 text, 12-20 b, 21-29 c, 30-34 text.
    assert atoms(spec, 7) == [
        ((0, BLOCK["a"]), 2),
        ((100, 101, BLOCK["b"], BLOCK["c"]), 4),
        ((102, 103, 104, 105, 106), 1),
    ]


def test_with_pages_of_one_position_bos_belongs_to_the_image_after_it():
    spec = Spec(1, (100, 101), image="a", more=((1, "b"),))
    assert atoms(spec, 21, page_size=1) == [
        ((0, BLOCK["a"]), 10),
        ((100,), 1),
        ((BLOCK["b"],), 9),
        ((101,), 1),
    ]
    assert atoms(replace(spec, image=None), 2, page_size=1) == [((0,), 1), ((100,), 1)]


@pytest.mark.parametrize("page_size", [1, 5, 7, 10])
def test_atoms_cover_their_pages_exactly(page_size):
    spec = Spec(1, TEXT, image="a", more=((1, "b"), (1, "c"), (5, "b")))
    submission = spec.submission()
    images = PromptImages(submission, page_size)
    size = dict.fromkeys(BLOCK.values(), IMAGE_POSITIONS)
    total = sum(size.get(token, 1) for token in submission.prompt)
    for num_pages in range(total // page_size + 1):
        found = images.atoms(submission.prompt, num_pages)
        tokens = [token for atom in found for token in atom.key]
        assert tuple(tokens) == submission.prompt[: len(tokens)]
        positions = sum(size.get(token, 1) for token in tokens)
        assert positions == page_size * sum(atom.num_pages for atom in found)
        assert positions <= num_pages * page_size
        assert images.num_tokens(positions) == len(tokens)


def test_every_image_is_computed_whole_and_text_in_chunks():
    budget = StepBudget(prefill_positions=4, crops=1, idle_scale=1)
    simulation = Simulation(policy=SchedulerPolicy(budget=budget))
    spec = Spec(1, TEXT, image="a", more=((0, "b"), (5, "c")))
    simulation.add(spec)
    simulation.drain()
    assert [row.tokens for row in rows(simulation)] == [
        (0, BLOCK["a"]),
        (BLOCK["b"],),
        (100, 101, 102, 103),
        (104,),
        (BLOCK["c"],),
        (105, 106),
    ]
    assert [row.start for row in rows(simulation)] == [0, 10, 19, 23, 24, 33]
    assert simulation.tokens[1] == alone(spec)


def test_a_prompt_with_several_images_fits_one_row():
    budget = StepBudget(prefill_positions=100, crops=100)
    simulation = Simulation(policy=SchedulerPolicy(budget=budget))
    simulation.add(Spec(1, TEXT, image="a", more=((0, "b"),), max_tokens=2))
    simulation.drain()
    (row,) = rows(simulation)
    assert row.tokens == (0, BLOCK["a"], BLOCK["b"], *TEXT)


def cached(simulation, number):
    return simulation.scheduler.stats.cached_positions - number


def test_images_are_shared_across_requests_and_turns():
    simulation = Simulation()
    first = Spec(1, TEXT, image="a", more=((0, "b"),), max_tokens=2)
    simulation.add(first)
    simulation.drain()
    # Another question about both images: pages 0 to 3 hold them and the first token after them.
    other = replace(first, number=2, text=(100, 7, 8))
    before = simulation.scheduler.stats.cached_positions
    simulation.add(other)
    simulation.drain()
    assert simulation.scheduler.stats.cached_positions - before == 20
    # Another second image: the first one stays shared.
    third = replace(first, number=3, more=((0, "c"),))
    before = simulation.scheduler.stats.cached_positions
    simulation.add(third)
    simulation.drain()
    assert simulation.scheduler.stats.cached_positions - before == 10
    # The next turn of the first conversation shows a third image.
    answer = tuple(simulation.tokens[1])
    turn = replace(
        first, number=4, text=(*TEXT, *answer[:1], 9, 10, 11, 12), more=((0, "b"), (9, "c"))
    )
    before = simulation.scheduler.stats.cached_positions
    simulation.add(turn)
    simulation.drain()
    assert simulation.scheduler.stats.cached_positions - before == 25
    for spec in (first, other, third, turn):
        assert simulation.tokens[spec.number] == alone(spec)


def test_requests_that_begin_alike_compute_each_image_once():
    budget = StepBudget(prefill_positions=12, crops=2, idle_scale=1)
    simulation = Simulation(replace(LIMITS, num_pages=60), SchedulerPolicy(budget=budget), depth=3)
    specs = [Spec(n, (100, 50 + n, 60), image="a", more=((0, "b"),)) for n in (1, 2, 3)]
    for spec in specs:
        simulation.add(spec)
    simulation.drain()
    computed = [token for row in rows(simulation) for token in row.tokens]
    assert computed.count(BLOCK["a"]) == computed.count(BLOCK["b"]) == 1
    assert all(simulation.tokens[spec.number] == alone(spec) for spec in specs)


def test_one_image_twice_in_a_prompt_is_encoded_once():
    simulation = Simulation()
    spec = Spec(1, TEXT, image="b", more=((3, "b"),), crops=4)
    simulation.add(spec)
    simulation.drain()
    pieces = [piece for plan in simulation.runtime.plans for piece in plan.encode]
    assert sum(piece.last - piece.first for piece in pieces) == 4
    assert simulation.tokens[1] == alone(spec)
