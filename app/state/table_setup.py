"""Making one of the tables, opening it, and giving it the columns that it lacks."""

from __future__ import annotations

import logging

from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import TableNotFoundError

from app.state.commit_log import NO_HOOKS, commit_path
from app.state.errors import StateMissing
from app.state.schemas import SCHEMAS
from app.state.store import Store

log = logging.getLogger(__name__)


def open_table(name: str, uri: str, options: dict[str, str], store: Store, *, read_only: bool) -> DeltaTable:
    if not DeltaTable.is_deltatable(uri, options):
        if read_only:
            raise StateMissing(f"There is no Holdfast state: no table {name} at {uri}. Is `root` right?")
        _create(name, uri, options, store)
    try:
        return DeltaTable(uri, storage_options=options)
    except TableNotFoundError as error:
        raise StateMissing(f"There is no Holdfast state: no table {name} at {uri}. Is `root` right?") from error


def _create(name: str, uri: str, options: dict[str, str], store: Store) -> None:
    schema = SCHEMAS[name]
    try:
        DeltaTable.create(
            uri,
            schema.columns,
            mode="error",
            name=f"holdfast {name}",
            configuration={
                "delta.enableExpiredLogCleanup": "false",
                "delta.logRetentionDuration": "interval 2 hours",
                "delta.deletedFileRetentionDuration": "interval 1 hours",
                "delta.dataSkippingStatsColumns": ",".join(
                    [*schema.keys, *(each for each in ("seq", "applied_at") if each in schema.columns.names)]
                ),
            },
            storage_options=options,
            commit_properties=CommitProperties(max_commit_retries=0),
            post_commithook_properties=NO_HOOKS,
        )
        log.info("table created uri=%s", uri)
    except Exception:  # whoever came first has made it; if nobody did, that is the error to show
        if not DeltaTable.is_deltatable(uri, options):
            raise
    store.sync([commit_path(0)])


def add_missing_columns(name: str, handle: DeltaTable, store: Store) -> None:
    """Adds the columns that came with a later version, null in all rows; one commit after the handle's version.

    Not done when a table is opened: a controller that may not touch the state, because a newer version wrote it or
    another one has taken over, finds that out only then.
    """
    there = {field.name for field in handle.schema().fields}
    missing = [field for field in Schema.from_arrow(SCHEMAS[name].columns).fields if field.name not in there]
    if missing:
        handle.alter.add_columns(
            missing, commit_properties=CommitProperties(max_commit_retries=0), post_commithook_properties=NO_HOOKS
        )
        store.sync([commit_path(handle.version())])
        log.info("columns added table=%s columns=%s", name, ",".join(field.name for field in missing))
