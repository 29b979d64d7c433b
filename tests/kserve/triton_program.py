"""A program of the unmodified ``tritonclient``, run in an environment of its own: GRPC_ADDRESS KEY IMAGE."""

import json
import queue
import sys

import numpy as np
import tritonclient.grpc as triton
from tritonclient._plugin import InferenceServerClientPlugin
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

sys.path.insert(0, "clients/triton")
from client import answers, tensors

address, key, path = sys.argv[1:]
headers = {"authorization": f"Bearer {key}"}


class Token(InferenceServerClientPlugin):
    """Adds the token to every call."""

    def __call__(self, request):
        request.headers.update(headers)


client = triton.InferenceServerClient(address)
client.register_plugin(Token())
with open(path, "rb") as file:
    image = file.read()
asked = {
    "SKILL": "query",
    "QUESTION": "How many green crescents are there?",
    "IMAGE": image,
    "TEMPERATURE": 0.0,
}


def refusal(call, *arguments, **named):
    try:
        call(*arguments, **named)
    except InferenceServerException as error:
        return [error.status(), error.message()]


config = client.get_model_config("moondream", as_json=True)["config"]
whole = client.infer("moondream", tensors(**asked), request_id="seven")
out = {
    "live": client.is_server_live(),
    "ready": client.is_server_ready() and client.is_model_ready("moondream", "1"),
    "server": client.get_server_metadata(as_json=True),
    "model": client.get_model_metadata("moondream", as_json=True),
    "decoupled": config["model_transaction_policy"]["decoupled"],
    "optional": [each["name"] for each in config["input"] if each.get("optional")],
    "index": client.get_model_repository_index(as_json=True)["models"],
    "infer": json.loads(whole.as_numpy("TEXT_OUTPUT")[0]),
    "infer_id": whole.get_response().id,
    "unserved": {
        "load": refusal(client.load_model, "moondream"),
        "unload": refusal(client.unload_model, "moondream"),
        "trace": refusal(client.get_trace_settings),
        "trace_update": refusal(client.update_trace_settings, settings={"trace_rate": "1"}),
        "log": refusal(client.get_log_settings),
        "log_update": refusal(client.update_log_settings, {"log_info": True}),
        "system_status": refusal(client.get_system_shared_memory_status),
        "system_register": refusal(client.register_system_shared_memory, "a", "/a", 8),
        "system_unregister": refusal(client.unregister_system_shared_memory, "a"),
        "cuda_status": refusal(client.get_cuda_shared_memory_status),
        "cuda_register": refusal(client.register_cuda_shared_memory, "a", b"aGk=", 0, 8),
        "cuda_unregister": refusal(client.unregister_cuda_shared_memory, "a"),
    },
    "bad": refusal(client.infer, "moondream", tensors(**{**asked, "TEMPERATURE": 200.0})),
    "other_model": refusal(client.infer, "llava", tensors(**asked)),
    "stream": list(answers(client, **asked, STREAM=True)),
    "caption": list(answers(client, SKILL="caption", IMAGE=image, STREAM=True, TEMPERATURE=0.0)),
    "detect": list(answers(client, SKILL="detect", IMAGE=image, OBJECT="green crescent")),
    "point": list(answers(client, SKILL="point", IMAGE=image, OBJECT="green crescent")),
}
pixels = np.zeros((40, 60, 3), np.uint8)
raw = triton.InferInput("IMAGE", list(pixels.shape), "UINT8")
raw.set_data_from_numpy(pixels)
drawn = client.infer("moondream", [*tensors(SKILL="caption", MAX_TOKENS=4), raw])
out["pixels"] = json.loads(drawn.as_numpy("TEXT_OUTPUT")[0])["caption"]

# Three requests on one stream, the second of which is wrong.
arrived = queue.SimpleQueue()
client.start_stream(callback=lambda result, error: arrived.put((result, error)))
for name, question in (("first", "Why?"), ("second", ""), ("third", "Why?")):
    client.async_stream_infer(
        "moondream",
        tensors(SKILL="query", QUESTION=question, MAX_TOKENS=3),
        request_id=name,
        enable_empty_final_response=True,
    )
results = [arrived.get(timeout=60) for _ in range(3)]
client.stop_stream()
out["between"] = sorted(result.get_response().id for result, error in results if error is None)
out["error"] = [str(error.message()) for result, error in results if error is not None]

# A stream that is given up.
client.start_stream(callback=lambda result, error: arrived.put((result, error)))
long = {**asked, "SKILL": "caption", "LENGTH": "long", "STREAM": True}
client.async_stream_infer("moondream", tensors(**long))
arrived.get(timeout=60)
client.stop_stream(cancel_requests=True)

statistics = client.get_inference_statistics("moondream", as_json=True)["model_stats"][0]
out["statistics"] = [statistics["name"], int(statistics["inference_count"])]
out["no_token"] = refusal(
    triton.InferenceServerClient(address).infer, "moondream", tensors(**asked)
)
out["rpcs"] = len(service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods)


def shape(message):
    """The fields of a message and of those in it."""
    return {
        f"{field.name}={field.number}": [field.type, field.is_repeated]
        + (
            [shape(field.message_type)]
            if field.message_type and "Config" not in message.name
            else []
        )
        for field in message.fields
    }


out["messages"] = {
    name: shape(message) for name, message in service_pb2.DESCRIPTOR.message_types_by_name.items()
}
print(json.dumps(out))
