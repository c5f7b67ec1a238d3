"""This file has the arguments that send a command to a Ray cluster, and runs the parts of one there."""

import argparse
import json
import logging
import os
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from diffsynth_lite.cli.arguments import positive_count
from diffsynth_lite.cli.processes import refuse_group
from diffsynth_lite.cluster.node import WRONG_INPUT, Ended
from diffsynth_lite.cluster.session import HERE, connected, num_slots, require_shared
from diffsynth_lite.cluster.tasks import run_tasks
from diffsynth_lite.config import Config, LoadedConfig
from diffsynth_lite.errors import RunStoppedError, UserError, join_lines

logger = logging.getLogger(__name__)

_MAX_FAILURES = 10
"""A run of days may lose some nodes; what fails at each start has failed by then."""
_RAY_FLAGS = ("--ray", "--ray-resources", "--gpus-per-task", "--parts")
_WRITTEN = ("output.dir", "data.cache_dir")
"""Settings of folders that are made where they are not there."""
_PARTS_PER_SLOT = 4
"""Tasks for each that the cluster runs at once, so that their costs even out."""


def add_ray_arguments(parser: argparse.ArgumentParser, *, parts: bool = False) -> None:
    """``--ray``, and what it needs to know.

    Args:
        parts: whether the command is split into parts.
    """
    group = parser.add_argument_group("on a Ray cluster")
    group.add_argument(
        "--ray",
        nargs="?",
        const=HERE,
        type=_address,
        metavar="ADDRESS",
        help="run there: auto, or HOST:PORT; without one Ray is started on this machine",
    )
    group.add_argument(
        "--ray-resources",
        type=_resources,
        default={},
        metavar="JSON",
        help="that each task needs, as Ray knows them, such as '{\"A100\": 1}'; CPU is 1 unless given",
    )
    if parts:
        group.add_argument(
            "--gpus-per-task",
            type=_share,
            metavar="X",
            help="a share such as 0.5 is shared by two; 0 uses CPUs (default: 1)",
        )
        group.add_argument(
            "--parts",
            type=positive_count,
            metavar="N",
            help=f"tasks in all (default: {_PARTS_PER_SLOT} for each that runs at once)",
        )


def add_training_arguments(parser: argparse.ArgumentParser, *, run: bool = True) -> None:
    """``--ray`` of commands that train.

    Args:
        run: whether the command is one run, which has a number of nodes.
    """
    add_ray_arguments(parser)
    flags = {
        "gpus-per-node": "a process for each; 0 is one on the CPU (default: 1)",
        "max-failures": f"after which it is not started again (default: {_MAX_FAILURES})",
    }
    if run:
        flags["num-nodes"] = "that train together (default: 1)"
        flags["min-nodes"] = "that will do where no more are free (default: all of them)"
    for name, text in flags.items():
        parser.add_argument(f"--{name}", type=_count, metavar="N", help=f"with --ray: {text}")


def ray_words(parsed: argparse.Namespace) -> list[str]:
    """The arguments of :func:`add_training_arguments`, as words for ``train``."""
    words = ["--ray", parsed.ray]
    if parsed.ray_resources:
        words += ["--ray-resources", json.dumps(parsed.ray_resources)]
    for name in ("gpus_per_node", "max_failures"):
        if (value := getattr(parsed, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def refuse_without_ray(parsed: argparse.Namespace, *names: str) -> None:
    """Refuse flags that have no effect without ``--ray``."""
    for name in ("ray_resources", *names):
        if getattr(parsed, name) not in (None, {}):
            raise UserError(
                f"--{name.replace('_', '-')}: has no effect without --ray; add it, or leave it out"
            )


def _needs(parsed: argparse.Namespace, gpus: float) -> dict[str, float]:
    """All that each task needs, by name."""
    return {"CPU": 1.0, **({"GPU": gpus} if gpus else {}), **parsed.ray_resources}


def without_ray(words: Sequence[str]) -> list[str]:
    """The words of a command, without what :func:`add_ray_arguments` adds."""
    left, rest = list[str](), list(words)
    while rest:
        name, has_value, _ = (word := rest.pop(0)).partition("=")
        if name not in _RAY_FLAGS:
            left.append(word)
        elif not has_value and rest and not rest[0].startswith("-"):
            rest.pop(0)
    return left


def shared_folder(text: str, *, key: str) -> Path:
    """The whole path of a folder or file that all nodes see.

    Args:
        key: the setting or flag that names it, for messages.

    Raises:
        UserError: it is in an object store.
    """
    if "://" in text:
        raise UserError(
            f"{key}: {text}: is in an object store, which commands on a cluster do not read; mount it as a "
            "folder on all nodes"
        )
    return Path(text).expanduser().resolve()


def folders_of(config: Config, *, sections: Container[str] = Config.model_fields) -> list[Path]:
    """The files and folders that settings name for reading, and ``output.copy_to``; not what is on a hub.

    Args:
        sections: of the config, whose settings matter.
    """
    sources = config.data.sources_by_key.items()
    datasets = [(f"{key}.dataset", source.dataset) for key, source in sources if source.dataset]
    found = list[Path]()
    for key, path in (*config.paths(), *datasets):
        is_uri = key == "data.sealed" and "://" in path  # which each node reads by itself
        if key.partition(".")[0] in sections and key not in _WRITTEN and not is_uri:
            found.append(shared_folder(path, key=key))
    return list(dict.fromkeys(path for path in found if path.exists()))


def run_parts(
    parsed: argparse.Namespace,
    words: Sequence[str],
    costs: Mapping[str, float],
    *,
    written: Sequence[Path],
    read: Sequence[Path],
    gpus: float | None = None,
    then: Sequence[str] = (),
) -> list[Ended]:
    """Run a command in parts on a cluster.

    Args:
        words: of the command, after the name of the program, started in this folder on all nodes.
        costs: of its items, by name, in any unit.
        written: folders that it writes to.
        read: files and folders that it reads.
        gpus: of each task, unless given; None is one, where there are any.
        then: words of a command that is run once all parts are done.

    Returns:
        How the parts ended, and the command after them.
    """
    with connected(parsed.ray) as ray:
        if parsed.gpus_per_task is not None:
            gpus = parsed.gpus_per_task
        needs = _needs(parsed, default_gpus(ray, parsed) if gpus is None else gpus)
        slots = num_slots(ray, needs)
        require_shared(ray, needs, written=written, read=read)
        count = parsed.parts or _PARTS_PER_SLOT * max(1, slots)
        parts = parts_by_cost(costs, max(1, min(count, len(costs))))
        logger.info("%d items in %d parts; %d run at once now", len(costs), len(parts), slots)
        ended = list[Ended]()
        with Progress(console=Console(stderr=True, emoji=False)) as progress:
            bar = progress.add_task("parts", total=sum(parts.values()))
            tasks = [(part, [*words, "--part", part]) for part in parts]
            for each in run_tasks(ray, tasks, str(Path.cwd()), needs):
                ended.append(each)
                progress.advance(bar, parts[each.name])
                outcome = f"failed: {each.last_line}" if each.exit_code else "done"
                logger.info("part %s: %s; %d of %d", each.name, outcome, len(ended), len(parts))
        if then and not any(each.exit_code for each in ended):
            ended += run_tasks(ray, [("all", then)], str(Path.cwd()), needs)
    return ended


def require_done(ended: Sequence[Ended]) -> None:
    """Check that all parts were done.

    Raises:
        UserError: those that were not have wrong input.
        RunStoppedError: some failed, also when they were tried again.
    """
    failed = [each for each in ended if each.exit_code]
    if failed:
        lines = join_lines([f"part {each.name}: {each.last_line}" for each in failed])
        is_input = all(each.exit_code == WRONG_INPUT for each in failed)
        raise (UserError if is_input else RunStoppedError)(
            f"{lines}\n{len(failed)} of {len(ended)} failed; the same command goes on with what is missing"
        )


def parts_by_cost(costs: Mapping[str, float], count: int) -> dict[str, float]:
    """The parts that have items, those that take longest first, with their costs.

    So the last to end are short ones, however many nodes there are and whenever they come.
    """
    from diffsynth_lite.data.records import part_index

    by_part = dict[int, float]()
    for name, cost in costs.items():
        index = part_index(name, count)
        by_part[index] = by_part.get(index, 0.0) + cost
    order = sorted(by_part, key=lambda index: -by_part[index])
    return {f"{index}/{count}": by_part[index] for index in order}


def train_there(
    parsed: argparse.Namespace, loaded: LoadedConfig, words: Sequence[str], *, again: str | None
) -> None:
    """Train on the nodes of a cluster.

    Args:
        words: of ``train``, after its name.
        again: the command that goes on with the run, for its messages.
    """
    from diffsynth_lite.cluster.training import TrainingRequest, train_on_cluster

    num_nodes = 1 if parsed.num_nodes is None else parsed.num_nodes
    min_nodes = num_nodes if parsed.min_nodes is None else parsed.min_nodes
    if not 1 <= min_nodes <= num_nodes:
        raise UserError(f"--num-nodes {num_nodes}, --min-nodes {min_nodes}: at least 1, and no more than all")
    refuse_group(os.environ, "train --ray")
    config, here = loaded.config, Path.cwd()
    run_folder = shared_folder(config.output.dir, key="output.dir")
    cache = [shared_folder(config.data.cache_dir, key="data.cache_dir")] if config.data.cache else []
    read = [here, loaded.path.resolve(), *folders_of(config)]
    with connected(parsed.ray) as ray:
        gpus = default_gpus(ray, parsed) if parsed.gpus_per_node is None else parsed.gpus_per_node
        needs = _needs(parsed, gpus)
        require_shared(ray, needs, written=[run_folder.parent, *cache], read=read)
        words = ["--config", str(loaded.path.resolve()), *words[2:], f"output.dir={run_folder}"]
        train_on_cluster(
            ray,
            TrainingRequest(
                command=again or "",
                words=words,
                folder=str(here),
                run_folder=str(run_folder),
                num_nodes=num_nodes,
                min_nodes=min_nodes,
                processes=max(1, int(gpus)),
                failures=_MAX_FAILURES if parsed.max_failures is None else parsed.max_failures,
            ),
            needs,
        )


def default_gpus(ray: Any, parsed: argparse.Namespace) -> float:
    """GPUs of a task where nobody gave their number: 1, or 0 on this machine if it has none.

    Raises:
        UserError: the cluster has none now; nodes with GPUs may be added once they are asked for.
    """
    if ray.cluster_resources().get("GPU", 0):
        return 1
    if parsed.ray == HERE:
        return 0
    flag = "--gpus-per-task" if hasattr(parsed, "gpus_per_task") else "--gpus-per-node"
    raise UserError(
        f"{flag}: no node has a GPU now; give 1 where one with a GPU is added when it is asked for, or 0 to "
        "use CPUs"
    )


def _address(text: str) -> str:
    if "=" in text:
        raise argparse.ArgumentTypeError(
            f"{text}: is a setting and not an address; write --ray after the settings, or --ray auto"
        )
    if "://" in text or (":" not in text and text not in ("auto", HERE)):
        raise argparse.ArgumentTypeError(
            f"{text}: auto or HOST:PORT, on a machine of the cluster, as ray start printed it"
        )
    return text


def _resources(text: str) -> dict[str, float]:
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if isinstance(given, dict) and "GPU" in given:
        raise argparse.ArgumentTypeError(f"{text}: GPU is what --gpus-per-task and --gpus-per-node ask for")
    if not isinstance(given, dict) or not all(
        isinstance(amount, int | float) and not isinstance(amount, bool) and amount > 0
        for amount in given.values()
    ):
        raise argparse.ArgumentTypeError(f'{text}: names with numbers above 0 as JSON, such as {{"A100": 1}}')
    return given


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: a whole number")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 <= value <= 1 or (value > 1 and value.is_integer())):
        raise argparse.ArgumentTypeError(f"{text}: 0, a share of a GPU such as 0.5, or a whole number")
    return value
