"""Train one network on the predictions of a run's ensemble: a cheap model for serving.

Examples:
    python -m dicedist.distill run=runs/NAME network=resnet8                   one network learns the mean probabilities
    python -m dicedist.distill run=runs/NAME network=resnet20 target=members   a trunk with one branch for each member
    python -m dicedist.distill run=runs/NAME network=resnet20 epochs=100 method.terms.distill.labels=0.1 --nproc 2

All other arguments are keys of `dicedist train`, and the same command resumes. Data, epochs, batch size, loss and
optimizer default to the teacher's; a recipe= or experiment= replaces all of these but the data. The student is a
separate run, which all commands accept and which does not need the teacher. docs/methods.md has the losses.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dicedist.cluster.process import command
from dicedist.config import Config, show_help

if TYPE_CHECKING:
    from dicedist.runs.run import Run

OWN = ("run=", "target=")
TARGETS = ("mean", "members")


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        show_help(__doc__, "train", Config, None if "all" in arguments else "dicedist distill --help all")
        return
    own = dict(word.split("=", 1) for word in arguments if word.startswith(OWN))
    keys = [word for word in arguments if not word.startswith(OWN)]
    if "run" not in own:
        raise ValueError("write run=runs/NAME, the run of the teacher, and network=NAME for the student")
    if not any(word.startswith(("network=", "network.")) for word in keys):
        raise ValueError("write network=NAME, the network of the student")
    if own.get("target", "mean") not in TARGETS:
        raise ValueError(f"target={own['target']}: write one of {', '.join(TARGETS)}")
    # Not above: importing torch takes seconds.
    from dicedist import train
    from dicedist.runs.run import Run

    train.run([*words_for(Run.open(own["run"]), own.get("target", "mean"), keys), *keys])


def words_for(teacher: "Run", target: str, keys: Sequence[str]) -> list[str]:
    """Return the overrides of the student: of its teacher and of all students, unless the user sets the same keys."""
    from dicedist.config.words import word, words_of
    from dicedist.data.sources import of_run

    config = teacher.config()
    given = {key.partition("=")[0] for key in keys}
    if not {"data", "data.root"} & given:
        of_run(config.data)  # refuses a URL that only the teacher's config names
    groups = ["data."] + ([] if {"recipe", "experiment"} & given else ["epochs", "batch_size", "loss.", "optimizer."])
    groups += ["schedules."] if len(groups) > 1 else []
    inherited = [] if "data" in given else [f"data={config.data.name}"]
    inherited += words_of(config, [group for group in groups if group.rstrip(".") not in given], inherited)
    network = next((key.partition("=")[2] for key in keys if key.startswith("network=")), "").replace("/", "-")
    named = "-".join(filter(None, [teacher.name, "distilled", network, "" if target == "mean" else target]))
    inherited += ["method=distill", word("teacher.run", str(teacher)), word("run.name", named)]
    inherited += [word("run.dir", str(teacher.directory.parent))]
    if target == "members":
        inherited += ["method.terms.distill.target=members", "structure=branch"]
        inherited += [f"ensemble.size={teacher.plan().num_predictors}"]
    return [each for each in inherited if each.partition("=")[0] not in given]


if __name__ == "__main__":
    command(run)
