"""The two views and their addresses."""

from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from examples.django_shop.book import book
from examples.django_shop.models import Order
from tidebook import Event


@csrf_exempt  # type: ignore[untyped-decorator]
@require_POST  # type: ignore[untyped-decorator]
def create(request: HttpRequest) -> JsonResponse:
    """Insert a row and append an event, in one transaction."""
    id, total = request.POST["id"], int(request.POST["total"])
    outbox = book().outbox
    with transaction.atomic():
        Order.objects.create(id=id, total=total)
        outbox.append(connection, "orders", id, [Event({"total": total}, tags={"ordered"})])
    return JsonResponse({"id": id}, status=201)


def show(request: HttpRequest, id: str) -> JsonResponse:
    """Return the row and the events of its journal, which arrive as soon as the relay has run."""
    order = Order.objects.get(id=id)
    events = [event.payload for event in book().journal("orders").read(id)]
    return JsonResponse({"id": order.id, "total": order.total, "events": events})


urlpatterns = [path("orders/", create), path("orders/<str:id>/", show)]
