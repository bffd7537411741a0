"""Open a book for a long-running job, retrying while its servers are unavailable."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tidebook.core.errors import OutcomeUnknown, Unavailable
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book

RETRY_FIRST_S = 0.5
RETRY_MAX_S = 15.0


def open_with_retries(
    book: Book,
    portal: BlockingPortal,
    *,
    stop: threading.Event,
    tell: Callable[[str, float], None],
    within_s: float | None = None,
) -> None:
    """Open a book on the portal's loop; retry with backoff while a server is unavailable.

    Before each pause `tell` is called with the reason and the seconds elapsed. Raise the last error once `stop` is set
    or `within_s` has elapsed.
    """
    began, backoff = time.monotonic(), Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
    while True:
        try:
            portal.run(book.__aenter__())
        except (Unavailable, OutcomeUnknown) as error:
            waited_s = time.monotonic() - began
            if stop.is_set() or (within_s is not None and waited_s >= within_s):
                raise
            tell(str(error), waited_s)
            stop.wait(backoff.next_s())
        else:
            return
