# SPDX-License-Identifier: Apache-2.0
"""Rows and sums in SQLite or PostgreSQL: each batch of lines is one transaction with the position behind it."""

from __future__ import annotations

import sqlite3
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DataError, IntegrityError, NoSuchModuleError, SQLAlchemyError

from controller.usage.log_follower import LogPosition
from controller.usage.rollups import (
    BOUNDED,
    DAY_S,
    DIMENSIONS,
    SUMS,
    Increments,
    NameCardinalityLimiter,
    rollup_increments,
)
from controller.usage.rows import MOST_CODE, MOST_NAME, UsageRow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Of the tables. A store of a newer one is refused; an older one is changed, by the steps of MIGRATIONS.
SCHEMA: Final = 3
# The statements that change version N to N + 1, at index N - 1.
MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    ("ALTER TABLE requests ADD COLUMN key_id VARCHAR(64) DEFAULT '' NOT NULL",),
    ("ALTER TABLE requests ADD COLUMN service_class VARCHAR(256) DEFAULT '' NOT NULL",),
)
# Writers of one PostgreSQL make its tables one after the other.
_MIGRATION_LOCK: Final = 0x61747461
_PRUNED_AT_ONCE: Final = 5_000
# Sums by hour and by day have one horizon.
SUMS_KEPT: Final = "sums"

metadata = sa.MetaData()
_NAME, _CODE, _NUMBER = sa.String(MOST_NAME), sa.String(MOST_CODE), sa.BigInteger()
_TYPES: Final[Mapping[str, sa.types.TypeEngine[Any]]] = {
    **dict.fromkeys(("trace_id", "ticket", "api", "band", "ended", "finish", "refused", "currency", "key_id"), _CODE),
    **dict.fromkeys(("streamed", "is_degraded", "is_estimated", "is_failed", "is_unpriced"), sa.Boolean()),
    **dict.fromkeys(("id", "request_id", "tenant", "key", "user", "route", "server", "endpoint"), _NAME),
    **dict.fromkeys(("model", "served_model", "price_id", "service_class"), _NAME),
}
_NULLABLE: Final = frozenset({"cost_micros", "price_id", "ttft_us"})
positions = sa.Table(
    "position",
    metadata,
    sa.Column("source", sa.String(512), primary_key=True),
    sa.Column("inode", _NUMBER, nullable=False),
    sa.Column("byte_offset", _NUMBER, nullable=False),
    sa.Column("head", _CODE, nullable=False),
    # every request of this log that ended before it is stored
    sa.Column("until_us", _NUMBER),
)
# What is older was deleted, in seconds since 1970: of requests and of sums.
horizons = sa.Table(
    "kept_since",
    metadata,
    sa.Column("what", _CODE, primary_key=True),
    sa.Column("at_s", _NUMBER, nullable=False),
)
versions = sa.Table("schema_version", metadata, sa.Column("version", sa.Integer, primary_key=True))


def _column(name: str, *, is_key: bool) -> sa.Column[Any]:
    return sa.Column(
        name, _TYPES.get(name, _NUMBER), primary_key=is_key, nullable=name in _NULLABLE, autoincrement=False
    )


def _rollup(name: str) -> sa.Table:
    return sa.Table(
        name,
        metadata,
        sa.Column("start", _NUMBER, primary_key=True, autoincrement=False),
        *(_column(one, is_key=True) for one in DIMENSIONS),
        *(sa.Column(one, _NUMBER, nullable=False) for one in SUMS),
    )


requests = sa.Table(
    "requests",
    metadata,
    *(_column(name, is_key=False) for name in UsageRow.__struct_fields__),
    # ids are random: with the time before them, new rows come to the end of the index, and ranges of time are in it
    sa.PrimaryKeyConstraint("at_us", "id"),
    # lists of a tenant's requests
    sa.Index("requests_by_tenant", "tenant", "at_us"),
)
rollups_hour = _rollup("rollups_hour")
rollups_day = _rollup("rollups_day")


class StoreError(Exception):
    """The store cannot be used as it is; the message says what to do. Trying again does not help."""


class StoreUnavailable(Exception):
    """The store does not answer, or takes nothing: trying again may help."""


class BadBatch(Exception):
    """The store refuses one of the rows for what is in it."""


class UsageSink(Protocol):
    """What keeps rows. Methods raise StoreAway, and ``write`` BadBatch; then nothing of the call is kept."""

    def read_position(self) -> LogPosition:
        """Behind the last line whose row is kept."""
        ...

    def write(
        self, rows: Sequence[UsageRow], before: LogPosition, after: LogPosition, until_s: float | None = None
    ) -> Sequence[UsageRow]:
        """Keep rows and the position behind them, all or nothing; returns the rows that are new. ``before``: the
        position that the rows follow. ``until_s``: every request of the log that ended before it is stored then.
        Raises StoreError if another process has moved the position.
        """
        ...

    def prune(self, now_s: float, keep_requests_s: float, keep_rollups_s: float) -> float | None:
        """Delete what is older, at most a day further than before: clocks may be wrong for a while. Returns since when
        rows are kept, in seconds since 1970; None if that is not known.
        """
        ...

    def close(self) -> None:
        """Close connections and files."""
        ...


def open_engine(url: str | sa.URL, *, timeout_s: float = 10.0) -> sa.Engine:
    """The database of ``url``: ``sqlite:///FILE`` or ``postgresql://USER@HOST/NAME``. Raises StoreError."""
    try:
        parsed = sa.make_url(url)
        backend = parsed.get_backend_name()
        if backend == "sqlite":
            if not parsed.database or parsed.database == ":memory:":
                raise StoreError(f"--store {url} names no file; write sqlite:////var/lib/attache/usage.db")
            engine = sa.create_engine(parsed, connect_args={"timeout": timeout_s})
            sa.event.listen(engine, "connect", partial(_set_pragmas, round(timeout_s * 1_000)))
            return engine
        if backend == "postgresql":
            seconds = max(2, round(timeout_s))
            # a network that swallows packets is noticed, and so is a lock that nobody lifts
            options = {
                "connect_timeout": seconds,
                "application_name": "attache-usage",
                "keepalives_idle": seconds,
                "tcp_user_timeout": 3_000 * seconds,
                "options": f"-c lock_timeout={3_000 * seconds}",
            }
            return sa.create_engine(
                parsed.set(drivername="postgresql+psycopg"), pool_pre_ping=True, pool_size=4, connect_args=options
            )
    except (ArgumentError, NoSuchModuleError) as error:
        raise StoreError(
            f"--store cannot be read: {error}; write sqlite:///FILE or postgresql://USER@HOST/NAME"
        ) from None
    raise StoreError(f"--store {backend} is not known; write sqlite:///FILE, postgresql://USER@HOST/NAME or jsonl:DIR")


def _set_pragmas(busy_ms: int, connection: Any, _: object) -> None:  # noqa: ANN401 - of the driver
    """A commit is on the disk before the log's bytes are given up: ``synchronous`` is FULL."""
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {busy_ms}")
    # only a new file takes it
    cursor.execute("PRAGMA auto_vacuum = INCREMENTAL")
    _use_wal(cursor, time.monotonic() + busy_ms / 1_000)  # noqa: TID251 - an edge
    for pragma in ("synchronous = FULL", "journal_size_limit = 67108864", "temp_store = MEMORY"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _use_wal(cursor: sqlite3.Cursor, until_s: float) -> None:
    """SQLite refuses at once, whatever its busy time-out is, where two connections to a new file both have its shared
    lock and both want it alone.
    """
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            is_over = time.monotonic() > until_s  # noqa: TID251 - an edge
            if is_over or error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            time.sleep(0.01)


@contextmanager
def _as_ours() -> Iterator[None]:
    try:
        yield
    except (DataError, IntegrityError) as error:
        raise BadBatch(first_error_line(error)) from error
    except (SQLAlchemyError, OSError) as error:
        raise StoreUnavailable(first_error_line(error)) from error


def next_retention_horizon(before_s: int | None, wanted_s: int, now_s: float) -> int:
    """Since when something is kept, if it was kept since ``before_s``. It moves by at most a day at a time, as a clock
    that is wrong for an hour must not delete all; and not back, but from a time that has not come yet.
    """
    if before_s is None or before_s > now_s:
        return wanted_s
    return min(max(before_s, wanted_s), before_s + DAY_S)


def first_error_line(error: BaseException) -> str:
    """Of the driver's own message, which has no statement and no values in it."""
    cause = getattr(error, "orig", None) or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]


class SqlStore:
    """A Sink, and what reports read. Not for threads, but for ``engine``."""

    def __init__(self, engine: sa.Engine, source: str, *, most_names: int = 10_000) -> None:
        """``source``: names the log, among all of this database. ``most_names``: see NameCardinalityLimiter."""
        self.engine = engine
        self._source = source
        self._names = NameCardinalityLimiter(most_names, self._names_of)
        self._connection: sa.Connection | None = None
        self._insert = sqlite.insert if engine.dialect.name == "sqlite" else postgresql.insert
        self._add_row = self._insert(requests).on_conflict_do_nothing().returning(requests.c.at_us, requests.c.id)
        self._is_file = engine.dialect.name == "sqlite"
        self._add_plainly = str(requests.insert().compile(engine))
        self._add_sums = tuple(self._adding(table) for table in (rollups_hour, rollups_day))

    def _adding(self, table: sa.Table) -> sa.Executable:
        adding = self._insert(table)
        return adding.on_conflict_do_update(
            index_elements=list(table.primary_key), set_={name: table.c[name] + adding.excluded[name] for name in SUMS}
        )

    def prepare(self, *, version: int = SCHEMA, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> None:
        """Make the tables, or change those of an older version; raises StoreError for a newer one, StoreAway."""
        with _as_ours(), self.engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
            else:
                # two that start at once wait for each other
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            if not sa.inspect(connection).has_table(versions.name):
                metadata.create_all(connection)
                connection.execute(versions.insert().values(version=version))
                return
            found = connection.execute(sa.select(sa.func.max(versions.c.version))).scalar_one()
            if found > version:
                advice = "run a newer attache, or restore a backup"
                raise StoreError(f"the store has version {found}, this attache knows {version}; {advice}")
            for statement in (one for step in migrations[found - 1 :] for one in step):
                connection.execute(sa.text(statement))
            if found < version:
                connection.execute(versions.update().values(version=version))

    def read_position(self) -> LogPosition:
        """Behind the last line whose row is kept."""
        with _as_ours(), self.engine.connect() as connection:
            return self._position(connection)

    def _position(self, connection: sa.Connection) -> LogPosition:
        query = sa.select(positions).where(positions.c.source == self._source)
        found = connection.execute(query).one_or_none()
        return LogPosition() if found is None else LogPosition(int(found.inode), int(found.byte_offset), found.head)

    def write(
        self, rows: Sequence[UsageRow], before: LogPosition, after: LogPosition, until_s: float | None = None
    ) -> Sequence[UsageRow]:
        """As Sink says. Rows whose ids are there already add nothing to sums."""
        try:
            with _as_ours(), self.engine.begin() as connection:
                self._connection = connection
                self._move(connection, before, after, until_s)
                return self._add(connection, rows)
        except BaseException:
            self._names.clear_cached_names()
            raise
        finally:
            self._connection = None

    def _move(self, connection: sa.Connection, before: LogPosition, after: LogPosition, until_s: float | None) -> None:
        """The first statement: it locks the source's row, so that two writers of a source never count twice."""
        values: dict[str, object] = {"inode": after.inode, "byte_offset": after.offset, "head": after.head}
        if until_s is not None:
            values["until_us"] = round(until_s * 1_000_000)
        where = (
            positions.c.source == self._source,
            positions.c.inode == before.inode,
            positions.c.byte_offset == before.offset,
        )
        if connection.execute(positions.update().where(*where).values(values)).rowcount:
            return
        if before == LogPosition() or self._position(connection) == LogPosition():
            added = self._insert(positions).values(source=self._source, **values).on_conflict_do_nothing()
            if connection.execute(added).rowcount:
                return
        raise StoreError(
            f"another process reads the log '{self._source}' into this store; stop it, or give each log a --source"
        )

    def _add(self, connection: sa.Connection, rows: Sequence[UsageRow]) -> Sequence[UsageRow]:
        if not rows:
            return ()
        # one request may come twice in a batch: the first one counts, as in the table
        unique = {(row.at_us, row.id): row for row in reversed(rows)}
        ordered = [unique[key] for key in sorted(unique)]
        new = self._add_to_file(connection, ordered) if self._is_file else self._add_new(connection, ordered)
        sums: tuple[Increments, ...] = rollup_increments(new, self._names) if new else ()
        for statement, found in zip(self._add_sums, sums, strict=False):
            connection.execute(
                statement, [{**key._asdict(), **dict(zip(SUMS, values, strict=True))} for key, values in found.items()]
            )
        return new

    def _add_new(self, connection: sa.Connection, rows: Sequence[UsageRow]) -> list[UsageRow]:
        """Returns the rows that are new. Other writers may add rows of other logs meanwhile."""
        added = connection.execute(self._add_row, [msgspec.structs.asdict(row) for row in rows])
        keys = {(at_us, name) for at_us, name in added}
        return [row for row in rows if (row.at_us, row.id) in keys]

    def _add_to_file(self, connection: sa.Connection, rows: Sequence[UsageRow]) -> Sequence[UsageRow]:
        """The same, for a third of the time: nobody else writes while this transaction has changed the position."""
        try:
            with connection.begin_nested():
                connection.exec_driver_sql(self._add_plainly, [msgspec.structs.astuple(row) for row in rows])
        except IntegrityError:
            # some are there already, as after a crash; or one cannot be kept, which is raised again
            return self._add_new(connection, rows)
        return rows

    def _names_of(self, day: int) -> Iterator[tuple[str, str, str]]:
        assert self._connection is not None  # noqa: S101 - names are asked for while rows are added
        table = rollups_day
        for name in BOUNDED:
            query = sa.select(table.c.tenant, table.c[name]).where(table.c.start == day).distinct()
            for tenant, found in self._connection.execute(query):
                yield name, tenant, found

    def prune(self, now_s: float, keep_requests_s: float, keep_rollups_s: float) -> float | None:
        """As Sink says: in short transactions, between which rows are written."""
        with _as_ours(), self.engine.connect() as connection:
            newest_us = connection.execute(sa.select(sa.func.max(requests.c.at_us))).scalar()
        if newest_us is None:
            return None
        # a host whose clock is ahead has no rows of then
        newest_s = min(round(now_s), newest_us // 1_000_000)
        since_s = self._raise_horizon(requests.name, newest_s - round(keep_requests_s), now_s)
        # a day whose end is kept stays whole
        sums_since_s = self._raise_horizon(SUMS_KEPT, newest_s - round(keep_rollups_s) - DAY_S, now_s)
        deleted = self._prune(requests, requests.c.at_us, since_s * 1_000_000)
        for table in (rollups_hour, rollups_day):
            self._prune(table, table.c.start, sums_since_s)
        if deleted and self.engine.dialect.name == "sqlite":
            with _as_ours(), self.engine.connect() as connection:
                driver: Any = connection.connection.driver_connection
                driver.execute("PRAGMA incremental_vacuum(10000)").fetchall()
        return since_s

    def _raise_horizon(self, what: str, wanted_s: int, now_s: float) -> int:
        """Since when it is kept from now on. Reports see that before anything is deleted."""
        with _as_ours(), self.engine.begin() as connection:
            found = connection.execute(sa.select(horizons.c.at_s).where(horizons.c.what == what)).scalar()
            at_s = next_retention_horizon(found, wanted_s, now_s)
            setting = self._insert(horizons).values(what=what, at_s=at_s)
            connection.execute(setting.on_conflict_do_update(index_elements=["what"], set_={"at_s": at_s}))
        return at_s

    def _prune(self, table: sa.Table, time: sa.Column[Any], before: int) -> int:
        """By ranges of time, each with some thousand rows."""
        deleted = 0
        while True:
            with _as_ours(), self.engine.begin() as connection:
                oldest = sa.select(time).where(time < before).order_by(time).limit(1).offset(_PRUNED_AT_ONCE)
                until = connection.execute(oldest).scalar()
                # rows of one instant go together
                limit = before if until is None else until + 1
                deleted += connection.execute(table.delete().where(time < limit)).rowcount
                if until is None:
                    return deleted

    def close(self) -> None:
        """Close connections."""
        self.engine.dispose()
