#!/usr/bin/env bash
# Sets up what is missing, then runs the controller, or the demo. See --help.
#
# It runs Python, which starts Spark's own spark-submit beneath it (app/spark.py), on this machine and on a cluster
# alike. The other way round, `spark-submit jobs/controller.py`, works too, but Python is then a child of the JVM:
# a SIGTERM ends the JVM and leaves Python behind without a word, so that no batch is finished and the exit code is
# 143 instead of ours. This way signals reach the driver, and its exit code is that of this script.
set -euo pipefail
caller=$PWD
cd "$(dirname "$0")"

usage() {
  cat <<'USAGE'
Usage: ./spark-submit.sh [--config FILE] [--read-only] [--once]
       ./spark-submit.sh demo

Runs the Holdfast controller: read holds, retention policies and safe drops for Delta Lake.
Needs Python 3.10 or newer. The first run sets up .venv and fetches the jars; Java comes with it if there is none.

  --config FILE   the configuration, seen from where you are (conf/local.yaml of the repository)
  --read-only     follow the journal; run no query, write nothing
  --once          apply what is on the command topic now, then stop
  demo            show the life of a collection, in under two minutes
  --help          this text

Examples:
  ./spark-submit.sh                       everything on this machine: an embedded Kafka, state under .holdfast/
  ./spark-submit.sh demo                  the first thing to run
  ./spark-submit.sh --once                take what is there, then stop
  MASTER='local[4]' ./spark-submit.sh     on four cores of this machine instead of all
  MASTER=spark://host:7077 ./spark-submit.sh --config conf/cluster.yaml
                                          on a cluster; `app` is sent to the executors, whose Python
                                          (PYSPARK_PYTHON) must have the packages of setup.cfg

Stop it with Ctrl-C or SIGTERM: it finishes the batch in hand. Spark's own log is .holdfast/logs/spark.log.
Exit codes: 0 stopped as asked, 2 usage or configuration, 3 another controller took over,
            4 a broken invariant, 5 storage or Kafka gone for longer than `give_up_after`, or Spark's JVM ended.
USAGE
}

job=jobs/controller.py
case "${1:-}" in
  -h | --help) usage; exit 0 ;;
  demo) job=jobs/demo.py; shift ;;
esac
for argument in "$@"; do
  case "$argument" in -h | --help) usage; exit 0 ;; esac
done

# We are in the repository now, and a relative FILE is meant from where we were called.
from_caller() {
  case "$1" in
    /*) printf '%s' "$1" ;;
    *) printf '%s' "$caller/$1" ;;
  esac
}
is_file=no
for argument in "$@"; do
  shift
  if [ "$is_file" = yes ]; then
    argument="$(from_caller "$argument")"
    is_file=no
  else
    case "$argument" in
      --config) is_file=yes ;;
      --config=*) argument="--config=$(from_caller "${argument#--config=}")" ;;
    esac
  fi
  set -- "$@" "$argument"
done

source ./setup-venv.sh
ensure_java
# Now, and both sets side by side, so that the wait comes with an explanation; a cluster has a Kafka of its own.
case "${MASTER:-local}" in
  local*) jars=(spark broker) ;;
  *) jars=(spark) ;;
esac
.venv/bin/python -m app.jars "${jars[@]}" > /dev/null
exec .venv/bin/python "$job" "$@"
