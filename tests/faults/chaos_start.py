"""What ckpt-chaos starts for each rank: ``chaos_start.py SOCKET OUT`` asks for a fork, and waits.

A process that has imported torch forks the rank, which is armed by ckpt-chaos's own
``arm_from_env`` as a fresh interpreter would be, with the environment of this one. It ends as the
rank ends; if this one is killed, so is the rank.
"""

import array
import json
import os
import signal
import socket
import sys


def main(place: str, out: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(place)
        descriptors = array.array("i", [1, 2])
        request = json.dumps({"environment": dict(os.environ), "out": out}).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        server.sendmsg([len(request).to_bytes(4, "big")], rights)
        server.sendall(request)

        def ask_it_to_end(*_) -> None:
            server.sendall(b"t")

        signal.signal(signal.SIGTERM, ask_it_to_end)
        code = int(server.recv(16))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
