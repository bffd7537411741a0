"""Named priorities; smaller numbers are processed first."""

from __future__ import annotations

from typing import Final

#: Before everything else.
NOW: Final = 0
#: A user asked for the entry to be processed as soon as possible.
IMPORTANT: Final = 10
#: A page, or another object, that was just created.
NEW_PAGE: Final = 20
#: A manual reset of many entries.
RESET: Final = 50
#: The priority of a put that does not specify one.
DEFAULT: Final = 100
#: Updates from other systems.
UPDATES: Final = 180
#: Entries of this priority and of larger numbers are claimed only when nothing more urgent is due.
SLOW: Final = 200
#: The occasional review of all entries.
REVIEW: Final = 230
#: After everything else.
TIME_ALLOWS: Final = 255

NAMES: Final = {
    "now": NOW,
    "important": IMPORTANT,
    "new_page": NEW_PAGE,
    "reset": RESET,
    "default": DEFAULT,
    "updates": UPDATES,
    "slow": SLOW,
    "review": REVIEW,
    "time_allows": TIME_ALLOWS,
}
