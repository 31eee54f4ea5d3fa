"""The manifests of launch/k8s: against the published schemas where these are installed, and against each other.

No cluster is needed: `pytest -m slow tests/unit/test_k8s.py` runs the Job's command in two processes instead of pods.
"""

import os
import socket
import subprocess
import sys

import pytest
import yaml
from torch.distributed import run as torchrun

from dicedist.algorithm.objectives import Method
from dicedist.cluster.placement import place
from dicedist.cluster.process import EXIT_STOPPED, EXIT_USER
from dicedist.config import compose_config
from tests.support import CHECKOUT
from tests.support.tiny import TINY, assert_same_run

FOLDER = CHECKOUT / "launch/k8s"
DOCUMENTS = [(path.name, document) for path in FOLDER.glob("*.yaml") for document in yaml.safe_load_all(path.open())]
CORE = [(name, document) for name, document in DOCUMENTS if "kubeflow" not in document["apiVersion"]]


def the(kind, name=None):
    (found,) = [d for _, d in DOCUMENTS if d["kind"] == kind and name in (None, d["metadata"]["name"])]
    return found["spec"] if "spec" in found else found


def pods():
    """The pod and its failure policy, of the Job and of the TrainingRuntime."""
    (replicated,) = the("TrainingRuntime")["template"]["spec"]["replicatedJobs"]
    return [(job["template"]["spec"], job["podFailurePolicy"]) for job in (the("Job"), replicated["template"]["spec"])]


def container(pod):
    (found,) = pod["containers"]
    return found


def label(value):
    return value if isinstance(value, str) else f"{value['kind']}-{value['metadata']['name']}"


@pytest.mark.parametrize(("file", "document"), CORE, ids=label)
def test_kubernetes_own_schema(file, document):
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate (23 MB)")
    validator.validate(document, validator.latest_version(), strict=True)


@pytest.mark.parametrize(("file", "document"), [one for one in DOCUMENTS if one[1]["kind"] != "Deployment"], ids=label)
def test_kubeflow_models(file, document):
    """The models drop keys that they do not know, so nothing may be missing afterwards."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    group = {"v1": "IoK8sApiCoreV1", "batch/v1": "IoK8sApiBatchV1"}.get(document["apiVersion"], "TrainerV1alpha1")
    assert getattr(models, group + document["kind"]).from_dict(document).to_dict() == document


def test_both_ways_run_the_same_pod():
    (plain, policy), (kubeflow, its_policy) = pods()
    for key in ("image", "env", "envFrom", "volumeMounts", "securityContext"):
        assert container(plain)[key] == container(kubeflow)[key]
    for key in ("volumes", "securityContext", "restartPolicy", "terminationGracePeriodSeconds"):
        assert plain[key] == kubeflow[key]
    assert container(plain)["args"] == the("TrainJob")["trainer"]["args"]
    assert container(plain)["resources"] == the("TrainJob")["trainer"]["resourcesPerNode"]
    assert str(policy).replace("'train'", "'node'") == str(its_policy)


def test_volumes_and_secret_exist():
    pod, _ = pods()[0]
    claims = {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
    assert claims == {d["metadata"]["name"] for _, d in DOCUMENTS if d["kind"] == "PersistentVolumeClaim"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container(pod)["volumeMounts"]}
    assert mounts == {"data": "/data", "runs": "/workspace/runs", "shm": "/dev/shm"}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    (uri,) = [entry for entry in container(pod)["env"] if entry["name"] == "MLFLOW_TRACKING_URI"]
    reference = uri["valueFrom"]["secretKeyRef"]
    assert reference["key"] in the("Secret", reference["name"])["stringData"]
    (bucket,) = container(pod)["envFrom"]
    assert "AWS_SECRET_ACCESS_KEY" in the("Secret", bucket["secretRef"]["name"])["stringData"]


def test_exit_codes_mean_what_they_mean():
    _, policy = pods()[0]
    actions = {c: rule["action"] for rule in policy["rules"] for c in rule.get("onExitCodes", {}).get("values", [])}
    assert (actions[EXIT_USER], actions[EXIT_STOPPED]) == ("FailJob", "Ignore")
    assert 0 not in actions and 1 not in actions  # 0: done; 1: a fault, which backoffLimit counts


def parsed(command):
    assert command[:3] == ["python", "-m", "dicedist.launch"]
    options = torchrun.parse_args(command[3:])
    assert options.module and options.training_script == "dicedist.train"
    assert options.rdzv_backend == "c10d"
    return options


def check_ranks(overrides, nodes, ranks, resources):
    config = compose_config(overrides)
    assert ranks == resources["limits"]["nvidia.com/gpu"]
    place(nodes * ranks, config.ensemble.size, Method(config.method).counterpart is not None)


def test_command_of_the_job():
    job = the("Job")
    pod = job["template"]["spec"]
    options = parsed([*container(pod)["command"], *container(pod)["args"]])
    fewest, most = map(int, options.nnodes.split(":"))
    assert most == job["completions"] == job["parallelism"]
    for nodes in range(fewest, most + 1):
        ranks = int(options.nproc_per_node)
        check_ranks(options.training_script_args, nodes, ranks, container(pod)["resources"])
    assert compose_config(options.training_script_args).run.remote.startswith("s3://")


def test_pods_meet_at_the_store():
    (name, port), words = "dicedist-store:29400".split(":"), container(the("Job")["template"]["spec"])["command"]
    assert f"--rdzv-endpoint={name}:{port}" in words
    service, deployment = the("Service", name), the("Deployment", name)
    store = container(deployment["template"]["spec"])
    assert service["selector"] == deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]
    assert [entry["port"] for entry in service["ports"]] == [int(port)]
    assert [entry["containerPort"] for entry in store["ports"]] == [int(port)]
    assert store["command"] == ["python", "-m", "dicedist.store", f"$(POD_IP):{port}"]
    assert store["env"][0]["name"] == "POD_IP" and deployment["replicas"] == 1


def test_command_of_the_trainjob(monkeypatch):
    """With the variables that Trainer's torch plugin puts into the pod."""
    trainer = the("TrainJob")["trainer"]
    variables = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "dicedist-net7-node-0-0.dicedist-net7",
        "PET_MASTER_PORT": "29400",
    }
    command = [*container(pods()[1][0])["command"], *trainer["args"]]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
        command = [word.replace(f"$({name})", value) for word in command]  # as Kubernetes does
    options = parsed(command)
    assert (options.nnodes, options.nproc_per_node) == ("2", "4")
    assert options.rdzv_endpoint == "dicedist-net7-node-0-0.dicedist-net7:29400"
    check_ranks(options.training_script_args, 2, 4, trainer["resourcesPerNode"])


@pytest.mark.slow
def test_the_jobs_command_on_two_local_pods(tmp_path):
    """With two ranks per pod instead of four, tiny settings and a loopback endpoint, it equals a run on one node."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = container(the("Job")["template"]["spec"])["command"]
    local = {
        "python": sys.executable,
        "--nproc_per_node=4": "--nproc_per_node=2",
        "--nnodes=1:2": "--nnodes=2:2",
        "--rdzv-endpoint=dicedist-store:29400": f"--rdzv-endpoint=127.0.0.1:{port}",
    }
    assert local.keys() <= set(words)
    command = [local.get(word, word) for word in words]
    overrides = [*TINY, "ensemble.size=3", f"run.dir={tmp_path / 'pods'}"]
    environment = {**os.environ, "DICEDIST_DATA": str(tmp_path)}
    pods = [
        subprocess.Popen([*command, *overrides], env={**environment, "JOB_COMPLETION_INDEX": str(index)})
        for index in range(2)
    ]
    assert [pod.wait(240) for pod in pods] == [0, 0]
    one_node = [sys.executable, "-m", "dicedist.launch", "--nproc_per_node=4", "-m", "dicedist.train"]
    subprocess.run([*one_node, *TINY, "ensemble.size=3", f"run.dir={tmp_path / 'node'}"], env=environment, check=True)
    assert_same_run(tmp_path / "pods/tiny", tmp_path / "node/tiny")
