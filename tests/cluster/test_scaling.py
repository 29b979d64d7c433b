"""How many servers a load needs."""

from types import SimpleNamespace

import pytest

from kestrel_grpc.cluster.scaling import KV_USE, QUEUE_WAIT_S, UTILIZATION, LoadPolicy


def policy(**changes):
    targets = {"utilization": 0.8, "queue_wait_s": 1.0, "kv_use": 0.9}
    return LoadPolicy(**{**targets, **changes})


def loads(*utilizations, wait=0.0, kv=0.0):
    count = len(utilizations)
    return {UTILIZATION: list(utilizations), QUEUE_WAIT_S: [wait] * count, KV_USE: [kv] * count}


@pytest.mark.parametrize(
    "found, current, wanted",
    [
        (loads(0.8), 1, 1),
        (loads(0.86), 1, 1),  # Within the tolerance.
        (loads(0.95), 1, 2),
        (loads(3.1), 1, 4),
        (loads(0.2, 0.2, 0.2, 0.2), 4, 1),
        (loads(0.7, 0.8, 0.8, 0.7), 4, 4),
        (loads(0.0), 1, 1),
        (loads(0.0, 0.0), 2, 1),  # Never none.
        (loads(0.1, kv=0.95), 1, 1),
        (loads(0.1, 0.1, kv=0.7), 2, 2),
        (loads(0.1, 0.1, kv=1.0), 2, 3),
        (loads(0.5, 0.5, wait=3.0), 2, 4),  # A wait doubles.
        (loads(1.5, 1.5, wait=3.0), 4, 4),  # But not while those that were added start.
        (loads(0.1, 0.1), 4, 1),  # Also if the nodes for the others never come.
        (loads(3.0, 3.0), 4, 8),
        ({}, 3, 3),
        (loads(), 3, 3),
    ],
)
def test_wanted(found, current, wanted):
    assert policy().wanted(found, current) == wanted


def context(metrics, current, running=("a",)):
    return SimpleNamespace(
        running_replicas=list(running), aggregated_metrics=metrics, target_num_replicas=current
    )


def test_ray_s_context():
    made = policy()
    # A replica that has ended still has figures.
    busy = {UTILIZATION: {"a": 9.0, "gone": 50.0}}
    assert made(context(busy, 1)) == (12, {})
    assert made(context({UTILIZATION: {"gone": 50.0}}, 1)) == (1, {})
    assert made(context(None, 2)) == (2, {})
