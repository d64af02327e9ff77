"""What is installed is what is here: wheel and sdist hold the kernels, pins and environment follow pyproject.

Builds without a network (`--no-isolation`; hatchling is a dev dependency) from a copy of the sources. Knows
nothing of what the package does.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

REPO = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]

# imported under another name than the distribution's, or brought by one as part of its documented interface
DISTRIBUTION = {
    "yaml": "pyyaml",
    "rattler": "py-rattler",
    "_pytest": "pytest",
    "PIL": "matplotlib",
    "IPython": "ipywidgets",
    "traitlets": "ipywidgets",
    "nbformat": "nbconvert",
    "nbclient": "nbconvert",
}
# libraries that the GPU benchmark measures too where somebody has installed them
RIVALS = {"deep_gemm", "vllm"}
# other engines the model card and `bench peers` measure: each runs in an environment of its own, never in this one
PEERS = {"xllamacpp", "gguf", "vllm", "torchvision"}


def requirements(*extras: str) -> dict[str, Requirement]:
    """Direct dependencies by canonical name: the runtime ones, and those of the extras named."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def pins() -> dict[str, Requirement]:
    lines = (REPO / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    assert len({canonicalize_name(pin.name) for pin in found}) == len(found), "a package is pinned twice"
    return {canonicalize_name(pin.name): pin for pin in found}


# constraints.txt


@pytest.mark.parametrize("name", sorted(requirements("dev") | {"hatchling": None}))
def test_every_direct_dependency_is_pinned_to_a_version_it_allows(name):
    pin = pins()[name]
    (exact,) = pin.specifier
    assert exact.operator == "==" and "*" not in exact.version
    wanted = (requirements("dev") | {"build-backend": Requirement(PYPROJECT["build-system"]["requires"][0])})[name]
    assert wanted.specifier.contains(exact.version, prereleases=True), f"{pin} is not in {wanted.specifier}"


def test_the_pins_are_the_tested_torch_and_its_own_triton():
    assert str(pins()["torch"].specifier) == "==2.13.0"
    assert str(pins()["triton"].specifier) == "==3.7.1"
    assert Requirement("torch>=2.11") == requirements()["torch"]
    triton = requirements()["triton"]
    assert str(triton.specifier) == ">=3.6"
    assert triton.marker.evaluate({"platform_system": "Linux"})
    assert not triton.marker.evaluate({"platform_system": "Darwin"})


def test_every_pin_is_exact_and_without_a_local_version():
    for pin in pins().values():
        (exact,) = pin.specifier
        assert exact.operator == "==" and Version(exact.version).local is None, pin


def test_transformers_is_an_oracle_only():
    assert "transformers" not in requirements()
    assert "transformers" in requirements("dev")


# what is imported is declared


def third_party_imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"mtplab", "tests"}


@pytest.mark.parametrize(
    ("folder", "extras"),
    [("mtplab", ["frames", "hub"]), ("kernels", []), ("data/recipe", ["dev"]), ("tests", ["dev"])],
)
def test_every_import_is_a_declared_dependency(folder, extras):
    files = [
        path for path in sorted((REPO / folder).rglob("*.py")) if "kernels" not in path.parts or folder == "kernels"
    ]
    assert files
    # scripts of the recipe, and helpers of the tests, which also test the recipe, go by their file's name
    beside = {path.stem for path in files}
    if folder == "tests":
        beside |= {path.stem for path in (REPO / "data" / "recipe").rglob("*.py")}
    for path in files:
        # the speed bench measures against transformers, and says so when it is not installed
        allowed = set(requirements(*extras, *(("dev",) if "bench" in path.parts else ())))
        ignored = beside | (PEERS if "peers" in path.parts else set())
        if path.name == "gemm_cases.py":
            ignored |= RIVALS
        found = {DISTRIBUTION.get(name, name) for name in third_party_imports(path) - ignored}
        assert {canonicalize_name(name) for name in found} <= allowed, path.relative_to(REPO)


# wheel and sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`direct`: a wheel built from the sources; `sdist`; `through`: the wheel built from that sdist."""
    source = tmp_path_factory.mktemp("source")
    wanted = ["pyproject.toml", ".gitignore", "kernels", *(entry.strip("/") for entry in SDIST["include"])]
    for name in sources(*wanted):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, source / name)
    (source / "mtplab" / "kernels").symlink_to(os.readlink(REPO / "mtplab" / "kernels"))
    found = {}
    for label, options in {"direct": ["--wheel"], "through": []}.items():
        out = tmp_path_factory.mktemp(label)
        done = subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(out), str(source)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (found[label],) = out.glob("*.whl")
    (found["sdist"],) = found["through"].parent.glob("*.tar.gz")
    return found


SDIST = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]


def sources(*tops: str) -> list[str]:
    """Files under these folders that git tracks or would add, relative to the checkout."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *tops]
    listing = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout
    return sorted({name for name in listing.split("\0") if (REPO / name).is_file()})


def package_files() -> set[str]:
    """Every file of the package, kernels included, by the name it has in a wheel."""
    return set(sources("mtplab")) | {f"mtplab/{name}" for name in sources("kernels")}


@pytest.mark.xdist_group("packaging")
@pytest.mark.parametrize("how", ["direct", "through"])
def test_a_wheel_holds_the_whole_package_and_nothing_else(built, how):
    with zipfile.ZipFile(built[how]) as wheel:
        names = wheel.namelist()
    assert len(names) == len(set(names))
    inside = {name for name in names if ".dist-info/" not in name}
    assert any(re.fullmatch(r"mtplab/kernels/\w+\.py", name) for name in inside)
    assert inside == package_files()


@pytest.mark.xdist_group("packaging")
def test_the_sdist_carries_the_kernels_as_files(built):
    with tarfile.open(built["sdist"]) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    inside = {member.name.split("/", 1)[1] for member in members}
    assert package_files() <= inside
    assert {"LICENSE", "README.md", "pyproject.toml", "constraints.txt"} <= inside


@pytest.mark.xdist_group("packaging")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["direct", "through"])
def test_an_installed_wheel_runs_away_from_the_checkout(built, how, tmp_path):
    """The kernels come from the installed package, and the console script's target is in it."""
    target = tmp_path / "site"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-index",
            "--target",
            str(target),
            str(built[how]),
        ],
        check=True,
        capture_output=True,
    )
    kernels = sorted(path.stem for path in (REPO / "kernels").glob("*.py"))
    code = f"""
import importlib, mtplab, mtplab.cli
files = [importlib.import_module('mtplab.kernels.' + name).__file__ for name in {kernels!r}]
assert callable(mtplab.cli.main)
print(*[mtplab.__file__, mtplab.cli.__file__, *files], sep=chr(10))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(target)},
    )
    assert done.returncode == 0, done.stderr
    assert all(Path(line).is_relative_to(target) for line in done.stdout.split("\n") if line)
    entry_points = ConfigParser()
    entry_points.read(next(target.glob("mtplab-*.dist-info/entry_points.txt")))
    assert dict(entry_points["console_scripts"]) == {"mtplab": "mtplab.cli:main"} == PROJECT["scripts"]


def test_licence_is_apache():
    text = (REPO / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0" and "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


# environment.yml


@pytest.fixture(scope="module")
def environment() -> dict:
    return yaml.safe_load((REPO / "environment.yml").read_text())


def test_environment_brings_python_and_pip_and_nothing_twice(environment):
    assert environment["name"] == PROJECT["name"]
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    conda = [spec for spec in environment["dependencies"] if isinstance(spec, str)]
    names = [re.match(r"[A-Za-z0-9_.-]+", spec)[0] for spec in conda]
    assert sorted(names) == ["pip", "python"], "what else is needed stands in pyproject.toml"


def test_environment_specs_parse(environment):
    from rattler import MatchSpec
    from rattler.exceptions import InvalidMatchSpecError

    for spec in environment["dependencies"]:
        if isinstance(spec, str):
            assert MatchSpec(spec, strict=True).name
    with pytest.raises(InvalidMatchSpecError):
        MatchSpec("numpy>=1,<", strict=True)


def test_environment_python_is_the_one_pyproject_asks_for(environment):
    (spec,) = [spec for spec in environment["dependencies"] if isinstance(spec, str) and spec.startswith("python")]
    assert SpecifierSet(spec.removeprefix("python")) == SpecifierSet(PROJECT["requires-python"])


def test_environment_installs_this_project_with_extras_that_exist(environment):
    (section,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    (line,) = section
    extras = re.fullmatch(r"-e \.\[([\w,]+)\]", line)[1].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])


# Makefile, CI and what the pages say about them


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.M))


def test_make_has_the_promised_targets():
    assert {"report", "test", "test-fast", "lab", "lint", "bench", "venv", "clean", "help"} <= make_targets()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "data/README.md", ".ci/run"])
def test_pages_name_targets_that_exist(page):
    named = re.findall(r"(?:`|^ *|exec )make ([a-z-]+)", (REPO / page).read_text(), re.M)
    assert set(named) <= make_targets()
    assert named or page == "data/README.md"


def test_help_is_the_default_and_lists_every_target(tmp_path):
    done = subprocess.run(["make", "-C", str(REPO), "--no-print-directory"], capture_output=True, text=True, check=True)
    assert set(re.findall(r"^  make ([a-z-]+) ", done.stdout, re.M)) == make_targets()


def test_an_old_or_missing_python_is_refused_by_name(tmp_path):
    old = tmp_path / "python3.9"
    # stands in for an older interpreter: runs the check under a version it should refuse
    old.write_text(
        f"#!{sys.executable}\nimport collections, sys\nsys.version_info = (3, 9, 18)\ncode = sys.argv[2]\nexec(code)\n"
    )
    old.chmod(0o755)
    for file in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPO / file, tmp_path)
    for python, says in [(str(old), "is 3.9.18"), ("python-not-there", "'python-not-there' was not found")]:
        done = subprocess.run(["make", "venv", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode != 0 and "needs Python 3.11 or newer" in done.stderr and says in done.stderr
        assert not (tmp_path / ".venv").exists()


def test_ci_runs_make_test_and_nothing_beside_it():
    script = (REPO / ".ci" / "run").read_text()
    assert subprocess.run(["bash", "-n", str(REPO / ".ci" / "run")]).returncode == 0
    assert "set -euo pipefail" in script and script.rstrip().endswith("exec make test")
    assert "pytest" not in script


# LOG.md and style


def test_log_entries_are_dated_newest_first():
    headings = re.findall(r"^## (.*)$", (REPO / "LOG.md").read_text(), re.M)
    dates = [re.fullmatch(r"(\d{4}-\d\d-\d\d) · \S.*", heading)[1] for heading in headings]
    assert dates and dates == sorted(dates, reverse=True)


def test_readme_opens_with_what_it_is_for():
    """One sentence, the two commands, a picture that is in the repository, one table: on the first screen."""
    first_screen = (REPO / "README.md").read_text().split("\n## ")[0]
    assert "make report" in first_screen and "make test" in first_screen
    assert re.search(r"^\|.*\|\n\|[-: |]+\|\n\|", first_screen, re.M), "no table"
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", first_screen)
    assert pictures and all((REPO / picture).is_file() for picture in pictures)
    assert len(first_screen.splitlines()) <= 60


def test_lint_passes():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
