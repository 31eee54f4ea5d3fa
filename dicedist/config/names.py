"""The names of records, for their writers and readers.

train/member_3/loss  train/members/loss  train/discriminator/accuracy    means over the steps since the last record
val/ensemble/nll  val/diversity/agreement  train_set/ensemble/accuracy   after an epoch: validation, training images
schedule/learning_rate                                                   the present value of a schedule
throughput/seconds_per_step                                              in system.jsonl
"""

TRAIN, VALIDATION, TRAINING_IMAGES, SCHEDULE = "train", "val", "train_set", "schedule"
ENSEMBLE, MEMBERS, DIVERSITY, DISCRIMINATOR = "ensemble", "members", "diversity", "discriminator"
TEMPERED = "ensemble_tempered"  # after temperature scaling, fitted on one half and measured on the other
LOSS, ACCURACY, GRADIENT_NORM = "loss", "accuracy", "gradient_norm"
REDUNDANCY, REDUNDANCY_NATS = "redundancy", "redundancy_nats"  # the loss that members get from w; w's estimate
IMAGES_PER_SECOND, SECONDS_PER_STEP = "throughput/images_per_second", "throughput/seconds_per_step"


def record(*words: str) -> str:
    return "/".join(words)


def train(*words: str) -> str:
    return record(TRAIN, *words)


def validation(*words: str) -> str:
    return record(VALIDATION, *words)


def schedule(name: str) -> str:
    return record(SCHEDULE, name)


def member(index: int) -> str:
    return f"member_{index}"


def is_of(name: str, first: str) -> bool:
    """Return whether the name of a record begins with this word."""
    return name.startswith(f"{first}/")


def whose(name: str) -> tuple[str, str]:
    """Split the name of a step's value into the part, which may be empty, and the measured quantity."""
    part, _, what = name.rpartition("/")
    return part, what
