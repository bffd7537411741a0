"""The table of orders."""

from django.db import models


class Order(models.Model):  # type: ignore[misc]  # Django has no types
    """An order, as a row of the application's own table."""

    id = models.CharField(primary_key=True, max_length=100)
    total = models.IntegerField()
