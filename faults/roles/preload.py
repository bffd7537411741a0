"""Everything that the processes of a run import, for the process that they are forked from."""

import tidebook.cli.app
import tidebook.remote.journal
import tidebook.server.serve
import tidebook.wiring.remote_book
import tidebook.wiring.sync  # noqa: F401
from faults.roles import inspector, journals, messages, replicator, streams, wal  # noqa: F401
