"""A SLURM of two simulated nodes: its own programs, as Debian has them, on nodes of this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from faults.bench import environment, wait_until
from faults.nodes import NAMES, NEEDS, Node, two_nodes

SLURM_NEEDS = (*NEEDS, "munged", "sbatch", "scancel", "scontrol", "slurmctld", "slurmd", "srun")
GPUS_PER_NODE = 2
"""That SLURM is configured with; there are none."""
_CONFIG = """
ClusterName=simulated
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
SlurmdParameters=config_overrides
InactiveLimit=0
KillWait=30
SlurmdTimeout=60
ReturnToService=2
NodeName={nodes} CPUs=8 Sockets=1 CoresPerSocket=8 RealMemory=1000 Gres=gpu:{gpus}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_READY_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A SLURM that takes jobs.

    Attributes:
        nodes: on the first one its controller runs, too.
    """

    root: Path
    nodes: tuple[Node, Node]

    def output_of(self, *command: str) -> str:
        """The output of a SLURM command, which must not fail."""
        done = self._called(*command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def submit(self, *arguments: str) -> str:
        """Put a script into the queue; the number of the job."""
        return self.output_of("sbatch", "--parsable", *arguments).strip()

    def wait_until(self, job: str, state: str, *, limit_s: float) -> None:
        """Wait until a job is in a state, such as RUNNING or COMPLETED."""
        wait_until(lambda: self.shown(job, "JobState") == state, f"job {job} {state}", limit_s)

    def shown(self, job: str, field: str) -> str:
        """A field of what SLURM reports of a job."""
        fields = self.output_of("scontrol", "--oneliner", "show", "job", job).split()
        return dict(part.split("=", 1) for part in fields if "=" in part)[field]

    def start_slurmd(self, node: Node) -> "subprocess.Popen[bytes]":
        """Have a node report to the controller, and take jobs."""
        log = self.root / f"printed by {node.name}"
        return node.start(("slurmd", "-D", "-N", node.name), log, self.environment())

    def wait_until_ready(self) -> None:
        """Wait until both nodes take jobs."""
        nodes = "scontrol", "--oneliner", "show", "nodes"
        wait_until(
            lambda: self._called(*nodes).stdout.count(" State=IDLE ") == len(self.nodes),
            "both nodes idle",
            _READY_WITHIN_S,
        )

    def environment(self) -> dict[str, str]:
        """Variables of SLURM's programs, and so of the jobs that are submitted."""
        programs = Path(sys.executable).parent
        return environment() | {
            "SLURM_CONF": str(self.root / "slurm.conf"),
            "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        }

    def _called(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.nodes[0].entered(("env", "-C", str(self.root), *command)),
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )


@contextmanager
def simulated_slurm(root: Path) -> Iterator[Cluster]:
    """A SLURM with two nodes.

    Args:
        root: an empty folder for its files.
    """
    (root / "state").mkdir()
    with two_nodes(root) as nodes:
        configured = _CONFIG.format(first=NAMES[0], root=root, nodes=",".join(NAMES), gpus=GPUS_PER_NODE)
        (root / "slurm.conf").write_text(configured)
        for number in range(GPUS_PER_NODE):
            (root / f"gpu{number}").touch()
        (root / "gres.conf").write_text(f"Name=gpu File={root}/gpu[0-{GPUS_PER_NODE - 1}]\n")
        key = root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        cluster = Cluster(root=root, nodes=nodes)
        files = {"socket": "munge.socket", "key-file": key.name, "pid-file": "munge.pid"}
        files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        paths = [f"--{name}={root / file}" for name, file in files.items()]
        variables = cluster.environment()
        daemons = [
            nodes[0].start(("munged", "--foreground", "--force", *paths), root / "munged", variables),
            nodes[0].start(("slurmctld", "-D", "-i"), root / "printed by slurmctld", variables),
        ]
        daemons += [cluster.start_slurmd(node) for node in nodes]
        cluster.wait_until_ready()
        yield cluster
    for daemon in daemons:
        daemon.wait()
