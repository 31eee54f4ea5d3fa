"""Make shards of a folder of images; repeat the command to continue after an interruption.

    python -m dicedist.data pack FOLDER OUTPUT [images=1000]     FOLDER holds train/<class>/*.jpg and test/<class>/*.jpg

OUTPUT then holds train-*.tar and test-*.tar with this many images each, for data=shards data.root=OUTPUT. The folder
may be copied to s3:// or to a web server as it is.
"""

from collections.abc import Sequence
from pathlib import Path

from dicedist.cluster.process import command
from dicedist.console.lines import plural, say


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments or not arguments:
        print(__doc__)
        return
    words = [word for word in arguments if not word.startswith("images=")]
    images = ["1000", *(word.removeprefix("images=") for word in arguments if word.startswith("images="))][-1]
    if words[:1] != ["pack"] or len(words) != 3:
        raise ValueError("write python -m dicedist.data pack FOLDER OUTPUT [images=1000]")
    if not (images.isdigit() and int(images) > 0):
        raise ValueError(f"images={images}: write a whole number from 1")
    from dicedist.data.pack import pack

    folder, output = (Path(word).expanduser() for word in words[1:])
    written = pack(folder, output, int(images))
    say(f"wrote {plural(written, 'shard')} to {output}; train with data=shards data.root={output}")


if __name__ == "__main__":
    command(run)
