"""Compare what training computes before and after a change of the code, bit for bit: a command, not a test.

    python -m tests.digests record FILE [--only WORD] [--quickstart]     at the old commit
    python -m tests.digests compare FILE [--only WORD] [--quickstart]    after every move

Every method trains a few steps in every structure and is evaluated. More runs cover features of training (mixup,
accumulation, moving averages) and several ranks. The digests cover metrics.jsonl, every tensor of the last checkpoint
and evaluation.json. They hold for one machine and one version of torch only.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support import CHECKOUT
from tests.support.steps import CASES, TRAJECTORIES

BASE = [
    "data=shapes", "data.train_limit=96", "data.val_limit=null", "data.pipeline=torch", "batch_size=16",
    "network=resnet8", "ensemble.size=3",
    "epochs=2", "log.every_steps=2", "evaluate.every_epochs=1", "tracking=none", "schedules.ramp_up=1",
    "bottleneck.log_beta=[[0,3]]",
]  # fmt: skip
TEACHER = "teacher"
ALONE = {
    "mixup": ["method=ceb", "loss.mixup=0.3"],
    "cutmix": ["method=ind", "loss.cutmix=1"],
    "accumulate": ["method=dice", "optimizer.accumulate=2"],
    "accumulate-branch": ["method=dice", "structure=branch", "optimizer.accumulate=2"],
    "grouped": ["method=dice", "ensemble.batched=true"],
    "per-member-branch": ["method=dice", "structure=branch", "data.per_member=true"],
    "per-member": ["method=ceb", "data.per_member=true"],
    "ema": ["method=dice", "optimizer.ema=0.9"],
    "clip": ["method=dice", "optimizer.clip_norm=0.5", "optimizer.name=adamw", "optimizer.lr=0.001"],
    "bf16": ["method=dice", "precision=bf16"],
    "smoothing": ["method=ind", "loss.label_smoothing=0.1", "loss.class_weights=balanced"],
    "max-pairs": ["method=dice", "redundancy.max_pairs=2"],
    "vectors": ["method=dice", "data=digits", "network=mlp", "data.train_limit=96"],
    "ranks-of-two": ["method=dice", "+nproc=2"],
    "ranks-of-four": ["method=dice", "+nproc=4"],
    "branch-of-two": ["method=dice", "structure=branch", "+nproc=2"],
    "replicas": ["method=dice", "ensemble.size=2", "ensemble.replicas=2", "+nproc=5"],
    "divided": ["method=dice", "redundancy.ranks=members", "+nproc=3"],
}


def cases() -> dict[str, list[str]]:
    named = {f"{method}-{structure}": [f"method={method}", f"structure={structure}"] for method, structure in CASES}
    for kind in TRAJECTORIES:
        named[kind] = [f"method={kind}", "ensemble.size=2", "trajectory.samples=2"]
    for name in ("distill-net", "distill-branch"):
        named[name] += ["teacher.run=..."]
    for name in [name for name in named if name.startswith("ffl")]:
        named[name] += ["ensemble.size=2"]
    return named | ALONE


def train(folder: Path, name: str, overrides: list[str]) -> None:
    keys = [f"teacher.run={folder / TEACHER}" if key.startswith("teacher.run") else key for key in overrides]
    nproc = next((key.partition("=")[2] for key in keys if key.startswith("+nproc")), "1")
    keys = [key for key in keys if not key.startswith("+")]
    command = [sys.executable, "-m", "dicedist", "train", *BASE, f"run.dir={folder}", f"run.name={name}", *keys]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        [*command, "--nproc", nproc], cwd=CHECKOUT, env=environment, text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")


def digest(run: Path) -> dict[str, str]:
    """Of the records, of the weights and of the results, so that a difference says where it is."""
    newest = sorted((run / "checkpoints").iterdir())[-1]
    files = sorted(newest.glob("*.safetensors"))
    result = json.loads((run / "evaluation.json").read_text()) if (run / "evaluation.json").exists() else {}
    return {
        "records": hashlib.sha256((run / "metrics.jsonl").read_bytes()).hexdigest(),
        "weights": hashlib.sha256(b"".join(tensor_bytes(file) for file in files)).hexdigest(),
        "files": " ".join(file.name for file in files),
        "results": hashlib.sha256(json.dumps(plain(result), sort_keys=True).encode()).hexdigest(),
    }


def tensor_bytes(file: Path) -> bytes:
    from safetensors.torch import load_file

    if file.stem == "records":
        return b""
    tensors = load_file(file)
    return b"".join(name.encode() + tensors[name].view(-1).numpy().tobytes() for name in sorted(tensors))


def plain(result: dict) -> dict:
    return {key: value for key, value in result.items() if key not in ("sha256",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="cases whose names contain this word")
    parser.add_argument("--quickstart", action="store_true", help="the quickstart too, which takes minutes")
    parser.add_argument("--at-once", type=int, default=2)
    options = parser.parse_args()
    chosen = {name: keys for name, keys in cases().items() if options.only in name}
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.at_once) as pool:
        folder = Path(name)
        if any(key.startswith("distill") for key in chosen):
            train(folder, TEACHER, ["method=ind"])

        def one(case: str) -> None:
            try:
                train(folder, case, chosen[case])
                found[case] = digest(folder / case)
            except RuntimeError as error:
                found[case] = {"error": str(error)}
                print(error, flush=True)
            print(f"{len(found)}/{len(chosen)} {case}", flush=True)

        list(pool.map(one, chosen))
        if options.quickstart:
            train(folder, "quickstart", ["experiment=quickstart", "ensemble.size=4", "+nproc=5"])
            found["quickstart"] = digest(folder / "quickstart")
    if options.action == "record":
        options.file.write_text(json.dumps(found, indent=1, sort_keys=True))
        return
    known = json.loads(options.file.read_text())
    different = [
        f"{case}: {', '.join(part for part in parts if parts[part] != known[case].get(part))}"
        for case, parts in sorted(found.items())
        if case in known and parts != known[case]
    ]
    print("\n".join(different) or f"all {len(found)} runs are the same")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
