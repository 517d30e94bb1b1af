"""The package as a stranger gets it: sdist, wheel and editable install, also beside Hugging Face's `kernels`."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from pytest_longca import __version__
from pytest_longca.catalogue import KERNELS, MASKS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "pytest_longca", "kernels", "masks")
MODULES = sorted({path.partition(":")[0] for path in (*KERNELS.values(), *MASKS.values())})

WHERE = """
import importlib, importlib.metadata, json, sys
import pytest_longca, pytest_longca.kernels.naive, pytest_longca.masks.regular
found = {name: getattr(importlib.import_module(name), "__file__", None) for name in sys.argv[1:]}
found["version"] = importlib.metadata.version("pytest-longca")
found["plugins"] = [entry.value for entry in importlib.metadata.entry_points(group="pytest11", name="longca")]
print(json.dumps(found))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command, which must succeed, with no Python path from outside."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def make_environment(folder: Path) -> Path:
    """A virtual environment that sees this environment's packages, after its own; the path of its Python."""
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def site_of(python: Path) -> Path:
    return next((python.parents[1] / "lib").glob("python*/site-packages"))


def pip_install(python: Path, *what: str | Path) -> None:
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", *what, cwd=python.parent)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is under version control, so that builds leave nothing in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def dist(source: Path) -> Path:
    """The folder with the sdist, and the wheel that was built from that sdist."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", source / "dist", source, cwd=source)
    return source / "dist"


@pytest.fixture(scope="module")
def python(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel."""
    python = make_environment(tmp_path_factory.mktemp("wheel") / "venv")
    pip_install(python, next(dist.glob("*.whl")))
    return python


def expected_files() -> set[str]:
    """Every file of the package that a wheel must hold, by its path in the wheel."""
    files = {path for path in (ROOT / "pytest_longca").rglob("*") if path.is_file()}
    files |= {ROOT / "pytest_longca" / folder / path.name for folder in ("kernels", "masks") for path in (ROOT / folder).glob("*.py")}
    return {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


def test_wheel_and_sdist_hold_every_file_of_the_package(dist: Path) -> None:
    wheel = set(zipfile.ZipFile(next(dist.glob("*.whl"))).namelist())
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        sdist = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert expected_files() <= wheel
    assert expected_files() <= sdist
    assert not any(name.startswith(("kernels/", "masks/")) for name in wheel), "a top-level `kernels` would shadow Hugging Face's"


def test_wheel_serves_kernels_masks_and_plugin_from_an_empty_directory(python: Path, tmp_path: Path) -> None:
    found = json.loads(run(python, "-c", WHERE, *MODULES, cwd=tmp_path))
    assert found.pop("version") == __version__
    assert found.pop("plugins")[0] == "pytest_longca.plugin"
    assert {name: Path(file).is_relative_to(site_of(python)) for name, file in found.items()} == dict.fromkeys(MODULES, True)


@pytest.mark.parametrize("install", ["wheel", "editable"])
def test_the_kernels_package_of_hugging_face_is_not_shadowed(
    install: str, python: Path, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if install == "editable":
        python = make_environment(tmp_path_factory.mktemp("editable") / "venv")
        pip_install(python, "--no-build-isolation", "--editable", source)
    foreign = site_of(python) / "kernels" / "__init__.py"
    foreign.parent.mkdir()
    foreign.write_text("'''Stands for the package of that name on the index.'''\n")
    # The checkout is the working directory, hence first on sys.path: the hardest place.
    found = json.loads(run(python, "-c", WHERE, "kernels", "pytest_longca.kernels.naive", cwd=source))
    assert Path(found["kernels"]) == foreign
    assert Path(found["pytest_longca.kernels.naive"]).name == "naive.py"
