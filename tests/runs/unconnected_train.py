"""The training command where each use of the network is noted, in the file of the first argument, and fails.

Sockets between the processes of one machine, which data workers use, are none.
"""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__)
WITH_ADDRESS = {"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"}
"""Their last argument is a tuple where it is one of a network, and text for one of this machine."""
PROBE = ("::1", 0)
"""urllib3 2.8 binds a socket to it when it is imported, to see whether there is IPv6; it sends nothing."""
LOOKUPS = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}


def refuse_connections(notes: Path) -> None:
    """From now on, this process has no network."""

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        address = arguments[-1] if arguments else None
        if event in LOOKUPS or (event in WITH_ADDRESS and isinstance(address, tuple) and address != PROBE):
            with notes.open("a") as file:
                file.write(f"{event} {arguments}\n")
            raise OSError("no network in this process")

    sys.addaudithook(refuse)


def train_unconnected(notes: Path, *arguments: str, is_offline: bool) -> "subprocess.CompletedProcess[str]":
    """The training command in a process of its own without network.

    Args:
        notes: file that is made when it tries to use one.
        arguments: of the command.
        is_offline: whether the libraries know it (``HF_HUB_OFFLINE``).
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(notes), *arguments],
        cwd=SCRIPT.parents[2],
        env=environment | ({"HF_HUB_OFFLINE": "1"} if is_offline else {}),
        capture_output=True,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    refuse_connections(Path(sys.argv[1]))
    from diffsynth_lite.cli.train import main

    sys.exit(main(sys.argv[2:]))
