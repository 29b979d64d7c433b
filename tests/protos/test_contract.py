"""The rules of the wire contract, read from the descriptors that the stubs carry and from the .proto files."""

from __future__ import annotations

import gzip
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import descriptor_pb2, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from kestrel_client._pb.inference import grpc_service_pb2
from kestrel_client._pb.kestrel.client.internal import wire_pb2
from kestrel_client._pb.kestrel.v1 import (
    admin_service_pb2,
    common_pb2,
    image_service_pb2,
    model_service_pb2,
    vision_service_pb2,
)

REPOSITORY = Path(__file__).parents[2]
FILES = [
    module.DESCRIPTOR
    for module in (
        common_pb2,
        vision_service_pb2,
        image_service_pb2,
        model_service_pb2,
        admin_service_pb2,
    )
]
VISION = vision_service_pb2.DESCRIPTOR.services_by_name["VisionService"]
SKILLS = ("Query", "Caption", "Point", "Detect", "Segment")
TAKES_AN_IMAGE = (*SKILLS, "Analyze", "RunSkill", "Embed")
MESSAGES: dict[str, Descriptor] = {
    name: message for file in FILES for name, message in file.message_types_by_name.items()
}


def buf(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    program = shutil.which("buf", path=Path(sys.executable).parent) or shutil.which("buf")
    if program is None:
        pytest.skip("buf is not installed (dev extra: buf-bin)")
    return subprocess.run(
        [program, *arguments], cwd=REPOSITORY, input=stdin, capture_output=True, timeout=60
    )


@pytest.mark.parametrize("command", [["lint"], ["format", "-d", "--exit-code"], ["build"]], ids=str)
def test_buf_is_content(command: list[str]) -> None:
    """Lint holds that every field, message, enum value, oneof and method has a comment (COMMENTS)."""
    run = buf(*command)
    assert run.returncode == 0, (run.stdout + run.stderr).decode()


def test_nothing_breaks_clients_of_the_baseline() -> None:
    image = buf("build", "--path", "protos/kestrel", "-o", "-#format=binpb")
    assert image.returncode == 0, image.stderr.decode()
    against = ["--against", "protos/baseline.binpb.gz", "--exclude-imports"]
    run = buf("breaking", "-#format=binpb", *against, stdin=image.stdout)
    assert run.returncode == 0, (run.stdout + run.stderr).decode()


def test_the_baseline_holds_the_whole_contract() -> None:
    """`make baseline` was run: what it lacks could be broken without notice."""
    built = buf("build", "--path", "protos/kestrel", "-o", "-#format=binpb")
    assert built.returncode == 0, built.stderr.decode()
    baseline = gzip.decompress((REPOSITORY / "protos/baseline.binpb.gz").read_bytes())
    guarded = set(symbols(baseline))
    assert len([name for name in guarded if name.endswith("Service")]) == 4
    assert set(symbols(built.stdout)) - guarded == set()


def test_the_descriptors_that_reflection_serves_are_those_of_the_protos() -> None:
    """`make protos` was run."""
    built = buf("build", "--path", "protos/kestrel", "--as-file-descriptor-set", "-o", "-")
    assert built.returncode == 0, built.stderr.decode()
    shipped = (REPOSITORY / "kestrel_grpc/services/kestrel.v1.binpb").read_bytes()
    assert built.stdout == shipped


def symbols(image: bytes) -> Iterator[str]:
    """Services, methods, messages, fields with their numbers, enums and values of kestrel.v1."""
    for file in descriptor_pb2.FileDescriptorSet.FromString(image).file:
        if file.package != "kestrel.v1":
            continue
        messages = [(file.package, message) for message in file.message_type]
        enums = [(file.package, enum) for enum in file.enum_type]
        for service in file.service:
            yield service.name
            yield from (f"{service.name}.{method.name}" for method in service.method)
        for scope, message in messages:  # grows
            name = f"{scope}.{message.name}"
            yield name
            yield from (f"{name}.{field.name}={field.number}" for field in message.field)
            messages += [(name, nested) for nested in message.nested_type]
            enums += [(name, nested) for nested in message.enum_type]
        for scope, enum in enums:
            yield from (f"{scope}.{value.name}={value.number}" for value in enum.value)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_file_names_its_packages_in_other_languages(file: FileDescriptor) -> None:
    """As buf's managed mode would, so that managed mode changes no import. protos/README.md has the reasons."""
    classname = Path(file.name).stem.title().replace("_", "") + "Proto"
    assert text_format.MessageToString(file.GetOptions()).splitlines() == [
        'java_package: "com.kestrel.v1"',
        f'java_outer_classname: "{classname}"',
        "java_multiple_files: true",
        'go_package: "kestrel/v1;kestrelv1"',
        'objc_class_prefix: "KXX"',
        'csharp_namespace: "Kestrel.V1"',
        r'php_namespace: "Kestrel\\V1"',
        r'php_metadata_namespace: "Kestrel\\V1\\GPBMetadata"',
        'ruby_package: "Kestrel::V1"',
    ]


def test_stubs_are_what_the_protos_give(tmp_path: Path) -> None:
    """`make protos` was run: the stubs' descriptors are those of the files, less the validation rules."""
    generator = load(REPOSITORY / "clients/python/generate_stubs.py")
    image = tmp_path / "image.binpb"
    assert buf("build", "--exclude-source-info", "-o", str(image)).returncode == 0
    # Through bytes, so that what an image holds beyond a descriptor set is unknown and dropped with the rules.
    wanted = descriptor_pb2.FileDescriptorSet.FromString(
        generator.without_rules(image.read_bytes())
    )
    by_name = {file.name: file for file in wanted.file}
    for descriptor in (*FILES, grpc_service_pb2.DESCRIPTOR):
        shipped = descriptor_pb2.FileDescriptorProto()
        descriptor.CopyToProto(shipped)
        for file in (shipped, by_name[descriptor.name]):
            clear_json_names(file)
        assert shipped == by_name[descriptor.name]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def clear_json_names(file: descriptor_pb2.FileDescriptorProto) -> None:
    """They follow from the names, and not everybody writes them out."""
    messages = list(file.message_type)
    while messages:
        message = messages.pop()
        messages += message.nested_type
        for field in message.field:
            field.ClearField("json_name")


def test_reflection_shows_clean_names_and_no_foreign_files() -> None:
    assert [file.name for file in FILES] == [
        "kestrel/v1/common.proto",
        "kestrel/v1/vision_service.proto",
        "kestrel/v1/image_service.proto",
        "kestrel/v1/model_service.proto",
        "kestrel/v1/admin_service.proto",
    ]
    for file in FILES:
        # Struct comes with protobuf itself; nothing else is foreign.
        foreign = {d.name for d in file.dependencies if not d.name.startswith("kestrel/v1/")}
        assert foreign <= {"google/protobuf/struct.proto"}
        assert file.package == "kestrel.v1"


def test_python_names_are_below_the_client() -> None:
    assert vision_service_pb2.QueryRequest.__module__ == (
        "kestrel_client._pb.kestrel.v1.vision_service_pb2"
    )
    assert wire_pb2.DESCRIPTOR.package == "kestrel.client.internal"


def test_methods_are_named_alike() -> None:
    assert {*SKILLS, *(f"Stream{s}" for s in SKILLS)} <= set(VISION.methods_by_name)
    for method in VISION.methods:
        assert method.server_streaming == method.name.startswith("Stream")
        assert method.client_streaming == (method.name == "StreamFrames")
        unary = {"StreamSkill": "RunSkill"}.get(method.name, method.name.removeprefix("Stream"))
        request = method.name if method.client_streaming else unary
        assert method.input_type.name == f"{request}Request"
        assert method.output_type.name == f"{method.name}Response"
    models = model_service_pb2.DESCRIPTOR.services_by_name["ModelService"]
    images = image_service_pb2.DESCRIPTOR.services_by_name["ImageService"]
    assert [m.name for m in images.methods if m.client_streaming] == ["UploadImage"]
    assert {m.GetOptions().idempotency_level for m in images.methods} == {
        descriptor_pb2.MethodOptions.IDEMPOTENT
    }
    no_side_effects = descriptor_pb2.MethodOptions.NO_SIDE_EFFECTS
    assert {m.GetOptions().idempotency_level for m in models.methods} == {no_side_effects}


@pytest.mark.parametrize("skill", [*SKILLS, "RunSkill"])
def test_every_result_tells_the_same(skill: str) -> None:
    fields = MESSAGES[f"{skill}Response"].fields_by_number
    assert {number: fields[number].name for number in range(10, 18)} == {
        10: "finish_reason",
        11: "usage",
        12: "timings",
        13: "model",
        14: "request_id",
        15: "image_size",
        16: "seed",
        17: "image_id",
    }
    has_text = skill in ("Query", "Caption", "RunSkill")
    assert [fields[n].name for n in fields if n > 17] == (["logprobs"] if has_text else [])
    request = MESSAGES[f"{skill}Request"].fields_by_number
    assert {n: request[n].name for n in (1, 10, 11)} == {1: "image", 10: "sampling", 11: "options"}


@pytest.mark.parametrize("skill", SKILLS)
def test_every_stream_has_the_same_shape(skill: str) -> None:
    message = MESSAGES[f"Stream{skill}Response"]
    event = message.oneofs_by_name["event"]
    sequence = message.fields_by_name["sequence"]
    assert sequence.number == 1 and sequence.containing_oneof is None
    numbers = {
        "started": 2,
        "text_delta": 3,
        "reasoning_delta": 4,
        "object": 5,
        "path_piece": 6,
        "final": 7,
        "task_final": 9,
    }
    assert [f.name for f in event.fields] == sorted([f.name for f in event.fields], key=numbers.get)  # type: ignore[arg-type]
    assert all(numbers[field.name] == field.number for field in event.fields)
    assert message.fields_by_name["final"].message_type is MESSAGES[f"{skill}Response"]
    several = ["key"] if skill in ("Point", "Detect") else []
    others = [f.name for f in message.fields if f.containing_oneof is None]
    assert others == ["sequence", *several]
    assert ("task_final" in [f.name for f in event.fields]) == bool(several)


SEVERAL = ("objects", "num_samples", "images", "tiles")


@pytest.mark.parametrize("skill", SKILLS)
def test_a_task_has_the_fields_of_the_method_with_their_numbers(skill: str) -> None:
    """All but image and options, which the call has once, and several objects, samples or looks, which are several
    tasks."""
    task, request = MESSAGES[f"{skill}Task"], MESSAGES[f"{skill}Request"]
    theirs = [f for f in request.fields if f.name not in ("image", "options", *SEVERAL)]
    shape = [(f.name, f.number, f.type, f.has_presence, f.is_repeated) for f in theirs]
    assert [(f.name, f.number, f.type, f.has_presence, f.is_repeated) for f in task.fields] == shape
    outcome = MESSAGES["TaskResult"].fields_by_name[skill.lower()]
    assert outcome.message_type is MESSAGES[f"{skill}Response"]


@pytest.mark.parametrize("skill", TAKES_AN_IMAGE)
def test_image_and_options_stand_in_the_same_place(skill: str) -> None:
    fields = MESSAGES[f"{skill}Request"].fields_by_number
    assert (fields[1].name, fields[11].name) == ("image", "options")
    assert MESSAGES[f"{skill}Response"].fields_by_name["image_id"].number == 17


@pytest.mark.parametrize(("stream", "final"), [("Analyze", "Analyze"), ("Skill", "RunSkill")])
def test_streams_of_any_skill_number_their_events_alike(stream: str, final: str) -> None:
    message = MESSAGES[f"Stream{stream}Response"]
    numbers = {f.name: f.number for f in message.oneofs_by_name["event"].fields}
    numbers.pop("task_final", None)
    assert numbers == {
        "started": 2,
        "text_delta": 3,
        "reasoning_delta": 4,
        "point": 5,
        "path_piece": 6,
        "final": 7,
        "box": 8,
    }
    assert message.fields_by_name["final"].message_type is MESSAGES[f"{final}Response"]


def test_embeddings_have_the_shared_fields_at_their_numbers() -> None:
    shared = {12: "timings", 13: "model", 14: "request_id", 15: "image_size", 17: "image_id"}
    fields = MESSAGES["EmbedResponse"].fields_by_number
    assert {number: fields[number].name for number in fields if number > 9} == shared
    stream = MESSAGES["StreamEmbedResponse"]
    numbers = {f.name: f.number for f in stream.oneofs_by_name["event"].fields}
    assert numbers == {"started": 2, "whole_image": 5, "crop": 6, "final": 7}
    assert stream.fields_by_name["final"].message_type is MESSAGES["EmbedResponse"]


def test_every_tunable_has_presence() -> None:
    """A list has none; the empty one means none of its values."""
    sampling = MESSAGES["Sampling"].fields
    tunables: list[FieldDescriptor] = [f for f in sampling if not f.is_repeated]
    tunables += [MESSAGES["QueryRequest"].fields_by_name["reasoning"]]
    tunables += [MESSAGES[f"{s}Request"].fields_by_name["max_objects"] for s in ("Point", "Detect")]
    tunables += [
        MESSAGES[f"{s}Request"].fields_by_name["min_score"] for s in ("Point", "Detect", "Segment")
    ]
    tunables += [
        MESSAGES[f"{s}Request"].fields_by_name["num_samples"] for s in ("Query", "Caption")
    ]
    tunables += [MESSAGES["EmbedRequest"].fields_by_name[name] for name in ("whole_image", "crops")]
    for field in tunables:
        assert field.has_presence, field.full_name


def test_durations_and_sizes_say_their_unit() -> None:
    for field in MESSAGES["Timings"].fields:
        assert field.name.endswith("_ms") and field.type == FieldDescriptor.TYPE_DOUBLE
    for name in ("max_message_bytes", "max_image_bytes", "max_text_bytes"):
        assert name in MESSAGES["ServerLimits"].fields_by_name
