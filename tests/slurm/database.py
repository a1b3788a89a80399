"""The database of a cluster's accounting: a MariaDB of its own, which listens on nothing but a unix socket.

It asks nobody for a password, for its folder is closed to all users but Slurm's own. What it has may be lost when it
is killed.
"""

from pathlib import Path

from tests.slurm.inside import Inside
from tests.slurm.plan import OWNER
from tests.waiting import wait_for

_SQL = "sql"
"""Its folder in the rig's directory."""
_OPTIONS = (
    "--skip-networking",
    "--skip-grant-tables",
    "--innodb-log-file-size=8M",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-doublewrite=OFF",
)
_FIRST = "create database slurm_acct_db;\ncreate database mysql;\nuse mysql;\n"
"""slurmdbd would make its own, but cannot with MariaDB's client library 11.8.9, which spoils a refused connection."""
_TABLES = "usr/share/{0}/{0}_system_tables.sql"
"""The server's own tables: Debian's mariadb-install-db would make them, but needs the client's package too."""


def start_database(directory: Path, inside: Inside) -> None:
    """Start MariaDB with an empty database in the rig's directory, as the host sees it."""
    sql, inner = directory / _SQL, inside.seen(directory)
    names = (_TABLES.format(name) for name in ("mysql", "mariadb"))
    tables = next(path for name in names if (path := inside.root / name).exists())
    (sql / "data").mkdir(parents=True)
    (sql / "tables.sql").write_text(_FIRST + tables.read_text(encoding="utf-8"))
    inside.run("chown", "-R", OWNER, f"{inner}/{_SQL}")
    inside.run("chmod", "700", f"{inner}/{_SQL}")
    files = {
        "datadir": "data",
        "init-file": "tables.sql",
        "socket": "socket",
        "pid-file": "pid",
        "log-error": "log.err",
    }
    options = [f"--{name}={inner}/{_SQL}/{file}" for name, file in files.items()]
    server = inside.path("mariadbd")
    background = ("start-stop-daemon", "--start", "--background", "--pidfile", f"{inner}/{_SQL}/pid", "--exec", server)
    inside.run(*background, "--", "--no-defaults", f"--user={OWNER}", *_OPTIONS, *options)
    log = sql / "log.err"
    wait_for(lambda: log.exists() and "ready for connections" in log.read_text(), "the database is ready")


def database_socket(directory: Path, inside: Inside) -> str:
    """Return where slurmdbd reaches it, as programs there see it."""
    return f"{inside.seen(directory)}/{_SQL}/socket"
