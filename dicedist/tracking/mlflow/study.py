"""The parent run of a study in MLflow: the runs of a sweep, a search or evidence are nested under it."""

from typing import Any

STUDY = "dicedist.study"  # tag of the parent


def parent_of(client: Any, experiment: str, study: str) -> str:
    """Return the id of the parent run, which is created if needed.

    Several mirrors may create one at the same time. All of them use the oldest, and remove their own.
    """
    found = parents(client, experiment, study)
    if not found:
        made = client.create_run(experiment, run_name=study, tags={STUDY: study}).info.run_id
        client.set_terminated(made)
        found = parents(client, experiment, study)
        if found[0] != made:
            client.delete_run(made)
    return found[0]


def parents(client: Any, experiment: str, study: str) -> list[str]:
    """Return the parent runs of a study, the oldest first. MLflow's filters cannot quote every name."""
    runs = client.search_runs([experiment], f"tags.`{STUDY}` LIKE '%'")
    found = [run.info for run in runs if run.data.tags[STUDY] == study]
    return [info.run_id for info in sorted(found, key=lambda info: (info.start_time, info.run_id))]
