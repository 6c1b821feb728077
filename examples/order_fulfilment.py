"""An order from validation to notification: a condition, a retry, a map, and an error that is no use to retry.

    pgflow-otp run examples.order_fulfilment
    pgflow-otp run examples.order_fulfilment --input '{"order_id": 7, "items": [], "notify": []}'

The second order is invalid: it is not charged, nobody is notified, and the summary says so.
"""

from typing import Any

from pgflow_otp import Context, Flow, NonRetryable

fulfilment = Flow("order_fulfilment", max_attempts=3, base_delay=1, timeout=10)

SAMPLE: dict[str, Any] = {
    "order_id": 123,
    "items": [{"sku": "kettle", "price": 39.9, "count": 1}, {"sku": "tea", "price": 4.5, "count": 6}],
    "notify": ["customer@example.org", "warehouse@example.org"],
}


@fulfilment.step()
def validate(order: Any) -> dict[str, Any]:
    """Check the order and add it up."""
    order = order or SAMPLE
    if not isinstance(order, dict) or "order_id" not in order:
        raise NonRetryable("an order needs an order_id")
    problems = [f"{item['sku']}: count is not positive" for item in order["items"] if item["count"] <= 0]
    if not order["items"]:
        problems.append("no items")
    total = sum(item["price"] * item["count"] for item in order["items"])
    return {"order_id": order["order_id"], "valid": not problems, "problems": problems, "total": round(total, 2)}


@fulfilment.step(depends_on=[validate], if_={"validate": {"valid": True}}, when_unmet="skip", base_delay=0)
def charge(deps: dict[str, Any], ctx: Context) -> dict[str, Any]:
    """Charge the card. The gateway drops the first connection, as gateways do."""
    if ctx.attempt == 1:
        raise ConnectionError("payment gateway closed the connection")
    return {"charged": deps["validate"]["total"], "attempts": ctx.attempt}


@fulfilment.step(depends_on=[charge])
def recipients(deps: dict[str, Any], ctx: Context) -> list[str]:
    """Whom to tell: nobody, unless the order was charged."""
    order = ctx.flow_input or SAMPLE
    return list(order["notify"]) if "charge" in deps else []


@fulfilment.map(array=recipients, max_attempts=5)
async def notify(recipient: str, ctx: Context) -> str:
    """Notify one party; async handlers are fine."""
    ctx.logger.info("notifying {}", recipient)
    return f"notified {recipient}"


@fulfilment.step(depends_on=[validate, charge, notify])
def summary(deps: dict[str, Any]) -> dict[str, Any]:
    """What happened. A skipped step is absent from the input."""
    return {
        "order_id": deps["validate"]["order_id"],
        "charged": deps.get("charge", {}).get("charged"),
        "problems": deps["validate"]["problems"],
        "notifications": deps["notify"],
    }
