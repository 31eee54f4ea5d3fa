"""Make shards of a folder of images; what was interrupted goes on when the same command is given again.

    python -m dicedist.data pack FOLDER OUTPUT [images=1000]     FOLDER holds train/<class>/*.jpg and test/<class>/*.jpg

OUTPUT then holds train-*.tar and test-*.tar of so many images each, for data=shards data.root=OUTPUT, and may be copied
to s3:// or a web server as it is.
"""

from collections.abc import Sequence
from pathlib import Path

from dicedist.cluster.process import command
from dicedist.console.lines import plural, say


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments or not arguments:
        print(__doc__)
        return
    verb, *places = (word for word in arguments if not word.startswith("images="))
    per_shard = [word.partition("=")[2] for word in arguments if word.startswith("images=")]
    if verb != "pack" or len(places) != 2:
        raise ValueError("write python -m dicedist.data pack FOLDER OUTPUT [images=1000]")
    if per_shard and not (per_shard[-1].isdigit() and int(per_shard[-1]) > 0):
        raise ValueError(f"images={per_shard[-1]}: write a whole number from 1")
    from dicedist.data.pack import pack

    output = Path(places[1]).expanduser()
    written = pack(Path(places[0]).expanduser(), output, int(per_shard[-1]) if per_shard else 1000)
    say(f"wrote {plural(written, 'shard')} to {output}; train with data=shards data.root={output}")


if __name__ == "__main__":
    command(run)
