"""The table of launch/diversity: fails unless redundancy is lower under DICE than with delta 0, for every seed.

Redundancy is the mean over pairs of members, in nats. A new discriminator was trained on training features, in
the same way for all runs, estimates it on test features.
"""

import json
import sys
from pathlib import Path
from statistics import mean

from dicedist.console.tables import table


def main(directory, *seeds):
    rows, lower = [], []
    for seed in seeds:
        nats = []
        for delta in ("auto", "0"):
            text = (Path(directory) / f"delta-{delta}-seed{seed}" / "evaluation.json").read_text()
            result = json.loads(text)
            nats.append(mean(result["redundancy_fresh"]["conditional"]["nats_P"]))
            accuracies = [100 * member["accuracy"] for member in result["members"]["per_member"]]
            ensemble, errors = 100 * result["ensemble"]["accuracy"], result["diversity"]["ratio_error"]
            rows.append([int(seed), delta, nats[-1], errors, mean(accuracies), max(accuracies), ensemble])
        lower.append(nats[0] < nats[1])
    print(table(["seed", "delta", "redundancy, nats", "ratio-error", "members %", "best member %", "ensemble %"], rows))
    print(f"redundancy is lower under DICE in {sum(lower)} of {len(lower)} seeds")
    return not all(lower)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
