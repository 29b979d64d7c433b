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
from google.protobuf.descriptor import Descriptor, FileDescriptor

from kestrel_client._pb.inference import grpc_service_pb2
from kestrel_client._pb.kestrel.client.internal import wire_pb2
from kestrel_client._pb.kestrel.v1 import (
    admin_service_pb2,
    batch_service_pb2,
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
        batch_service_pb2,
        admin_service_pb2,
    )
]
VISION = vision_service_pb2.DESCRIPTOR.services_by_name["VisionService"]
PARTS = {
    "Query": ("query", "QueryTask"),
    "Caption": ("caption", "CaptionTask"),
    "Point": ("point", "PointTask"),
    "Detect": ("detect", "DetectTask"),
    "Segment": ("segment", "SegmentTask"),
    "RunSkill": ("skill", "SkillTask"),
    "Embed": ("embed", "EmbedTask"),
    "Analyze": ("tasks", "Task"),
}
"""Of each request, the field that says what to do, and its message."""
TASKS = [name for name, (field, _) in PARTS.items() if field not in ("embed", "tasks")]
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


def test_the_baseline_holds_the_whole_contract() -> None:
    """`make baseline` was run: what it lacks could be broken without notice."""
    built = buf("build", "--path", "protos/kestrel", "-o", "-#format=binpb")
    assert built.returncode == 0, built.stderr.decode()
    baseline = gzip.decompress((REPOSITORY / "protos/baseline.binpb.gz").read_bytes())
    guarded = set(symbols(baseline))
    assert len([name for name in guarded if name.endswith("Service")]) == 5
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
        "kestrel/v1/batch_service.proto",
        "kestrel/v1/admin_service.proto",
    ]
    for file in FILES:
        # They come with protobuf itself and with googleapis-common-protos.
        foreign = {d.name for d in file.dependencies if not d.name.startswith("kestrel/v1/")}
        assert foreign <= {
            "google/protobuf/struct.proto",
            "google/protobuf/timestamp.proto",
            "google/rpc/status.proto",
        }
        assert file.package == "kestrel.v1"


def test_python_names_are_below_the_client() -> None:
    assert vision_service_pb2.QueryRequest.__module__ == (
        "kestrel_client._pb.kestrel.v1.vision_service_pb2"
    )
    assert wire_pb2.DESCRIPTOR.package == "kestrel.client.internal"


def test_methods_are_named_alike() -> None:
    assert {*PARTS, *(f"Stream{name}" for name in PARTS)} <= set(VISION.methods_by_name)
    for method in VISION.methods:
        assert method.server_streaming == method.name.startswith("Stream")
        assert method.client_streaming == (method.name == "StreamFrames")
        unary = method.name.removeprefix("Stream")
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


@pytest.mark.parametrize("name", PARTS)
def test_every_request_and_result_has_the_same_form(name: str) -> None:
    """The image, what to do with it, the options; and what a result tells beside the answer."""
    field, message = PARTS[name]
    request = [(f.name, f.number) for f in MESSAGES[f"{name}Request"].fields]
    assert request == [("images" if name == "Query" else "image", 1), (field, 2), ("options", 3)]
    assert MESSAGES[f"{name}Request"].fields_by_name[field].message_type is MESSAGES[message]
    shared = {f.number: f.name for f in MESSAGES[f"{name}Response"].fields if f.number >= 10}
    assert shared == {10: "usage", 11: "timings", 12: "info"}


@pytest.mark.parametrize("name", PARTS)
def test_every_stream_begins_and_ends_alike(name: str) -> None:
    """tests/protos/test_conventions.py holds the numbers between."""
    message = MESSAGES[f"Stream{name}Response"]
    assert message.fields[0].name == "sequence"
    event = {f.name: f for f in message.oneofs_by_name["event"].fields}
    assert event["started"].message_type is MESSAGES["RequestInfo"]
    assert event["final"].message_type is MESSAGES[f"{name}Response"]


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_one_message_everywhere(name: str) -> None:
    field, message = PARTS[name]
    assert MESSAGES["Task"].fields_by_name[field].message_type is MESSAGES[message]
    outcome = MESSAGES["TaskResult"].fields_by_name[field]
    assert outcome.message_type is MESSAGES[f"{name}Response"]


def test_the_fields_of_all_tasks_have_the_same_numbers() -> None:
    """From 9 up they mean the same; the skills that find objects share the numbers below, too."""
    for names, least in (
        (("Query", "Caption", "Point", "Detect", "Segment", "Skill"), 9),
        (("Point", "Detect"), 1),
    ):
        numbers: dict[str, int] = {}
        for name in names:
            for field in MESSAGES[f"{name}Task"].fields:
                if field.number >= least:
                    assert numbers.setdefault(field.name, field.number) == field.number
        assert len(set(numbers.values())) == len(numbers)
