"""This file joins a Ray cluster, or starts one, and checks that its nodes see the folders of a command."""

import contextlib
import logging
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffsynth_lite import __version__
from diffsynth_lite.cluster.node import look
from diffsynth_lite.errors import Problems, UserError, join_names

if TYPE_CHECKING:
    import ray

logger = logging.getLogger(__name__)

HERE = "local"
"""The address that starts Ray on this machine, whatever else runs here."""
_ANSWER_S = 10.0
_CHECK_S = 120.0
"""Time in which all nodes answer; what they have to import first takes some seconds."""
_SEES_NO_GPU = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
"""For tasks without a GPU, to which Ray 2.60 leaves all those of their node."""


def _require_answer(address: str) -> None:
    """Check that something listens at ``HOST:PORT``: Ray itself would wait for minutes.

    Raises:
        OSError: nothing does.
    """
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()


@contextmanager
def connected(address: str) -> Iterator["ray"]:
    """Scope in which the cluster is joined; yields the module of Ray.

    Args:
        address: ``HOST:PORT`` of a cluster, "auto" for the one of this machine, or :data:`HERE`.

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
        _require_answer(address)
        # What Ray Train starts to watch a run looks for a cluster by itself, and finds that of somebody else.
        own = {"RAY_ADDRESS": address} if ":" in address else {}
        variables = {"env_vars": {**_SEES_NO_GPU, **own}}
        ray.init(address=address, logging_level=logging.WARNING, runtime_env=variables)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"--ray {address}: {reason}; give the address of a running cluster, as ray start printed it, "
            "with RAY_AUTH_MODE=token set if it has a token, auto for the one of this machine, or no address "
            "to start one here"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def require_shared(
    ray: Any, needs: Mapping[str, float], *, written: Sequence[Path], read: Sequence[Path]
) -> None:
    """Check that all nodes that can run a task have this version, and see all folders at the same paths.

    A file is written to each folder here, and read on every node.

    Args:
        needs: what a task needs, by the names that the cluster gave them.
        written: folders that the command writes to; they are made.
        read: files and folders that it only reads.

    Raises:
        UserError: names each node that does not.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in _alive(ray) if _slots_of(node, needs)]
    if not nodes:
        logger.warning("--ray: no node has %s; waits until one is added", needs)
    with _tokens(written) as tokens:
        remote = ray.remote(num_cpus=0, max_retries=1)(look)
        looks = []
        for node in nodes:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = remote.options(scheduling_strategy=there)
            looks.append(task.remote([str(path) for path in read], tokens))
        ray.wait(looks, num_returns=len(looks), timeout=_CHECK_S)
        problems = Problems()
        for node, seen in zip(nodes, looks, strict=True):
            problems.extend(_problems(ray, node, seen))
    problems.require_none()


def _alive(ray: Any) -> list[Mapping[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def num_slots(ray: Any, needs: Mapping[str, float]) -> int:
    """Tasks with such needs that the nodes can run at once, as they are now."""
    return sum(_slots_of(node, needs) for node in _alive(ray))


def _slots_of(node: Mapping[str, Any], needs: Mapping[str, float]) -> int:
    # 1 // 0.2 is 4; Ray counts in ten-thousandths.
    return min(int(node["Resources"].get(name, 0) / amount + 1e-4) for name, amount in needs.items())


def _problems(ray: Any, found: Mapping[str, Any], seen: Any) -> Iterator[str]:
    node = f"{found['NodeManagerHostname']} ({found['NodeManagerAddress']})"
    try:
        missing, version = ray.get(seen, timeout=0)
    except (ray.exceptions.RayError, ModuleNotFoundError) as error:
        if found["NodeID"] not in [other["NodeID"] for other in _alive(ray)]:
            return  # It was lost since.
        cause = getattr(error, "cause", None) or error
        reason = str(cause).strip().splitlines()[-1]
        yield f"--ray: {node}: cannot run this package: {reason}; install the same version on all nodes"
        return
    if missing:
        yield (
            f"--ray: {node}: does not see {join_names(missing)}; mount a shared folder at the same path on "
            "all nodes"
        )
    if version != __version__:
        yield f"--ray: {node}: has version {version}, and {socket.gethostname()} {__version__}"


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
