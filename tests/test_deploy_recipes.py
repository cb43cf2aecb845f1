"""The files in ``examples/deploy``: what they name exists, what they say twice agrees, and Ray takes its parts."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from apache_beam.options.pipeline_options import PipelineOptions
from packaging.version import Version

from luminosity._shared.flags import MODEL_FLAGS, RUNNER_FLAGS
from luminosity.cli import import_commands
from luminosity.dataflow import image_recipe
from luminosity.engine.options import EngineConfig
from luminosity.engine.resources.drafts import Pool
from luminosity.engine.resources.hints import Needs
from luminosity.engine.resources.machine import LeaseNeeds, Machine, Node
from luminosity.engine.resources.pools import assign
from tests.docs_pages import REPOSITORY

FOLDER = REPOSITORY / "examples" / "deploy"
FILES = {path.name: path.read_text() for path in sorted(FOLDER.iterdir())}
PAGE = (REPOSITORY / "docs" / "deploy.md").read_text()

_OF_SCRIPTS = {"--input", "--output"}  # of the pipelines in the recipes, not of the runner
_OF_DATAFLOW = {"--project", "--region", "--temp_location", "--sdk_container_image"}
_STOP_S = 30 + 20  # after --stop_timeout: for the copy, and for workers to tear down and end
_VERIFY_TIMEOUT_S = 60


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all(FILES[name]))


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield each ``lum …`` of the files, without comments, with the file's name."""
    for name, text in FILES.items():
        code = re.sub(r"(?m)(^|\s)#.*$", "", text)
        code = re.sub(r"\\\n\s+", " ", code)  # of the unit
        for words in re.findall(r"(?:^|[ /])lum ((?:[^\n;#]|\n(?= +--))*)", code):
            yield name, shlex.split(words)
    (stream,) = [each for each in containers("stream.yaml") if each["name"] == "stream"]
    assert stream["args"][0] == "lum"
    yield "stream.yaml", stream["args"][1:]


def containers(name: str) -> list[dict[str, Any]]:
    """Return all containers of a file's pods."""

    def inside(value: Any) -> Iterator[dict[str, Any]]:
        if isinstance(value, dict):
            found: dict[str, Any] = value
            yield from found.get("containers", ())
            for each in found.values():
                yield from inside(each)
        elif isinstance(value, list):
            several: list[Any] = value
            for each in several:
                yield from inside(each)

    return list(inside(documents(name)))


def options(words: Sequence[str]) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in words) if name.startswith("--")}


def seconds(time: str) -> int:
    return int(time.rstrip("sm")) * (60 if time.endswith("m") else 1)


def command_helps() -> Mapping[str, str]:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    for module in import_commands("").values():
        module.add_to(subparsers)
    return {name: each.format_help() for name, each in subparsers.choices.items()}


def test_commands_and_options_exist() -> None:
    helps = command_helps()
    of_run = {f"--{flag.name}" for flag in (*RUNNER_FLAGS, *MODEL_FLAGS)} | _OF_SCRIPTS
    found = list(commands())
    assert {name for name, _ in found} == {
        "pipeline-ci.yaml",
        "rayjob.yaml",
        "stream.service",
        "stream.yaml",
    }
    for name, words in found:
        command = words[0]
        assert command in helps, f"{name}: lum {command}"
        for option in options(words):
            if command == "run":
                assert option in of_run, f"{name}: lum run has no {option}"
            else:
                assert option in helps[command], f"{name}: lum {command} has no {option}"
    (job,) = documents("pipeline-ci.yaml")
    of_export = options(job["jobs"]["pipeline"]["env"]["DATAFLOW"].split())
    assert set(of_export) == _OF_DATAFLOW | _OF_SCRIPTS


def test_the_page_names_all_files_and_no_options_that_are_not_there() -> None:
    for name in FILES:
        assert f"(../examples/deploy/{name})" in PAGE
    known = {f"--{flag.name}" for flag in (*RUNNER_FLAGS, *MODEL_FLAGS)}
    with_underscore = set(re.findall(r"`(--[a-z]+_[a-z_]+)", PAGE))
    assert with_underscore
    assert with_underscore <= known


@pytest.mark.parametrize("kind", ["systemd", "kubernetes"])
def test_a_stop_has_the_time_that_it_takes(kind: str) -> None:
    if kind == "systemd":
        (limit,) = map(int, re.findall(r"(?m)^TimeoutStopSec=(\d+)$", FILES["stream.service"]))
        name = "stream.service"
    else:
        limit = documents("stream.yaml")[1]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        name = "stream.yaml"
    for each, words in commands():
        if each == name and words[0] == "run":
            assert limit >= seconds(options(words)["--stop_timeout"]) + _STOP_S


def test_the_stream_on_kubernetes_has_one_owner_and_its_parts_agree() -> None:
    service, stateful_set = documents("stream.yaml")
    spec = stateful_set["spec"]
    pod = spec["template"]["spec"]
    (claim,) = spec["volumeClaimTemplates"]
    assert (stateful_set["kind"], spec["replicas"], spec["serviceName"]) == (
        "StatefulSet",
        1,
        service["metadata"]["name"],
    )
    assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"]
    labels = spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == spec["selector"]["matchLabels"] == labels
    assert "restartPolicy" not in pod  # a StatefulSet takes Always alone

    stream, metrics = pod["containers"]
    named = options(stream["args"])
    assert named["--checkpoint_copy"] == named["--restore_from"]
    (state,) = [each["mountPath"] for each in stream["volumeMounts"] if each["name"] == claim["metadata"]["name"]]
    for option in ("--checkpoint_dir", "--run_dir", "--model_cache"):  # below the volume: its root may have lost+found
        assert named[option].startswith(f"{state}/")
    volumes = {each["name"] for each in pod["volumes"]} | {claim["metadata"]["name"]}
    for container in pod["containers"]:
        assert {each["name"] for each in container["volumeMounts"]} <= volumes
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert container["image"] == stream["image"]
    (line,) = metrics["command"][2:]
    (port,) = metrics["ports"]
    assert f"--run_dir={named['--run_dir']} " in line
    assert f"http.server {port['containerPort']} " in line
    assert (service["spec"]["ports"][0]["port"], service["spec"]["ports"][0]["targetPort"]) == (9464, port["name"])
    assert f":{port['containerPort']}/metrics.txt" in PAGE


def test_the_unit_is_one_for_systemd(tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd-analyze is not installed")
    (program,) = re.findall(r"(?m)^ExecStart=(\S+)", FILES["stream.service"])
    unit = tmp_path / "stream.service"
    unit.write_text(FILES["stream.service"].replace(program, sys.executable))  # it must exist
    done = subprocess.run(
        [verify, "verify", str(unit)], capture_output=True, text=True, timeout=_VERIFY_TIMEOUT_S, check=False
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.name in line]) == (0, []), done.stderr


def ray_groups() -> dict[str, dict[str, Any]]:
    """Return the groups of nodes of both recipes as Ray's autoscaler has them, which checks them."""
    util = pytest.importorskip("ray.autoscaler._private.util")
    from ray.autoscaler._private.kuberay import autoscaling_config

    prepared = util.prepare_config(documents("ray-cluster.yaml")[0])
    util.validate_config(prepared)
    cluster = documents("kuberay.yaml")[1]
    cluster["metadata"]["namespace"] = "default"
    derive: Any = vars(autoscaling_config)["_derive_autoscaling_config_from_ray_cr"]
    derived = derive(cluster)  # checked with the same schema
    return {"aws": prepared["available_node_types"], "kuberay": derived["available_node_types"]}


def test_both_ray_clusters_have_the_same_groups_that_begin_with_no_nodes() -> None:
    groups = ray_groups()
    groups["kuberay"]["head"] = groups["kuberay"].pop("headgroup")
    assert set(groups["aws"]) == set(groups["kuberay"]) == {"head", "cpu", "gpu"}
    for name, of_aws in groups["aws"].items():
        on_kubernetes = groups["kuberay"][name]
        for each in (of_aws, on_kubernetes):
            assert each["min_workers"] == 0
            each["resources"].pop("memory", None)  # on AWS, Ray looks it up
        assert of_aws["max_workers"] == on_kubernetes["max_workers"]
        assert of_aws["resources"] == on_kubernetes["resources"]
    most = sum(each["max_workers"] for each in groups["aws"].values())
    assert documents("ray-cluster.yaml")[0]["max_workers"] == most


def test_the_parts_of_the_ray_recipes_agree() -> None:
    import ray

    ((aws,), (claim, cluster), (job,)) = (documents(f"{name}.yaml") for name in ("ray-cluster", "kuberay", "rayjob"))
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    assert cluster["spec"]["rayVersion"] == f"{Version(ray.__version__).major}.{Version(ray.__version__).minor}.0"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert aws["idle_timeout_minutes"] * 60 == cluster["spec"]["autoscalerOptions"]["idleTimeoutSeconds"]
    specs = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for pod in (each["template"]["spec"] for each in specs):
        (container,) = pod["containers"]
        assert container["image"] == aws["docker"]["image"]
        assert container["volumeMounts"] == [{"name": "shared", "mountPath": "/shared"}]
        assert pod["volumes"] == [{"name": "shared", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}]
        assert container["resources"]["limits"] == container["resources"]["requests"]
    assert "--volume=/shared:/shared" in aws["docker"]["run_options"]
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:2] == ["env", "--chdir=/shared"]
    assert not set(job["spec"]["entrypoint"]) & set("&;|'\"$")  # KubeRay puts it into a command of a shell
    assert "lum run /app/pipeline/pipeline.py --ray_address=auto --cpu_workers=64 --accelerators=4" in PAGE


def test_a_run_that_starts_with_the_head_alone_plans_workers_for_which_nodes_can_come() -> None:
    """What the page says about a start with no nodes, by the plan of the engine for the recipe's head."""
    groups = ray_groups()["kuberay"]
    named = options(shlex.split(documents("rayjob.yaml")[0]["spec"]["entrypoint"]))
    accelerators, cpu_workers = int(named["--accelerators"]), int(named["--cpu_workers"])
    head = Node("1", "10.0.0.1", groups["headgroup"]["resources"]["CPU"], groups["headgroup"]["resources"]["memory"])

    def pool(needs: Needs, declared: int | None = accelerators) -> Pool:
        config = EngineConfig.of(PipelineOptions([f"--cpu_workers={cpu_workers}"]))
        machine = Machine.of_cluster([head], declared, ["T4", "TPU-V5E"])
        return assign([(_Stage(), needs)], machine, config, is_quiet=True)["Step"].pool

    cpu, device = pool(Needs()), pool(Needs(accelerator_count=1, accelerator_type="nvidia-tesla-t4", cpu_count=4))
    assert (cpu.workers, set(cpu.nodes)) == (cpu_workers, {""})
    assert (device.workers, set(device.nodes)) == (accelerators, {""})
    assert device.lease is not None
    assert (device.lease.gpus, device.lease.accelerator_type, device.lease.cpus) == (1, "T4", 4)
    most = {name: (each["max_workers"], each["resources"]) for name, each in groups.items()}
    assert most["cpu"][0] * most["cpu"][1]["CPU"] >= cpu_workers
    assert most["gpu"][0] * most["gpu"][1]["GPU"] >= accelerators
    assert not pool(Needs(accelerator_count=1), declared=None).device_groups  # without --accelerators
    large = pool(Needs(min_ram_bytes=8 << 30, cpu_count=8))
    assert (large.workers, set(large.nodes), large.lease) == (cpu_workers, {""}, LeaseNeeds(8, 8 << 30, 0))
    chips = pool(Needs(accelerator_count=4, accelerator_type="TPU-V5E"))
    assert chips.lease is not None
    assert (chips.lease.accelerator_kind, chips.workers, set(chips.nodes)) == ("tpu", accelerators // 4, {""})


class _Stage:
    id = label = "Step"
    is_source = False


def test_the_flex_template_fits_its_image_and_the_pipeline() -> None:
    spec = json.loads(FILES["flex-template.json"])
    dockerfile = FILES["flex-template.Dockerfile"]
    assert set(spec) == {"image", "sdkInfo", "metadata"}
    assert spec["sdkInfo"] == {"language": "PYTHON"}
    assert f"--tag {spec['image']} " in dockerfile
    assert set(spec["metadata"]) == {"name", "description", "parameters"}
    for each in spec["metadata"]["parameters"]:
        assert set(each) == {"name", "label", "helpText", "regexes"}
        value = "REGISTRY/shop:1-template" if each["name"] == "sdk_container_image" else "gs://BUCKET/in.csv"
        assert all(re.fullmatch(regex, value) for regex in each["regexes"])
        assert not any(re.fullmatch(regex, "two words\n") for regex in each["regexes"])
    names = {f"--{each['name']}" for each in spec["metadata"]["parameters"]}
    assert names == _OF_SCRIPTS | {"--sdk_container_image"}
    instructions = [line for line in dockerfile.splitlines() if line and not line.startswith("#")]
    (job,) = documents("pipeline-ci.yaml")
    image = options(job["jobs"]["pipeline"]["env"]["DATAFLOW"].split())["--sdk_container_image"]
    assert instructions[0] == f"FROM {image}"
    assert instructions[-1] == f"ENV FLEX_TEMPLATE_PYTHON_PY_FILE={image_recipe.APP}/pipeline/pipeline.py"
