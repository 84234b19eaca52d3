"""/metrics: requests, their times and the state of the index, in Prometheus's text format."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hce.errors import HceError, needs_extra
from hce.web.api import NO_STORE, ServedIndex

with needs_extra("web", "hce serve without --no-metrics"):
    from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
    from prometheus_client.core import GaugeMetricFamily

TEXT = "text/plain; version=0.0.4; charset=utf-8"
VERDICTS = ("ok", "re-cluster", "retrain", "unknown")
DRIFT_SECONDS = 600.0  # least time between the starts of two drift measurements for /metrics
GONE = "499"  # as in nginx: the client left before there was an answer
NO_ROUTE = "none"  # the route of an unknown path, or of a request that the guard refused


class Metrics:
    """The metrics of one server; the state of the index is read at each request to /metrics."""

    def __init__(self, site: ServedIndex) -> None:
        self._site = site
        self._registry = CollectorRegistry()
        self.requests = Counter("hce_requests", "Number of answers.", ["route", "code"], registry=self._registry)
        self.seconds = Histogram("hce_request_seconds", "Seconds to answer.", ["route"], registry=self._registry)
        self._registry.register(self)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the state of the index; `hce_up` is 0 if the store cannot be read."""
        try:
            found = [*self._of_index()]
        except HceError:
            found = []
        yield GaugeMetricFamily("hce_up", "1 if the store can be read.", value=float(bool(found)))
        yield from found
        verdict = GaugeMetricFamily("hce_drift", "1 for the last drift verdict.", labels=["verdict"])
        last = self._site.drift.now(DRIFT_SECONDS).verdict if found else "unknown"
        for each in VERDICTS:
            verdict.add_metric([each], float(each == last))
        yield verdict

    def _of_index(self) -> Iterator[GaugeMetricFamily]:
        part = self._site.index.state.derived.engine_part
        with self._site.index.state.reading() as reader:
            documents, pending, saved = reader.moment().documents, part.pending(reader), part.facts(reader)
        yield GaugeMetricFamily("hce_documents", "Documents in the index.", documents)
        yield GaugeMetricFamily("hce_pending_changes", "Changes since the engine's last snapshot.", pending)
        if "written" in saved:
            age = time.time() - saved["written"]
            yield GaugeMetricFamily("hce_snapshot_age_seconds", "Seconds since the engine's last snapshot.", age)


class Metered:
    """ASGI middleware: counts and times each request, including those that the guard refuses."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer, and record the request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        code, start = GONE, time.perf_counter()

        async def noted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            # Use the route's template, never the path: a monitor keeps every label forever.
            found: Any = scope.get("route")
            route = getattr(found, "path", "") or scope.get("root_path") or NO_ROUTE  # mounted files have a root_path
            self._metrics.requests.labels(route, code).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - start)


def add_metrics(app: FastAPI, site: ServedIndex) -> None:
    """Count requests in the outermost middleware, and serve /metrics."""
    metrics = Metrics(site)
    app.add_middleware(Metered, metrics=metrics)

    @app.get("/metrics", include_in_schema=False)
    async def numbers() -> Response:
        return Response(await site.looks.run(metrics.text), headers=NO_STORE, media_type=TEXT)
