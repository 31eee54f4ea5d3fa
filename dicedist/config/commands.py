"""The commands of dicedist."""

from importlib.util import find_spec

COMMANDS = {  # name of the module, which has a function run(arguments) -> what it does
    "train": "train an ensemble, or resume its training",
    "evaluate": "accuracy, calibration, diversity, redundancy, out-of-distribution detection",
    "show": "print all tables of a run's results",
    "report": "one page with tables and figures of runs",
    "distill": "train one network on the predictions of an ensemble",
    "predict": "classify images, with confidence, disagreement and an OOD score",
    "export": "write pt2, onnx or safetensors",
    "sweep": "train over values of keys and seeds, or search for the best",
    "evidence": "compare methods by a protocol, with intervals",
    "mirror": "send a run to MLflow, TensorBoard or Weights & Biases",
    "doctor": "check this machine before a training",
    "bench": "measure this machine",
    "store": "rendezvous server for elastic runs",
    "clean": "remove cached data and old checkpoints",
    "completion": "print the completion script of bash, zsh or fish",
}


def available() -> list[str]:
    return [name for name in COMMANDS if find_spec(f"dicedist.{name}")]
