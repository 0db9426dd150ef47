"""The peer's Django project: its database and broker come from the environment."""

import json
import os

SECRET_KEY = "of a benchmark"
USE_TZ = True
INSTALLED_APPS = ["django_celery_outbox"]
DATABASES = {
    "default": {"ENGINE": "django.db.backends.postgresql", **json.loads(os.environ["PEER_DATABASE"])}
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
CELERY_OUTBOX_APP = "peer_app.app"
