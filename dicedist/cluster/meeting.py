"""The store of a rendezvous, in a process of its own."""

import socket
import threading

from torch.distributed import TCPStore

from dicedist.console.lines import say


def serve(host: str, port: int) -> None:
    """Listens at this address alone, until a signal ends the process."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family)
    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    say(f"nodes meet here: --rdzv-backend=c10d --rdzv-endpoint={host}:{port}")
    while store is not None:
        threading.Event().wait(3600)  # signals are heard in between
