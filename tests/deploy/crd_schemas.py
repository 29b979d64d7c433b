"""Validates objects by the schemas of CustomResourceDefinitions, which are not in this repository.

KESTREL_CRDS names a folder with the definitions' files, as their projects publish them. Rules in CEL are not checked.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = "KESTREL_CRDS"
_OWN_GROUPS = ("apps", "autoscaling", "networking.k8s.io", "policy", "rbac.authorization.k8s.io")
"""Kubernetes' own."""


def is_custom(document: dict[str, Any]) -> bool:
    """Whether Kubernetes itself does not know the object's kind."""
    group, _, version = document["apiVersion"].rpartition("/")
    return bool(version) and group not in ("", *_OWN_GROUPS)


class Definitions:
    """The schemas in the folder, by group, version and kind."""

    def __init__(self, folder: Path) -> None:
        self._schemas: dict[tuple[str, str], dict[str, Any]] = {}
        for path in sorted(folder.glob("*.yaml")):
            # Charts have lines of templates around a definition.
            lines = [line for line in path.read_text().splitlines() if not line.startswith("{{")]
            for document in yaml.safe_load_all("\n".join(lines)):
                if document and document["kind"] == "CustomResourceDefinition":
                    self._add(document["spec"])

    def _add(self, spec: dict[str, Any]) -> None:
        for version in spec["versions"]:
            name = f"{spec['group']}/{version['name']}"
            schema = closed(version["schema"]["openAPIV3Schema"])
            for own in ("apiVersion", "kind", "metadata"):
                schema["properties"][own] = {}
            self._schemas[name, spec["names"]["kind"]] = schema

    def errors(self, document: dict[str, Any]) -> list[str]:
        """What is wrong with an object. A kind without a definition is an error."""
        import jsonschema

        found = self._schemas.get((document["apiVersion"], document["kind"]))
        if found is None:
            return [f"no definition of {document['apiVersion']} {document['kind']}"]
        validator = jsonschema.Draft7Validator(found)
        return [
            f"{'.'.join(map(str, error.path))}: {error.message[:300]}"
            for error in validator.iter_errors(document)
        ]


def closed(schema: Any) -> Any:
    """``schema`` as JSON Schema that allows no unknown field. Kubernetes drops these without a word."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    found = {
        name: {key: closed(each) for key, each in value.items()}
        if name == "properties"
        else closed(value)
        for name, value in schema.items()
        if name not in ("format", "default", "description")
    }
    if (
        "properties" in found
        and "additionalProperties" not in found
        and not found.get("x-kubernetes-preserve-unknown-fields")
        and "type" in found
    ):
        found["additionalProperties"] = False
    return found


@cache
def definitions() -> Definitions | None:
    """Those of KESTREL_CRDS; None if it names no folder."""
    name = os.environ.get(FOLDER)
    return None if name is None else Definitions(Path(name))
