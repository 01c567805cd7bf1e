#!/usr/bin/env bash
# Sets up .venv if needed, lints, checks types and runs the tests. Arguments go to pytest:
#   ./test.sh                                  everything
#   ./test.sh tests/unit -k policy             some tests
#   REWRITE=1 ./test.sh tests/datadriven       write the expected replies of the text tests anew
set -euo pipefail
cd "$(dirname "$0")"
source ./setup-venv.sh
step() { printf '\n== %s\n' "$1"; shift; "$@"; }
step "ruff check" .venv/bin/ruff check .
step "ruff format" .venv/bin/ruff format --check .
step "mypy" .venv/bin/mypy
step "pytest" .venv/bin/pytest "$@"
