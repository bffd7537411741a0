"""Priorities: the smallest first."""

from __future__ import annotations

from typing import Final

#: The first on the list.
NOW: Final = 0
#: Somebody says that it should be worked on as soon as possible.
IMPORTANT: Final = 10
#: Something that was just created.
NEW_PAGE: Final = 20
#: A manual reset of many.
RESET: Final = 50
#: What a put takes where it does not say.
DEFAULT: Final = 100
#: Updates from elsewhere.
UPDATES: Final = 180
#: From here up, only when nothing else was processed in this round.
SLOW: Final = 200
#: Once in a while, all are reviewed.
REVIEW: Final = 230
#: The last on the list.
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
