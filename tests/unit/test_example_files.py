"""The units and manifests that the documentation shows are what systemd and Kubernetes read."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Final

import click
import kubernetes_validate  # type: ignore[import-untyped]  # it has no types
import pytest
import yaml

from tests.support.commands import expect_parsed
from tests.support.processes import REPOSITORY
from tests.support.requirements import require

UNITS: Final = sorted((REPOSITORY / "docs/examples/systemd").iterdir())
MANIFESTS: Final = sorted((REPOSITORY / "docs/examples/kubernetes").iterdir())
ANALYZE: Final = shutil.which("systemd-analyze")
COMPOSE: Final = REPOSITORY / "docker-compose.yml"


def objects(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def verdict(directory: Path) -> str:
    """Return what systemd has to say against the units in a directory."""
    done = subprocess.run(
        [str(ANALYZE), "verify", "--man=no", *map(str, directory.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with what is on this machine in the place of the project's program and account."""
    require(ANALYZE, "systemd-analyze (apt install systemd)")
    for unit in UNITS:
        text = unit.read_text().replace("/srv/proj/env/bin/celery", "/bin/true")
        text = text.replace("User=proj", f"User={getpass.getuser()}")
        (tmp_path / unit.name).write_text(text)
    return tmp_path


def test_systemd_has_nothing_against_the_units(units: Path) -> None:
    assert verdict(units) == ""


def test_control_systemd_would_say_what_is_wrong(units: Path) -> None:
    worker = units / "proj-worker.service"
    worker.write_text(worker.read_text().replace("KillMode=mixed", "KillMode=mixt"))
    assert "kill mode" in verdict(units)


def test_the_probe_sees_a_file_that_is_touched_and_one_that_is_not(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs/examples/systemd/proj-beat-probe.service").read_text()
    found = re.search(r"ExecStart=/bin/sh -c '(.*)'", text)
    assert found is not None
    directory = tmp_path / "proj-beat"
    directory.mkdir()
    alive = directory / "alive"
    alive.touch()
    probe = found[1].replace("/run/proj-beat", str(directory))
    probe = probe.replace("systemctl restart proj-beat.service", "echo restarted")

    def said() -> str:
        return subprocess.check_output(["/bin/sh", "-c", probe], text=True)

    assert said() == ""
    for path in (alive, directory):
        os.utime(path, (time.time() - 120,) * 2)
    assert said() == "restarted\n"


@pytest.mark.parametrize(
    ("source", "path"),
    [("howto/operate-beats.md", "/run/beat"), ("examples/kubernetes/beat.yaml", "/run/beat/alive")],
)
def test_the_probe_of_the_page_looks_at_the_age_of_the_file(
    tmp_path: Path, source: str, path: str
) -> None:
    text = (REPOSITORY / "docs" / source).read_text()
    found = re.search(r"test \$\(\(.*-lt 60", text)
    assert found is not None
    assert path in found[0]
    file = tmp_path / "alive"
    probe = found[0].replace(path, str(file))

    def code() -> int:
        return subprocess.run(["/bin/sh", "-c", probe], check=False, capture_output=True).returncode

    assert code() != 0
    file.touch()
    assert code() == 0
    os.utime(file, (time.time() - 61,) * 2)
    assert code() != 0


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_knows_each_field_of_the_manifests(manifest: Path) -> None:
    for each in objects(manifest):
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


def test_control_a_field_that_kubernetes_does_not_know_is_refused() -> None:
    worker, *_ = objects(REPOSITORY / "docs/examples/kubernetes/worker.yaml")
    worker["spec"]["template"]["spec"]["terminationGracePeriod"] = 900
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(worker, kubernetes_validate.latest_version(), strict=True)


def test_the_probes_of_beats_look_at_one_file_in_a_volume() -> None:
    beat, _ = objects(REPOSITORY / "docs/examples/kubernetes/beat.yaml")
    (container,) = beat["spec"]["template"]["spec"]["containers"]
    (mount,) = container["volumeMounts"]
    path = f"{mount['mountPath']}/alive"
    for probe in ("startupProbe", "livenessProbe"):
        assert any(path in word for word in container[probe]["exec"]["command"])
    page = (REPOSITORY / "docs/howto/kubernetes.md").read_text()
    assert f'app.conf.pglock_heartbeat_file = "{path}"' in page


def started() -> list[list[str]]:
    """Return each celery command line that units, manifests and the Compose file start."""
    lines = [
        line.removeprefix("ExecStart=").replace("%H", "web1").split()  # as systemd does
        for unit in UNITS
        for line in unit.read_text().splitlines()
        if line.startswith("ExecStart=/srv/proj")
    ]
    lines += [
        container["command"]
        for manifest in MANIFESTS
        for each in objects(manifest)
        for container in each["spec"].get("template", {}).get("spec", {}).get("containers", [])
    ]
    (compose,) = objects(COMPOSE)
    lines += [
        service["command"].split()
        for service in compose["services"].values()
        if "celery" in service.get("command", "")
    ]
    return lines


@pytest.mark.parametrize("line", sorted(set(map(" ".join, started()))))
def test_each_command_is_one_that_celery_takes(line: str) -> None:
    expect_parsed(line.split())


def test_control_an_option_that_celery_does_not_have_is_refused() -> None:
    with pytest.raises(click.UsageError):
        expect_parsed(["celery", "-A", "proj", "worker", "--concurency", "4"])
