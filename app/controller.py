"""The controller: boot, epoch, the lock; every change goes core → journal → replies → tables, in this order.

What comes after the journal entry can be repeated, and is, after a crash. Whatever goes wrong before an entry is known
to be written leaves memory in doubt (app/memory.py): it is thrown away, and the state is read back.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from prometheus_client.core import GaugeMetricFamily

from app.applied import AppliedTopics
from app.clock import Clock, wall_ms
from app.config import Config, texts
from app.core.advancing import Observation
from app.core.images import SHARD, Changes, Shard
from app.core.locations import Warehouse
from app.core.machine import Machine, Step
from app.core.state import State
from app.failpoints import reach
from app.maintenance import Maintenance
from app.memory import Memory
from app.metrics import Metrics, Question, StateMetrics
from app.records import Record, Reply, Topic, offset_rows, recorded_reply, reply_to, rows_of
from app.shards.registering import found_at
from app.state.entries import JournalRow
from app.state.errors import Fenced
from app.state.journal import Journal
from app.state.recovery import Recovered, check_booted_last, controller_row, image_row, recover, this_controller
from app.state.tables import Tables
from app.table_writer import TableWriter

log = logging.getLogger(__name__)
R = TypeVar("R")
GC_THRESHOLDS: Final = (50_000, 20, 20)


class Controller:
    """One lock around the core and the journal. Its methods may be called from any thread."""

    def __init__(self, config: Config, *, resolve: Callable[[str], str] = os.path.realpath) -> None:
        self.instance = uuid.uuid4().hex
        self.metrics = Metrics()
        self._config = config
        self._storage = texts(config.storage_options)
        self._warehouse = Warehouse(
            roots=config.warehouse,
            reserved=[config.state, config.streams.checkpoints],
            resolve=lambda location: resolve(location) if location.startswith("/") else location,
        )
        self._root = secrets.token_hex(4)  # unless the state has one already
        self._memory = Memory()
        self._applied_until = 0  # everything on the topic at this time has been applied
        self._touched: set[str] = set()

    # Boot.

    def boot(self) -> None:
        """Takes the state over: from here on every entry of an older controller fails."""
        # The journal is opened first: an entry written while the tables are read is then seen as one after them.
        self._journal = Journal.open(
            f"{self._config.state}/journal", storage_options=self._storage, instance=self.instance
        )
        self._tables = Tables.open(self._config.root, storage_options=self._storage)
        self._maintenance = Maintenance(self._journal, self._tables)
        self._writer = TableWriter(self._tables, after_merge=self._maintain)
        # Once, and not when memory is read back later: leases are measured on it.
        self._clock = Clock()
        recovered = self._take_up()
        self._raise_epoch(recovered)
        self._writer.start()
        # What is there now stays for long: the garbage collector need not look at it again and again. Nor every 700
        # objects at what a batch makes, which stays as well: that took half of the time of a large one.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        self.metrics.registry.register(StateMetrics(self._answer))

    def recover(self) -> None:
        """Throws the memory away and reads the truth again.

        After an entry of which nobody knows whether it landed, and after a merge of the tables that failed.
        """
        with self._memory.lock:
            epoch = self.epoch
            check_booted_last(self._take_up().controller, self.instance, epoch)
            self._writer.start()  # if a failed merge ended the last one
            self._memory.was_read_back()

    def _take_up(self) -> Recovered:
        recovered = recover(self._journal, self._tables, now_ms=wall_ms())
        self.epoch = 0 if recovered.controller is None else recovered.controller.epoch
        self._clock.never_below(recovered.last_at)
        self._applied_until = 0
        if recovered.controller is not None:
            self._root = recovered.controller.root
        self.machine = Machine(
            warehouse=self._warehouse,
            epoch=self.epoch,
            images=recovered.images.items(),
            namespace=f"-{self._root}",
            look=lambda location, format: found_at(location, format, self._storage),
        )
        self._touched = set(self.machine.state.shards)
        self._topics = AppliedTopics(self.machine, recovered)
        self._writer.replace(recovered.tables_behind, upto=recovered.seq)
        self.seq = recovered.seq
        return recovered

    def _raise_epoch(self, recovered: Recovered) -> None:
        before = recovered.controller
        self.epoch = self.machine.epoch = self.epoch + 1
        image = this_controller(self.epoch, self.instance, self._root, started_at=self._clock.now())
        changes = dict(self.machine.boot(self._clock.now()).changes)
        if before is None and self._config.parameters:
            changes.update(self.machine.update_parameters(self._clock.now(), self._config.parameters).changes)
        self._write(changes, origin="boot", extra=[controller_row(image)])
        log.info("controller booted epoch=%d seq=%d instance=%s", self.epoch, self.seq, self.instance)

    # Query 1.

    @property
    def last_replies(self) -> list[Reply]:
        """Those of the last entry before the boot: they may not have been sent."""
        return self._topics.last_replies

    def offsets(self, topic: Topic) -> dict[int, int]:
        """Per partition of this topic, the offset of the first record that has not been applied."""
        with self._memory.lock:
            return self._topics.offsets(topic)

    def go_on_at(self, topic: Topic, offsets: Mapping[int, int]) -> None:
        """Kafka does not have what comes after the last applied record: these are the offsets to go on at.

        At an offset that is set back comes another record than the one that was applied there. The table `commands`
        keeps both rows only if it has the first before the second is journalled, for of one place the newest row waits.
        """
        self._writer.wait_for(self.seq)
        with self._changing() as now:
            self._write({}, origin="offsets", extra=offset_rows(topic, offsets), now=now)
            self._topics.go_on_at(topic, offsets)

    def apply(self, topic: Topic, records: Sequence[Record]) -> list[Reply]:
        """Applies a batch in the order of partition and offset: one entry, and then these replies are to be sent."""
        with self._changing() as now:
            changes: Changes = {}
            changes.update(self._expire(now))
            batch = self._topics.apply(topic, records, now=now)
            changes.update(batch.changes)
            replies = self._repeated(topic, batch.repeated)
            if not batch.done and not changes:
                return replies
            seq = self._write(changes, origin="commands", extra=rows_of(topic, batch.done), now=now)
            self._topics.written(seq, self.epoch)
            self.metrics.answered(outcome.image for _, outcome in batch.done)
            self.metrics.lost_holds.inc(batch.warnings)
            log.info(
                "applied commands=%d repeated=%d seq=%d changes=%d",
                *(len(batch.done), len(batch.repeated), seq, len(changes)),
            )
            return replies + [
                reply_to(record, outcome, topic, seq=seq, epoch=self.epoch) for record, outcome in batch.done
            ]

    def _repeated(self, topic: Topic, records: Sequence[Record]) -> list[Reply]:
        """The recorded replies of records that were applied before; they may not have been sent."""
        if not records:
            return []
        self._writer.wait_for(self.seq)
        rows = self._tables.find_commands(topic.name, [(record.partition, record.offset) for record in records])
        return [recorded_reply(row, seq, epoch) for row, seq, epoch in rows]

    # What the controller sees and does by itself.

    def observe(self, observations: Iterable[Observation]) -> None:
        """Shards were seen with these uppers."""
        self.step("frontiers", lambda machine, now: machine.observe(now, observations))

    def report(self, errors: Mapping[str, str | None]) -> None:
        """The logs of these shards cannot be read, or can be read again (None): one entry for all."""
        self.step("frontiers", lambda machine, now: machine.watched(now, errors))

    def begin_watching(self) -> None:
        """Whoever watched before has ended."""
        self.step("frontiers", lambda machine, now: machine.begin_watching(now))

    def heartbeat(self, *, applied_until: int | None) -> None:
        """What time alone does. What was on the topic at `applied_until` is applied; None: nobody knows."""
        with self._changing() as now:
            self._journal.look(self.epoch)
            if applied_until is not None:
                self._applied_until = max(self._applied_until, applied_until)
            changes: Changes = {}
            changes.update(self._expire(now))
            changes.update(self.machine.purge(now).changes)
            changes.update(self.machine.downgrade_sinces(now).changes)
            if changes:
                self._write(changes, origin="heartbeat", now=now)

    def step(self, origin: str, compute: Callable[[Machine, int], Step[R]]) -> R:
        """One step of the machine, in the journal if it changed anything; its result."""
        with self._changing() as now:
            step = compute(self.machine, now)
            if step.changes:
                self._write(step.changes, origin=origin, now=now)
            return step.result

    def read(self, question: Callable[[State], R]) -> R:
        """The answer to a question about the state as it is in the journal."""
        with self._memory.used():
            return question(self.machine.state)

    def look(self) -> None:
        """Fenced, if another controller took over. To be called before every physical step."""
        with self._memory.lock:
            self._journal.look(self.epoch)

    def touched_shards(self) -> list[Shard]:
        """The shards that have changed since the last call, all of them after a boot."""
        with self._memory.lock:
            touched, self._touched = self._touched, set()
            return [self.machine.state.shards[id] for id in sorted(touched)]

    def _expire(self, now: int) -> Changes:
        step = self.machine.expire_leases(now, applied_until=self._applied_until)
        self.metrics.expired.inc(len(step.result))
        return step.changes

    def _answer(self, question: Question) -> list[GaugeMetricFamily]:
        with self._memory.lock:
            return question(self.machine.state, self._clock.now())

    def now(self) -> int:
        with self._memory.lock:
            return self._clock.now()

    # Stopping.

    def stop_taking_batches(self) -> None:
        """The batch in hand is finished; the next one is refused."""
        self._memory.close()

    def close(self) -> None:
        """Brings the tables up to date, and lets go."""
        self._writer.stop()

    @property
    def failure(self) -> BaseException | None:
        """Why the tables cannot be written any more, if so."""
        return self._writer.failure

    def check(self) -> None:
        """Raises what keeps the tables from being written, if anything does."""
        if isinstance(self.failure, Fenced):
            with self._memory.lock:
                self._journal.look(self.epoch)  # the journal knows who replaced us; a table knows only the epoch
        if self.failure is not None:
            raise self.failure

    @property
    def tables_reached(self) -> int:
        """The entry up to which all tables are."""
        return self._writer.reached

    def wait_for_tables(self) -> None:
        self._writer.wait_for(self.seq)

    @contextmanager
    def _changing(self) -> Iterator[int]:
        """The time of a change."""
        with self._memory.changed():
            yield self._clock.now()

    # The journal.

    def _write(self, changes: Changes, *, origin: str, extra: Sequence[JournalRow] = (), now: int | None = None) -> int:
        rows = [image_row(key, image) for key, image in changes.items()]
        rows += extra
        reach("before_entry")
        at = self._clock.now() if now is None else now
        with self.metrics.entry_seconds.time():
            self.seq = self._journal.append(epoch=self.epoch, at=at, origin=origin, rows=rows)
        self.metrics.entries.labels(origin).inc()
        reach("after_entry")
        self._touched.update(key for entity, key in changes if entity == SHARD)
        self._writer.submit(self.seq, self.epoch, rows)
        return self.seq

    def _maintain(self, position: int) -> None:
        """Called by the writer of the tables when they have reached `position`.

        Without the lock: no command waits for this, and whoever has the lock may be waiting for this thread.
        """
        parameters, now = self.machine.state.parameters, self._clock.now()
        self._maintenance.tables(parameters, now=now)
        if not self._memory.is_closed:
            self._maintenance.journal(parameters, seq=self.seq, epoch=self.epoch, tables_reached=position, now=now)
