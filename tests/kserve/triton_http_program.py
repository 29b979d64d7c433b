"""A program of the unmodified ``tritonclient[http]``, run in an environment of its own: HTTP_ADDRESS KEY IMAGE."""

import json
import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

address, key, path = sys.argv[1:]
headers = {"authorization": f"Bearer {key}"}
client = triton.InferenceServerClient(address)
with open(path, "rb") as file:
    image = file.read()


def tensor(name, value, datatype="BYTES", kind=np.object_, binary=True):
    made = triton.InferInput(name, [1], datatype)
    made.set_data_from_numpy(np.array([value], dtype=kind), binary_data=binary)
    return made


def answer(inputs, **options):
    result = client.infer("moondream", inputs, headers=headers, **options)
    return json.loads(result.as_numpy("TEXT_OUTPUT")[0])


def refusal(call, *arguments, **named):
    try:
        call(*arguments, headers=headers, **named)
    except InferenceServerException as error:
        return [error.status(), error.message()]


asked = [
    tensor("SKILL", b"query"),
    tensor("QUESTION", b"How many green crescents are there?"),
    tensor("IMAGE", image),
    tensor("TEMPERATURE", 0.0, "FP32", np.float32),
]
text = triton.InferRequestedOutput("TEXT_OUTPUT", binary_data=False)
mixed = [tensor("SKILL", "query", binary=False), *asked[1:]]
print(
    json.dumps(
        {
            "live": client.is_server_live(headers=headers),
            "ready": client.is_server_ready(headers=headers)
            and client.is_model_ready("moondream", "1", headers=headers),
            "server": client.get_server_metadata(headers=headers)["name"],
            "model": client.get_model_metadata("moondream", headers=headers)["outputs"],
            "decoupled": client.get_model_config("moondream", headers=headers)[
                "model_transaction_policy"
            ],
            "index": client.get_model_repository_index(headers=headers)[0]["state"],
            "binary": answer(asked)["answer"],
            "json": answer(mixed, outputs=[text], request_id="seven")["answer"],
            "count": client.get_inference_statistics("moondream", headers=headers)["model_stats"][
                0
            ]["inference_count"],
            "bad": refusal(client.infer, "moondream", [tensor("SKILL", b"smell")]),
            "load": refusal(client.load_model, "moondream"),
            "shared": refusal(client.get_system_shared_memory_status),
            "log": refusal(client.get_log_settings),
        }
    )
)
