"""Everything that the processes of a run import, for the process that they are forked from."""

import signal

import tidebook.cli.app
import tidebook.remote.journal
import tidebook.server.serve
import tidebook.wiring.remote_book
import tidebook.wiring.sync  # noqa: F401
from faults.disk import FAIL_SIGNAL, HEAL_SIGNAL
from faults.roles import deciders, inspector, journals, messages, replicator, streams, wal  # noqa: F401

# A process may get the signal to change its clock or disk before it listens; by default these signals would end it.
for number in (signal.SIGUSR1, signal.SIGUSR2, FAIL_SIGNAL, HEAL_SIGNAL):
    signal.signal(number, signal.SIG_IGN)
