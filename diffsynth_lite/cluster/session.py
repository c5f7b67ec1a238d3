"""This file joins a Ray cluster, or starts one, and checks that its nodes see the folders of a command."""

import contextlib
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffsynth_lite import __version__
from diffsynth_lite.cluster.node import version, what_is_missing
from diffsynth_lite.errors import Problems, UserError, join_names

if TYPE_CHECKING:
    import ray

_ANSWER_S = 10.0
_CHECK_S = 120.0
"""Time in which a node answers; what it has to import first takes some seconds."""


@dataclass(frozen=True, kw_only=True)
class ClusterRequest:
    """What a command asks of Ray.

    Attributes:
        address: of a cluster, or "auto" for the one of this machine; None starts one here.
        gpus: of each task; a share such as 0.5 is shared by two.
        resources: that each task needs, by the names that the cluster gave them; "CPU" is 1 unless given.
        retries: of a task that was killed or lost its node.
    """

    address: str | None = None
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    retries: int = 2

    @property
    def bundle(self) -> dict[str, float]:
        """All that a task needs, by name."""
        return {"CPU": 1.0, **({"GPU": self.gpus} if self.gpus else {}), **self.resources}


def _require_answer(address: str) -> None:
    """Check that something listens at ``HOST:PORT``: Ray itself would wait for minutes.

    Raises:
        OSError: nothing does.
    """
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()


@contextmanager
def connected(request: ClusterRequest) -> Iterator["ray"]:
    """Scope in which the cluster is joined; yields the module of Ray.

    Raises:
        UserError: Ray is not installed, or there is no cluster at the address.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError(
            "--ray: Ray is not installed; install it on all nodes with pip install 'diffsynth_lite[ray]'"
        ) from None
    try:
        _require_answer(request.address or "")
        ray.init(address=request.address, include_dashboard=None, logging_level="warning")
    except (OSError, OverflowError, ValueError) as error:
        given = request.address or ""
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"--ray {given}: {reason}; give the address of a running cluster, as ray start printed it, auto "
            "for the one of this machine, or no address to start one here"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def require_shared(ray: Any, *, written: Sequence[Path], read: Sequence[Path]) -> None:
    """Check that all nodes have this version, and see all folders at the same paths.

    A file is written to each folder here, and read on every node.

    Args:
        written: folders that the command writes to; they are made.
        read: files and folders that it only reads.

    Raises:
        UserError: names each node that does not.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = _alive(ray)
    with _tokens(written) as tokens:
        looks = {}
        for node in nodes:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(num_cpus=0, scheduling_strategy=there, max_retries=1)
            looks[node["NodeID"]] = (
                task(what_is_missing).remote([str(path) for path in read], tokens),
                task(version).remote(),
            )
        problems = Problems()
        for node in nodes:
            problems.extend(_problems(ray, node, *looks[node["NodeID"]]))
    problems.require_none()


def _alive(ray: Any) -> list[Mapping[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _problems(ray: Any, found: Mapping[str, Any], missing: Any, found_version: Any) -> Iterator[str]:
    node = f"{found['NodeManagerHostname']} ({found['NodeManagerAddress']})"
    try:
        lacking, its_version = ray.get([missing, found_version], timeout=_CHECK_S)
    except (ray.exceptions.RayError, ModuleNotFoundError) as error:
        if found["NodeID"] not in [other["NodeID"] for other in _alive(ray)]:
            return  # It was lost since.
        cause = getattr(error, "cause", None) or error
        reason = str(cause).strip().splitlines()[-1]
        yield f"--ray: {node}: cannot run this package: {reason}; install the same version on all nodes"
        return
    if lacking:
        yield (
            f"--ray: {node}: does not see {join_names(lacking)}; mount a shared folder at the same path on "
            "all nodes"
        )
    if its_version != __version__:
        yield f"--ray: {node}: has version {its_version}, and {socket.gethostname()} {__version__}"


@contextmanager
def _tokens(folders: Sequence[Path]) -> Iterator[dict[str, str]]:
    """Scope in which each folder has a file of which only its text shows that it is the same folder."""
    text, files = secrets.token_hex(16), list[Path]()
    try:
        for folder in dict.fromkeys(folders):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file = folder / f".tmp-{text}.ray"
                file.write_text(text)
            except OSError as error:
                raise UserError(f"{folder}: cannot be written to: {error.strerror}") from None
            files.append(file)
        yield {str(file): text for file in files}
    finally:
        for file in files:
            with contextlib.suppress(OSError):
                file.unlink()
