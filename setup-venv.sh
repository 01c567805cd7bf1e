# Sourced by the scripts beside it: makes .venv with everything that setup.cfg pins, once.
# The stamp holds what the environment was built from, so a second run costs one comparison.
want="$(cat setup.cfg pyproject.toml)"
stamp=.venv/holdfast-installed
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$want" ]; then
  python="${PYTHON:-python3}"
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo "Holdfast needs Python 3.10 or newer; '$python' is not. Set PYTHON=/path/to/python3 and run this again." >&2
    exit 2
  fi
  echo "Setting up .venv (once; about a minute) ..."
  if ! "$python" -m venv --clear .venv; then
    echo "Could not make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv; then run this again." >&2
    exit 2
  fi
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
  printf '%s' "$want" > "$stamp"
fi
