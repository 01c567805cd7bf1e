"""The jars of Spark's packages and of the embedded broker, fetched once from Maven Central.

The Ivy that comes with pyspark does it, under our settings: one repository, and a cache of our own. Its usual settings
ask ~/.m2 first, where half-downloaded artifacts break the resolution, and a second repository that may not answer.

A set of jars lies in a directory that is named after what it was made of. It appears by renaming, when everything is
there, and a list of sizes is checked at every use: what was downloaded half or deleted later never looks complete.
"""

import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

from app.java import java
from app.versions import BROKER_PACKAGES, SPARK_PACKAGES

log = logging.getLogger(__name__)

MAVEN = "https://repo1.maven.org/maven2/"
MANIFEST = "sizes.txt"
ATTEMPTS = 2  # the second finds in Ivy's cache what the first has fetched
TIME_LIMIT_S = 900


class JarsMissing(Exception):
    """The jars could not be fetched."""


class JarSet(NamedTuple):
    name: str
    packages: tuple[str, ...]
    # Whether it is loaded beside Spark's own jars, so that what is among those must not be there twice.
    beside_spark: bool


SPARK = JarSet("spark", SPARK_PACKAGES, beside_spark=True)
BROKER = JarSet("broker", BROKER_PACKAGES, beside_spark=False)


def spark_jars(directory: Path | None = None) -> list[Path]:
    """What `spark.jars` is to be."""
    return fetch([SPARK], directory)[0]


def broker_jars(directory: Path | None = None) -> list[Path]:
    """The class path of the embedded broker."""
    return fetch([BROKER], directory)[0]


def spark_home() -> Path:
    """Where pyspark is installed, found without importing it."""
    if "PYSPARK_GATEWAY_PORT" in os.environ and (home := os.environ.get("SPARK_HOME")):
        return Path(home)  # spark-submit has started us, with a pyspark that is in an archive
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise JarsMissing(
            "pyspark is not installed in this Python. Run ./spark-submit.sh or ./test.sh, which install it."
        )
    return Path(spec.origin).parent


def fetch(sets: Sequence[JarSet], directory: Path | None = None) -> list[list[Path]]:
    """The jars of each set. Those that are missing are fetched, side by side: Ivy mostly waits for the network."""
    base = directory or Path(os.environ.get("HOLDFAST_JARS") or Path(sys.prefix) / "jars")
    found = [_look(_place(base, jars)) for jars in sets]
    if None in found:
        base.mkdir(parents=True, exist_ok=True)
        with (base / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be fetching them: wait, then look again
            _fetch_missing([jars for jars in sets if _look(_place(base, jars)) is None], base)
        found = [_look(_place(base, jars)) for jars in sets]
    return [paths or [] for paths in found]


def _place(base: Path, jars: JarSet) -> Path:
    made_of = "\n".join((*jars.packages, *_excluded(jars)))
    return base / f"{jars.name}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"


def _excluded(jars: JarSet) -> list[str]:
    """The modules that Spark brings itself; two versions of one library side by side are trouble."""
    if not jars.beside_spark:
        return []
    names = (re.match(r"(.+?)-\d", path.name) for path in (spark_home() / "jars").glob("*.jar"))
    return sorted({name[1] for name in names if name})


def _look(place: Path) -> list[Path] | None:
    try:
        lines = (place / MANIFEST).read_text().splitlines()
        sizes = {place / name: int(size) for size, name in (line.split(" ", 1) for line in lines)}
        if all(path.stat().st_size == size for path, size in sizes.items()):
            return list(sizes)
    except (OSError, ValueError):
        pass
    return None


def _fetch_missing(sets: Sequence[JarSet], base: Path) -> None:
    started = time.monotonic()
    parts = {jars: _place(base, jars).with_suffix(".part") for jars in sets}
    for part in parts.values():
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
    waiting = parts
    for attempt in range(1, ATTEMPTS + 1):
        waiting = _run_ivy(waiting, base, deadline=started + TIME_LIMIT_S)
        log.info("jars fetched attempt=%d failed=%s", attempt, [jars.name for jars in waiting])
        if not waiting:
            break
    if waiting:
        logs = ", ".join(str(base / f"{jars.name}.log") for jars in waiting)
        packages = ", ".join(package for jars in waiting for package in jars.packages)
        raise JarsMissing(
            f"Could not fetch {packages} from {_repository()}; Spark and the embedded broker cannot start without. "
            f"What Ivy said is in {logs}. Behind a proxy, or with a certificate authority of your own, tell Java in "
            "JAVA_TOOL_OPTIONS (-Dhttps.proxyHost=… -Dhttps.proxyPort=…, -Djavax.net.ssl.trustStore=…); "
            "a mirror of Maven Central can be named in HOLDFAST_MAVEN."
        )
    for jars, part in parts.items():
        files = sorted((part / "jars").iterdir())
        (part / "jars" / MANIFEST).write_text("".join(f"{path.stat().st_size} {path.name}\n" for path in files))
        place = _place(base, jars)
        shutil.rmtree(place, ignore_errors=True)
        (part / "jars").rename(place)
        shutil.rmtree(part)
    print(
        f"Fetched the jars ({', '.join(jars.name for jars in sets)}) in {time.monotonic() - started:.0f} s.",
        file=sys.stderr,
    )


def _repository() -> str:
    return os.environ.get("HOLDFAST_MAVEN") or MAVEN


def _run_ivy(parts: dict[JarSet, Path], base: Path, *, deadline: float) -> dict[JarSet, Path]:
    """Runs an Ivy for each set and shows how far they are; returns the sets that failed."""
    running = {}
    with ExitStack() as stack:
        for jars, part in parts.items():
            output = stack.enter_context((base / f"{jars.name}.log").open("ab"))
            ivy = subprocess.Popen(_ivy_command(jars, part), stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            stack.callback(ivy.wait)
            stack.callback(ivy.kill)
            running[jars] = ivy
        progress = _Progress([part / "cache" for part in parts.values()])
        while any(ivy.poll() is None for ivy in running.values()) and time.monotonic() < deadline:
            progress.show()
            time.sleep(0.25)
        progress.end()
        return {jars: parts[jars] for jars, ivy in running.items() if ivy.poll() != 0}


def _ivy_command(jars: JarSet, part: Path) -> list[str]:
    dependencies = "".join(
        "<dependency org={} name={} rev={} conf='default->default'/>".format(*map(quoteattr, package.split(":")))
        for package in jars.packages
    )
    exclusions = "".join(f"<exclude module={quoteattr(module)}/>" for module in _excluded(jars))
    (part / "ivy.xml").write_text(
        "<ivy-module version='2.0'><info organisation='holdfast' module='jars'/>"
        "<configurations><conf name='default'/></configurations>"
        f"<dependencies>{dependencies}{exclusions}</dependencies></ivy-module>"
    )
    (part / "settings.xml").write_text(
        "<ivysettings><settings defaultResolver='maven'/><resolvers>"
        f"<ibiblio name='maven' m2compatible='true' root={quoteattr(_repository())}/>"
        "</resolvers></ivysettings>"
    )
    ivy = next((spark_home() / "jars").glob("ivy-*.jar"))
    options = ["-settings", "settings.xml", "-cache", "cache", "-ivy", "ivy.xml", "-types", "jar", "bundle"]
    retrieve = ["-retrieve", "jars/[artifact]-[revision](-[classifier]).[ext]"]
    paths = {"settings.xml", "cache", "ivy.xml", retrieve[1]}
    return [
        java(),
        "-jar",
        str(ivy),
        *(str(part / word) if word in paths else word for word in (*options, *retrieve)),
    ]


class _Progress:
    """One line that is written over on a terminal; elsewhere only its first state is shown."""

    def __init__(self, caches: Sequence[Path]) -> None:
        self.caches = caches
        self.terminal = sys.stderr.isatty()
        self.shown = False

    def show(self) -> None:
        if self.shown and not self.terminal:
            return
        sizes = [path.stat().st_size for cache in self.caches for path in cache.glob("**/*.jar")]
        text = "Fetching jars from Maven Central (once; about a minute)"
        if self.terminal:
            text = f"\r{text}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB "
        print(text, end="" if self.terminal else "\n", file=sys.stderr, flush=True)
        self.shown = True

    def end(self) -> None:
        if self.terminal and self.shown:
            print(file=sys.stderr)


if __name__ == "__main__":
    # python -m app.jars [spark] [broker]: fetches, and prints the class path of each.
    wanted = [jars for jars in (SPARK, BROKER) if jars.name in sys.argv[1:]]
    try:
        for paths in fetch(wanted):
            print(",".join(map(str, paths)))
    except JarsMissing as missing:
        print(missing, file=sys.stderr)
        sys.exit(2)  # as the controller says it
