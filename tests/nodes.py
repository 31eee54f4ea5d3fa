"""Compares runs over several nodes with a run of a single process group. The nodes are network namespaces of this
machine, each with its own address. Needs root and iproute2 (`ip`).

python -m tests.nodes            every scenario, about 8 minutes on two cores
python -m tests.nodes replicas   some of them
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dicedist.console.tables import table
from dicedist.runs import checkpoint
from dicedist.runs.run import Run
from tests.faults.subject import PATIENCE, SETTINGS, STEPS
from tests.support import CHECKOUT
from tests.support.tiny import assert_same_run, assert_same_tensors, records_of

PREFIX, PORT = "10.77.0.", 29500
# A node counts as lost after 3 s, and a round waits 5 s for more nodes than it needs.
IMPATIENT = "read_timeout=20,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
LONG = 600  # steps


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Node:
    """A network namespace on a bridge; its processes see one link and their own host name."""

    def __init__(self, number):
        self.name, self.address = f"dicedist{number}", f"{PREFIX}{number + 1}"
        self.link = f"dd-veth{number}"
        self.etc = Path("/etc/netns") / self.name  # `ip netns exec` mounts its files over those of /etc
        self.etc.mkdir(parents=True, exist_ok=True)
        (self.etc / "hosts").write_text(f"127.0.0.1 localhost\n{self.address} {self.name}\n")
        ip("netns", "add", self.name)
        ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", self.link, "master", "dd-bridge", "up")
        ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self.name, "link", "set", "eth0", "up")
        ip("-n", self.name, "link", "set", "lo", "up")

    def start(self, command, log):
        named = f"hostname {self.name} && exec {' '.join(command)}"
        words = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", named]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("a") as file:
            return subprocess.Popen(words, cwd=CHECKOUT, env=environment, stdout=file, stderr=file)

    def plug(self, state):
        """Sets the far end of the node's link up or down; down cuts the node off."""
        ip("link", "set", self.link, state)

    def lose(self):
        """The machine is gone, without a word to anybody."""
        self.plug("down")
        kill_inside(self.name)


@contextlib.contextmanager
def nodes(count):
    remove_leftovers()
    ip("link", "add", "dd-bridge", "type", "bridge")
    ip("link", "set", "dd-bridge", "up")
    try:
        yield [Node(number) for number in range(count)]
    finally:
        remove_leftovers()


def remove_leftovers():
    known = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
    for name in (name for name in known if name.startswith("dicedist")):
        kill_inside(name)  # they would keep the namespace and its link alive
        ip("netns", "delete", name)
        shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    for link in re.findall(r"dd-(?:veth\d+|bridge)", links):  # a namespace takes its links with it, but not at once
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "delete", link)


def kill_inside(name):
    for process in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def launch(places, ranks, directories, *settings, attempt=0):
    """One launcher per node; the rendezvous is on the first node."""
    processes = []
    for node, here, directory in zip(places, ranks, directories, strict=True):
        options = [
            f"--nnodes={len(places)}", f"--nproc_per_node={here}", "--rdzv-backend=c10d", f"--rdzv-id=run{attempt}",
            f"--rdzv-endpoint={places[0].address}:{PORT + attempt}", "--max-restarts=0",
            "--rdzv-conf=read_timeout=20",
        ]  # fmt: skip
        train = ["-m", "dicedist.train", *SETTINGS, f"run.dir={directory}", *settings]
        command = [sys.executable, "-m", "dicedist.launch", *options, *train]
        processes.append(node.start(command, directory.with_name(f"{node.name}.log")))
    return processes


def finish(processes):
    return [process.wait(PATIENCE) for process in processes]


def alone(directory, num_ranks, *settings):
    """The same run, in one process group of this machine."""
    command = [sys.executable, "-m", "dicedist.launch", f"--nproc_per_node={num_ranks}", "-m", "dicedist.train"]
    with directory.with_name("alone.log").open("a") as log:
        subprocess.run(
            [*command, *SETTINGS, f"run.dir={directory}", *settings], cwd=CHECKOUT, stdout=log, stderr=log, check=True
        )


def two_nodes(folder):
    """Three members and the discriminator on 2 + 2 ranks with one folder; equal bit for bit."""
    with nodes(2) as places:
        assert finish(launch(places, [2, 2], [folder / "runs"] * 2, "ensemble.size=3")) == [0, 0]
    alone(folder / "alone", 4, "ensemble.size=3")
    assert_same_run(folder / "runs" / "tiny", folder / "alone" / "tiny", STEPS)


def three_nodes_apart(folder):
    """One rank per node, and no shared folder: rank 0's folder has every part."""
    with nodes(3) as places:
        own = [folder / f"disk-{number}" for number in range(3)]
        assert finish(launch(places, [1, 1, 1], own)) == [0, 0, 0]
    alone(folder / "alone", 3)
    assert_same_run(folder / "disk-0" / "tiny", folder / "alone" / "tiny", STEPS)
    assert not list(folder.glob("disk-[12]/*/checkpoints/*"))


def replicas(folder):
    """Two members with two replicas each, and the discriminator, on 3 + 2 ranks."""
    settings = ("ensemble.replicas=2",)
    with nodes(2) as places:
        assert finish(launch(places, [3, 2], [folder / "runs"] * 2, *settings)) == [0, 0]
    alone(folder / "alone", 5, *settings)
    assert_same_tensors(folder / "runs" / "tiny", folder / "alone" / "tiny", STEPS)


def cut_link(folder):
    """The second node is cut off while it trains: both end with one line within the time-out; a restart continues."""
    with nodes(2) as places:
        processes = launch(places, [2, 2], [folder / "runs"] * 2, "ensemble.size=3")
        deadline = time.monotonic() + PATIENCE
        while not checkpoint.saved(Run(folder / "runs" / "tiny").checkpoints):
            assert time.monotonic() < deadline and processes[0].poll() is None
            time.sleep(0.05)
        places[1].plug("down")
        cut = time.monotonic()
        codes = finish(processes)
        seconds = time.monotonic() - cut
        told = {node.name: lines_of(folder / f"{node.name}.log") for node in places}
        print(f"    ended after {seconds:.0f} s with {codes}: {told}")
        assert 0 not in codes and all(len(lines) >= 1 for lines in told.values())
        places[1].plug("up")
        assert finish(launch(places, [2, 2], [folder / "runs"] * 2, "ensemble.size=3", attempt=1)) == [0, 0]
    alone(folder / "alone", 4, "ensemble.size=3")
    assert_same_run(folder / "runs" / "tiny", folder / "alone" / "tiny", STEPS)


class Elastic:
    """A run over nodes that come and go. They meet at a store in a place of its own, and each has two ranks."""

    def __init__(self, folder, nnodes, *settings):
        self.folder, self.nnodes, self.settings = folder, nnodes, ("ensemble.size=3", *settings)
        self.meeting = Node(9)
        endpoint = f"{self.meeting.address}:{PORT}"
        self.meeting.start([sys.executable, "-m", "dicedist", "store", endpoint], folder / "store.log")
        self.options = [
            f"--nnodes={nnodes}", "--nproc_per_node=2", "--rdzv-backend=c10d", "--rdzv-id=elastic",
            f"--rdzv-endpoint={endpoint}", "--max-restarts=10", f"--rdzv-conf={IMPATIENT}",
        ]  # fmt: skip

    def start(self, node, directory=None):
        train = ["-m", "dicedist.train", *SETTINGS, f"run.dir={directory or self.folder / 'runs'}", *self.settings]
        command = [sys.executable, "-m", "dicedist.launch", *self.options, *train]
        return node.start(command, self.folder / f"{node.name}.log")

    def wait_for_checkpoint(self, process, run=None, after=0):
        deadline = time.monotonic() + PATIENCE
        while not (steps := steps_saved(run or self.folder / "runs" / "tiny")) or steps[-1] <= after:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        return steps[-1]

    def told(self, node):
        return (self.folder / f"{node.name}.log").read_text()


def steps_saved(run):
    """Of a folder, or of a bucket in one, where the manifest comes last."""
    saved = checkpoint.saved(Run(run).checkpoints)
    return [checkpoint.step_of(path) for path in saved if (path / checkpoint.MANIFEST).exists()]


def node_replaced(folder):
    """The second of two nodes is lost and another takes its place; nobody starts the first again. Equal bit for bit."""
    with nodes(3) as (first, second, third):
        run = Elastic(folder, "2:2")
        processes = [run.start(first), run.start(second)]
        run.wait_for_checkpoint(processes[0])
        second.lose()
        assert finish([processes[0], run.start(third)]) == [0, 0]
        assert "continues after" in run.told(first)
    alone(folder / "alone", 4, "ensemble.size=3")
    assert_same_run(folder / "runs" / "tiny", folder / "alone" / "tiny", STEPS)


def first_node_replaced(folder):
    """The node of rank 0 is lost with its disk, another takes its place; the run goes on from a bucket."""
    with nodes(3) as (first, second, third):
        run = Elastic(folder, "2:2", f"run.remote=file://{folder}/bucket")
        processes = [run.start(first, folder / "disk-0"), run.start(second, folder / "disk-1")]
        sent = run.wait_for_checkpoint(processes[0], folder / "bucket" / "tiny")
        first.lose()
        shutil.rmtree(folder / "disk-0")
        assert finish([processes[1], run.start(third, folder / "disk-2")]) == [0, 0]
        (after,) = re.findall(r"continues after step (\d+)", run.told(second) + run.told(third))
        assert int(after) >= sent
    alone(folder / "alone", 4, "ensemble.size=3")
    (left,) = folder.glob("disk-*/tiny")
    assert_same_run(left, folder / "alone" / "tiny", STEPS)


def assert_same_values(run, reference, step):
    """Bit for bit; ranks of another number name what they record in another order."""
    assert_same_tensors(run, reference, step)
    assert records_of(run) == records_of(reference)


def node_lost_for_good(folder):
    """One of two nodes is lost and not replaced: members are dealt over the ranks that are left."""
    with nodes(2) as (first, second):
        run = Elastic(folder, "1:2")
        processes = [run.start(first), run.start(second)]
        run.wait_for_checkpoint(processes[0])
        second.lose()
        assert finish([processes[0]]) == [0]
        placements = re.findall(r"^ +(\d+)  cpu", run.told(first), re.M)
        assert placements == ["0", "1", "2", "3", "0", "1"]
    alone(folder / "alone", 4, "ensemble.size=3")
    assert_same_values(folder / "runs" / "tiny", folder / "alone" / "tiny", STEPS)


def node_comes_back(folder):
    """One of two nodes is lost, the other goes on alone; when it is back, members are spread again."""
    longer = ("epochs=100", "schedules.scale=false", f"max_steps={LONG}")
    with nodes(2) as (first, second):
        run = Elastic(folder, "1:2", *longer)
        processes = [run.start(first), run.start(second)]
        run.wait_for_checkpoint(processes[0])
        second.lose()
        while "continues after" not in run.told(first):
            assert processes[0].poll() is None
            time.sleep(0.1)
        run.wait_for_checkpoint(processes[0], after=steps_saved(folder / "runs" / "tiny")[-1])
        second.plug("up")
        assert finish([processes[0], run.start(second)]) == [0, 0]
        placements = re.findall(r"^ +(\d+)  cpu", run.told(first), re.M)
        assert placements == ["0", "1", "2", "3", "0", "1", "0", "1", "2", "3"]
    alone(folder / "alone", 4, "ensemble.size=3", *longer)
    assert_same_values(folder / "runs" / "tiny", folder / "alone" / "tiny", LONG)


def one_asked_to_stop(folder):
    """SIGTERM to one launcher of two: both end with 75 within seconds, and the next start continues."""
    with nodes(2) as (first, second):
        run = Elastic(folder, "2:2")
        for asked, rest in [(0, 1), (1, 0)]:
            processes = [run.start(first), run.start(second)]
            run.wait_for_checkpoint(processes[0], after=max(steps_saved(folder / "runs" / "tiny"), default=0))
            began = time.monotonic()
            processes[asked].send_signal(signal.SIGTERM)
            codes = finish([processes[asked], processes[rest]])
            print(f"    ended with {codes} after {time.monotonic() - began:.0f} s")
            assert codes == [75, 75] and time.monotonic() - began < 60
        assert finish([run.start(first), run.start(second)]) == [0, 0]
    alone(folder / "alone", 4, "ensemble.size=3")
    assert_same_run(folder / "runs" / "tiny", folder / "alone" / "tiny", STEPS)


def fixed_node_asked_to_stop(folder):
    """The same for nodes of fixed ranks (--node-rank, --master-addr), and the next start continues."""
    with nodes(2) as places:

        def start(attempt):
            options = ["--nnodes=2", "--nproc_per_node=2", f"--master-addr={places[0].address}", "--max-restarts=0"]
            options.append(f"--master-port={PORT + attempt}")
            train = ["-m", "dicedist.train", *SETTINGS, f"run.dir={folder / 'runs'}", "ensemble.size=3"]
            command = [sys.executable, "-m", "dicedist.launch", *options]
            logs = [folder / f"{node.name}.log" for node in places]
            return [
                node.start([*command, f"--node-rank={rank}", *train], log)
                for rank, (node, log) in enumerate(zip(places, logs, strict=True))
            ]

        for asked in (0, 1):
            processes, before = start(asked), max(steps_saved(folder / "runs" / "tiny"), default=0)
            while max(steps_saved(folder / "runs" / "tiny"), default=0) <= before:
                assert processes[0].poll() is None
                time.sleep(0.05)
            began = time.monotonic()
            processes[asked].send_signal(signal.SIGTERM)
            codes = finish(processes)
            print(f"    ended with {codes} after {time.monotonic() - began:.0f} s")
            assert codes == [75, 75] and time.monotonic() - began < 60
        assert finish(start(2)) == [0, 0]
    alone(folder / "alone", 4, "ensemble.size=3")
    assert_same_run(folder / "runs" / "tiny", folder / "alone" / "tiny", STEPS)


def lines_of(log):
    return [line for line in log.read_text().splitlines() if line.startswith("dicedist: ") and "warning" not in line]


SCENARIOS = {
    function.__name__: function
    for function in (
        two_nodes, three_nodes_apart, replicas, cut_link,
        node_replaced, first_node_replaced, node_lost_for_good, node_comes_back, one_asked_to_stop,
        fixed_node_asked_to_stop,
    )
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser("tests.nodes", description=__doc__)
    parser.add_argument("scenarios", nargs="*", choices=[[], *SCENARIOS], default=[])
    chosen = parser.parse_args().scenarios or [*SCENARIOS]
    rows = []
    for name in chosen:
        print(name, flush=True)
        started = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix=f"dicedist-{name}-"))
        try:
            SCENARIOS[name](folder)
        except BaseException:
            for log in sorted(folder.glob("*.log")):
                print(f"--- {log}\n{log.read_text()[-3000:]}")
            raise
        rows.append([name, (SCENARIOS[name].__doc__ or "").strip(), round(time.monotonic() - started)])
    print(table(["scenario", "what is shown", "s"], rows))


if __name__ == "__main__":
    main()
