"""How Prefect's server uses SQLite: whoever is going to write waits for its turn, instead of being refused.

    use_patient_sqlite()     # before `create_app`

Most transactions of Prefect 3.8.8 begin as DEFERRED. One that has read and then writes is refused at once where another
wrote meanwhile (SQLITE_BUSY_SNAPSHOT, https://www.sqlite.org/rescode.html#busy_snapshot), whatever time limit is set:
the API answers 503, and its client sleeps for two seconds, then four, while a study waits. With eight writers nearly
every request was. One that begins as IMMEDIATE waits for the others (https://www.sqlite.org/lang_transaction.html).
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration
from prefect.server.database.dependencies import set_database_config
from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL


class PatientSqlite(AioSqliteConfiguration):
    """SQLite with IMMEDIATE transactions. One within another keeps Prefect's mode: it would wait for its outer one."""

    @asynccontextmanager
    async def begin_transaction(self, session: Any, with_for_update: bool = False) -> AsyncGenerator[Any, None]:
        """Begin a transaction, as Prefect's interface of databases asks for it."""
        outermost = SQLITE_BEGIN_MODE.get() is None
        async with super().begin_transaction(session, with_for_update=with_for_update or outermost) as transaction:
            yield transaction


def use_patient_sqlite() -> None:
    """Let the server of this process use such transactions, unless its database is another one than SQLite."""
    url = PREFECT_SERVER_DATABASE_CONNECTION_URL.value()
    if url is not None and url.startswith("sqlite"):
        set_database_config(PatientSqlite(url))
