"""The configurations of docs/serving.md, against the schemas of KServe and Triton.

Both packages need an older protobuf than MLflow, so they are checked in an environment of their own, without dicedist:
`pip install kserve tritonclient pytest pyyaml`, then `pytest --noconftest -c /dev/null` and the path of this file.
"""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

PAGE = Path(__file__).parents[2] / "docs/serving.md"
SERVICES = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S)]
(TRITON,) = re.findall(r"^```protobuf\n(.*?)^```", PAGE.read_text(), re.M | re.S)
PLAIN = {"str": str, "int": int, "bool": bool, "float": float, "object": object}


def name_of(service):
    return service["metadata"]["name"]


def check(value, kind, classes, path):
    """Check a value against the type that a published class names; unknown keys and other types fail."""
    if parts := re.fullmatch(r"[Ll]ist\[(.*)\]", kind):
        for place, one in enumerate(value):
            check(one, parts[1], classes, f"{path}[{place}]")
    elif parts := re.fullmatch(r"[Dd]ict[\[(]str, (.*)[\])]", kind):
        for key, one in value.items():
            check(one, parts[1], classes, f"{path}.{key}")
    elif kind in PLAIN:
        assert isinstance(value, PLAIN[kind]), f"{path} is {value!r}, not {kind}"
    else:
        (model,) = {getattr(module, kind) for module in classes if hasattr(module, kind)}
        names = {key: attribute for attribute, key in model.attribute_map.items()}
        for key, one in value.items():
            assert key in names, f"{path}.{key}: {kind} has no such key"
            check(one, model.openapi_types[names[key]], classes, f"{path}.{key}")
        model(**{names[key]: one for key, one in value.items()})  # raises where a required key is missing


@pytest.mark.parametrize("service", SERVICES, ids=name_of)
def test_kserve(service):
    models = pytest.importorskip("kserve.models", reason="pip install kserve, in an environment of its own")
    from kubernetes.client import models as core

    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    check(service, "V1beta1InferenceService", (models, core), name_of(service))


def test_triton():
    """By the file of the messages alone: the package around it asks for grpc."""
    package = importlib.util.find_spec("tritonclient")
    file = Path(package.origin).parent / "grpc/model_config_pb2.py" if package and package.origin else None
    if file is None or not file.exists():
        pytest.skip("pip install tritonclient, in an environment of its own")
    from google.protobuf import text_format

    spec = importlib.util.spec_from_file_location("model_config_pb2", file)
    messages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(messages)
    found = text_format.Parse(TRITON, messages.ModelConfig())
    assert found.max_batch_size > 1 and found.HasField("dynamic_batching") and len(found.output) == 7


@pytest.mark.parametrize("service", SERVICES, ids=name_of)
def test_containers_are_kubernetes_own(service):
    """KServe passes these fields on to a pod. The models are those that check the manifests of launch/k8s."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    predictor = service["spec"]["predictor"]
    kserves_own = ("modelFormat", "protocolVersion", "runtime", "storageUri")
    model = {key: value for key, value in predictor.get("model", {}).items() if key not in kserves_own}
    for container in predictor.get("containers", [{"name": "kserve-container", **model}]):
        found = models.IoK8sApiCoreV1Container.from_dict(container)
        assert found.to_dict() == container
