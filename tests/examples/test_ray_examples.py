"""The clusters of examples/ray: Ray accepts them, and their command is one of ours."""

import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from diffsynth_lite.cli.main import build_parser

FOLDER = Path(__file__).parents[2] / "examples" / "ray"


def test_the_cluster_of_a_cloud_is_valid_to_ray() -> None:
    ray = pytest.importorskip("ray")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    cluster = yaml.safe_load((FOLDER / "cluster.yaml").read_text())
    jsonschema.validate(cluster, schema)
    assert cluster["head_node_type"] in cluster["available_node_types"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster | {"head_type": "head"}, schema)


def test_the_job_of_kubernetes_runs_a_command_that_there_is() -> None:
    job = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())
    program, *words = shlex.split(job["spec"]["entrypoint"])
    parsed = build_parser().parse_args(words)
    assert (program, parsed.ray, parsed.num_nodes) == ("diffsynth-lite", "auto", 2)
    [workers] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["minReplicas"] == parsed.num_nodes
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == parsed.gpus_per_node
