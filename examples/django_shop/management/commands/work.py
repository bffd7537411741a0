"""`django work`: relay the outbox, feed the queue from a tag, and send the mails, until SIGTERM or Ctrl-C."""

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

import tidebook
from tidebook.queue import Job


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """Runs the background tasks of the application."""

    help = "Relay the outbox and send the mails."

    def handle(self, **options: Any) -> None:
        """Run until a signal, then finish the started work."""
        with tidebook.open_sync(settings.BOOK, replicate=True) as book:
            parts = (book.relay(), book.feed("ordered", "mails"), book.worker("mails", self.send))
            with book.running(*parts) as running:
                running.until_stopped()

    def send(self, job: Job[Any]) -> None:
        """Send the mail of an order; this example prints it."""
        self.stdout.write(f"mail about {job.data['id']}")
