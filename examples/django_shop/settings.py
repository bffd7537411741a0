"""Settings of the project: Django and the outbox of the book use the same database."""

import os
from pathlib import Path

BOOK = Path(os.environ.get("SHOP_BOOK", "django-shop"))
SECRET_KEY = "only for this example"
DEBUG = True
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "testserver"]
ROOT_URLCONF = "examples.django_shop.urls"
INSTALLED_APPS = ["examples.django_shop"]
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
USE_TZ = True
BOOK.mkdir(parents=True, exist_ok=True)
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": BOOK / "outbox.db",
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    }
}
