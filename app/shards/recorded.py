"""The app transactions that a version of a shard's log has recorded."""

from __future__ import annotations

from typing import Any

import msgspec

from app.shards.commit_log import EPOCH, SINCE, UPPER


class Recorded(msgspec.Struct, frozen=True):
    """What one version of the table's log says."""

    version: int
    transactions: dict[str, int]

    def __getitem__(self, app_id: str) -> int:
        return self.transactions.get(app_id, 0)


def recorded_in(snapshot: Any) -> Recorded:
    found = known_transactions(snapshot)
    if found is None:
        every = snapshot.transactions()
        options = {app: every.get(app) for app in (UPPER, SINCE, EPOCH)}
        found = {app: int(option.get()) for app, option in options.items() if option.isDefined()}
    return Recorded(snapshot.version(), found)


def known_transactions(snapshot: Any) -> dict[str, int] | None:
    """The app transactions of a snapshot, if Delta's checksum of that version has them.

    Each commit of Delta's leaves a checksum. Without it, Delta reads the whole log in a Spark job for this question,
    after each commit anew, which takes longer than the commit. Other writers leave none: then there is no other way.
    """
    checksum = snapshot.checksumOpt()
    if not checksum.isDefined() or not (found := checksum.get().setTransactions()).isDefined():
        return None
    each, transactions = found.get().iterator(), {}
    while each.hasNext():
        transaction = each.next()
        transactions[str(transaction.appId())] = int(transaction.version())
    return transactions
