"""Two nodes of a cluster, simulated on this machine: each with a network, a name and mounts of its own.

Needs root, iproute2 and util-linux. The kernel's namespaces are what containers are made of: between the two
nodes is a cable of the kernel's, which can be cut.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiny_run import REPOSITORY

from faults.bench import environment, wait_until

NEEDS = ("root", "ip", "nsenter", "setpriv", "unshare")
NAMES = ("node-a", "node-b")
PORT = 29500
"""Free on a node, whose network is its own."""
_ADDRESS = "10.99.0.{}"
_CABLE = "cable"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node that is there as long as its holder runs.

    Attributes:
        pid: of its first process.
        holder: the process whose end takes all others of the node with it.
    """

    name: str
    pid: int
    holder: "subprocess.Popen[bytes]"

    def run(self, *command: str) -> None:
        """Run a command on the node, to its end; it must not fail."""
        subprocess.run(self.entered(command), check=True, env=environment())

    def start(
        self, command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command on the node, in the repository."""
        with log.open("w") as file:
            return subprocess.Popen(
                self.entered(("env", "-C", str(REPOSITORY), *command)),
                env=environment() | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def processes(self, part: str = "") -> list[int]:
        """Processes of the node in whose command line a text is; but for its first one."""
        own, found = Path(f"/proc/{self.pid}/ns/pid").readlink(), []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.pid:
                continue
            try:
                is_here = (entry / "ns" / "pid").readlink() == own
                command = (entry / "cmdline").read_bytes()
            except OSError:  # it has ended meanwhile
                continue
            # One that is dead has none: nobody may be there to ask how it ended.
            if is_here and command and part.encode() in command:
                found.append(int(entry.name))
        return found

    def signal(self, number: int, part: str = "") -> None:
        """Signal those processes of the node in whose command line a text is."""
        for pid in self.processes(part):
            os.kill(pid, number)

    def mount(self, folder: Path, at: Path, *, read_only: bool = False) -> None:
        """Have a folder of the node be found at another path."""
        self.run("mount", "--bind", str(folder), str(at))
        if read_only:
            self.run("mount", "-o", "remount,bind,ro", str(at))

    def unmount(self, at: Path) -> None:
        """Take the last mount at a path away."""
        self.run("umount", str(at))

    def cut(self) -> None:
        """Take the network away: what was sent arrives nowhere, and nobody is notified."""
        self.run("ip", "link", "set", _CABLE, "down")

    def join(self) -> None:
        """Bring the network back."""
        self.run("ip", "link", "set", _CABLE, "up")

    def end(self) -> None:
        """End all processes of the node, and its network with them."""
        self.holder.kill()
        self.holder.wait()

    def entered(self, command: Sequence[str]) -> tuple[str, ...]:
        """The command that runs another one on the node."""
        return ("nsenter", "--target", str(self.pid), "--all", "--", *command)


@contextmanager
def two_nodes(root: Path) -> Iterator[tuple[Node, Node]]:
    """Two nodes that see the files of this machine, and each other under their names.

    Args:
        root: a folder for the files that they have of their own.
    """
    first, second = nodes = tuple(_held(name) for name in NAMES)
    hosts = root / "hosts"
    addresses = {_ADDRESS.format(place): name for place, name in enumerate(NAMES, start=1)}
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in addresses.items())]
    hosts.write_text("\n".join(lines) + "\n")
    try:
        # On the network of the first node only: there the second one has another process number.
        laying = ("nsenter", "--target", str(first.pid), "--net", "ip", "link", "add", _CABLE, "type", "veth")
        subprocess.run((*laying, "peer", "name", _CABLE, "netns", str(second.pid)), check=True)
        for node, address in zip(nodes, addresses, strict=True):
            node.run("hostname", node.name)
            node.run("ip", "link", "set", "lo", "up")
            node.run("ip", "address", "add", f"{address}/24", "dev", _CABLE)
            node.join()
            node.mount(hosts, Path("/etc/hosts"))
        yield first, second
    finally:
        for node in nodes:
            node.end()


def _held(name: str) -> Node:
    """A node whose first process sleeps, and which ends with this process."""
    separate = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    holder = subprocess.Popen(
        ("setpriv", "--pdeathsig", "KILL", "unshare", *separate, "sleep", "infinity"),
        stdin=subprocess.DEVNULL,
    )
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
    wait_until(children.read_text, name, limit_s=10)
    pid = int(children.read_text())
    # Until it has become the program that it shall be.
    wait_until(lambda: Path(f"/proc/{pid}/comm").read_text().strip() == "sleep", name, limit_s=10)
    return Node(name=name, pid=pid, holder=holder)
