"""Labels of ensembles in a report: the method, and the settings that distinguish the ensembles."""

from collections.abc import Mapping, Sequence
from typing import Any

Settings = Mapping[str, Any]  # dotted key -> value, for everything that can change a result except the seed

# The paper's order of rows; other methods follow, sorted by name.
ORDER = ("ind", "one", "okddip", "adp", "ib", "ceb", "ibr", "cebr", "dice")
# If these differ, every label shows them. Other differences are added only to labels that would be equal.
FOREMOST = ("data.name", "network.name", "ensemble", "epochs", "data.train_limit")
OF_METHOD = ("method.name", "method.title", "method.meaning")
WORDING = {
    "data.name": "{}",
    "network.name": "{}",
    "ensemble": "{}",
    "epochs": "{} epochs",
    "data.train_limit": "{} images",
    "redundancy.delta": "δ {}",
    "average": "averaged {}",
    "members": "members {}",
}


def labels(ensembles: Sequence[Settings]) -> list[str]:
    """Return the shortest distinct labels: DICE, Ind.; DICE δ 0.1, DICE δ 0.2; DICE 4-net, DICE 4-branch."""
    texts = [settings["method.title"] for settings in ensembles]
    for key in FOREMOST:
        if varies(key, ensembles):
            texts = [extended(text, key, settings) for text, settings in zip(texts, ensembles, strict=True)]
    others = {key for settings in ensembles for key in settings} - {*FOREMOST, *OF_METHOD}
    for key in sorted(others, key=lambda key: (key != "redundancy.delta", key)):
        alike = {
            text: [other for other, label in zip(ensembles, texts, strict=True) if label == text] for text in texts
        }
        texts = [
            extended(text, key, settings) if varies(key, alike[text]) else text
            for text, settings in zip(texts, ensembles, strict=True)
        ]
    return texts


def shared(ensembles: Sequence[Settings]) -> list[str]:
    """Describe the main settings that all ensembles share."""
    return [
        wording(key, ensembles[0][key])
        for key in FOREMOST
        if ensembles[0].get(key) is not None and not varies(key, ensembles)
    ]


def varies(key: str, ensembles: Sequence[Settings]) -> bool:
    return any(settings.get(key) != ensembles[0].get(key) for settings in ensembles)


def extended(text: str, key: str, settings: Settings) -> str:
    return f"{text} {wording(key, settings.get(key))}"


def wording(key: str, value: object) -> str:
    return WORDING.get(key, key + " {}").format("all" if value is None else value)
