"""A durable work journal with priorities, leases, expiry and wake-ups."""
