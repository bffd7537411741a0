"""The plan of a run, a file that all its processes read: the book, the start of the run, leases, addresses."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

TOPIC = "ledger"
MAIL = "mail"
QUEUE = "work"
#: The topic of deciders, the prefix of the ids that a process manager writes to, and the queue of its entries.
ACCOUNTS, MIRROR, CAUSED = "accounts", "mirror-", "caused"
TAGS = ("red", "blue")
GROUP, GROUP_TAG = "readers", "red"
NAMESPACE, REGION = "faults", 1
#: The lease of the queue, the group and the projections, which a pause outlasts; longer on servers, which are slower.
LEASE_S = 1.0
SERVER_LEASE_S = 3.0
#: With servers, which share the cores with the processes of the run, sources pause this many times as long between
#: calls, so that consumers keep up, and use the same journals this many times as long.
SERVER_REST, SERVER_GENERATIONS = 15.0, 3.0
#: Writers switch to new journals after this time, so that each history is short enough for the checker to decide.
GENERATION_S = 5.0
KEYS = 6
#: The number of consumers; each follows every tag.
CONSUMERS = 2
ACCOUNT_GENERATION_S, ACCOUNTS_AT_ONCE = 20.0, 3


class Plan(msgspec.Struct, frozen=True):
    """The settings of a run that all its processes share."""

    folder: str
    book: str
    seed: int
    began_ns: int
    #: The address of the server, through its proxy.
    url: str
    lease_s: float = LEASE_S
    #: The database and the brokers, if the book uses servers.
    sql_url: str | None = None
    brokers: str | None = None

    @property
    def histories(self) -> Path:
        """The folder of the histories."""
        return Path(self.folder) / "history"

    @property
    def effects(self) -> Path:
        """The SQLite file into which the consumers write, if the book is embedded."""
        return Path(self.folder) / "effects.db"

    @property
    def is_quiet(self) -> bool:
        """Whether all faults are over; from then on the workload adds no deliberate delays."""
        return self._quiet_file.exists()

    def be_quiet(self) -> None:
        """Signal to all processes that the faults are over."""
        self._quiet_file.touch()

    @property
    def _quiet_file(self) -> Path:
        return Path(self.folder) / "quiet"

    def key(self, choice: float) -> str:
        """Return the id of one of the current journals."""
        return f"k{self._generation(GENERATION_S) * KEYS + int(choice * KEYS)}"

    def account(self, choice: float) -> str:
        """Return the id of one of the current accounts."""
        return f"a{self._generation(ACCOUNT_GENERATION_S) * ACCOUNTS_AT_ONCE + int(choice * ACCOUNTS_AT_ONCE)}"

    def _generation(self, lasts_s: float) -> int:
        factor = 1.0 if self.brokers is None else SERVER_GENERATIONS
        return int((time.monotonic_ns() - self.began_ns) / 1e9 / (lasts_s * factor))


def read_plan(folder: Path) -> Plan:
    """Return the plan of a run."""
    return msgspec.json.decode((folder / "plan.json").read_bytes(), type=Plan)


def write_plan(plan: Plan) -> None:
    """Store the plan for the processes of the run."""
    (Path(plan.folder) / "plan.json").write_bytes(msgspec.json.encode(plan))
