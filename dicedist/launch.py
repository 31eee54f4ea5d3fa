"""torchrun, for runs of days: takes the same arguments, and starts a run again when a rank fails.

Example:
    python -m dicedist.launch --nproc_per_node=5 -m dicedist.train key=value ...

- Its exit code is the run's own: 0 done, 2 refused in one line, 75 stopped on request (the same command continues).
- A run that ended so is not restarted; after a fault it is, up to --max-restarts times (3), from its last checkpoint.
- SIGUSR1, Slurm's warning, is passed on to the ranks like SIGTERM and SIGINT.
- On one node nothing listens beyond loopback, while torchrun's store listens to the whole network.
"""

import os
import signal
import sys

from dicedist.cluster.signals import ASKING, EXIT_STOPPED

for _number in ASKING:  # torch takes seconds to import, and a signal may come before torchrun listens for it
    if signal.getsignal(_number) is not signal.SIG_IGN:
        signal.signal(_number, lambda *_: os._exit(EXIT_STOPPED))

from dicedist.cluster.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
