"""The commands of dicedist."""

from importlib.util import find_spec

COMMANDS = {  # name of the module, which has a function run(arguments) -> what it does
    "train": "train an ensemble, or continue to",
    "evaluate": "accuracy, calibration, diversity, redundancy, out-of-distribution detection",
    "show": "print all tables of a run's results",
    "report": "one page with tables and figures of runs",
    "distill": "train one network on what an ensemble predicts",
    "predict": "label images, and tell how sure that is",
    "export": "write pt2, onnx or safetensors",
    "sweep": "train over values of keys and seeds, or search for the best",
    "evidence": "compare methods by a protocol, with intervals",
    "mirror": "send a run to MLflow, TensorBoard or Weights & Biases",
    "doctor": "check this machine before a training",
    "bench": "measure this machine",
    "store": "where the nodes of a run meet, outside of them",
    "clean": "remove prepared data and old checkpoints",
    "completion": "commands, keys and values for bash, zsh or fish",
}


def available() -> list[str]:
    return [name for name in COMMANDS if find_spec(f"dicedist.{name}")]
