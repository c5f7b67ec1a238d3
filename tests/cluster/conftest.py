"""A Ray cluster of three nodes and a head, and a tiny run on it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import Nodes, make_tiny_run
from tiny_run import TinyRun

from diffsynth_lite.pipelines.qwen_image import tiny

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def nodes(cluster: Nodes) -> Nodes:
    cluster.restore()
    return cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Nodes]:
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        yield Nodes(cluster)
        cluster.shutdown()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_qwen_image")
    tiny().save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_run(tmp_path: Path, tiny_model: Path) -> TinyRun:
    return make_tiny_run(tmp_path / "r", tiny_model)
