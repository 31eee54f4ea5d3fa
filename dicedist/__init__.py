"""dicedist: diverse deep ensembles, one member per device.

    from dicedist import Ensemble
    ensemble = Ensemble.load("runs/NAME")        # or an exported model.safetensors or model.pt2
    answers = ensemble.predict("photos/")        # or PIL images, arrays, tensors, paths
    print(answers.names, answers.confidence, answers.ood_score)

    import dicedist
    run = dicedist.fit("experiment=quickstart", nproc=4)        # trains; run.records(), run.results, run.ensemble()
    found = dicedist.score(logits, labels)                      # measures anyone's ensemble

The names listed here are public: they keep their meaning within a major version. Everything else may change. Names are
imported on first use, because importing torch takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dicedist import metrics
    from dicedist.algorithm import losses
    from dicedist.algorithm.conditional_redundancy import ConditionalRedundancy
    from dicedist.algorithm.losses import vceb, vib
    from dicedist.algorithm.objectives import Objective
    from dicedist.algorithm.probes import Probe
    from dicedist.cluster.distributed_redundancy import DistributedRedundancy
    from dicedist.evaluation.answers import Prediction
    from dicedist.evaluation.ensemble import Ensemble
    from dicedist.library import Run, fit, score

__version__ = "0.1.0"
__all__ = [
    "ConditionalRedundancy", "DistributedRedundancy", "Ensemble", "Objective", "Prediction", "Probe", "Run", "fit",
    "losses", "metrics", "score", "vceb", "vib",
]  # fmt: skip

HOMES = {
    "ConditionalRedundancy": "algorithm.conditional_redundancy",
    "DistributedRedundancy": "cluster.distributed_redundancy",
    "Ensemble": "evaluation.ensemble",
    "Objective": "algorithm.objectives",
    "Prediction": "evaluation.answers",
    "Probe": "algorithm.probes",
    "Run": "library",
    "fit": "library",
    "score": "library",
    "vceb": "algorithm.losses",
    "vib": "algorithm.losses",
}
MODULES = {"losses": "algorithm.losses", "metrics": "metrics"}


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return import_module(f"dicedist.{MODULES[name]}")
    if name in HOMES:
        return getattr(import_module(f"dicedist.{HOMES[name]}"), name)
    raise AttributeError(f"module 'dicedist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
