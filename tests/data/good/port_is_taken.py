"""Another program listens where the script's store would."""

import socket

from torch.distributed import TCPStore

if __name__ == "__main__":
    with socket.socket() as other:
        other.bind(("localhost", 0))
        other.listen()
        TCPStore("localhost", other.getsockname()[1], is_master=True)
