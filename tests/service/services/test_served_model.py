"""The errors that callers get while a model is not ready."""

import pytest

from kestrel_engine import RuntimeConfig
from kestrel_grpc.edge.failures.errors import ModelNotReady
from kestrel_grpc.process.startup_progress import shown_by
from kestrel_grpc.served_model import ServedModel


def refusal(model: ServedModel) -> str:
    with pytest.raises(ModelNotReady) as refused:
        _ = model.engine
    return str(refused.value)


def test_a_refusal_tells_how_far_loading_is() -> None:
    model = ServedModel(RuntimeConfig())
    assert refusal(model) == "kestrel-small is still loading (0 s so far)"
    seen: list[tuple[int, int, str]] = []
    report = shown_by(lambda *event: seen.append(event), model.note_progress)
    report(3, 64, "decode graph of 8 rows")
    assert refusal(model).endswith("(0 s so far; decode graph of 8 rows, 4 %)")
    report(17, 0, "model.safetensors")
    assert refusal(model).endswith("(0 s so far; model.safetensors)")
    assert [step for _, _, step in seen] == ["decode graph of 8 rows", "model.safetensors"]
