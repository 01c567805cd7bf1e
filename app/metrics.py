"""Metrics for Prometheus: what happened is counted where it happens; what is so is asked of the state when scraped.

docs/metrics.md lists all of them; a test keeps it so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from heapq import nsmallest
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from app.commands import CommandImage
from app.core.descriptions import DEFAULT_TIMELINE
from app.core.frontier import EMPTY, ZERO
from app.core.state import State
from app.messages import COMMAND_TYPES
from app.protocol import ErrorBody

log = logging.getLogger(__name__)

MOST_COLLECTIONS: Final = 1_000
"""Collections with series of their own: the first by id. Every series costs whoever stores them."""
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class PortTaken(Exception):
    """The configured port for metrics cannot be had."""


class Metrics:
    """All metrics of one controller. Cheap to count on, from any thread."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.batches = Counter("holdfast_batches", "Batches that a query has finished.", ["query"], registry=registry)
        self._batch_seconds = Histogram(
            "holdfast_batch_seconds",
            "From the beginning of a batch in foreachBatch to its end.",
            ["query"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._commands = Counter(
            "holdfast_commands", "Commands answered.", ["type", "status", "code"], registry=registry
        )
        self._reply_seconds = Histogram(
            "holdfast_reply_seconds",
            "From a command's timestamp in Kafka to its durable reply being sent.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.expired_commands = Counter(
            "holdfast_expired_commands",
            "Records that Kafka had deleted before they were applied.",
            ["partition"],
            registry=registry,
        )
        self.lost_records = Counter(
            "holdfast_lost_records",
            "Applied records, the newest of the topic, that Kafka has lost.",
            ["partition"],
            registry=registry,
        )
        self.entries = Counter("holdfast_entries", "Entries of the journal.", ["origin"], registry=registry)
        self.entry_seconds = Histogram(
            "holdfast_entry_seconds", "Writing an entry durably.", buckets=_SECONDS, registry=registry
        )
        self.expired = Counter(
            "holdfast_leases_expired", "Holds released because they were not renewed.", registry=registry
        )
        self.lost_holds = Counter(
            "holdfast_lost_holds",
            "Collections that cannot be continued without a gap: someone lost a hold.",
            registry=registry,
        )
        self.work = Counter(
            "holdfast_work",
            "Pieces of work on shards: create, evolve, tend (merge and clean up), finalize, purge.",
            ["kind", "outcome"],
            registry=registry,
        )
        self.working = Gauge(
            "holdfast_work_running", "Pieces of work on shards that are under way.", ["kind"], registry=registry
        )
        self.merges = Counter("holdfast_merges", "Merges of a shard's history.", registry=registry)
        self.merged_bytes_before = Counter(
            "holdfast_merged_bytes_before", "Bytes of the files that merges have replaced.", registry=registry
        )
        self.merged_bytes_after = Counter(
            "holdfast_merged_bytes_after", "Bytes of the files that merges have written.", registry=registry
        )
        self.deleted_files = Counter("holdfast_deleted_files", "Data files deleted.", ["why"], registry=registry)
        self.deleted_bytes = Counter(
            "holdfast_deleted_bytes", "Bytes of data files deleted.", ["why"], registry=registry
        )
        self._progress = Gauge(
            "holdfast_query_progress",
            "Spark's own report on the last batch of a query: rows, rows per second, milliseconds of each phase.",
            ["query", "what"],
            registry=registry,
        )

    def answered(self, images: Iterable[CommandImage]) -> None:
        for image in images:
            error = image.reply.error
            self.command(image.type, error.code if isinstance(error, ErrorBody) else None)

    def command(self, type_: str | None, error_code: str | None) -> None:
        """A name that is no command is not taken as a label: anyone could make any number of series."""
        name = type_ if type_ in COMMAND_TYPES else "unknown"
        self._commands.labels(name, "ok" if error_code is None else "error", error_code or "").inc()

    def replied(self, sent_ms: Iterable[int], now_ms: int) -> None:
        for at_ms in sent_ms:
            self._reply_seconds.observe(max(0, now_ms - at_ms) / 1000)

    @contextmanager
    def batch(self, query: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._batch_seconds.labels(query).observe(time.perf_counter() - started)
        self.batches.labels(query).inc()

    def progress(self, query: str, report: dict[str, Any] | None) -> None:
        """Takes up what Spark says of a query (`StreamingQuery.lastProgress`)."""
        for what in ("numInputRows", "inputRowsPerSecond", "processedRowsPerSecond"):
            if isinstance(value := (report or {}).get(what), int | float):
                self._progress.labels(query, what).set(value)
        for phase, milliseconds in ((report or {}).get("durationMs") or {}).items():
            self._progress.labels(query, phase).set(milliseconds)

    @contextmanager
    def serving(self, port: int) -> Iterator[int]:
        """Serves them over HTTP, on this machine only unless a port was chosen; the port."""
        try:
            server, thread = start_http_server(port, addr="0.0.0.0" if port else "127.0.0.1", registry=self.registry)
        except OSError as error:
            raise PortTaken(
                f"Metrics cannot be served on port {port}: {error.strerror}. Set `metrics.port`."
            ) from error
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


Question = Callable[[State, int], list[GaugeMetricFamily]]


class StateMetrics(Collector):
    """What can be read off the state, at the moment of a scrape. `ask` answers when nobody changes the state."""

    def __init__(self, ask: Callable[[Question], list[GaugeMetricFamily]]) -> None:
        self._ask = ask

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield from self._ask(lambda state, now: [*_totals(state), *_lags(state, now)])


def _totals(state: State) -> Iterator[GaugeMetricFamily]:
    dropped = sum(collection.dropped for collection in state.collections.values())
    yield _family(
        "holdfast_collections",
        "Collections by state.",
        "state",
        {"live": len(state.collections) - dropped, "dropped": dropped},
    )
    shards: dict[str, int] = dict.fromkeys(("live", "dropped", "finalizing", "finalized"), 0)
    failing = 0
    for shard in state.shards.values():
        shards[shard.state] += 1
        failing += shard.last_error is not None
    yield _family(
        "holdfast_shards", "Shards by state; dropped ones are pending, finalizing ones outstanding.", "state", shards
    )
    yield GaugeMetricFamily("holdfast_shards_with_error", "Shards whose row has a last_error.", failing)
    yield GaugeMetricFamily("holdfast_holds", "Read holds.", len(state.holds))
    yield GaugeMetricFamily(
        "holdfast_pending_downgrades", "Shards whose since is behind their owner's.", len(state.pending_downgrades)
    )
    yield GaugeMetricFamily("holdfast_tombstones", "Ids that cannot be used again yet.", len(state.tombstones))


def _lags(state: State, now: int) -> Iterator[GaugeMetricFamily]:
    ids = nsmallest(MOST_COLLECTIONS, state.collections)
    upper = GaugeMetricFamily(
        "holdfast_upper_lag_seconds",
        "How far the upper is behind the clock, where it follows it, of live collections.",
        labels=["collection"],
    )
    since = GaugeMetricFamily(
        "holdfast_history_seconds",
        "Upper minus since, where they are milliseconds: how much history is kept.",
        labels=["collection"],
    )
    for id in ids:
        collection = state.collections[id]
        if collection.upper in (ZERO, EMPTY):
            continue
        if collection.time_dependence is not None and not collection.dropped:  # nobody need write to it any more
            upper.add_metric([id], (now - collection.upper) / 1000)
        if collection.description.timeline == DEFAULT_TIMELINE:
            since.add_metric([id], max(0, collection.upper - collection.since) / 1000)
    yield upper
    yield since
    yield GaugeMetricFamily(
        "holdfast_collections_without_series",
        f"Collections beyond the first {MOST_COLLECTIONS} by id, which have no lags here.",
        len(state.collections) - len(ids),
    )


def _family(name: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
