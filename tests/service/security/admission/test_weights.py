"""Principals and their weights, from the file of tokens to the engine."""

from kestrel_client._pb.kestrel.v1 import image_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine.preprocess.pool import PreprocessPool
from kestrel_engine.steps.loop import EngineLoop
from kestrel_grpc.security.identity.tokens import digest_of, new_token, read_credentials
from kestrel_grpc.settings.security import SecurityConfig
from tests.service.conftest import raw_image
from tests.service.security.identity.test_tokens import bearer, query


def weighted_line(name, weight, token):
    return f"{name} infer weight={weight} sha256:{digest_of(token).hex()}\n"


def test_the_file_gives_weights(tmp_path):
    path, one, two = tmp_path / "tokens", new_token(), new_token()
    path.write_text(
        weighted_line("a", "2.5", one)
        + f"b infer sha256:{digest_of(two).hex()}\n"
        + "c infer weight=4 cert:CN of a camera\n"
    )
    known = read_credentials(str(path))
    first, second = known.of_token(one), known.of_token(two)
    assert first is not None and first.weight == 2.5
    assert second is not None and second.weight == 1.0
    assert known.by_identity["CN of a camera"].weight == 4.0


async def test_the_principal_and_its_weight_reach_engine_and_pool(serve, tmp_path, monkeypatch):
    path, token = tmp_path / "tokens", new_token()
    path.write_text(weighted_line("farm", "3", token))
    decoded, computed = [], []
    prepare, submit = PreprocessPool.prepare, EngineLoop.submit

    async def spied_prepare(self, source, namespace="", *, principal="", is_high=False):
        decoded.append(principal)
        return await prepare(self, source, namespace, principal=principal, is_high=is_high)

    def spied_submit(self, work):
        computed.append((work.submission.principal, work.submission.weight))
        submit(self, work)

    served = await serve(server_config={"security": SecurityConfig(auth_tokens=str(path))})
    monkeypatch.setattr(PreprocessPool, "prepare", spied_prepare)
    monkeypatch.setattr(EngineLoop, "submit", spied_submit)
    put = image_service_pb2.PutImageRequest(image=raw_image())
    await served.images.PutImage(put, metadata=bearer(token))
    assert (decoded, computed) == (["farm"], [])
    await served.vision.Query(query(raw_image()), metadata=bearer(token))
    assert (decoded, computed) == (["farm"] * 2, [("farm", 3.0)])
    tasks = [pb.Task(key="q", query=query().query)]
    analyze = pb.AnalyzeRequest(image=raw_image(), tasks=tasks)
    await served.vision.Analyze(analyze, metadata=bearer(token))
    assert (decoded, computed) == (["farm"] * 3, [("farm", 3.0)] * 2)
