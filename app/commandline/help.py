"""The longer texts of `--help`: what it is for, and examples that can be typed."""

from __future__ import annotations

from typing import Final

DESCRIPTION: Final = """\
Read holds, retention policies and safe drops for Delta Lake.

Commands go to a running controller over Kafka; status, why, dump and the lists read its Delta tables.
Exit codes: 0 done, 1 the command was refused, 2 wrong usage or configuration, 5 broker or controller not answering."""

SIMULATE_HELP: Final = """\
Reads JSON lines, one command or control line each, runs them in memory and prints one JSON line for each.
Nothing is stored and nothing is needed: no Kafka, no Spark. Commands are those of docs/commands.md, answered exactly as
on Kafka. Control lines stand for what happens around them:

  {"type":"upper","collection":"orders","upper":100}   its data is complete up to 100 (null: for ever)
  {"type":"clock","now":60000}                         the time is now 60000 ms; leases and windows pass
  {"type":"restart"}                                   a new controller takes over
  {"type":"downgrades"}                                does the since downgrades that are due
  {"type":"finalize","fail":["orders"]}                one round of finalization, in which these fail
  {"type":"dump"}                                      the rows of the tables
"""

_EXAMPLES: Final = {
    "holdfast": """\
  holdfast create orders --schema 'k STRING, v BIGINT'
  holdfast policy orders --lag 7d
  holdfast hold acquire orders --holder nightly-report --lease 15m
  holdfast status
  holdfast why orders""",
    "status": """\
  holdfast status
  holdfast status orders totals --json""",
    "why": """\
  holdfast why orders
  holdfast why orders --json | jq '.[0].reasons[].hold.holder'""",
    "dump": """\
  holdfast dump
  holdfast dump --commands --root s3://bucket/holdfast --config conf/cluster.yaml""",
    "create": """\
  holdfast create orders users --schema 'k STRING, v BIGINT'
  holdfast create totals --inputs orders users
  holdfast create export --from totals
  holdfast create --file collections.json --register-ts 5""",
    "drop": """\
  holdfast drop totals orders""",
    "undrop": """\
  holdfast params undrop_window=1h     # before the drop
  holdfast undrop totals""",
    "reconcile": """\
  holdfast reconcile orders users
  holdfast reconcile --file catalogue.json --json""",
    "alter": """\
  holdfast alter orders orders_v2 --schema 'k STRING, v BIGINT, note STRING' --expected-version 0""",
    "policy": """\
  holdfast policy orders --lag 7d --granularity 1m       # the last seven days
  holdfast policy totals --step-back                     # the latest complete time
  holdfast policy audit --valid-from 2026-01-01          # everything from then on
  holdfast policy orders --lag 7d --valid-from 2026-01-01   # what either of them needs""",
    "params": """\
  holdfast params
  holdfast params undrop_window=1h finalize_shards=false hold_max_lease=null""",
    "hold": """\
  holdfast hold acquire orders totals --holder nightly-report --purpose 'month end' --lease 15m
  holdfast hold list
  holdfast hold release 5f0c2a9be1d4/orders""",
    "hold acquire": """\
  holdfast hold acquire orders totals --holder nightly-report --purpose 'month end' --lease 15m
  holdfast hold acquire orders --at 2026-01-31T12:00:00Z
  holdfast hold acquire orders --at now-1h --lease 1h --pin-files""",
    "hold downgrade": """\
  holdfast hold downgrade 5f0c2a9be1d4/orders --to 2026-01-31T12:00:00Z""",
    "hold renew": """\
  holdfast hold renew 5f0c2a9be1d4/orders
  holdfast hold renew 5f0c2a9be1d4/orders --lease 1h""",
    "hold release": """\
  holdfast hold release 5f0c2a9be1d4/orders 5f0c2a9be1d4/totals""",
    "hold clone": """\
  holdfast hold clone 5f0c2a9be1d4/orders""",
    "hold merge": """\
  holdfast hold merge 5f0c2a9be1d4/orders 81aa03c2f7e6/orders""",
    "hold list": """\
  holdfast hold list
  holdfast hold list orders --holder nightly-report --json""",
    "send": """\
  holdfast send commands.jsonl
  echo '{"type":"reconcile","id":"r1","collections":["orders"]}' | holdfast send""",
    "simulate": """\
  holdfast simulate commands.jsonl
  echo '{"type":"reconcile","id":"r1","collections":["orders"]}' | holdfast simulate""",
}
EXAMPLES: Final = {name: f"examples:\n{text}" for name, text in _EXAMPLES.items()}
