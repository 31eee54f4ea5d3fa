"""Launch ranks like torchrun, with the same arguments, and restart the run after faults.

Example:
    python -m dicedist.launch --nproc_per_node=5 -m dicedist.train key=value ...

- Its exit code is the run's own: 0 done, 2 refused in one line, 75 stopped on request (the same command resumes).
- After a fault the run restarts from its last checkpoint, up to --max-restarts times (3). The codes 0, 2 and 75 end it.
- SIGUSR1, Slurm's warning, is forwarded to the ranks like SIGTERM and SIGINT.
- On one node the rendezvous listens on loopback only, while torchrun's store listens on all interfaces.
"""

import os
import signal
import sys

from dicedist.cluster.signals import ASKING, EXIT_STOPPED

for _number in ASKING:  # importing torch takes seconds, and a signal may arrive before torchrun handles it
    if signal.getsignal(_number) is not signal.SIG_IGN:
        signal.signal(_number, lambda *_: os._exit(EXIT_STOPPED))

from dicedist.cluster.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
