"""What `python -m build` makes of a checkout: complete, well described, and running where nothing else is installed."""

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from packaging.metadata import Metadata

import lightning_mp

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
#: what a checkout may hold beside its sources
_NO_SOURCE = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "runs", "lightning_mp_*", "node_modules", "site")


@dataclass(frozen=True, slots=True)
class Built:
    sdist: Path
    wheel: Path

    def in_wheel(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    def metadata(self) -> Metadata:
        """What an index shows of it; what an index would refuse raises."""
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            return Metadata.from_email(archive.read(name), validate=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    source = shutil.copytree(ROOT, folder / "source", ignore=_NO_SOURCE, symlinks=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return Built(sdist, wheel)


def sources() -> set[str]:
    files = (path for path in (ROOT / "lightning_mp").rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(ROOT)) for path in files}


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(built: Built) -> None:
    assert {name for name in built.in_wheel() if ".dist-info/" not in name} == sources()
    assert {".py", ".yaml", ".css", ".js"} <= {Path(name).suffix for name in sources()}


def test_an_index_can_show_what_it_is(built: Built) -> None:
    about = built.metadata()
    assert (about.name, str(about.version)) == ("lightning-mp", lightning_mp.__version__)
    assert about.description_content_type == "text/markdown"
    assert about.description == (ROOT / "README.md").read_text(encoding="utf-8")
    assert about.license_expression == "Apache-2.0 AND MIT"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in built.in_wheel())


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.version.cuda is not None, reason="the torch that would be installed is gigabytes")
def test_the_wheel_installs_in_an_empty_environment_and_runs_the_demo(built: Built, tmp_path: Path) -> None:
    cwd, environment = tmp_path / "cwd", tmp_path / "venv"
    cwd.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=100)
    own = {"XDG_CACHE_HOME": str(environment / "cache"), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"}
    own |= {name: value for name, value in os.environ.items() if not name.startswith("PYTHON") and name not in own}

    def run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Nothing of this checkout is on its path."""
        words = [str(environment / "bin" / command), *arguments]
        return subprocess.run(words, cwd=cwd, env=own, capture_output=True, text=True, check=False, timeout=200)

    options = ("-qq", "--no-input", "--disable-pip-version-check", "--no-cache-dir")
    for what in ("torch", f"{built.wheel}[hf]"):
        done = run("python", "-m", "pip", "install", *options, "-c", str(ROOT / "constraints.txt"), what)
        assert done.returncode == 0, done.stderr
    place = run("python", "-c", "import lightning_mp; print(lightning_mp.__file__)")
    assert Path(place.stdout.strip()).is_relative_to(environment)
    done = run("lightning-mp", "demo", "--steps", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "tf32: left out, since this CPU has no TF32." in done.stdout
    table = done.stdout[done.stdout.index("─") :]
    assert [line.split()[0] for line in table.splitlines()[1:5]] == ["fp32", "bf16", "bf16-ckpt", "fp16"]
    assert [path.name for path in cwd.iterdir()] == ["lightning_mp_demo"]
    assert "<html" in (cwd / "lightning_mp_demo" / "compare.html").read_text(encoding="utf-8")[:500]
