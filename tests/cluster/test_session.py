"""What nodes have, and what a task on one sees of it."""

import os
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from nodes import Nodes

from diffsynth_lite.cluster.node import Ended
from diffsynth_lite.cluster.session import connected, num_slots
from diffsynth_lite.cluster.tasks import run_tasks


def test_tasks_that_run_at_once_are_counted_by_node_and_not_on_those_that_are_lost() -> None:
    def node(*, is_alive: bool = True, **resources: float) -> dict[str, object]:
        return {"Alive": is_alive, "Resources": resources}

    found = [node(CPU=8, GPU=3), node(CPU=8, GPU=1), node(CPU=64), node(CPU=0, GPU=8)]
    ray = SimpleNamespace(nodes=lambda: [*found, node(is_alive=False, CPU=8, GPU=8)])
    assert num_slots(ray, {"CPU": 1, "GPU": 2}) == 1
    assert num_slots(ray, {"CPU": 1, "GPU": 0.2}) == 8 + 5
    assert num_slots(ray, {"CPU": 1, "A100": 1}) == 0


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_task_sees_as_many_gpus_of_its_node_as_it_asked_for(cluster: Nodes) -> None:
    def work(name: str, words: Sequence[str], folder: str) -> Ended:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        return Ended(name=name, node="", exit_code=0, last_line=visible)

    node = cluster.cluster.add_node(num_cpus=1, num_gpus=2, resources={"card": 1}, include_dashboard=False)
    with connected(cluster.address) as ray:
        for gpus, visible in (({}, ""), ({"GPU": 1}, "0"), ({"GPU": 2}, "0,1")):
            needs = {"CPU": 1, "card": 1, "memory": 1e6} | gpus
            [ended] = run_tasks(ray, [("", [])], "/", needs, work=work)
            assert ended.last_line == visible
    cluster.cluster.remove_node(node)
