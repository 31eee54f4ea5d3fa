"""The parent run of a study in MLflow: the runs of a sweep, a search or evidence are nested under it."""

from typing import Any

STUDY = "dicedist.study"  # tag of the parent


def parent_of(client: Any, experiment: str, study: str) -> str:
    """Return the id of the parent run, which is created if needed.

    Several mirrors may create one at the same time. All of them take the first, and remove their own.
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
    quoted = study.replace("'", "\\'")
    runs = client.search_runs([experiment], f"tags.`{STUDY}` = '{quoted}'")
    return [run.info.run_id for run in sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))]
