#!/usr/bin/env bash
# Sets up .venv if needed, lints, checks types and runs the tests. Arguments go to pytest:
#   ./test.sh                                  everything, side by side on two cores
#   ./test.sh tests/unit -k policy             some tests
#   REWRITE=1 ./test.sh tests/datadriven       write the expected replies of the text tests anew
set -euo pipefail
cd "$(dirname "$0")"
source ./setup-venv.sh
step() { printf '\n== %s\n' "$1"; shift; "$@"; }
step "ruff check" .venv/bin/ruff check .
step "ruff format" .venv/bin/ruff format --check .
step "mypy" .venv/bin/mypy
# All of it in two processes, each with a Spark and a Kafka of its own: much of the time a test waits for one of them.
if [ $# -eq 0 ]; then set -- -n 2 --dist loadfile --durations 10; fi
step "pytest" .venv/bin/pytest "$@"
